{{/* The tiny job of `helm test`: a few epochs of a linear model on two workers. */}}
{{- define "springtide.testJob" -}}
apiVersion: springtide.dev/v1alpha1
kind: TrainingJob
metadata:
  name: {{ include "springtide.fullname" . | trunc 30 | trimSuffix "-" }}-helm-test
  namespace: {{ include "springtide.testNamespace" . }}
  labels: {{- include "springtide.labels" . | nindent 4 }}
spec:
  {{- if ne (include "springtide.managedBy" .) "springtide.dev/operator" }}
  managedBy: {{ include "springtide.managedBy" . }}
  {{- end }}
  podCleanup: All
  failurePolicy:
    backoffLimit: 1
  workers:
    replicas: 2
    minReplicas: 2
    maxReplicas: 2
    template:
      spec:
        securityContext: {{- include "springtide.podSecurityContext" . | nindent 10 }}
        containers:
          - name: worker
            image: {{ include "springtide.workerImage" . | quote }}
            imagePullPolicy: {{ .Values.image.pullPolicy }}
            command: [python, -c]
            args:
              - {{ .Files.Get "files/helm_test_script.py" | quote }}
            resources:
              requests:
                cpu: 100m
                memory: 256Mi
            securityContext:
              allowPrivilegeEscalation: false
              capabilities:
                drop: [ALL]
{{- end -}}

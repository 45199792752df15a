{{- define "springtide.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of all names: the release's name, with the chart's unless that is part of it. */}}
{{- define "springtide.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "springtide.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "springtide.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "springtide.operatorName" -}}
{{ include "springtide.fullname" . }}-operator
{{- end -}}

{{- define "springtide.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "springtide.operatorName" .) -}}
{{- end -}}

{{- define "springtide.selectorLabels" -}}
app.kubernetes.io/name: springtide
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "springtide.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: springtide
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "springtide.operatorLabels" -}}
{{ include "springtide.labels" . }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "springtide.registry" -}}
{{- with .Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- end -}}

{{- define "springtide.managedBy" -}}
{{ (.Values.jobs).managedBy | default "springtide.dev/operator" }}
{{- end -}}

{{- define "springtide.image" -}}
{{- $image := .Values.image -}}
{{- include "springtide.registry" . -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "springtide.parameterServerImage" -}}
{{- if .Values.parameterServerImage -}}
{{ .Values.parameterServerImage }}
{{- else -}}
{{ include "springtide.registry" . }}springtide/ps:{{ .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "springtide.workerImage" -}}
{{- if .Values.helmTest.workerImage -}}
{{ .Values.helmTest.workerImage }}
{{- else -}}
{{ include "springtide.registry" . }}springtide/worker:{{ .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "springtide.testNamespace" -}}
{{- if .Values.helmTest.namespace -}}
{{ .Values.helmTest.namespace }}
{{- else if or (empty .Values.watchNamespaces) (has .Release.Namespace .Values.watchNamespaces) -}}
{{ .Release.Namespace }}
{{- else -}}
{{ first .Values.watchNamespaces }}
{{- end -}}
{{- end -}}

{{/* Both security contexts together meet PodSecurity `restricted`. The user is the image's own (65532), or the one
that the cluster assigns (OpenShift refuses pods that name one). */}}
{{- define "springtide.podSecurityContext" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "springtide.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Refuses a values file that asks for a kind that the cluster does not serve. Takes (list $ KIND SWITCH). */}}
{{- define "springtide.needsMonitoring" -}}
{{- $root := index . 0 -}}
{{- $kind := index . 1 -}}
{{- if not ($root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" $kind)) -}}
{{- fail (printf "%s is true, but the cluster serves no monitoring.coreos.com/v1 %s: install the Prometheus operator first, or set %s=false (with `helm template`: add --api-versions monitoring.coreos.com/v1/%s)" (index . 2) $kind (index . 2) $kind) -}}
{{- end -}}
{{- end -}}

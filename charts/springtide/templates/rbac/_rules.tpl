{{/* What the operator does in a namespace with jobs: each verb with its reason. */}}
{{- define "springtide.jobRules" -}}
# Jobs are watched; never created or changed. delete: ttlSecondsAfterFinished.
- apiGroups: [springtide.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch, delete]
# The template that a job names is read once, and kept in the job's status.
- apiGroups: [springtide.dev]
  resources: [trainingtemplates]
  verbs: [get]
# What the operator knows about a job is written to its status, and nowhere else.
- apiGroups: [springtide.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
# get, list, watch: how pods fare. create: coordinators, workers, parameter servers. patch: the reason is written to a pod before it
# is deleted. delete: scaling down, replacing, cleaning up.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
# The address of each job's coordinator: read, and made by server-side apply, which needs create and patch.
# delete: an ended job gives its address back.
- apiGroups: [""]
  resources: [services]
  verbs: [get, create, patch, delete]
# How many of a job's parameter servers may be evicted at once. Get: one of that name may be somebody else's. list, watch:
# one that was deleted by hand comes back. Delete: what an older version made under a name without the job's uid.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.networkPolicy.jobs }}
# Keeps other pods away from those of a job. Get, list, watch and delete: as above.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .Values.rbac.gangScheduling }}
# Gang start with Volcano, the coscheduling plugin or Kubernetes itself, where their API is served and a job names their
# scheduler: a PodGroup is made before the pods, and deleted when its job has none. Get: one of that name may be
# somebody else's.
- apiGroups: [scheduling.volcano.sh, scheduling.x-k8s.io, scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, create, patch, delete]
{{- end }}
{{- if .Values.rbac.kueue }}
# Kueue, where it is installed and a job names a queue. create, patch: what the job asks for. list, watch: whether it
# is admitted or evicted. delete: when the job is suspended or leaves its queue.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list, watch, create, patch, delete]
# That training has started, that an evicted job has left, that a job has ended.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
{{- end }}
# The token of each job. It is computed from the root key, so no Secret of a job is ever read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
# What happened to a job, for `kubectl describe`; patched where it happens again.
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{/* What the operator does in its own namespace. */}}
{{- define "springtide.ownRules" -}}
# The root key: made at the first start, read at every later one.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [springtide-root-key]
  verbs: [get]
# The Lease by which one operator is active. (A right to create cannot name its object.)
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [springtide-operator]
  verbs: [get, update]
{{- end -}}

"""Reasons (CamelCase constants) of conditions, events and deletions."""

from __future__ import annotations

from typing import Final

# Condition types
RUNNING: Final = "Running"
RESCALING: Final = "Rescaling"
DEGRADED: Final = "Degraded"
SUSPENDED: Final = "Suspended"
SUCCEEDED: Final = "Succeeded"
FAILED: Final = "Failed"
READY: Final = "Ready"
RECONCILING: Final = "Reconciling"
STALLED: Final = "Stalled"
READINESS: Final = (READY, RECONCILING, STALLED)  # they follow from the others, for tools

# Running
TRAINING: Final = "Training"
FINISHING: Final = "Finishing"
NOT_STARTED: Final = "NotStarted"
WAITING_FOR_WORKERS: Final = "WaitingForWorkers"
FORMING: Final = "FormingGroup"
COORDINATOR_STARTING: Final = "CoordinatorStarting"

# Suspended
JOB_SUSPENDED: Final = "JobSuspended"
JOB_RESUMED: Final = "JobResumed"
QUEUED: Final = "Queued"
EVICTED: Final = "EvictedFromQueue"
ADMITTED: Final = "Admitted"

# Rescaling
SCALING_UP: Final = "ScalingUp"
SCALING_DOWN: Final = "ScalingDown"
REPLACING_WORKERS: Final = "ReplacingWorkers"
AT_SIZE: Final = "AtSize"

# Degraded
HEALTHY: Final = "Healthy"
POD_CREATION_REFUSED: Final = "PodCreationRefused"
POD_DELETION_REFUSED: Final = "PodDeletionRefused"
SERVICE_REFUSED: Final = "ServiceRefused"
NETWORK_POLICY_REFUSED: Final = "NetworkPolicyRefused"
QUEUE_UNAVAILABLE: Final = "QueueUnavailable"
QUEUE_LIMITS_SIZE: Final = "QueueLimitsSize"
OPEN_FILES_LIMIT_SIZE: Final = "OpenFilesLimitSize"
WORKLOAD_REFUSED: Final = "WorkloadRefused"
POD_GROUP_REFUSED: Final = "PodGroupRefused"
GANG_UNAVAILABLE: Final = "GangSchedulingUnavailable"
NAMESPACE_TERMINATING: Final = "NamespaceTerminating"
IMAGE_PULL_FAILED: Final = "ImagePullFailed"
CONTAINER_CONFIG_ERROR: Final = "ContainerConfigError"
CONTAINERS_NOT_STARTED: Final = "ContainersNotStarted"
UNSCHEDULABLE: Final = "Unschedulable"
HUNG: Final = "Hung"
WORKER_SILENT: Final = "WorkerSilent"
BACKING_OFF: Final = "BackingOff"
CRASH_LOOP: Final = "CrashLoop"
COORDINATOR_FAILING: Final = "CoordinatorFailing"
COORDINATOR_UNREACHABLE: Final = "CoordinatorUnreachable"
STATE_LOST: Final = "StateLost"
SERVER_MISSING: Final = "ParameterServerMissing"
SERVER_FAILING: Final = "ParameterServerFailing"
CONSISTENCY_REFUSED: Final = "ConsistencyRefused"
SERVER_BUDGET_REFUSED: Final = "DisruptionBudgetRefused"
PROGRESS_NOT_SAVED: Final = "ProgressNotSaved"
CHECKPOINT_FAILING: Final = "CheckpointFailing"
MEMORY_TOO_SMALL: Final = "MemoryTooSmall"
TOO_MANY_NODES_UNKNOWN: Final = "TooManyNodesUnknown"
CERTIFICATE_ENDING: Final = "CertificateEnding"

# Outcome
WORKER_FINISHED: Final = "WorkerFinished"
BACKOFF_LIMIT_EXCEEDED: Final = "BackoffLimitExceeded"
PREEMPTION_LIMIT_EXCEEDED: Final = "PreemptionLimitExceeded"
FAILURE_RULE: Final = "FailureRuleMatched"
DEADLINE_EXCEEDED: Final = "DeadlineExceeded"
POISON_STEP: Final = "PoisonStep"
INVALID_TEMPLATE: Final = "InvalidTemplate"
INVALID_SPEC: Final = "InvalidSpec"
TEMPLATE_NOT_FOUND: Final = "TemplateNotFound"
TEMPLATE_UNREADABLE: Final = "TemplateUnreadable"
TEMPLATE_LIMITS: Final = "BeyondTemplateLimits"
INTERNAL_ERROR: Final = "InternalError"
OUTDATED_CRD: Final = "OutdatedCRD"

# Sizing (status.elasticity)
SIZE_TRYING: Final = "TryingExtraWorkers"
SIZE_EXTRA: Final = "ExtraWorkers"
SIZE_NO_ROOM: Final = "NoRoom"
SIZE_YIELDED: Final = "OthersWait"
SIZE_WAITING: Final = "WaitingForWorkers"
SIZE_MAXIMUM: Final = "AtMaximum"
SIZE_MEASURING: Final = "Measuring"
SIZE_GAIN: Final = "AllWorkersGain"
SIZE_NO_GAIN: Final = "GainTooSmall"

# How a worker pod's life ended (slots in status)
END_FINISHED: Final = "Finished"
END_LEFT: Final = "Left"
END_SURPLUS: Final = "Surplus"
END_FAILED: Final = "Failed"
END_PREEMPTED: Final = "Preempted"
END_SCALED_DOWN: Final = "ScaledDown"
END_OUTDATED: Final = "Outdated"

# Why the operator deletes a pod
DELETE_SCALE_DOWN: Final = "ScaledDown"
DELETE_SUSPENDED: Final = "Suspended"
DELETE_SUPERSEDED: Final = "Superseded"
DELETE_REPLACED: Final = "Replaced"
DELETE_JOB_OVER: Final = "JobOver"
DELETE_GIVEN_UP: Final = "GivenUp"
DELETE_NODE_LOST: Final = "NodeLost"
DELETE_NODE_CORDONED: Final = "NodeCordoned"
DELETE_HUNG: Final = "Hung"
DELETE_STUCK: Final = "StuckTerminating"
DELETE_OUTDATED: Final = "Outdated"
DELETE_KEY: Final = "KeyReplaced"

# Events of their own (others carry the condition's reason)
EVENT_WORKER_FAILED: Final = "WorkerFailed"
EVENT_WORKER_PREEMPTED: Final = "WorkerPreempted"
EVENT_WORKER_MOVED: Final = "WorkerMoved"
EVENT_OUTDATED: Final = "OutdatedPodReplaced"
EVENT_POD_FORCED: Final = "PodDeletedByForce"
EVENT_WORKER_IGNORED: Final = "WorkerEndIgnored"
EVENT_STANDBY_STEPPED_IN: Final = "StandbySteppedIn"
EVENT_STANDBY_ENDED: Final = "StandbyEnded"
EVENT_REASON_UNKNOWN: Final = "UnknownReasonInRule"
EVENT_TOO_MANY_PROCESSES: Final = "TooManyProcesses"
EVENT_SERVER_REPLACED: Final = "ParameterServerReplaced"
EVENT_SERVERS_SCALED: Final = "ParameterServersScaled"
EVENT_CONSISTENCY: Final = "ConsistencyChanged"
EVENT_CONSISTENCY_PENDING: Final = "ConsistencyPending"
EVENT_TEMPLATE: Final = "TemplateTaken"
EVENT_SCALED: Final = "Scaled"
EVENT_GANG_REQUESTED: Final = "GangRequested"
EVENT_RECOVERED: Final = "Recovered"
EVENT_RESTORED: Final = "CheckpointRestored"
EVENT_COORDINATOR_STARTED: Final = "CoordinatorStarted"

# states for people
STATE_PENDING: Final = "Pending"
STATE_STARTING: Final = "Starting"
STATE_RUNNING: Final = "Running"
STATE_RESCALING: Final = "Rescaling"
STATE_RECOVERING: Final = "Recovering"
STATE_SUSPENDED: Final = "Suspended"
STATE_QUEUED: Final = "Queued"
STATE_SUCCEEDED: Final = "Succeeded"
STATE_FAILED: Final = "Failed"
STATES: Final = (
    STATE_PENDING,
    STATE_STARTING,
    STATE_RUNNING,
    STATE_RESCALING,
    STATE_RECOVERING,
    STATE_SUSPENDED,
    STATE_QUEUED,
    STATE_SUCCEEDED,
    STATE_FAILED,
)

"""The TrainingJob, as users write it. The CRD is generated from these models (`springtide_operator.api.crd`).

Only fields whose behaviour exists are here. Descriptions are what `kubectl explain` prints.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from springtide_operator.api import names, spec_rules
from springtide_operator.api.all_reduce import AllReduce
from springtide_operator.api.base import ApiModel
from springtide_operator.api.checkpoint import Checkpoint
from springtide_operator.api.coordinator import Coordinator
from springtide_operator.api.elasticity import Elasticity
from springtide_operator.api.failure_rules import FailureRule
from springtide_operator.api.names import CLASS_PATTERN, DEFAULT_CLASS, MAX_WORKERS
from springtide_operator.api.pod_template import without_nulls, worker_template
from springtide_operator.api.servers import Consistency, ParameterServer, ParameterServers

MAX_SECONDS = 2**31 - 1
MAX_PROCESSES_PER_POD = 64


class StrategyType(StrEnum):
    ALL_REDUCE = "AllReduce"
    PARAMETER_SERVER = "ParameterServer"
    HYBRID = "Hybrid"


class PodCleanup(StrEnum):
    ALL = "All"
    RUNNING = "Running"
    NONE = "None"


class GangScheduling(StrEnum):
    AUTO = "Auto"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"
    KUBERNETES = "Kubernetes"
    NONE = "None"


class Strategy(ApiModel):
    """How workers exchange gradients."""

    type: StrategyType = Field(
        default=StrategyType.ALL_REDUCE,
        description="AllReduce: every worker holds the whole model and gradients are summed."
        " ParameterServer: gradients are pushed to servers, which hold the parameters and run the optimizer."
        " Hybrid: dense gradients are summed, and servers hold the tables of springtide.Embedding."
        " The script is the same. Immutable.",
    )
    all_reduce: AllReduce = Field(
        default_factory=AllReduce,
        description="Settings of the AllReduce strategy.",
        json_schema_extra={"default": {}},
    )
    parameter_server: ParameterServer = Field(
        default_factory=ParameterServer,
        description="Settings of the strategies ParameterServer and Hybrid.",
        json_schema_extra={"default": {}},
    )

    @property
    def consistency(self) -> Consistency | None:
        """Return how parameters on servers are kept consistent; None where there are no servers."""
        return self.parameter_server.consistency if self.type is StrategyType.PARAMETER_SERVER else None


PodTemplate = Annotated[
    dict[str, Any],
    BeforeValidator(without_nulls),
    WithJsonSchema(worker_template()),
]


class Workers(ApiModel):
    """The worker pods and how many of them there may be."""

    model_config = ConfigDict(json_schema_extra={"x-kubernetes-validations": spec_rules.WORKERS})

    replicas: int = Field(
        default=1,
        ge=1,
        le=MAX_WORKERS,
        description="Workers wanted. `kubectl scale` and autoscalers change it; the operator never does."
        " It must lie between minReplicas and maxReplicas.",
    )
    min_replicas: int = Field(
        default=1,
        ge=1,
        le=MAX_WORKERS,
        description="Training starts, and goes on, with at least this many workers.",
    )
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        le=MAX_WORKERS,
        description="Scaling above this is refused. Absent: no limit but that of the API"
        f" ({MAX_WORKERS} workers).",
    )
    standby: int = Field(
        default=0,
        ge=0,
        le=MAX_WORKERS,
        description="So many more pods stand by: they run the script up to the first step, and wait outside"
        " of the group. When a worker is lost or leaves, one takes its place at once, and another one is"
        " made. Standbys are made when all workers wanted train, hold up none of their steps, count in no"
        " budget of failurePolicy and not in replicas, minReplicas and maxReplicas, and go first when room"
        " is short.",
    )
    processes_per_pod: int = Field(
        default=1,
        ge=1,
        le=MAX_PROCESSES_PER_POD,
        description="Processes in each worker pod, each a member of the job: one per GPU of the pod. With"
        " more than one the container needs a command, which `springtide launch --processes N --` runs."
        " Immutable.",
    )
    group_size: int = Field(
        default=1,
        ge=1,
        le=MAX_WORKERS,
        description="With strategy.type ParameterServer: so many processes sum their gradients among"
        " themselves, and one of them sends the sum to the servers and fetches the new values for all, so"
        " that servers receive and send less. With consistency BoundedStaleness and Asynchronous such a"
        " group works on one global batch together, and groups do not wait for each other. Immutable.",
    )
    template: PodTemplate = Field(
        description="The worker pod; needed, unless templateRef names a template that has one: then this one"
        " is merged into it, containers and their variables by name. A change holds for pods made afterwards,"
        " and pods that have not begun are made anew; status.workers.outdated counts the older ones."
    )

    @property
    def maximum(self) -> int:
        """Pods."""
        return self.max_replicas if self.max_replicas is not None else MAX_WORKERS

    @property
    def processes_foreseen(self) -> int:
        """Processes that the job will have, as far as the manifest says."""
        return (self.max_replicas or max(self.replicas, self.min_replicas)) * self.processes_per_pod

    @property
    def processes_connected(self) -> int:
        """Processes that the coordinator will be connected to: standbys, too."""
        return self.processes_foreseen + self.standby * self.processes_per_pod


class OnHang(StrEnum):
    WARN = "Warn"
    REPLACE = "Replace"
    FAIL_JOB = "FailJob"


class FailurePolicy(ApiModel):
    """Limits at which the job gives up."""

    backoff_limit: int = Field(
        default=6,
        ge=0,
        le=10000,
        description="Worker failures that are endured: one more fails the job. Workers that fail together for"
        " one cause count once. Evictions, preemptions, deleted pods and scaling down are no failures.",
    )
    preemption_limit: int | None = Field(
        default=None,
        ge=0,
        le=10000,
        description="Preemptions, evictions, deletions and lost nodes that are endured: one more fails the"
        " job. Workers that go together for one cause count once. Absent: any number.",
    )
    hang_timeout_seconds: int = Field(
        default=600,
        ge=5,
        le=MAX_SECONDS,
        description="The job hangs when no step was committed for so long: since the last commit, or since"
        " the generation formed; longer than any step may take, its compilation included.",
    )
    on_hang: OnHang = Field(
        default=OnHang.WARN,
        description="What is done when the job hangs. Warn: condition Degraded (reason Hung) names the late"
        " worker, its node and what it last did. Replace: as well, the late workers are replaced while"
        " others wait for them, and those that stand still for a minute (WorkerSilent) while others train,"
        " unless more than a third do; that counts against backoffLimit, unless a rule for reason Hung says"
        " otherwise. FailJob: the job fails.",
    )
    heartbeat_seconds: int | None = Field(
        default=None,
        ge=1,
        le=300,
        description="The heartbeat limit: so long after its last sign of life, at most, a worker or server"
        " counts as lost. Longer for networks that stop for seconds now and then. Absent: 2; from 0.5 on for"
        " a worker that trains, by how regular its own heartbeats are. Jobs of more than 200 processes are"
        " asked less often: 0.8 s are added at 512, 2.1 s at 1,024.",
    )
    force_delete_after_seconds: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SECONDS,
        description="How long after its grace period a pod may stay Terminating on a node that lives, until"
        " it is deleted by force. Its process may still hold a device or a volume then. Absent: for ever; the"
        " job does not wait for it, and on lost nodes pods are deleted by force in any case.",
    )
    rules: list[FailureRule] = Field(
        default_factory=list,
        max_length=32,
        description="What is done about an end of a worker, by its cause; the first rule that holds decides."
        " Without one, failures count against backoffLimit and everything else against preemptionLimit.",
        json_schema_extra={"x-kubernetes-list-type": "atomic", "default": []},
    )


Label = Annotated[str, Field(max_length=63)]
Annotation = Annotated[str, Field(max_length=4096)]


class PodMetadata(ApiModel):
    """Labels and annotations of every pod of the job. The worker template's own entries win."""

    labels: dict[str, Label] = Field(
        default_factory=dict,
        description="Labels of all pods of the job.",
        json_schema_extra={"maxProperties": 32, "default": {}},
    )
    annotations: dict[str, Annotation] = Field(
        default_factory=dict,
        description="Annotations of all pods of the job.",
        json_schema_extra={"maxProperties": 32, "default": {}},
    )


class Security(ApiModel):
    """Protection beyond the job's token."""

    tls: bool | None = Field(
        default=None,
        description="Whether calls of the job's coordinator and streams of its parameter servers are"
        " encrypted, with a certificate of the job's own. Gradients between workers are not. Absent: as the"
        " operator's default was when it first saw the job, which status.tls says. Immutable.",
    )


class TemplateKind(StrEnum):
    TEMPLATE = names.TEMPLATE_KIND
    CLUSTER_TEMPLATE = names.CLUSTER_TEMPLATE_KIND


class TemplateRef(ApiModel):
    """The name of a template."""

    kind: TemplateKind = Field(
        default=TemplateKind.CLUSTER_TEMPLATE,
        description="ClusterTrainingTemplate, or TrainingTemplate: one of the job's own namespace.",
    )
    name: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        description="Name of the template.",
    )


class TrainingJobSpec(ApiModel):
    """The wanted state of a TrainingJob."""

    model_config = ConfigDict(json_schema_extra={"x-kubernetes-validations": spec_rules.SPEC})

    managed_by: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        pattern=CLASS_PATTERN,
        description="The class of the job: the release of Springtide that has this class runs it, and all"
        f" others leave it alone. Absent: {DEFAULT_CLASS}, which a release has unless it is given another."
        " Immutable.",
    )
    template_ref: TemplateRef | None = Field(
        default=None,
        description="A template of the platform, from which comes whatever this job leaves out, and whose"
        " limits hold for it. It is read once, and kept in status.template: later edits of it concern later"
        " jobs. A job whose template is not there waits for it. Immutable.",
    )
    strategy: Strategy = Field(
        default_factory=Strategy,
        description="How workers exchange gradients.",
        json_schema_extra={"default": {}},
    )
    workers: Workers = Field(
        description="The worker pods and how many of them there may be.",
        json_schema_extra={"default": {}},
    )
    parameter_servers: ParameterServers | None = Field(
        default=None,
        description="The parameter servers of strategy.type ParameterServer. Absent: one.",
    )
    coordinator: Coordinator = Field(
        default_factory=Coordinator,
        description="The pod of the coordinator. A change holds for pods made afterwards, and one that has"
        " not begun is made anew.",
        json_schema_extra={"default": {}},
    )
    elasticity: Elasticity = Field(
        default_factory=Elasticity,
        description="How many workers there are, within minReplicas and maxReplicas.",
        json_schema_extra={"default": {}},
    )
    checkpoint: Checkpoint | None = Field(
        default=None,
        description="Where the state of the job is saved, and how often. Absent: nowhere; a job that loses"
        " all its workers begins again.",
    )
    failure_policy: FailurePolicy = Field(
        default_factory=FailurePolicy,
        description="When the job gives up.",
        json_schema_extra={"default": {}},
    )
    suspend: bool = Field(
        default=False,
        description="While true the job has no pods: workers save the state (with spec.checkpoint) after the"
        " step they are in, and leave. When it is set to false, training goes on from what was saved.",
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SECONDS,
        description="The job fails (DeadlineExceeded) when it has been active for so long, counted from"
        " status.startTime; suspending stops and resets the clock. Absent: no limit.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SECONDS,
        description="The job is deleted, with all that it made, so many seconds after it has ended."
        " Absent: it stays.",
    )
    security: Security = Field(
        default_factory=Security,
        description="Protection beyond the job's token.",
        json_schema_extra={"default": {}},
    )
    pod_metadata: PodMetadata = Field(
        default_factory=PodMetadata,
        description="Labels and annotations of all pods of the job, coordinator included.",
        json_schema_extra={"default": {}},
    )
    gang_scheduling: GangScheduling = Field(
        default=GangScheduling.AUTO,
        description="Who starts minReplicas workers and the coordinator together or not at all, by a PodGroup"
        " that the operator keeps. Auto: Volcano or Coscheduling (scheduler-plugins) where the template's"
        " schedulerName is theirs. Kubernetes: its own PodGroups (scheduling.k8s.io, from 1.36 on, with the"
        " feature gates GenericWorkload and GangScheduling). Without their API pods are started one by"
        " one, and Degraded says so. Holds for pods made afterwards.",
    )
    pod_cleanup: PodCleanup = Field(
        default=PodCleanup.RUNNING,
        description="Which worker pods are deleted when the job ends: All; Running (ended ones"
        " stay, for their logs); None. Workers that still run when another has finished get 60 s"
        " to end by themselves. The coordinator and its Service go when no worker is left.",
    )

    @property
    def servers(self) -> int:
        """Parameter servers wanted; 0 with a strategy that has none."""
        if self.strategy.type is StrategyType.ALL_REDUCE:
            return 0
        return self.parameter_servers.replicas if self.parameter_servers is not None else 1

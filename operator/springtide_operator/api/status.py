"""The TrainingJob's status, as the operator writes it. Fractions are strings, rounded for people."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from springtide_operator.api import names
from springtide_operator.api.base import ApiModel
from springtide_operator.api.names import MAX_WORKERS
from springtide_operator.api.servers import MAX_SERVERS

Text = Annotated[str, Field(max_length=1024)]
Short = Annotated[str, Field(max_length=128)]
Time = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
Count = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]


# What steers must not be what somebody else wrote: names stay names, and APIs the two that are known.
_LABEL_NAME = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_GANGS = (names.VOLCANO_API, names.COSCHEDULING_API, *names.POD_GROUP_APIS)
_GANG_APIS = f"^({'|'.join(re.escape(api) for api in _GANGS)})$"

PlacementsOfSets = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]


TemplateSpec = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]


class TemplateStatus(ApiModel):
    """The template that the job names, as it was when the operator first saw the job."""

    kind: Short = Field(description="TrainingTemplate or ClusterTrainingTemplate.")
    name: Annotated[str, Field(max_length=253)] = Field(description="Its name.")
    uid: Short = Field(description="Its uid.")
    generation: Count = Field(description="Its metadata.generation.")
    time: Time = Field(description="When it was read.")
    spec: TemplateSpec = Field(description="Its spec: the defaults and limits that hold for this job.")


class KeyStatus(ApiModel):
    """A key that processes of the job know each other by."""

    id: Annotated[str, Field(max_length=6)] = Field(
        description="By which pods and Secrets are marked; empty for a key of before keys had names."
    )
    secret: Annotated[str, Field(max_length=253)] = Field(description="The Secret that holds it.")
    certificate_ends: Time | None = Field(
        default=None, description="When its certificate ends, with TLS; it is renewed well before."
    )


class Condition(ApiModel):
    """One aspect of the job's state."""

    type: Short = Field(
        description="Running, Rescaling, Degraded, Suspended, Succeeded or Failed; and for tools Ready,"
        " Reconciling and Stalled."
    )
    status: Short = Field(
        description="True, False or Unknown.", json_schema_extra={"enum": ["True", "False", "Unknown"]}
    )
    reason: Short = Field(description="Why, in one CamelCase word.")
    message: Annotated[str, Field(max_length=4096)] = Field(description="Why, in a sentence.")
    last_transition_time: Time = Field(description="When the status last changed.")
    observed_generation: Count = Field(description="metadata.generation that this was decided for.")


class ShareStatus(ApiModel):
    """A worker's part of each global batch."""

    name: Annotated[str, Field(max_length=253)] = Field(
        description="Its pod, and the process in it where a pod has several."
    )
    samples: Count = Field(description="Samples of each whole global batch that fall to it.")
    seconds_per_sample: Short = Field(
        default="",
        description="Its computing time per sample, without fetching and waiting; the reason for its part.",
    )


class WorkersStatus(ApiModel):
    """Counts of worker pods."""

    desired: Count = Field(default=0, description="Workers wanted.")
    replicas: Count = Field(default=0, description="Worker pods that exist and are not ending.")
    ready: Count = Field(default=0, description="Worker pods whose containers run.")
    active: Count = Field(default=0, description="Workers that train in the current generation.")
    outdated: Count = Field(default=0, description="Worker pods made from an older template.")
    selector: Text = Field(default="", description="Selects the worker pods; used by the scale subresource.")
    summary: Short = Field(default="", description="active/desired, for people.")
    balance: list[ShareStatus] | None = Field(
        default=None,
        max_length=32,
        description="The parts of the slowest workers, the slowest first, while elasticity.balance has made"
        " parts uneven; absent while they are even.",
    )


class StandbyStatus(ApiModel):
    """Standbys: how many there are, and why not more; absent where workers.standby is 0."""

    wanted: Count = Field(default=0, description="Standbys wanted, as far as the job's queue admits them.")
    asked: Count = Field(default=0, description="Standbys asked for now: no more than there is room for.")
    replicas: Count = Field(default=0, description="Their pods that exist and are not ending.")
    ready: Count = Field(default=0, description="Those that wait, warmed up, to take a place.")
    summary: Short = Field(default="", description="ready/wanted, for people.")
    reason: Short = Field(default="", description="Why so many are asked for, in one CamelCase word.")
    message: Text = Field(default="", description="Why so many are asked for, in a sentence.")
    trouble: Text = Field(
        default="",
        description="Why those that are asked for are not ready; absent while it is a matter of time.",
    )
    last_end: Text = Field(
        default="", description="How the last one ended that did not live; absent once all wanted are ready."
    )
    stepped_in: Text = Field(default="", description="Which standbys took whose places last.")
    stepped_in_generation: Count | None = Field(default=None, description="The generation in which they did.")
    settled: Count = Field(default=0, description="Pods of workers and standbys that it has settled on.")
    failures: Count = Field(default=0, description="Tries in a row that found no room.")
    trying_since: Time | None = Field(default=None, description="Since when standbys wait for a node.")
    retry_time: Time | None = Field(default=None, description="The next try is not before this.")
    open_nodes: Count | None = Field(
        default=None,
        description="Nodes that took pods at the last try; more of them bring the next one forward.",
    )
    returned_time: Time | None = Field(
        default=None, description="When standbys were last given back for pods that found no node."
    )


class ParameterServersStatus(ApiModel):
    """Counts of parameter servers' pods."""

    desired: Count = Field(default=0, description="Parameter servers wanted.")
    replicas: Count = Field(default=0, description="Their pods that exist and are not ending.")
    ready: Count = Field(default=0, description="Their pods that are ready.")
    outdated: Count = Field(default=0, description="Their pods made from an older template.")
    summary: Short = Field(default="", description="ready/desired, for people.")
    image: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Image of their pods, unless the template names one: that of the operator that made the"
        " job's first one. Another operator's takes its place at a boundary.",
    )
    consistency: Short = Field(
        default="",
        description="In which the workers train; it follows strategy.parameterServer at a step boundary.",
    )
    staleness: Count | None = Field(
        default=None, description="With BoundedStaleness: steps that the fastest worker may be ahead."
    )
    consistency_pending: Text = Field(
        default="",
        description="That another consistency comes at the end of the running epoch. An edit takes it back.",
    )


class TakenStatus(ApiModel):
    """The part of data in shards that the committed steps of the running pass have taken.

    A shard's place is its number in the order in which the pass takes the shards, from 0.
    """

    step: Count = Field(default=0, description="The step after which this holds.")
    total_seen: Count = Field(
        default=0, description="data.totalSeen when this was written; another number there makes this old."
    )
    samples: Count = Field(
        default=0, description="Samples of the running pass before the positions, counted as they were dealt."
    )
    shards: Text = Field(
        default="", description="Places of the shards that were taken whole, as intervals: 0-41,43."
    )
    begun: Text = Field(
        default="",
        description="By the places of shards that were begun, how many samples were taken: 42:512,44:14.",
    )


class DataStatus(ApiModel):
    """The check of samples that travels with the surviving parameters."""

    epoch: Count = Field(default=0, description="Epochs completed.")
    seen: Count = Field(default=0, description="Samples counted in the running epoch.")
    repeated: Count = Field(default=0, description="Samples counted more than once, over the job.")
    lost: Count = Field(default=0, description="Samples not counted, over the job.")
    skipped: Count = Field(default=0, description="Steps skipped because gradients were not finite.")
    total_seen: Count = Field(default=0, description="Samples counted over the job.")
    taken: TakenStatus | None = Field(
        default=None, description="Of data in shards: what was taken in the running pass."
    )


class IncidentStatus(ApiModel):
    """Workers that ended together for one cause."""

    cause: Short = Field(description="What they have in common.")
    time: Time = Field(description="When the first of them was counted.")
    slots: list[Count] = Field(max_length=4 * MAX_WORKERS, description="Their slots.")


class RestartsStatus(ApiModel):
    """Workers that ended early and were replaced. Workers that end together for one cause, within ten
    seconds, are one restart.
    """

    failures: Count = Field(default=0, description="Counted against failurePolicy.backoffLimit.")
    preemptions: Count = Field(
        default=0,
        description="Evicted, preempted, deleted, left or on a lost node: counted against"
        " failurePolicy.preemptionLimit.",
    )
    ignored: Count = Field(default=0, description="Counted against nothing, by a rule that says Ignore.")
    failed_workers: Count = Field(default=0, description="Worker pods behind failures.")
    preempted_workers: Count = Field(default=0, description="Worker pods behind preemptions.")
    total: Count = Field(default=0, description="failures + preemptions + ignored.")
    incidents: list[IncidentStatus] | None = Field(
        default=None, max_length=16, description="Restarts of the last seconds, which take in late comers."
    )


class LastFailure(ApiModel):
    """The newest worker failure."""

    pod: Short = Field(description="Name of the pod.")
    reason: Short = Field(description="Error, OOMKilled, NotFinished, StartError, ...")
    message: Annotated[str, Field(max_length=2048)] = Field(description="The error, or the log's end.")
    exit_code: int = Field(default=0, description="Exit code of the container.")
    time: Time = Field(description="When it ended.")


class BackoffStatus(ApiModel):
    """Delay before a role's next pod; it doubles with every bad end and decays with time."""

    count: Count = Field(default=0, description="Recent bad ends that the delay is computed from.")
    last_time: Time = Field(description="When the newest of them was counted.")
    until: Time = Field(description="The next pod is made after this.")


class CoordinatorStatus(ApiModel):
    """The job's coordinator pod."""

    incarnation: Count = Field(default=0, description="Raised before each coordinator pod is made.")
    address: Short = Field(default="", description="host:port that workers are given.")
    image: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Image of its pods, unless the manifest names one: that of the operator that made the"
        " job's first one. Another operator's takes its place at a boundary.",
    )
    ended: Count | None = Field(
        default=None, description="Highest incarnation whose end the backoff has counted."
    )
    reachable: bool = Field(default=False, description="Whether it answered the operator's last call.")
    restart: Count | None = Field(default=None, description="Restarts of the container in its pod.")
    recoveries: Count | None = Field(
        default=None, description="Its own count, as added to status.recoveries."
    )
    states_lost: Count | None = Field(
        default=None, description="Its own count, as added to status.statesLost."
    )
    lost_seconds: dict[str, Short] | None = Field(
        default=None,
        description="Its own sums, as added to status.lostSeconds.",
        json_schema_extra={"maxProperties": 8},
    )


class SlowWorkerStatus(ApiModel):
    """A worker whose own time per step is well above the others', so that they wait for it."""

    pod: Short = Field(description="Its pod.")
    node: Annotated[str, Field(max_length=253)] = Field(default="", description="The pod's node.")
    step_seconds: Short = Field(description="Its data and compute time per step.")
    median_seconds: Short = Field(description="The other workers' median.")


class QueueStatus(ApiModel):
    """Kueue's decision about the job."""

    name: Short = Field(description="The queue that the job's label names.")
    workload: Short = Field(description="The job's Workload.", pattern=_LABEL_NAME)
    admitted: bool = Field(description="Whether the job may have pods.")
    reason: Short = Field(description="Queued, Admitted, EvictedFromQueue or JobSuspended.")
    message: Text = Field(description="Kueue's word on it.")
    cluster_queue: Annotated[str, Field(max_length=253)] | None = Field(
        default=None, description="The ClusterQueue whose quota is used."
    )
    workers: Count | None = Field(default=None, description="Workers admitted: the job has no more.")
    asked: Count | None = Field(default=None, description="Workers that the job asks for.")
    servers: Count | None = Field(
        default=None, description="Parameter servers admitted: the job has no more."
    )
    servers_asked: Count | None = Field(default=None, description="Parameter servers that the job asks for.")
    pod_sets: PlacementsOfSets | None = Field(
        default=None,
        description="By pod set (coordinator, workers, parameter-servers): node selector, tolerations, labels"
        " and annotations that the admission gives to pods.",
    )


class GangStatus(ApiModel):
    """The PodGroup by which pods are started together."""

    scheduler: Short = Field(
        description="Volcano, Coscheduling or Kubernetes.", pattern="^(Volcano|Coscheduling|Kubernetes)$"
    )
    api_version: Short = Field(description="Of the PodGroup.", pattern=_GANG_APIS)
    pod_group: Short = Field(description="Its name.", pattern=_LABEL_NAME)
    min_member: Count = Field(description="Pods that are started together or not at all.")


class CheckpointStatus(ApiModel):
    """The newest checkpoint that is whole."""

    name: Short = Field(description="Its folder.")
    uri: Annotated[str, Field(max_length=2048)] = Field(description="The folder of the job's checkpoints.")
    step: Count = Field(description="The committed step that it holds.")
    time: Time = Field(description="When it was completed.")
    up_to_date: bool = Field(
        default=False,
        description="Whether the workers left with it: it holds all there was, so nothing is lost.",
    )


class MemoryStatus(ApiModel):
    """Memory of a worker's pod for parameters, buffers, gradients and the optimizer's state.

    It is counted by the workers when they have built their model. Activations and what libraries take come on
    top, so a limit above it is no promise, and one below it is too small.
    """

    per_worker: Short = Field(description="Needed by each worker at the present number of them, a quantity.")
    per_worker_at_min_replicas: Short = Field(
        description="Needed by each where no more than workers.minReplicas are left, a quantity."
    )
    limit: Short | None = Field(
        default=None,
        description="What a worker has, a quantity: its container's limit, or else its node's memory; that"
        " of its devices where the parameters are there. The smallest among the workers and the template.",
    )
    limited_by: Short | None = Field(
        default=None, description="Container or Device.", json_schema_extra={"enum": ["Container", "Device"]}
    )
    fewest_workers: Count | None = Field(
        default=None,
        description="The smallest number of workers of which each has room. A job that has trained does not"
        " go on with fewer; absent where no number is enough.",
    )


class SlotStatus(ApiModel):
    """The newest pod of one worker slot. Its end is counted by writing here, before anything follows."""

    attempt: Count = Field(default=0, description="Number in the pod's name.")
    uid: Short | None = Field(default=None, description="The pod's uid, once it was seen.")
    ended: Short | None = Field(
        default=None,
        description="How it ended: Finished, Left, Surplus, Failed, Preempted, ScaledDown, Outdated.",
    )
    moves: Short | None = Field(
        default=None,
        description="uid of the pod before it, on a cordoned node, that goes on until this one takes over.",
    )
    healthy: bool = Field(
        default=False,
        description="It takes part in training; of one that ended: its end was no part of a loop.",
    )
    replaces: bool = Field(
        default=False, description="A parameter server in the place of one that was not given back."
    )
    edited: bool = Field(
        default=False,
        description="Its pod is still to be made, after one that had not begun when its template was edited.",
    )
    standby: bool = Field(
        default=False,
        description="It stands by, or is made to; of one that ended: it did until then, so that its end"
        " counts in no budget.",
    )
    avoid: Annotated[str, Field(max_length=253)] | None = Field(
        default=None, description="The node that its next pod must not be on, by a rule that says Replace."
    )


class MeasuredStatus(ApiModel):
    """Throughput that one number of workers brought."""

    workers: Count = Field(description="Number of workers.")
    samples_per_second: Short = Field(description="Samples per second of all of them; 0: no node took them.")
    time: Time = Field(description="When it was measured.")


class ElasticityStatus(ApiModel):
    """The decisions of elasticity.policy; absent with Manual."""

    workers: Count = Field(default=0, description="Workers that it has settled on.")
    reason: Short = Field(default="", description="Why, in one CamelCase word.")
    message: Text = Field(default="", description="Why, in a sentence.")
    extra: Count | None = Field(
        default=None, description="Capacity: workers asked for beyond workers.replicas."
    )
    target: Count | None = Field(
        default=None,
        description="Throughput: workers asked for, while sizes are measured not those settled on.",
    )
    target_time: Time | None = Field(default=None, description="Throughput: since when.")
    measured: list[MeasuredStatus] | None = Field(
        default=None, max_length=32, description="Throughput: what sizes brought."
    )
    trying_since: Time | None = Field(
        default=None, description="Capacity: since when extra workers wait for a node."
    )
    failures: Count | None = Field(
        default=None,
        description="Tries in a row without success: no room (Capacity), or no other size (Throughput).",
    )
    retry_time: Time | None = Field(default=None, description="The next try is not before this.")
    open_nodes: Count | None = Field(
        default=None,
        description="Capacity: nodes that took pods when the last try failed; more of them bring the next"
        " try forward.",
    )
    returned_time: Time | None = Field(
        default=None, description="Capacity: when extra workers were last given back for others."
    )


class TrainingJobStatus(ApiModel):
    """The observed state of a TrainingJob."""

    state: Short | None = Field(default=None, description="The state in one word, derived from conditions.")
    message: Annotated[str, Field(max_length=4096)] | None = Field(
        default=None, description="The job's state in a sentence: what it does, or what it waits for."
    )
    observed_generation: Count | None = Field(default=None, description="metadata.generation acted on.")
    start_time: Time | None = Field(
        default=None, description="When the job became active: first seen, or resumed."
    )
    completion_time: Time | None = Field(default=None, description="When the job succeeded or failed.")
    conditions: list[Condition] | None = Field(
        default=None,
        max_length=16,
        description="Running, Rescaling, Degraded, Suspended; Succeeded or Failed at the end. Ready,"
        " Reconciling and Stalled follow from them, for tools that roll manifests out.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    workers: WorkersStatus | None = Field(default=None, description="Counts of worker pods.")
    parameter_servers: ParameterServersStatus | None = Field(
        default=None, description="Counts of parameter servers' pods, with a strategy that has them."
    )
    generation: Count | None = Field(default=None, description="Number of the membership generation.")
    step: Count | None = Field(default=None, description="Newest committed step.")
    progress: Annotated[int, Field(ge=0, le=100)] | None = Field(
        default=None,
        description="Committed steps as a share of those that the job has at its end, in percent, rounded"
        " down; 100 when it has succeeded. Absent while nobody knows its end.",
    )
    estimated_completion_time: Time | None = Field(
        default=None,
        description="When the last step is committed, if steps go on as fast as now. Absent while the end is"
        " not known, nothing is trained, or the speed at the present number of workers is not measured yet.",
    )
    samples_per_second: Short | None = Field(default=None, description="Samples per second of all workers.")
    goodput: Short | None = Field(default=None, description="Time spent on steps that survive / wall time.")
    data: DataStatus | None = Field(
        default=None, description="The check of samples that travels with the surviving parameters."
    )
    values: dict[str, Short] | None = Field(
        default=None,
        description="What the script reported last.",
        json_schema_extra={"maxProperties": 64},
    )
    restarts: RestartsStatus | None = Field(default=None, description="Workers that ended early.")
    recoveries: Count | None = Field(default=None, description="Changes of workers that training survived.")
    states_lost: Count | None = Field(
        default=None,
        description="Times that no worker with the job's state survived and training started again.",
    )
    last_recovery_seconds: Short | None = Field(
        default=None, description="Last recovery: last commit before it to first commit after it, in seconds."
    )
    lost_seconds: dict[str, Short] | None = Field(
        default=None,
        description="Seconds lost over the job's life, by cause. Between steps that survive: failure,"
        " rescale, checkpoint. Within them: data, straggler.",
        json_schema_extra={"maxProperties": 8},
    )
    slow_worker: SlowWorkerStatus | None = Field(
        default=None, description="A worker that holds the others up now."
    )
    elasticity: ElasticityStatus | None = Field(
        default=None, description="What elasticity.policy has decided, and why."
    )
    standby: StandbyStatus | None = Field(
        default=None, description="Pods that wait to take a place; absent where workers.standby is 0."
    )
    checkpoint: CheckpointStatus | None = Field(
        default=None, description="The newest checkpoint that is whole."
    )
    restored: Annotated[str, Field(max_length=2200)] | None = Field(
        default=None, description="The checkpoint that training last went on from."
    )
    memory: MemoryStatus | None = Field(
        default=None, description="Memory that a worker needs for the model, once a worker has built it."
    )
    last_failure: LastFailure | None = Field(default=None, description="The newest worker failure.")
    backoff: dict[str, BackoffStatus] | None = Field(
        default=None,
        description="Delay before the next pod, by role (worker, coordinator); doubles with every bad end,"
        " decays with time.",
        json_schema_extra={"maxProperties": 8},
    )
    coordinator: CoordinatorStatus | None = Field(default=None, description="The job's coordinator pod.")
    tls: bool | None = Field(
        default=None,
        description="Whether a job without security.tls uses TLS: decided once, before its first pod.",
    )
    keys: list[KeyStatus] | None = Field(
        default=None,
        description="The job's key, and before it was replaced the ones that pods were made with which may"
        " still run; the newest comes first.",
        json_schema_extra={"maxItems": 64},
    )
    template: TemplateStatus | None = Field(
        default=None,
        description="The template that spec.templateRef names, as it holds for this job; later edits of the"
        " template change nothing here.",
    )
    queue: QueueStatus | None = Field(default=None, description="What Kueue has decided about the job.")
    gang: GangStatus | None = Field(
        default=None, description="The PodGroup by which pods are started together."
    )
    slots: dict[str, SlotStatus] | None = Field(
        default=None,
        description="The newest pod of each worker slot, and how it ended.",
        json_schema_extra={"maxProperties": 4 * MAX_WORKERS},
    )
    server_slots: dict[str, SlotStatus] | None = Field(
        default=None,
        description="The newest pod of each parameter server's slot, and how it ended.",
        json_schema_extra={"maxProperties": MAX_SERVERS},
    )
    progress_time: Time | None = Field(
        default=None,
        description="When step, progress, samplesPerSecond, goodput, data and values were last written.",
    )

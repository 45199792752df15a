"""Facts that policies see: pods, the coordinator's report, refusals. Nothing here decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from springtide_operator.plan.workload import WorkloadSeen
from springtide_protocol.memory import ModelMemory
from springtide_protocol.versions import PROTOCOL_VERSION


def newest_served(known: Mapping[str, bool], apis: Iterable[str]) -> str | None:
    """Return which of several versions of an API is to be used.

    Args:
        known: which APIs are served or not; absent: it is not known yet.
        apis: the versions, in order of preference.

    Returns:
        The first that is served; "" where none is; None where it is not known yet.
    """
    for api in apis:
        if api not in known:
            return None
        if known[api]:
            return api
    return ""


@dataclass(frozen=True)
class Problem:
    """Something that a person must know: `reason` is a constant of `api.reasons`."""

    reason: str
    message: str
    cause: str = ""  # the pod's own word for it: ImagePullBackOff, CrashLoopBackOff, Unschedulable, ...


@dataclass(frozen=True)
class TakenReport:
    """The part of a pass over shards that lies before its positions.

    Attributes:
        step: after which it holds.
        samples: of the running pass, counted as they were dealt.
        shards: places of the shards that were taken whole.
        begun: by the places of others, how many samples were taken.
    """

    step: int
    samples: int
    shards: str = ""
    begun: str = ""


@dataclass(frozen=True)
class Finished:
    """A worker's script ended after its last training loop was committed by all."""

    incarnation: int | None = None  # number of the coordinator that said so
    generation: int | None = None
    step: int | None = None
    data: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    taken: TakenReport | None = None


@dataclass(frozen=True)
class End:
    """How a worker's process ended. `kind` is one of the END_ constants of `api.reasons`."""

    kind: str
    reason: str
    message: str
    exit_code: int = 0
    at: float | None = None  # unix seconds; None: not said
    finished: Finished | None = None
    exception: str | None = None  # class of the exception that ended the script, if one is known
    waiting: bool = False  # it never ran: it waits for something that a rule says not to wait for


@dataclass(frozen=True)
class WorkerPod:
    name: str
    uid: str
    slot: int
    attempt: int
    phase: str = "Pending"
    created_at: float = 0.0
    started_at: float | None = None  # of the container that runs the script
    running: bool = False  # that container runs now
    deletion_asked_at: float | None = None
    gone_by: float | None = None  # deletionTimestamp
    deleted_because: str | None = None  # our annotation
    template: str | None = None  # hash of the template it was made from
    end: End | None = None  # None: a process may still run
    stopped: bool = False  # none of its containers runs any more: kubelets say that before the phase
    problem: Problem | None = None
    starting_since: float | None = None  # a node has it, and none of its containers has begun since
    disruption: str | None = None  # why somebody ends it (eviction, preemption, taint), in words
    disruption_reason: str | None = None  # and in one: EvictionByEvictionAPI, DeletionByTaintManager, ...
    node: str | None = None
    key: str = ""  # name of the key that it was made with
    unreachable: bool = False  # its node's loss drove it out: the kubelet does not hear of the deletion
    going_since: float | None = None  # when the operator first saw that it is to go, by its steady clock
    address: tuple[str, int] | None = None  # of its metrics

    @property
    def deleting(self) -> bool:
        return self.gone_by is not None

    @property
    def placed(self) -> bool:
        """A node has taken it."""
        return self.node is not None or self.running or self.started_at is not None

    @property
    def live(self) -> bool:
        """Counts towards the size: may run, and nobody has asked it to go."""
        return self.end is None and not self.deleting

    @property
    def finished(self) -> bool:
        """Return whether its script ended well; no successor takes its slot until the job counts that."""
        return self.end is not None and self.end.finished is not None and not self.deleting

    @property
    def terminal(self) -> bool:
        """Return whether nothing of the pod runs, and nothing will."""
        return self.stopped or self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True)
class CoordinatorPod:
    name: str
    uid: str
    incarnation: int
    phase: str = "Pending"
    created_at: float = 0.0
    running_since: float | None = None
    running_seen_at: float | None = None  # when the operator first saw that start, by its steady clock
    ready_since: float | None = None  # it has passed its startup probe
    deletion_asked_at: float | None = None
    gone_by: float | None = None  # deletionTimestamp
    ip: str | None = None
    template: str | None = None  # hash of what it took from the job's spec
    keys: tuple[str, ...] = ()  # names of the keys that it knows, the newest first
    problem: Problem | None = None
    starting_since: float | None = None  # a node has it, and none of its containers has begun since
    node: str | None = None
    unreachable: bool = False  # its node's loss drove it out
    going_since: float | None = None  # when the operator first saw that it is to go, by its steady clock
    lost: bool = False  # nothing is heard of it, nor of its node
    why_lost: str = ""

    @property
    def deleting(self) -> bool:
        return self.gone_by is not None

    @property
    def live(self) -> bool:
        return not self.deleting and not self.lost and self.phase not in ("Succeeded", "Failed")


@dataclass(frozen=True)
class ServerPod:
    """A parameter server's pod."""

    name: str
    uid: str
    slot: int
    attempt: int
    phase: str = "Pending"
    created_at: float = 0.0
    started_at: float | None = None
    running: bool = False
    ready: bool = False
    restarts: int = 0  # of its container
    deletion_asked_at: float | None = None
    gone_by: float | None = None  # deletionTimestamp
    deleted_because: str | None = None  # our annotation
    template: str | None = None  # hash of the template that it was made from
    problem: Problem | None = None
    starting_since: float | None = None  # a node has it, and none of its containers has begun since
    disruption: str | None = None  # why somebody ends it, in words
    node: str | None = None
    key: str = ""  # name of the key that it was made with
    unreachable: bool = False  # its node's loss drove it out
    going_since: float | None = None  # when the operator first saw that it is to go, by its steady clock
    address: tuple[str, int] | None = None  # of its metrics
    lost: bool = False  # nothing is heard of it, nor of its node

    @property
    def deleting(self) -> bool:
        return self.gone_by is not None

    @property
    def live(self) -> bool:
        """Return whether the pod is to stay: nobody has asked it to go, and its node lives."""
        return not self.deleting and not self.lost and self.phase not in ("Succeeded", "Failed")


@dataclass(frozen=True)
class Node:
    """`ready`: None for Unknown, which is what Kubernetes says of a node that it does not hear of.

    since: of the last change of `ready` or `gone`, as the operator saw it, by its steady clock.
    """

    name: str
    ready: bool | None = True
    since: float = 0.0
    cordoned: bool = False  # it takes no more pods
    leaving: bool = False  # a taint says that it is about to be taken away
    zone: str = ""
    gone: bool = False  # the Node object was deleted


@dataclass(frozen=True)
class Testimony:
    """Result of asking a pod itself, at its metrics port.

    reached: something answered there, or refused. silent: for so many seconds nothing has. missing: so long
    its process has had no stream to the coordinator (0: it has one); idle: so long it has committed no step;
    both in seconds, None where it did not say.
    """

    uid: str
    pod: str
    reached: bool
    silent: float = 0.0
    missing: float | None = None
    idle: float | None = None


@dataclass(frozen=True)
class LeaseSeen:
    """A node's lease: for how many seconds the operator has looked at it and seen no renewal, and whether it
    has seen one since it looks.
    """

    unchanged: float
    renewed: bool = False


@dataclass(frozen=True)
class Sight:
    """Observations of the operator itself, since a coordinator does not answer or waits for somebody.

    silence: seconds since the last answer of the pod with uid `coordinator`, or since it was first asked.
    answered: it ever did. leases: by node. unanswered: coordinators of all jobs that owe an answer, by node;
    answering: those that have given one just now.
    """

    coordinator: str
    silence: float = 0.0
    answered: bool = False
    testimonies: tuple[Testimony, ...] = ()
    leases: Mapping[str, LeaseSeen] = field(default_factory=dict)
    unanswered: Mapping[str, int] = field(default_factory=dict)
    answering: int = 0


@dataclass(frozen=True)
class MemberReport:
    pod_uid: str
    active: bool  # in the current generation
    connected: bool
    leaving: bool
    starting: bool = False  # it has said Hello, and has not come to its training loop
    waiting: bool = False  # it is ready to train, and not in the current generation
    protocol: int = PROTOCOL_VERSION  # the newest version that it speaks


@dataclass(frozen=True)
class ServerReport:
    """A parameter server, as the coordinator sees it."""

    pod_uid: str
    connected: bool
    serving: bool  # the newest generation has it, or asks it for what it holds
    protocol: int = PROTOCOL_VERSION  # the newest version that it speaks


@dataclass(frozen=True)
class FailureReport:
    """A failure that training has gone on after. number: among all recoveries of the coordinator's process,
    from 1. seconds: without a step.
    """

    number: int
    generation: int
    seconds: float
    reason: str


@dataclass(frozen=True)
class SlowReport:
    """A worker that holds the others up; seconds per step."""

    pod: str
    busy: float
    median: float  # of the others


@dataclass(frozen=True)
class ShareReport:
    """A worker's part of each whole global batch, where parts follow speed."""

    name: str  # of the pod, and of the process in it where there are several
    samples: int
    sample_seconds: float  # of computing per sample; 0: not known


@dataclass(frozen=True)
class LateReport:
    """A worker that the others wait for. `doing`: what, in words; "" where nothing was heard of it."""

    pod_uid: str
    pod: str
    doing: str = ""
    where: str = ""  # line of the script
    since: float = 0.0  # unix seconds; 0: not known


@dataclass(frozen=True)
class StallReport:
    """No step was committed for `seconds`. `step`: the one waited for; 0: the end of the loop."""

    seconds: float
    since: float  # unix seconds, by the coordinator's clock
    step: int
    late: tuple[LateReport, ...] = ()
    waiting: int = 0  # members that wait


@dataclass(frozen=True)
class PoisonReport:
    """A step that was done again and ended another worker with the same exception."""

    step: int
    samples: str  # which it takes, in words
    workers: tuple[str, ...]
    detail: str


@dataclass(frozen=True)
class RateReport:
    """Throughput of a number of workers: samples/s, measured over so many seconds and steps."""

    workers: int
    samples_per_second: float
    seconds: float
    steps: int


@dataclass(frozen=True)
class CheckpointReport:
    """The newest checkpoint that is whole; at: unix seconds of its completion."""

    name: str
    uri: str
    step: int
    at: float


@dataclass(frozen=True)
class TraceReport:
    """A change of members that somebody records: its span, and the pods (uids) that it lost."""

    traceparent: str
    lost_pods: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Report:
    """The coordinator's last answer."""

    incarnation: int
    restart: int
    at: float  # unix seconds, when the operator got it
    phase: str  # WAITING, FORMING, RUNNING, ENDING, AFTER_LOOP
    generation: int | None = None
    generation_incarnation: int | None = None  # of the coordinator that made that generation
    step: int | None = None
    members: tuple[MemberReport, ...] = ()
    waiting_for: tuple[str, ...] = ()
    reason: str = ""
    message: str = ""
    data: Mapping[str, int] | None = None
    taken: TakenReport | None = None
    samples_per_second: float = 0.0
    goodput: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    recoveries: int = 0
    recovery_seconds: float | None = None
    recovery_cause: str = ""
    failures: tuple[FailureReport, ...] = ()  # the newest, oldest first
    states_lost: int = 0
    last_commit_at: float | None = None
    still: bool = False  # no step for five seconds, and for longer than three steps take
    step_seconds: float = 0.0  # median of the recent ones
    planned_steps: int = 0  # that the job has committed at its end; 0: nobody knows
    seconds_per_step: float = 0.0  # from commit to commit at the present size, smoothed; 0: not measured yet
    lost_seconds: Mapping[str, float] = field(default_factory=dict)  # by cause, since its process began
    slow: SlowReport | None = None
    shares: tuple[ShareReport, ...] = ()  # the slowest workers first; empty: all have even parts
    stall: StallReport | None = None  # None: it moves
    poison: PoisonReport | None = None
    rates: tuple[RateReport, ...] = ()
    servers: tuple[ServerReport, ...] = ()
    servers_settled: bool = False  # a generation runs with exactly those that were asked for
    consistency: str = ""  # in which the generation trains; "": no parameters on servers
    staleness: int = 0  # with BoundedStaleness
    consistency_refused: str = ""  # why the wanted one cannot be
    consistency_pending: str = ""  # that the wanted one comes at the end of the epoch
    checkpoint: CheckpointReport | None = None
    checkpoint_error: str = ""  # why newer ones fail
    protocol: int = PROTOCOL_VERSION  # the newest version that the coordinator speaks
    seats: bool = False  # the coordinator lets no more train than are wanted while standbys wait
    steps_in: str = ""  # which standbys the generation has in whose places, in words
    former_members: frozenset[str] = frozenset()  # uids of pods that a generation had and has lost
    held_back: str = ""  # why processes that are ready do not take part
    memory: ModelMemory | None = None  # of the process that has least room
    restored: str = ""  # URI of the checkpoint that training went on from
    restored_step: int = 0
    not_restored: tuple[str, ...] = ()  # newer ones that could not be used, and why
    put_away: bool = False  # told to suspend: nobody is left who has anything to save
    all_saved: bool = False  # the newest checkpoint holds the job's newest state
    silent: frozenset[str] = frozenset()  # pod uids that run and have not said Hello
    vanished: frozenset[str] = frozenset()  # that run, were members, and have not been heard of for a minute
    opaque: bool = False  # its members run scripts that commit no steps of ours: no progress is no hang
    traces: tuple[TraceReport, ...] = ()  # of the last changes of members, oldest first

    @cached_property
    def connected(self) -> frozenset[str]:
        """The uids of the pods that the coordinator is connected to: asked for once for each pod."""
        members = {member.pod_uid for member in self.members if member.connected}
        return frozenset(members | {server.pod_uid for server in self.servers if server.connected})

    asked_living: frozenset[str] | None = None  # worker pods (uids) called living in the question
    steady_at: float | None = None  # when the operator got it, by its steady clock

    @property
    def training(self) -> bool:
        return self.phase in ("RUNNING", "ENDING", "AFTER_LOOP")


# How the API server names those whose no is a policy's, with whatever code they choose.
_POLICIES = ("admission webhook", "ValidatingAdmissionPolicy")
_WEBHOOK_FAILS = "failed calling webhook"
TRANSIENT_SECONDS = 30.0


def is_transient(code: int) -> bool:
    """Return whether a server that answers so (0: it does not) may well take the same later. PURE."""
    return code in (0, 429) or code >= 500


@dataclass(frozen=True)
class Refusal:
    """The API server's no to a creation; kept by the shell, cleared by a success."""

    code: int
    message: str
    retry_at: float
    since: float
    terminating: bool = False  # the namespace is being deleted: nothing can be made in it any more
    ours: bool = False  # the operator itself found the template wrong
    generation: int = 0  # of the job's spec that it was the answer to; 0: not said

    @property
    def transient(self) -> bool:
        """The server did not get to an answer, or has too much to do: nothing that a user can act on."""
        return is_transient(self.code)

    @property
    def invalid(self) -> bool:
        """The object itself is wrong: asking again cannot help. (A policy may change its mind.)"""
        return self.code in (400, 422) and not any(words in self.message for words in _POLICIES)

    def hidden(self, now: float) -> bool:
        """No word about it yet: the server is likely to answer soon. A webhook that does not answer is
        somebody's to mend, and so is whatever lasts.
        """
        return self.transient and _WEBHOOK_FAILS not in self.message and now - self.since < TRANSIENT_SECONDS


@dataclass(frozen=True)
class ServiceSeen:
    """The coordinator's Service as the API server answered when it was applied."""

    address: str  # host:port
    incarnation: int  # that it selects
    applied_at: float


@dataclass(frozen=True)
class Observation:
    workers: tuple[WorkerPod, ...] = ()
    coordinators: tuple[CoordinatorPod, ...] = ()
    servers: tuple[ServerPod, ...] = ()
    server_budget: int | None = None  # servers that the disruption budget was applied for by this process
    service: ServiceSeen | None = None
    service_gone: bool = False  # this process has deleted it, or found it gone
    secret_made: bool = False
    secret_made_at: float = 0.0  # unix seconds of the last try
    secret_version: str = ""  # which Secret that was
    key: str = ""  # id of the key that the job is to have; "": keys are not looked after
    certificate_seconds: float = 7_776_000.0  # validity of certificates
    policy_missing: bool = False  # a NetworkPolicy is wanted, and this process has not applied it
    report: Report | None = None
    unreachable_since: float | None = None  # the coordinator's calls fail since
    deaf_since: float | None = None  # the same by the steady clock
    unreachable_why: str = ""
    sight: Sight | None = None  # None while the coordinator answers and waits for nobody
    # By the steady clock: when the coordinator last said of each pod (uid) that it is connected, and since
    # when this process has had its word.
    heard_at: Mapping[str, float] = field(default_factory=dict)
    listening_since: float | None = None
    # By the steady clock: since when this process has seen that the job is halted, that it is and no worker
    # is left, that it has ended (`first_seen`).
    halted_since: float | None = None
    left_since: float | None = None
    ended_since: float | None = None
    refusals: Mapping[str, Refusal] = field(
        default_factory=dict
    )  # by role: worker, coordinator, service, secret
    taken: frozenset[str] = frozenset()  # pod names that somebody else holds
    apis: Mapping[str, bool] = field(default_factory=dict)  # optional ones: served or not; absent: unknown
    workload: WorkloadSeen | None = None  # Kueue's
    workloads_listed: bool = False  # since this process acts
    workloads_trouble: str = ""  # why they cannot be listed
    pod_group: str = ""  # version of the PodGroup that this process has applied
    pod_group_gone: bool = False  # this process has deleted it, or found it gone
    pods_wait: str = ""  # what must be there before any pod is made; set by the plan
    nodes: Mapping[str, Node] | None = None  # by name; None: they cannot be read
    steady: float | None = None  # what the clock says by which things were first seen; None: unix seconds
    tls_default: bool = False  # the operator's, for jobs that do not say
    coordinator_image: str = ""  # the operator's own; "": not told
    server_image: str = ""  # the same
    crowd: tuple[str, ...] = ()  # pods of others that no node takes, and that this job could make room for

    @cached_property
    def newest_pods(self) -> Mapping[int, WorkerPod]:
        """The worker's pod with the highest attempt of each slot."""
        result: dict[int, WorkerPod] = {}
        for pod in self.workers:
            if pod.slot not in result or pod.attempt > result[pod.slot].attempt:
                result[pod.slot] = pod
        return result

    @cached_property
    def live_pods(self) -> tuple[WorkerPod, ...]:
        """One per slot, in the order of slots: workers' pods that count towards the size."""
        return tuple(sorted((pod for pod in self.newest_pods.values() if pod.live), key=lambda pod: pod.slot))

    def seen_for(self, since: float, now: float) -> float:
        """Return the seconds since something was seen first, by the operator's steady clock.

        Args:
            since: when, by that clock; in unix seconds where the observation has no reading of it.
            now: in unix seconds, for such an observation.
        """
        return (now if self.steady is None else self.steady) - since

    def report_of(self, incarnation: int) -> Report | None:
        """The coordinator's word, if it is the word of this incarnation."""
        return self.report if self.report is not None and self.report.incarnation == incarnation else None

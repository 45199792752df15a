"""Between the protocol's messages and the state machine's values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import coordinator_pb2 as pb
from . import evaluation
from .membership import messages as say
from .membership.consistency import BOUNDED, MODES
from .membership.describe import Phase
from .membership.events import PodSeen, Synced
from .membership.names import GenerationName, Incarnation, StateName

STANDINGS = {
    pb.STARTING: say.Standing.STARTING,
    pb.PARKED: say.Standing.PARKED,
    pb.ACTIVE: say.Standing.ACTIVE,
    pb.ENDED: say.Standing.ENDED,
    pb.AFTER: say.Standing.AFTER,
}
_STANDINGS_BACK = {value: key for key, value in STANDINGS.items()}
_PARK_REASONS = {
    pb.STANDBY: say.ParkReason.STANDBY,
    pb.DROPPED: say.ParkReason.DROPPED,
    pb.REDUCTION_FAILED: say.ParkReason.REDUCTION_FAILED,
    pb.BOUNDARY: say.ParkReason.BOUNDARY,
    pb.FORMATION_FAILED: say.ParkReason.FORMATION_FAILED,
    pb.SERVERS_LACK_STATE: say.ParkReason.SERVERS_LACK_STATE,
}
PHASES = {
    Phase.WAITING: pb.WAITING,
    Phase.FORMING: pb.FORMING,
    Phase.RUNNING: pb.RUNNING,
    Phase.ENDING: pb.ENDING,
    Phase.AFTER_LOOP: pb.AFTER_LOOP,
}


_TEXT_LIMIT = 1000
# What a message may count, at most. Far above every job, far below what could keep this process busy.
MAX_PROCESSES = 1_000_000
MAX_PER_POD = 1024
MAX_SERVERS = 4096
MAX_SLOT = 10_000_000
MAX_STALENESS = 1_000_000
MAX_COUNT = 2**53
MAX_PAUSE = 3600.0


class MalformedError(ValueError):
    """A message lacks something it must have; the text says what."""


def _count(value: int, most: int, what: str) -> int:
    if value > most:
        raise MalformedError(f"{what} is {value}, and {most} is the limit")
    return value


def _duration(value: float, most: float = math.inf) -> float:
    """Seconds, or a unix time: what cannot be one counts as not told."""
    return min(value, most) if value > 0 and math.isfinite(value) else 0.0


# ---- names ----


def to_incarnation(name: pb.Incarnation) -> Incarnation:
    """Raises MalformedError for a number beyond all: whoever made that up would fence every later one."""
    _count(max(name.number, name.restart), MAX_COUNT, "an incarnation's number")
    return Incarnation(name.number, name.restart)


def to_generation(name: pb.GenerationName) -> GenerationName | None:
    """None when unset: generation numbers begin at 1. Raises MalformedError for a number beyond all."""
    _count(name.number, MAX_COUNT, "a generation's number")
    return GenerationName(to_incarnation(name.incarnation), name.number) if name.number else None


def to_state(name: pb.StateName) -> StateName | None:
    generation = to_generation(name.generation)
    _count(name.step, MAX_COUNT, "a step")
    return StateName(generation, name.step) if generation is not None else None


def from_incarnation(name: Incarnation) -> pb.Incarnation:
    return pb.Incarnation(number=name.number, restart=name.restart)


def from_generation(name: GenerationName) -> pb.GenerationName:
    return pb.GenerationName(incarnation=from_incarnation(name.incarnation), number=name.number)


def from_state(name: StateName | None) -> pb.StateName | None:
    if name is None:
        return None
    return pb.StateName(generation=from_generation(name.generation), step=name.step)


# ---- worker -> coordinator ----


def to_member(member: pb.Member) -> say.MemberInfo:
    """Raises MalformedError."""
    _count(member.slot, MAX_SLOT, "a member's slot")
    _count(member.local_rank, MAX_PER_POD, "a member's local rank")
    return say.MemberInfo(
        member.id, member.pod_uid, member.pod_name, member.local_rank, member.address, member.slot
    )


def to_server(server: pb.Server) -> say.ServerInfo:
    """Raises MalformedError."""
    _count(server.slot, MAX_SERVERS, "a parameter server's slot")
    return say.ServerInfo(
        server.id, server.pod_uid, server.pod_name, server.slot, server.address, server.attempt
    )


def to_consistency(told: pb.Consistency) -> say.Consistency | None:
    """None when it is not told. Raises MalformedError for a mode that there is not."""
    if not told.mode:
        return None
    if told.mode not in MODES:
        raise MalformedError(f"{told.mode!r} is no consistency: {', '.join(MODES)} are")
    staleness = _count(told.staleness, MAX_STALENESS, "the staleness")
    return say.Consistency(told.mode, max(1, staleness) if told.mode == BOUNDED else 0)


def from_consistency(known: say.Consistency | None) -> pb.Consistency | None:
    return None if known is None else pb.Consistency(mode=known.mode, staleness=known.staleness)


def to_hello(hello: pb.Hello) -> say.Hello:
    """Raises MalformedError when the standing is missing."""
    standing = STANDINGS.get(hello.standing)
    if standing is None:
        raise MalformedError("Hello.standing is not set")
    newest = hello.newest_incarnation
    return say.Hello(
        member=to_member(hello.member),
        standing=standing,
        protocol_version=hello.protocol_version,
        newest_incarnation=to_incarnation(newest) if newest.number else None,
        generation=to_generation(hello.generation),
        members=tuple(to_member(member) for member in hello.members),
        state=to_state(hello.state),
        layout_hash=hello.layout_hash,
        leaving=hello.leaving,
        ended_stage=hello.ended_stage,
        servers=tuple(to_server(server) for server in hello.servers),
        opaque=hello.opaque,
        checkpoints=hello.checkpoints,
        books=hello.books,
        consistency=to_consistency(hello.consistency),
        storage=hello.storage or hello.checkpoints,
        bound_to_steps=hello.bound_to_steps[:_TEXT_LIMIT],
        cut=hello.cut,
    )


def to_incoming(message: pb.WorkerMessage) -> say.Incoming | None:
    """None for messages that are no matter of membership. Raises MalformedError."""
    match message.WhichOneof("message"):
        case "parked":
            parked = message.parked
            return say.Parked(
                _PARK_REASONS.get(parked.reason, say.ParkReason.UNKNOWN),
                to_generation(parked.generation),
                to_state(parked.state),
                parked.layout_hash,
                parked.detail,
                tuple(parked.suspects),
                parked.cannot_go_back,
                parked.cut,
            )
        case "formed":
            formed = message.formed
            return say.Formed(
                _needed(to_generation(formed.generation), "Formed.generation"),
                tuple(formed.needed_servers),
                formed.servers_unsettled,
                max(1, formed.server_copies),
                formed.restored.name,
            )
        case "checkpoint":
            told = message.checkpoint
            saved = to_state(told.state)
            if saved is None:
                raise MalformedError("Checkpoint.state is not set")
            return say.Checkpointed(saved, told.error, max(0.0, told.seconds), told.reason)
        case "progress":
            states = [state for c in message.progress.commits if (state := to_state(c.state)) is not None]
            return say.Progressed(max(states)) if states else None
        case "leaving":
            return say.Leaving(message.leaving.reason)
        case "ended":
            ended = message.ended
            generation = _needed(to_generation(ended.generation), "Ended.generation")
            state = to_state(ended.state)
            if state is None:
                raise MalformedError("Ended.state is not set")
            return say.Ended(generation, state, ended.stage)
        case "bound_to_steps":
            return say.BoundToSteps(message.bound_to_steps.reason[:_TEXT_LIMIT])
        case "bye":
            return say.Bye(message.bye.outcome, message.bye.detail)
    return None


@dataclass(frozen=True, slots=True)
class Asked:
    """A question in an evaluation loop, and what was finished before it."""

    key: evaluation.Key
    finished: evaluation.Finished | None


def to_evaluate(message: pb.Evaluate) -> Asked:
    """Raises MalformedError."""
    state = to_state(message.state)
    if state is None:
        raise MalformedError("Evaluate.state is not set")
    if not message.samples or not message.unit:
        raise MalformedError("Evaluate needs samples and unit")
    _count(max(message.samples, message.unit, message.start, message.stop), MAX_COUNT, "Evaluate's samples")
    if len(message.sums) > evaluation.MOST_NAMES:
        raise MalformedError(f"Evaluate has more than {evaluation.MOST_NAMES} names")
    finished = None
    if message.stop:
        taken = evaluation.Range(message.start, message.stop)
        finished = evaluation.Finished(taken, dict(message.sums), dict(message.weights))
    return Asked(evaluation.Key(state, message.index), finished)


def _needed(name: GenerationName | None, what: str) -> GenerationName:
    if name is None:
        raise MalformedError(f"{what} is not set")
    return name


# ---- parameter server <-> coordinator ----


def to_server_hello(hello: pb.ServerHello) -> say.ServerHello:
    newest = hello.newest_incarnation
    return say.ServerHello(
        server=to_server(hello.server),
        protocol_version=hello.protocol_version,
        newest_incarnation=to_incarnation(newest) if newest.number else None,
        leaving=hello.leaving,
    )


def from_server(server: say.ServerInfo) -> pb.Server:
    return pb.Server(
        id=server.id,
        pod_uid=server.pod_uid,
        pod_name=server.pod_name,
        slot=server.slot,
        address=server.address,
        attempt=server.attempt,
    )


def from_order(message: say.Outgoing) -> pb.ServerOrder:
    """Raises TypeError for what is not said to parameter servers."""
    match message:
        case say.Welcome():
            welcome = pb.Welcome(
                incarnation=from_incarnation(message.incarnation), protocol_version=say.PROTOCOL_VERSION
            )
            return pb.ServerOrder(welcome=welcome)
        case say.Refused():
            return pb.ServerOrder(refused=pb.Refused(reason=message.reason, retry=message.retry))
        case say.ServerLeave():
            return pb.ServerOrder(leave=pb.ServerLeave(reason=message.reason))
    raise TypeError(f"{type(message).__name__} is not said to parameter servers")


# ---- coordinator -> worker ----


def from_evaluation(number: int, answer: evaluation.Answer) -> pb.CoordinatorMessage:
    message = pb.Evaluation(ask=number)
    match answer:
        case evaluation.Range():
            message.start, message.stop = answer.start, answer.stop
        case evaluation.Total():
            message.values.update(answer.values)
            message.samples = answer.samples
        case evaluation.Mismatch():
            message.problem = answer.problem
    return pb.CoordinatorMessage(evaluation=message)


def from_member(member: say.MemberInfo) -> pb.Member:
    return pb.Member(
        id=member.id,
        pod_uid=member.pod_uid,
        pod_name=member.pod_name,
        local_rank=member.local_rank,
        address=member.address,
        slot=member.slot,
    )


def from_standing(standing: say.Standing) -> pb.Standing:
    return _STANDINGS_BACK[standing]


def from_outgoing(message: say.Outgoing, known: StateName | None) -> pb.CoordinatorMessage:
    """`known`: the newest commit on record, told with Welcome and Start."""
    match message:
        case say.Welcome():
            return pb.CoordinatorMessage(
                welcome=pb.Welcome(
                    incarnation=from_incarnation(message.incarnation),
                    protocol_version=say.PROTOCOL_VERSION,
                    known=from_state(known),
                )
            )
        case say.Prepare():
            generation = from_generation(message.generation)
            return pb.CoordinatorMessage(prepare=pb.Prepare(generation=generation, reason=message.reason))
        case say.Start():
            return pb.CoordinatorMessage(
                start=pb.Start(
                    generation=from_generation(message.generation),
                    members=[from_member(member) for member in message.members],
                    state=from_state(message.state),
                    transfers=[pb.Transfer(receiver=t.receiver, holder=t.holder) for t in message.transfers],
                    fresh=message.fresh,
                    known=from_state(known),
                    reason=message.reason,
                    had_state=message.had_state,
                    consistency=from_consistency(message.consistency),
                    servers=[from_server(server) for server in message.servers],
                    leaving_servers=[from_server(server) for server in message.leaving_servers],
                )
            )
        case say.Boundary():
            generation = from_generation(message.generation)
            at_end = message.at_epochs_end
            asked = pb.Boundary(generation=generation, reason=message.reason, at_epochs_end=at_end)
            return pb.CoordinatorMessage(boundary=asked)
        case say.Save():
            state = from_state(message.state)
            return pb.CoordinatorMessage(
                save=pb.Save(state=state, writers=message.writers, attempt=message.attempt)
            )
        case say.Leave():
            return pb.CoordinatorMessage(leave=pb.Leave(reason=message.reason, finished=message.finished))
        case say.EndOk():
            generation = from_generation(message.generation)
            return pb.CoordinatorMessage(end_ok=pb.EndOk(generation=generation, stage=message.stage))
        case say.Refused():
            return pb.CoordinatorMessage(refused=pb.Refused(reason=message.reason, retry=message.retry))
        case say.ServerLeave():
            raise TypeError("ServerLeave is said to parameter servers only")


# ---- operator ----


def to_pod(pod: pb.Pod) -> PodSeen:
    """Raises MalformedError."""
    _count(pod.slot, MAX_SLOT, "a pod's slot")
    return PodSeen(pod.uid, pod.name, pod.slot, pod.started, _duration(pod.leave_by), pod.unheard)


def to_synced(request: pb.SyncRequest) -> Synced:
    """Raises MalformedError for counts beyond every job, and a consistency that there is not."""
    return Synced(
        target=_count(request.target, MAX_PROCESSES, "target"),
        minimum=_count(request.minimum, MAX_PROCESSES, "minimum"),
        maximum=_count(request.maximum, MAX_PROCESSES, "maximum"),
        living=tuple(to_pod(pod) for pod in request.living),
        observed=request.observed,
        processes_per_pod=_count(request.processes_per_pod, MAX_PER_POD, "processes_per_pod") or 1,
        number=_count(request.incarnation_number, MAX_COUNT, "incarnation_number"),
        trained=request.generation > 0,
        pause=_duration(request.pause_seconds, MAX_PAUSE),
        servers=_count(request.servers, MAX_SERVERS, "servers"),
        living_servers=tuple(to_pod(pod) for pod in request.living_servers),
        hung=frozenset(request.hung),
        suspend=request.suspend,
        suspend_by=_duration(request.suspend_by),
        saved=request.saved,
        consistency=to_consistency(request.consistency),
    )

"""Conversion between the protocol's messages and the state machine's values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from springtide_coordinator import evaluation
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.consistency import BOUNDED, MODES
from springtide_coordinator.membership.events import PodSeen, Synced
from springtide_coordinator.membership.machine import Phase
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import (
    MalformedError,
    check_count,
    generation_from_proto,
    generation_to_proto,
    incarnation_from_proto,
    incarnation_to_proto,
    required_generation,
    speaks_from_proto,
    speaks_to_proto,
    state_from_proto,
    state_to_proto,
)
from springtide_protocol.limits import (
    FOLLOW_SECRET_BYTES,
    MAX_COUNT,
    MAX_PAUSE_SECONDS,
    MAX_PORT,
    MAX_PROCESSES,
    MAX_PROCESSES_PER_POD,
    MAX_SERVERS,
    MAX_SLOT,
    MAX_STALENESS,
    MAX_STOP_SECONDS,
    MAX_TEXT_CHARACTERS,
)
from springtide_protocol.names import StateName
from springtide_protocol.versions import OWN

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


def _duration(value: float, most: float = math.inf) -> float:
    """Seconds, or a unix time: what cannot be one counts as not told."""
    return min(value, most) if value > 0 and math.isfinite(value) else 0.0


# ---- worker -> coordinator ----


def to_member(member: pb.Member) -> say.MemberInfo:
    """Raises MalformedError."""
    check_count(member.slot, MAX_SLOT, "a member's slot")
    check_count(member.local_rank, MAX_PROCESSES_PER_POD, "a member's local rank")
    return say.MemberInfo(
        member.id, member.pod_uid, member.pod_name, member.local_rank, member.address, member.slot
    )


def to_server(server: pb.Server) -> say.ServerInfo:
    """Raises MalformedError."""
    check_count(server.slot, MAX_SERVERS, "a parameter server's slot")
    return say.ServerInfo(
        server.id, server.pod_uid, server.pod_name, server.slot, server.address, server.attempt
    )


def to_consistency(reported: pb.Consistency) -> say.Consistency | None:
    """Convert a consistency; None when it is not set. Raise MalformedError for an unknown mode."""
    if not reported.mode:
        return None
    if reported.mode not in MODES:
        raise MalformedError(f"{reported.mode!r} is no consistency: {', '.join(MODES)} are")
    staleness = check_count(reported.staleness, MAX_STALENESS, "the staleness")
    return say.Consistency(reported.mode, max(1, staleness) if reported.mode == BOUNDED else 0)


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
        speaks=speaks_from_proto(hello.speaks, hello.protocol_version),
        newest_incarnation=incarnation_from_proto(newest) if newest.number else None,
        generation=generation_from_proto(hello.generation),
        members=tuple(to_member(member) for member in hello.members),
        state=state_from_proto(hello.state),
        layout_hash=hello.layout_hash,
        leaving=hello.leaving,
        ended_stage=hello.ended_stage,
        servers=tuple(to_server(server) for server in hello.servers),
        opaque=hello.opaque,
        stop_seconds=min(float(hello.stop_seconds), MAX_STOP_SECONDS),
        checkpoints=hello.checkpoints,
        keeps_applied_batches=hello.keeps_applied_batches,
        consistency=to_consistency(hello.consistency),
        storage=hello.storage or hello.checkpoints,
        bound_to_steps=hello.bound_to_steps[:MAX_TEXT_CHARACTERS],
        at_epoch_end=hello.at_epoch_end,
        largest_group=hello.largest_group,
        together=max(1, hello.together),
    )


def to_incoming(message: pb.WorkerMessage) -> say.Incoming | None:
    """Convert a worker's message; None for one that does not concern membership. Raise MalformedError."""
    match message.WhichOneof("message"):
        case "parked":
            parked = message.parked
            return say.Parked(
                _PARK_REASONS.get(parked.reason, say.ParkReason.UNKNOWN),
                generation_from_proto(parked.generation),
                state_from_proto(parked.state),
                parked.layout_hash,
                parked.detail,
                tuple(parked.suspects),
                parked.cannot_go_back,
                parked.at_epoch_end,
                tuple(parked.reached),
                parked.largest_group,
                max(1, parked.together),
                parked.hands_over,
            )
        case "formed":
            formed = message.formed
            return say.Formed(
                required_generation(formed.generation, "Formed.generation"),
                tuple(formed.needed_servers),
                formed.servers_unsettled,
                max(1, formed.server_copies),
                formed.restored.name,
            )
        case "checkpoint":
            reported = message.checkpoint
            saved = state_from_proto(reported.state)
            if saved is None:
                raise MalformedError("Checkpoint.state is not set")
            return say.Checkpointed(saved, reported.error, max(0.0, reported.seconds), reported.reason)
        case "progress":
            states = [
                state for c in message.progress.commits if (state := state_from_proto(c.state)) is not None
            ]
            told = message.progress.HasField("data")
            loop = check_count(message.progress.data.stage, MAX_COUNT, "the loop's number") if told else None
            return say.Progressed(max(states), loop) if states else None
        case "leaving":
            return say.Leaving(message.leaving.reason)
        case "ended":
            ended = message.ended
            generation = required_generation(ended.generation, "Ended.generation")
            state = state_from_proto(ended.state)
            if state is None:
                raise MalformedError("Ended.state is not set")
            return say.Ended(generation, state, ended.stage)
        case "bound_to_steps":
            return say.BoundToSteps(message.bound_to_steps.reason[:MAX_TEXT_CHARACTERS])
        case "follow":
            port, secret = message.follow.port, message.follow.secret
            if not 0 < port <= MAX_PORT or len(secret) != FOLLOW_SECRET_BYTES:
                raise MalformedError(
                    f"Follow names port {port} and a secret of {len(secret)} bytes: a port from 1 to "
                    f"{MAX_PORT} and {FOLLOW_SECRET_BYTES} bytes are wanted"
                )
            return say.Follow(port, secret)
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
    state = state_from_proto(message.state)
    if state is None:
        raise MalformedError("Evaluate.state is not set")
    if not message.samples or not message.unit:
        raise MalformedError("Evaluate needs samples and unit")
    check_count(
        max(message.samples, message.unit, message.start, message.stop), MAX_COUNT, "Evaluate's samples"
    )
    if len(message.sums) > evaluation.MOST_NAMES:
        raise MalformedError(f"Evaluate has more than {evaluation.MOST_NAMES} names")
    if len(message.kind) > evaluation.MOST_CHARACTERS:
        raise MalformedError(f"Evaluate.kind has more than {evaluation.MOST_CHARACTERS} characters")
    finished = None
    if message.stop:
        taken = evaluation.SampleRange(message.start, message.stop)
        finished = evaluation.Finished(taken, dict(message.sums), dict(message.weights))
    return Asked(evaluation.Key(state, message.index), finished)


# ---- parameter server <-> coordinator ----


def to_server_hello(hello: pb.ServerHello) -> say.ServerHello:
    newest = hello.newest_incarnation
    return say.ServerHello(
        server=to_server(hello.server),
        speaks=speaks_from_proto(hello.speaks, hello.protocol_version),
        newest_incarnation=incarnation_from_proto(newest) if newest.number else None,
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
                incarnation=incarnation_to_proto(message.incarnation),
                protocol_version=message.agreement.version,
                speaks=speaks_to_proto(OWN),
            )
            return pb.ServerOrder(welcome=welcome)
        case say.Refused():
            return pb.ServerOrder(refused=pb.Refused(reason=message.reason, retry=message.retry))
        case say.ServerLeave():
            return pb.ServerOrder(leave=pb.ServerLeave(reason=message.reason))
    raise TypeError(f"{type(message).__name__} is not said to parameter servers")


# ---- coordinator -> worker ----


def from_evaluation(number: int, answer: evaluation.Answer) -> pb.CoordinatorMessage:
    """Return the message that answers a question of an evaluation.

    Args:
        number: of the question.
        answer: a range, the total, or why there is none.
    """
    message = pb.Evaluation(ask=number)
    match answer:
        case evaluation.SampleRange():
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


def _from_running_loop(stage: int | None) -> pb.RunningLoop | None:
    return None if stage is None else pb.RunningLoop(stage=stage)


def from_outgoing(message: say.Outgoing, known: StateName | None) -> pb.CoordinatorMessage:
    """Return the message of a decision of the state machine.

    Args:
        message: the decision.
        known: the newest commit on record, told with Welcome and Start.

    Raises:
        TypeError: the decision is one for parameter servers.
    """
    match message:
        case say.Welcome():
            return pb.CoordinatorMessage(
                welcome=pb.Welcome(
                    incarnation=incarnation_to_proto(message.incarnation),
                    protocol_version=message.agreement.version,
                    speaks=speaks_to_proto(OWN),
                    known=state_to_proto(known),
                    running_loop=_from_running_loop(message.running_loop),
                )
            )
        case say.RunningLoop():
            return pb.CoordinatorMessage(running_loop=pb.RunningLoop(stage=message.stage))
        case say.Prepare():
            generation = generation_to_proto(message.generation)
            return pb.CoordinatorMessage(prepare=pb.Prepare(generation=generation, reason=message.reason))
        case say.Start():
            return pb.CoordinatorMessage(
                start=pb.Start(
                    generation=generation_to_proto(message.generation),
                    members=[from_member(member) for member in message.members],
                    state=state_to_proto(message.state),
                    transfers=[pb.Transfer(receiver=t.receiver, holder=t.holder) for t in message.transfers],
                    fresh=message.fresh,
                    known=state_to_proto(known),
                    reason=message.reason,
                    had_state=message.had_state,
                    minimum=message.minimum,
                    consistency=from_consistency(message.consistency),
                    servers=[from_server(server) for server in message.servers],
                    leaving_servers=[from_server(server) for server in message.leaving_servers],
                )
            )
        case say.Boundary():
            generation = generation_to_proto(message.generation)
            at_end = message.at_epochs_end
            asked = pb.Boundary(generation=generation, reason=message.reason, at_epochs_end=at_end)
            return pb.CoordinatorMessage(boundary=asked)
        case say.Save():
            state = state_to_proto(message.state)
            return pb.CoordinatorMessage(
                save=pb.Save(state=state, writers=message.writers, attempt=message.attempt)
            )
        case say.Feed():
            feed = pb.Feed(
                follower=message.follower,
                address=message.address,
                secret=message.secret,
                index=message.index,
                count=message.count,
            )
            return pb.CoordinatorMessage(feed=feed)
        case say.Feeding():
            return pb.CoordinatorMessage(feeding=pb.Feeding(count=message.count))
        case say.Leave():
            return pb.CoordinatorMessage(leave=pb.Leave(reason=message.reason, finished=message.finished))
        case say.EndOk():
            generation = generation_to_proto(message.generation)
            return pb.CoordinatorMessage(end_ok=pb.EndOk(generation=generation, stage=message.stage))
        case say.Refused():
            return pb.CoordinatorMessage(refused=pb.Refused(reason=message.reason, retry=message.retry))
        case say.ServerLeave():
            raise TypeError("ServerLeave is said to parameter servers only")


# ---- operator ----


def to_pod(pod: pb.Pod, now: float) -> PodSeen:
    """Raises MalformedError.

    Args:
        pod: of the message.
        now: by this process's clock, in which the time to leave is to be.
    """
    check_count(pod.slot, MAX_SLOT, "a pod's slot")
    leave_by = _moment(pod.leave_in_seconds, pod.leave_by, now)
    return PodSeen(pod.uid, pod.name, pod.slot, pod.started, leave_by, pod.unheard)


def _moment(seconds: float, at: float, now: float) -> float:
    """Return a time by this process's clock: so many seconds from now on, or as an operator of an earlier
    release has said it, by the clock of another machine; 0: never. PURE.
    """
    duration = _duration(seconds)
    return now + duration if duration else _duration(at)


def to_synced(request: pb.SyncRequest, now: float) -> Synced:
    """Raises MalformedError for counts beyond every job, and a consistency that there is not.

    Args:
        request: of the operator.
        now: by this process's clock.
    """
    return Synced(
        target=check_count(request.target, MAX_PROCESSES, "target"),
        minimum=check_count(request.minimum, MAX_PROCESSES, "minimum"),
        maximum=check_count(request.maximum, MAX_PROCESSES, "maximum"),
        living=tuple(to_pod(pod, now) for pod in request.living),
        observed=request.observed,
        processes_per_pod=check_count(request.processes_per_pod, MAX_PROCESSES_PER_POD, "processes_per_pod")
        or 1,
        number=check_count(request.incarnation_number, MAX_COUNT, "incarnation_number"),
        trained=request.generation > 0,
        pause=_duration(request.pause_seconds, MAX_PAUSE_SECONDS),
        servers=check_count(request.servers, MAX_SERVERS, "servers"),
        living_servers=tuple(to_pod(pod, now) for pod in request.living_servers),
        hung=frozenset(request.hung),
        suspend=request.suspend,
        suspend_by=_moment(request.suspend_in_seconds, request.suspend_by, now),
        saved=request.saved,
        consistency=to_consistency(request.consistency),
        standby=check_count(request.standby, MAX_PROCESSES, "standby"),
    )

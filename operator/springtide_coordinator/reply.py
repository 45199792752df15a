"""The answer to the operator's Sync."""

from __future__ import annotations

from collections.abc import Iterator

from springtide_coordinator import stall, wire
from springtide_coordinator.history import Recovery
from springtide_coordinator.hub import Hub
from springtide_coordinator.membership import Membership, Phase, describe
from springtide_coordinator.membership import servers as serving
from springtide_coordinator.membership.consistency import why_epoch_end, why_refused
from springtide_coordinator.membership.failure import silent_pods, vanished_pods
from springtide_coordinator.membership.saving import put_away
from springtide_coordinator.membership.seats import former_members
from springtide_coordinator.membership.succession import why_held_back
from springtide_coordinator.reported import bounded
from springtide_protocol import codec
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import StateName
from springtide_protocol.versions import OWN, agreed, as_coordinator, as_operator


def answer_sync(hub: Hub, request: pb.SyncRequest) -> pb.SyncReply:
    """Take in what the operator wants and sees, and return the job's state.

    Args:
        hub: all state of the process.
        request: the operator's word.

    Raises:
        MalformedError: a count beyond every job, or a consistency that there is not.
        IncompatibleError: the operator is of a release that is too far away.
    """
    agreed(as_operator(codec.speaks_from_proto(request.speaks, 1)), as_coordinator(OWN))
    hub.sync(request)
    return sync_reply(hub, hub.clock())


def sync_reply(hub: Hub, now: float) -> pb.SyncReply:
    """Return the job's state as the operator writes it to status; times are unix seconds.

    Args:
        hub: all state of the process.
        now: in unix seconds.
    """
    m, history = hub.membership, hub.history
    phase, status = describe(m, now)
    current = m.current
    away = put_away(m)
    known = history.known or (m.known if not history.commits else None)
    reply = pb.SyncReply(
        incarnation=codec.incarnation_to_proto(m.incarnation),
        phase=wire.PHASES[phase],
        generation=codec.generation_to_proto(current.name) if current is not None else None,
        state=codec.state_to_proto(known),
        waiting_for=sorted(status.waiting_for),  # in an order that does not change: it is written to status
        reason=status.reason,
        message=_message(hub, phase, status.message),
        data=hub.data,
        samples_per_second=history.samples_per_second(now),
        goodput=goodput(hub, now),
        step_seconds=history.step_seconds(),
        recoveries=sum(history.recoveries.values()),
        states_lost=m.states_lost,
        ended_stages=m.ended_stages,
        values=bounded({**hub.values, **history.values}),
        unix_time=now,
        last_commit_unix=history.last_commit_unix,
        silent=[uid for uid, _ in silent_pods(m)],
        vanished=vanished_pods(m, now),
        lost_seconds=history.lost_seconds,
        opaque=any(record.opaque for record in m.members.values() if m.in_current(record.info.id)),
        checkpoint=hub.storage.newest,
        checkpoint_error=hub.storage.error,
        restored=hub.storage.restored,
        put_away=away.done,
        all_saved=away.all_saved,
        consistency=wire.from_consistency(current.consistency) if current is not None else None,
        consistency_refused=why_refused(m),
        consistency_pending=why_epoch_end(m),
        speaks=codec.speaks_to_proto(OWN),
        held_back=why_held_back(m),
        planned_steps=history.planned_steps,
        seconds_per_step=hub.step_rate.seconds_per_step,
        steps_in=current.steps_in if current is not None else "",
        former_members=former_members(m),
    )
    reply.members.extend(_members(hub))
    reply.servers_settled = serving.settled(m)
    reply.servers.extend(_servers(m))
    _add_findings(reply, hub, known, now)
    for size, rate in hub.rates.by_size.items():
        reply.rates.add(
            workers=size,
            samples_per_second=rate.samples_per_second,
            seconds=rate.seconds,
            steps=int(rate.steps),
        )
    if (last := history.last_recovery) is not None:
        reply.last_recovery.CopyFrom(_recovery(last))
    reply.failures.extend(map(_recovery, history.failures))
    for change in hub.changes.announced:
        reply.traces.add(traceparent=str(change.context), lost_pods=change.lost_pods)
    return reply


def _members(hub: Hub) -> Iterator[pb.MemberStatus]:
    """Yield the workers' processes that are connected or in the generation, in the order of their ranks."""
    m = hub.membership
    rank_zero = m.current.members[0].id if m.current is not None else ""
    for record in sorted(m.members.values(), key=lambda record: record.info.rank_key):
        if not record.connected and not m.in_current(record.info.id):
            continue
        times = hub.slowness.times.get(record.info.id)
        own = hub.history.step_seconds() if record.info.id == rank_zero else 0.0
        yield pb.MemberStatus(
            member=wire.from_member(record.info),
            standing=wire.from_standing(record.standing),
            connected=record.connected,
            step_seconds=times.step if times is not None else own,
            leaving=record.leaving,
            data_seconds=times.data if times is not None else 0.0,
            compute_seconds=times.compute if times is not None else 0.0,
            wait_seconds=times.wait if times is not None else 0.0,
            speaks=codec.speaks_to_proto(record.speaks),
            share_samples=times.share.samples if times is not None else 0,
            sample_seconds=times.share.sample_seconds if times is not None else 0.0,
            by_speed=times is not None and times.share.by_speed,
        )


def _servers(m: Membership) -> Iterator[pb.ServerStatus]:
    """Yield the parameter servers that are connected or that the job needs, in the order of their slots."""
    for server in sorted(m.servers.values(), key=lambda record: (record.info.slot, record.order)):
        needed = serving.is_needed(m, server.info.id)
        if server.connected or needed:
            yield pb.ServerStatus(
                server=wire.from_server(server.info),
                connected=server.connected,
                serving=needed,
                leaving=bool(server.leaving),
                speaks=codec.speaks_to_proto(server.speaks),
            )


def _add_findings(reply: pb.SyncReply, hub: Hub, known: StateName | None, now: float) -> None:
    """Add what was found out about the job, where there is any: too little memory, a slow worker, samples
    that end workers, a standstill.

    Args:
        reply: that is made.
        hub: all state of the process.
        known: the newest state of the job.
        now: in unix seconds.
    """
    m = hub.membership
    if (model := hub.memories.tightest()) is not None:
        reply.memory.CopyFrom(codec.memory_to_proto(model))
    if (slow := hub.slow()) is not None and slow.member in m.members:
        reply.slow.CopyFrom(
            pb.Slow(
                pod_name=m.members[slow.member].info.label,
                busy_seconds=slow.busy,
                median_seconds=slow.median,
                since_unix=slow.since,
            )
        )
    if (poison := hub.poison.verdict) is not None:
        reply.poison.CopyFrom(
            pb.Poison(step=poison.step, samples=poison.samples, workers=poison.workers, detail=poison.detail)
        )
    if (stalled := hub.motion.stall(m, known, hub.hang_seconds, now)) is not None:
        reply.stall.CopyFrom(stall.to_proto(stalled, m, now))


def _recovery(recovery: Recovery) -> pb.Recovery:
    return pb.Recovery(
        generation=codec.generation_to_proto(recovery.generation),
        cause=recovery.cause,
        seconds=recovery.seconds,
        at_unix=recovery.at_unix,
        number=recovery.number,
        reason=recovery.reason,
    )


def _message(hub: Hub, phase: Phase, text: str) -> str:
    moving = hub.transfers.text(hub.membership) if phase is Phase.FORMING else ""
    return f"{text}; {moving}" if moving else text


def goodput(hub: Hub, now: float) -> float:
    """Return the job's goodput, 0..1: up to now while it trains, up to the last commit once the loop has
    ended.

    Args:
        hub: all state of the process.
        now: in unix seconds.
    """
    phase, _ = describe(hub.membership, now)
    return hub.history.goodput(hub.history.last_commit_unix if phase is Phase.AFTER_LOOP else now)

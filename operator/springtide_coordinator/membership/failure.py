"""Failures: who is dead for certain, who is lost, and when a generation is over because of it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from springtide_coordinator.membership.events import Effect, EndStream, MemberLost, PodSeen, Send
from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.members import Record, once
from springtide_coordinator.membership.messages import MemberInfo, ParkReason, Prepare, Refused, Standing
from springtide_coordinator.membership.state import Membership
from springtide_protocol.names import Incarnation

MACHINE_SILENT = "nothing is heard of it, nor of its machine"
VANISHED_SECONDS = 60.0  # without a stream; whoever restarts in place is back before


def proof_of_death(m: Membership, info: MemberInfo) -> str:
    """Return how it is known that a process can never act again; "" when it is not known.

    Args:
        m: facts of the membership.
        info: of the process.
    """
    record = m.members.get(info.id)
    if record is not None:
        if record.goodbye:
            return f"it ended ({record.goodbye})"
        if record.replaced:
            return "another process took its place"
        if record.connected:
            return ""
    if m.operator_synced and info.pod_uid and info.pod_uid not in m.living:
        left = record.disconnected_at if record is not None else None
        if left is None or (m.operator_synced_at or 0.0) >= left:
            return "its pod is gone"
    if record is None and any(
        other.id != info.id and same_place(other, info) for other in m.known_members.values()
    ):
        return "another process took its place"
    return ""


def same_place(one: MemberInfo, other: MemberInfo) -> bool:
    """Return whether two processes can only have lived one after the other.

    Args:
        one: of a process.
        other: of another one.
    """
    return bool(one.pod_uid) and (one.pod_uid, one.local_rank) == (other.pod_uid, other.local_rank)


def complaint_in(m: Membership, generation: Generation) -> bool:
    """Return whether a member of a generation said that a reduction or the formation failed.

    Args:
        m: facts of the membership.
        generation: the current one.
    """
    return any(
        record.generation == generation.name
        and record.standing is Standing.PARKED
        and record.park_reason.is_complaint
        for record in (m.members[member] for member in generation.order if member in m.members)
    )


def why_lost(
    m: Membership,
    generation: Generation,
    info: MemberInfo,
    now: float,
    complained: Callable[[], bool],
    paused: Callable[[], bool],
) -> str:
    """Return how it is known that a member will not take part in what follows; "" while it may.

    A stream that broke has a short grace. The end of its process's lifeline, a failed reduction or the
    operator's word ends it at once. Without any of these, a coordinator that cannot hear the operator pauses:
    it may be the one that was cut off.

    Args:
        m: facts of the membership.
        generation: the current one; a member that has parked is fenced no more.
        info: of the process.
        now: in unix seconds.
        complained: returns whether a member of the generation said that a reduction or the formation failed.
        paused: returns whether a silent loss must wait for the operator.
    """
    if info.pod_uid in m.hung:
        return "it hangs, and its pod is replaced"
    if proof := proof_of_death(m, info):
        return proof
    record = m.members.get(info.id)
    if record is None:
        return MACHINE_SILENT if gone_with_machine(m, info, now) else ""
    if record.parked:
        generation.fenced.pop(info.id, None)
    if info.id in generation.fenced:
        return generation.fenced[info.id]
    if record.dismissed:
        return "it left"
    if record.connected or record.disconnected_at is None:
        return ""
    if record.ended:
        return "its process ended"
    if complained():
        return "its stream broke and a peer could not reach it"
    if may_return(m, record.disconnected_at, now) or paused():
        return ""
    return "its stream broke"


def gone_with_machine(m: Membership, info: MemberInfo, now: float) -> bool:
    """Return whether a process that an earlier coordinator knew, and this one never heard, counts as lost.

    It is no proof of death, and starts nothing anew: the process may be on the far side of a broken network.
    Its steps there have older names than all that come here, and it is fenced when it returns.

    Args:
        m: facts of the membership.
        info: of the process.
        now: in unix seconds.
    """
    return info.id not in m.known_members and silent_machine(m, m.living.get(info.pod_uid), now)


def silent_machine(m: Membership, pod: PodSeen | None, now: float) -> bool:
    """Return whether the operator hears nothing of a pod, and this coordinator has listened for long enough,
    too.

    That is as long as it takes all that live to find a coordinator. Others must have come, with their
    generation; where one of them says that a reduction failed, half of that is long enough.

    Args:
        m: facts of the membership.
        pod: as the operator sees it; None: the operator does not know it.
        now: in unix seconds.
    """
    if pod is None or not pod.unheard or m.current is None or m.deaf(now):
        return False
    patience = m.settings.return_after_standstill
    if complaint_in(m, m.current):
        patience /= 2
    return now - m.started_at >= patience


def may_return(m: Membership, broken_at: float, now: float) -> bool:
    """Return whether a broken stream still has time to come back.

    Where this process itself stood still (its node did, or its share of the processor was used up), all
    streams break at once, and one whose grace had not ended before is given one anew that is long enough.

    Args:
        m: facts of the membership.
        broken_at: when it broke, in unix seconds.
        now: in unix seconds.
    """
    until = broken_at + m.settings.grace
    if m.awake_since is not None and until > m.asleep_since:
        until = max(until, m.awake_since + m.settings.return_after_standstill)
    return now < until


def paused_without_operator(m: Membership, generation: Generation, now: float) -> bool:
    """Return whether a silent loss must wait for the operator.

    Args:
        m: facts of the membership.
        generation: the current one.
        now: in unix seconds.
    """
    return m.deaf(now) and not complaint_in(m, generation)


def silent_pods(m: Membership) -> list[tuple[str, str]]:
    """(uid, name) of the pods that run and of which not every process has said Hello."""
    greeted: dict[str, set[int]] = {}
    for info in m.known_members.values():
        greeted.setdefault(info.pod_uid, set()).add(info.local_rank)
    return [
        (pod.uid, pod.name or pod.uid)
        for pod in m.living.values()
        if pod.started and len(greeted.get(pod.uid, ())) < m.processes_per_pod
    ]


def vanished_pods(m: Membership, now: float) -> list[str]:
    """Return the uids of pods that run, and of which a process was a member and is not heard of any more.

    Args:
        m: facts of the membership.
        now: in unix seconds.
    """
    gone = {
        record.info.pod_uid
        for record in m.members.values()
        if record.disconnected_at is not None
        and now - record.disconnected_at >= VANISHED_SECONDS
        and not (record.connected or record.dismissed or proof_of_death(m, record.info))
    }
    return [pod.uid for pod in m.living.values() if pod.started and pod.uid in gone and pod.uid not in m.hung]


_TRAINS = (Standing.ACTIVE, Standing.ENDED)


def note_losses(m: Membership, generation: Generation, now: float) -> list[Effect]:
    """Write down which members of the generation are lost by now.

    Args:
        m: facts of the membership.
        generation: the current one; it is changed.
        now: in unix seconds.

    Returns:
        One effect for each member that is lost since the last call.
    """
    effects: list[Effect] = []
    complained = functools.cache(lambda: complaint_in(m, generation))
    paused = functools.cache(lambda: paused_without_operator(m, generation, now))
    for info in generation.members:
        if info.id in generation.lost:
            continue
        if why := why_lost(m, generation, info, now, complained, paused):
            generation.lost[info.id] = why
            effects.append(MemberLost(info.id, f"{info.label}: {why}"))
    return effects


def close_if_over(m: Membership, generation: Generation, now: float) -> None:
    """Decide whether the generation is over; the reason stays with it.

    Args:
        m: facts of the membership.
        generation: the current one; it is changed.
        now: in unix seconds.
    """
    if generation.closing:
        return
    labels = {info.id: info.label for info in generation.members}
    records = [m.members[member] for member in generation.order if member in m.members]
    stage = generation.ended_stage
    ended = stage is not None and not any(r.at_stage is not None and r.at_stage > stage for r in records)
    for member, why in generation.lost.items():
        if not ended or not finished(m, member):
            generation.close(f"{labels[member]} is lost: {why}", now)
            return
    for record in records:
        if record.standing is not Standing.PARKED or record.park_reason is ParkReason.BOUNDARY:
            continue
        if record.park_reason is ParkReason.SERVERS_LACK_STATE:
            generation.close(why_parked(record), now)
            return
        if ended and not record.park_reason.is_complaint:
            continue
        if now - record.parked_at >= m.settings.complaint:
            generation.complained = record.park_reason.is_complaint
            generation.close(why_parked(record), now)
            return
    ends = {(r.at_stage, r.state) for r in records if r.standing is Standing.ENDED and r.connected}
    if len(ends) > 1:
        generation.close("members wait at the end of the loop with different states", now)


def why_parked(record: Record) -> str:
    told = f": {record.detail}" if record.detail else ""
    return f"{record.info.label} parked ({record.park_reason.name}){told}"


def finished(m: Membership, member: str) -> bool:
    """Return whether a process ended well after the last loop: the others may do the same.

    Args:
        m: facts of the membership.
        member: its id.
    """
    record = m.members.get(member)
    return record is not None and record.goodbye == "Finished"


def ask_to_park(m: Membership, now: float) -> list[Effect]:
    """Send Prepare to the members of a generation that is over, and to processes that train in an older one.

    Args:
        m: facts of the membership.
        now: in unix seconds.

    Returns:
        Prepare messages, and the end of streams that do not answer them.
    """
    effects: list[Effect] = []
    current = m.current
    for record in list(m.connected()):
        name = record.generation
        if name is None or record.standing not in (*_TRAINS, Standing.AFTER):
            continue
        if current is None or (record.info.id in current.ids and name == current.name):
            if current is None or not current.closing:
                continue
            effects += once(record, ("prepare", name), Prepare(name, current.closing))
            effects += disconnect_if_stuck(m, current, record, now)
        elif record.standing in _TRAINS:
            reason = f"generation {current.name} goes on without this process"
            effects += once(record, ("prepare", name), Prepare(name, reason))
    return effects


def disconnect_if_stuck(m: Membership, generation: Generation, record: Record, now: float) -> list[Effect]:
    """Disconnect a member that was told to park and does not answer: it must not hold the others for ever.

    Args:
        m: facts of the membership.
        generation: the current one.
        record: of the process.
        now: in unix seconds.

    Returns:
        The refusal and the end of the stream, once its time is over.
    """
    since, limit = max(generation.closing_at, record.connected_at), m.settings.parking
    if record.stop_seconds:
        limit = max(limit, record.stop_seconds + m.settings.after_script)
    if record.standing not in _TRAINS or now - since < limit or record.session is None:
        return []
    return disconnect(m, generation, record, f"{record.info.label} did not park within {limit:g} s", now)


def disconnect_hung(m: Membership, now: float) -> list[Effect]:
    """Disconnect members that hang, whose pods the operator replaces: the others go on without them at once.

    Args:
        m: facts of the membership.
        now: in unix seconds.

    Returns:
        Refusals and the end of streams.
    """
    effects: list[Effect] = []
    current = m.current
    for record in list(m.connected()):
        if current is not None and record.info.pod_uid in m.hung and record.info.id in current.ids:
            effects += disconnect(m, current, record, f"{record.info.label} hangs", now)
    return effects


def disconnect_silent(m: Membership, session: int, seconds: float, now: float) -> list[Effect]:
    """Disconnect a member that says no heartbeats: the others go on without it at once.

    It is lost to the generation until it parks, which it does when it is awake again.

    Args:
        m: facts of the membership.
        session: number of its stream.
        seconds: of its silence.
        now: in unix seconds.

    Returns:
        The refusal and the end of the stream; empty for a process that does not train in the generation.
    """
    current, member = m.current, m.sessions.get(session)
    if current is None or member is None or not _trains(m, m.members[member], now):
        return []
    record = m.members[member]
    why = f"it said no heartbeat for {seconds:.1f} s"
    return disconnect(m, current, record, f"{record.info.label}: {why}", now, why)


def disconnect_ended(m: Membership, member: str, session: int, now: float) -> list[Effect]:
    """Disconnect a member whose process has ended: the others go on without it at once.

    Should it say Hello again, something else had ended its lifeline, and it is waited for like the others.

    Args:
        m: facts of the membership.
        member: its id.
        session: number of the stream that the lifeline was for; it may have broken before.
        now: in unix seconds.

    Returns:
        The refusal and the end of the stream; empty for a process that does not train in the generation,
        which loses nothing by waiting until the stream breaks.
    """
    record = m.members.get(member)
    if record is None or record.session not in (None, session) or not _trains(m, record, now):
        return []
    record.ended = True
    if record.session is None:
        return []
    return _end_stream(m, record, session, f"{record.info.label}: its lifeline has ended", now)


def _trains(m: Membership, record: Record, now: float) -> bool:
    """Return whether a process trains in the current generation.

    A coordinator that hears no operator says no: it may be the one that is cut off.
    """
    current = m.current
    if current is None or record.info.id not in current.ids or m.deaf(now):
        return False
    return record.generation == current.name and record.standing is Standing.ACTIVE


def disconnect(
    m: Membership, generation: Generation, record: Record, reason: str, now: float, why: str = ""
) -> list[Effect]:
    """End the stream of a member that does not answer; it stays lost to the generation until it parks.

    Args:
        m: facts of the membership.
        generation: the current one.
        record: of the process.
        reason: in words, for the process.
        now: in unix seconds.
        why: how it is known that it is lost; empty: it did not park.

    Returns:
        The refusal and the end of the stream; empty without one.
    """
    session = record.session
    if session is None:
        return []
    generation.fenced[record.info.id] = why or "it did not stop when it was told to"
    return _end_stream(m, record, session, reason, now)


def _end_stream(m: Membership, record: Record, session: int, reason: str, now: float) -> list[Effect]:
    m.sessions.pop(session, None)
    record.session, record.disconnected_at = None, now
    return [
        Send(session, record.info.id, Refused(reason, retry=True)),
        EndStream(session, record.info.id, reason),
    ]


def is_outranked(m: Membership, newest: Incarnation | None) -> bool:
    """Return whether somebody has heard of a newer incarnation of the coordinator, and this one still works.

    Args:
        m: facts of the membership.
        newest: that was heard of; None: of none.
    """
    return newest is not None and newest > m.incarnation and not m.superseded


def step_down(m: Membership, why: str) -> list[Effect]:
    """Become passive for good: a newer coordinator lives. All are sent to look for it.

    Args:
        m: facts of the membership, which are changed.
        why: in words.

    Returns:
        Refusals and the end of all streams.
    """
    m.superseded = why
    effects: list[Effect] = []
    for record in list(m.connected()):
        assert record.session is not None
        reason = f"this coordinator is out of date: {why}"
        effects.append(Send(record.session, record.info.id, Refused(reason, retry=True)))
        effects.append(EndStream(record.session, record.info.id, reason))
        m.sessions.pop(record.session, None)
        record.session = None
    for server in m.servers.values():
        if server.session is not None:
            reason = f"this coordinator is out of date: {why}"
            effects.append(Send(server.session, server.info.id, Refused(reason, retry=True)))
            effects.append(EndStream(server.session, server.info.id, reason))
            m.server_sessions.pop(server.session, None)
            server.session = None
    return effects

"""Losses and complaints: when a generation is over, and who is told to park."""

from __future__ import annotations

from springtide_coordinator.membership.events import Effect, EndStream, MemberLost, Send
from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.liveness import why_lost
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import ParkReason, Prepare, Refused, Standing
from springtide_coordinator.membership.send_once import once
from springtide_coordinator.membership.state import Membership

_TRAINS = (Standing.ACTIVE, Standing.ENDED)


def note_losses(m: Membership, generation: Generation, now: float) -> list[Effect]:
    """Write down which members of the generation are lost by now."""
    effects: list[Effect] = []
    for info in generation.members:
        if info.id in generation.lost:
            continue
        if why := why_lost(m, generation, info, now):
            generation.lost[info.id] = why
            effects.append(MemberLost(info.id, f"{info.label}: {why}"))
    return effects


def close_if_over(m: Membership, generation: Generation, now: float) -> None:
    """Decide whether the generation is over; the reason stays with it."""
    if generation.closing:
        return
    labels = {info.id: info.label for info in generation.members}
    records = [m.members[member] for member in generation.ids if member in m.members]
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
    """Whether the process ended well after the last loop: the others may do the same."""
    record = m.members.get(member)
    return record is not None and record.goodbye == "Finished"


def tell_to_park(m: Membership, now: float) -> list[Effect]:
    """Prepare: to the members of a generation that is over, and to whoever trains in an older one."""
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
            effects += cut_if_stuck(m, current, record, now)
        elif record.standing in _TRAINS:
            reason = f"generation {current.name} goes on without this process"
            effects += once(record, ("prepare", name), Prepare(name, reason))
    return effects


def cut_if_stuck(m: Membership, generation: Generation, record: Record, now: float) -> list[Effect]:
    """A member that was told to park and does not answer must not hold the others for ever."""
    since = max(generation.closing_at, record.connected_at)
    if record.standing not in _TRAINS or now - since < m.settings.parking or record.session is None:
        return []
    return cut_off(
        m, generation, record, f"{record.info.label} did not park within {m.settings.parking:g} s", now
    )


def cut_off_hung(m: Membership, now: float) -> list[Effect]:
    """The operator replaces the pods of members that hang: the others go on without them at once."""
    effects: list[Effect] = []
    current = m.current
    for record in list(m.connected()):
        if current is not None and record.info.pod_uid in m.hung and record.info.id in current.ids:
            effects += cut_off(m, current, record, f"{record.info.label} hangs", now)
    return effects


def cut_off(m: Membership, generation: Generation, record: Record, reason: str, now: float) -> list[Effect]:
    """End the stream of a member that does not answer; it stays lost to the generation until it parks."""
    session = record.session
    if session is None:
        return []
    m.sessions.pop(session, None)
    record.session, record.disconnected_at = None, now
    generation.fenced.add(record.info.id)
    return [
        Send(session, record.info.id, Refused(reason, retry=True)),
        EndStream(session, record.info.id, reason),
    ]

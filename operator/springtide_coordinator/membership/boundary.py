"""Joins and leaves happen at a step boundary: when it is asked for, and who leaves in between."""

from __future__ import annotations

from springtide_coordinator.membership.consistency import why_cut, why_other_consistency
from springtide_coordinator.membership.events import Effect
from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.leaving import is_due, may_leave
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import Boundary, Leave, ParkReason, Standing
from springtide_coordinator.membership.saving import saves, time_to_go
from springtide_coordinator.membership.send_once import once
from springtide_coordinator.membership.serving import why_other_servers
from springtide_coordinator.membership.state import Membership


def ask_for_boundary(m: Membership, generation: Generation, now: float) -> list[Effect]:
    """Ask all members to stop after the same step when somebody wants in or out."""
    if generation.closing or generation.ended_stage is not None or not m.settled:
        return []
    asked = generation.boundary or stopped_by_itself(m, generation)
    if not asked:
        records = [m.members.get(member) for member in generation.ids]
        trains = [r for r in records if r is not None and r.connected and r.standing is Standing.ACTIVE]
        if len(trains) < len(generation.ids) or not generation.complete:
            return []
        why = why_leave(m, trains, now) or why_join(m, generation, trains, now)
        why = why or why_other_servers(m, generation, now) or why_other_consistency(m, generation)
        if why is None:
            return ask_for_cut(m, generation, trains)
        generation.boundary_cause, asked = why
        generation.boundary = asked
    effects: list[Effect] = []
    for record in list(m.connected()):
        if record.generation == generation.name and record.standing is Standing.ACTIVE:
            message = Boundary(generation.name, asked)
            effects += once(record, ("boundary", generation.name), message)
    return effects


def ask_for_cut(m: Membership, generation: Generation, trains: list[Record]) -> list[Effect]:
    """Ask all members to stop at the epoch's end, and let them train until then."""
    effects: list[Effect] = []
    if reason := why_cut(m):
        for record in trains:
            message = Boundary(generation.name, reason, at_epochs_end=True)
            effects += once(record, ("cut", generation.name), message)
    return effects


def stopped_by_itself(m: Membership, generation: Generation) -> str:
    """Who waits at a boundary that nobody was asked for; "" if nobody does.

    Where all step together the others are there, too. Where they do not, nothing else tells them.
    """
    for member in generation.ids:
        record = m.members.get(member)
        if (
            record is not None
            and record.parked
            and record.park_reason is ParkReason.BOUNDARY
            and record.generation == generation.name
        ):
            return f"{record.info.label} has stopped at a step boundary"
    return ""


def standbys(m: Membership, generation: Generation | None) -> list[Record]:
    """Parked processes outside of the generation that want in."""
    inside = () if generation is None else generation.ids
    return [r for r in m.connected() if r.parked and not r.leaving and r.info.id not in inside]


def why_leave(m: Membership, trains: list[Record], now: float) -> tuple[str, str] | None:
    leavers = [record for record in trains if record.leaving]
    if not leavers:
        return None
    holders = len(trains) - len(leavers)
    waiting = len(standbys(m, m.current))
    going = may_leave(m, leavers, holders + waiting, holders, now)
    if going:
        return "leave", ", ".join(f"{r.info.label} leaves ({r.leave_reason})" for r in going)
    if holders == 0 and waiting:
        return "join", f"{leavers[0].info.label} leaves and hands its state over first"
    if holders == 0 and any(saves(m, r) and time_to_go(m, r, now) for r in leavers):
        return "leave", f"all members leave ({leavers[0].leave_reason}), and their state is saved first"
    return None


def why_join(
    m: Membership, generation: Generation, trains: list[Record], now: float
) -> tuple[str, str] | None:
    staying = sum(not record.leaving for record in trains)
    room = m.maximum - staying if m.maximum else len(m.members)
    joiners = sorted(standbys(m, generation), key=lambda record: record.parked_at)
    if room <= 0 or not joiners:
        return None
    coming = any(r.standing is Standing.STARTING and not r.leaving for r in m.connected())
    if coming and len(joiners) < room and now - joiners[0].parked_at < m.settings.joiners:
        return None
    return "join", ", ".join(record.info.label for record in joiners[:room]) + " joins"


def dismiss(m: Membership, now: float) -> list[Effect]:
    """Leave: to parked processes that nobody needs, and to those whose time is over."""
    effects: list[Effect] = []
    current = m.current
    relieved = any(not record.leaving for record in m.connected())
    for record in list(m.connected()):
        if record.dismissed and record.standing is Standing.PARKED:
            effects += once(record, "leave", Leave(record.dismissed, record.surplus))
        if not record.parked:
            continue
        member = m.in_current(record.info.id)
        idle = not member or (current is not None and current.ended_stage is not None)
        running = current is not None and not current.closing and somebody_trains(m, current)
        unneeded = record.leaving and not member and (record.state is None or running)
        reason = (m.void_reason or record.detail) if record.voided else ""
        surplus = m.finished and idle and record.park_reason is not ParkReason.BOUNDARY
        if surplus:
            reason = "the job is finished"
        elif unneeded or is_due(m, record, now, relieved):
            reason = record.leave_reason
        if reason:
            effects += send_away(record, reason, surplus)
    return effects


def somebody_trains(m: Membership, generation: Generation) -> bool:
    """Whether a member of the generation is connected: what a process outside of it holds is not needed."""
    return any(member in m.members and m.members[member].connected for member in generation.ids)


def send_away(record: Record, reason: str, surplus: bool = False) -> list[Effect]:
    """Leave: the process exits with outcome Left. surplus: the job has finished, and needs nobody."""
    record.dismissed, record.surplus = reason, surplus
    return once(record, "leave", Leave(reason, surplus))

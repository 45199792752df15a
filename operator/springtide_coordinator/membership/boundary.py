"""Step boundaries: joins and leaves happen there, and a training loop ends there.

Nothing that only a leaver holds is let go before its last moment, and nobody goes on after a loop before all
members stand at its end with the same state.
"""

from __future__ import annotations

from collections.abc import Sequence

from springtide_coordinator.membership.consistency import why_epoch_end, why_other_consistency
from springtide_coordinator.membership.events import Effect, LoopEnded
from springtide_coordinator.membership.failure import proof_of_death
from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.group_size import choose_parts
from springtide_coordinator.membership.members import Record, once
from springtide_coordinator.membership.messages import Boundary, EndOk, Leave, ParkReason, Standing
from springtide_coordinator.membership.pods import whole
from springtide_coordinator.membership.saving import leave_deadline, saves, time_to_go
from springtide_coordinator.membership.seats import most, seated
from springtide_coordinator.membership.servers import why_other_servers
from springtide_coordinator.membership.state import Membership
from springtide_protocol.names import StateName


def ask_for_boundary(m: Membership, generation: Generation, now: float) -> list[Effect]:
    """Ask all members to stop after the same step when somebody wants in or out.

    Args:
        m: facts of the membership, which are changed.
        generation: the current one.
        now: in unix seconds.

    Returns:
        Boundary messages; empty when nobody wants in or out, or all were asked already.
    """
    if generation.closing or generation.ended_stage is not None or not m.settled:
        return []
    asked = generation.boundary or stopped_by_itself(m, generation)
    if not asked:
        records = [m.members.get(member) for member in generation.order]
        trains = [r for r in records if r is not None and r.connected and r.standing is Standing.ACTIVE]
        if len(trains) < len(generation.ids) or not generation.complete:
            return []
        why = why_leave(m, trains, now) or why_join(m, generation, trains, now)
        why = why or why_other_servers(m, generation, now) or why_other_consistency(m, generation)
        if why is None:
            return ask_for_epoch_end(m, generation, trains)
        generation.boundary_cause, asked = why
        generation.boundary = asked
    effects: list[Effect] = []
    for record in list(m.connected()):
        if record.generation == generation.name and record.standing is Standing.ACTIVE:
            message = Boundary(generation.name, asked)
            effects += once(record, ("boundary", generation.name), message)
    return effects


def ask_for_epoch_end(m: Membership, generation: Generation, trains: list[Record]) -> list[Effect]:
    """Ask all members to stop at the epoch's end, and let them train until then.

    Args:
        m: facts of the membership.
        generation: the current one.
        trains: its members that train.

    Returns:
        Boundary messages to members that were not asked yet.
    """
    effects: list[Effect] = []
    if reason := why_epoch_end(m):
        for record in trains:
            message = Boundary(generation.name, reason, at_epochs_end=True)
            effects += once(record, ("cut", generation.name), message)
    return effects


def stopped_by_itself(m: Membership, generation: Generation) -> str:
    """Return which member waits at a boundary that nobody was asked for; "" if none does.

    With common steps the others are there, too. Without them nothing else makes the others stop.

    Args:
        m: facts of the membership.
        generation: the current one.
    """
    for member in generation.order:
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
    """Return the parked processes outside of a generation that want in.

    Args:
        m: facts of the membership.
        generation: the current one; None: there is none.
    """
    inside = () if generation is None else generation.ids
    return whole(r for r in m.connected() if r.parked and not r.leaving and r.info.id not in inside)


def joiners(m: Membership, trains: Sequence[Record]) -> list[Record]:
    """Return the processes outside of the current generation that the next one would have, the eldest first;
    none where it would not be larger.

    Args:
        m: facts of the membership.
        trains: members of the current generation, which all hold its state.
    """
    inside = {record.info.id for record in trains}
    staying = [record for record in trains if not record.leaving]
    leaving = [record for record in trains if record.leaving]
    outside = sorted(standbys(m, m.current), key=lambda record: record.parked_at)
    following = whole(choose_parts(seated(m, [*staying, *outside]), leaving, trains, most(m)))
    larger = sum(not record.leaving for record in following) > len(staying)
    return [record for record in following if larger and record.info.id not in inside]


def why_leave(m: Membership, trains: list[Record], now: float) -> tuple[str, str] | None:
    """Return why a boundary is to be asked for so that members can leave.

    Args:
        m: facts of the membership.
        trains: its members that train.
        now: in unix seconds.

    Returns:
        (cause, reason); None while there is no need.
    """
    leavers = [record for record in trains if record.leaving]
    if not leavers:
        return None
    holders = len(trains) - len(leavers)
    waiting = len(joiners(m, trains))
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
    """Return why a boundary is to be asked for so that processes can join.

    Args:
        m: facts of the membership.
        generation: the current one.
        trains: its members that train.
        now: in unix seconds.

    Returns:
        (cause, reason); None while nobody can, or more are about to come.
    """
    staying = sum(not record.leaving for record in trains)
    room = most(m) - staying if most(m) else len(m.members)
    coming_in = joiners(m, trains)
    if room <= 0 or not coming_in:
        return None
    coming = any(r.standing is Standing.STARTING and not r.leaving for r in m.connected())
    if coming and len(coming_in) < room and now - coming_in[0].parked_at < m.settings.joiners:
        return None
    return "join", ", ".join(record.info.label for record in coming_in) + " joins"


def dismiss(m: Membership, now: float) -> list[Effect]:
    """Dismiss parked processes that nobody needs, and those whose time is over.

    Args:
        m: facts of the membership, which are changed.
        now: in unix seconds.

    Returns:
        Leave messages.
    """
    effects: list[Effect] = []
    current = m.current
    relieved = any(not record.leaving for record in m.connected())
    running = current is not None and not current.closing and somebody_trains(m, current)
    for record in list(m.connected()):
        if record.dismissed and record.standing is Standing.PARKED:
            effects += once(record, "leave", Leave(record.dismissed, record.surplus))
        if not record.parked:
            continue
        member = m.in_current(record.info.id)
        idle = not member or (current is not None and current.ended_stage is not None)
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
    """Return whether a member of the generation that stays is connected: what a process outside of it holds
    is not needed. One that leaves, too, may be gone before it has handed over what it holds.

    Args:
        m: facts of the membership.
        generation: the current one.
    """
    records = [m.members[member] for member in generation.order if member in m.members]
    return any(record.connected and not record.leaving for record in records)


def send_away(record: Record, reason: str, surplus: bool = False) -> list[Effect]:
    """Dismiss a process: it exits with outcome Left.

    Args:
        record: of the process; it is changed.
        reason: in words.
        surplus: the job has finished, and needs nobody.

    Returns:
        The Leave message, unless it was sent.
    """
    record.dismissed, record.surplus = reason, surplus
    return once(record, "leave", Leave(reason, surplus))


def is_due(m: Membership, record: Record, now: float, relieved: bool = False) -> bool:
    """Return whether a leaver must be let go now, whatever it holds.

    Args:
        m: facts of the membership.
        record: of the process.
        now: in unix seconds.
        relieved: others wait to take that over.
    """
    if not record.leaving:
        return False
    if now >= leave_deadline(m, record):
        return True
    wanted = m.target > 0 or m.operator_synced_at is None
    if relieved and wanted and not m.suspended:
        return False
    return time_to_go(m, record, now) and not saves(m, record)


def may_leave(
    m: Membership, leavers: Sequence[Record], staying: int, holders: int, now: float
) -> list[Record]:
    """Return the leavers that can go now.

    Args:
        m: facts of the membership.
        leavers: members that want to go.
        staying: processes that stay and are ready to train.
        holders: how many of them hold the newest state.
        now: in unix seconds.
    """
    if holders > 0 and staying >= max(1, m.minimum):
        return list(leavers)
    return [record for record in leavers if is_due(m, record, now, relieved=staying > 0)]


def hands_over_first(
    m: Membership, record: Record, chosen: StateName | None, relieved: bool, now: float
) -> bool:
    """Return whether a leaver takes part in one more generation, since it holds parts of the state that may
    have been lost elsewhere with a member: it hands them over at that generation's boundary.

    Args:
        m: facts of the membership.
        record: of the process.
        chosen: the state that the generation begins from.
        relieved: others stay, to take them over.
        now: in unix seconds.
    """
    return (
        record.hands_over
        and chosen is not None
        and record.state == chosen
        and relieved
        and not is_due(m, record, now, relieved)
    )


def end_loop(m: Membership, generation: Generation) -> list[Effect]:
    """Say EndOk when all members wait at the end of the same loop; say it again to those that missed it.

    Args:
        m: facts of the membership.
        generation: the current one; it is changed.

    Returns:
        EndOk messages.
    """
    effects: list[Effect] = []
    records = [m.members.get(member) for member in generation.order]
    there = [record for record in records if record is not None]
    after = [r for r in there if r.standing is Standing.AFTER and r.generation == generation.name]
    if after:
        stage = max(record.ended_stages for record in after) - 1
        if stage >= 0 and (generation.ended_stage is None or stage > generation.ended_stage):
            generation.ended_stage = stage
            generation.ended_state = max((r.state for r in after if r.state is not None), default=None)
    waiting = [r for r in there if r.standing is Standing.ENDED and r.generation == generation.name]
    if not waiting or generation.closing:
        return effects
    if ended_together(generation, waiting):
        stage = max(record.at_stage or 0 for record in waiting)
        if generation.ended_stage is None or stage > generation.ended_stage:
            generation.ended_stage = stage
            generation.ended_state = max((r.state for r in waiting if r.state is not None), default=None)
            effects.append(LoopEnded(stage))
    if generation.ended_stage is None:
        return effects
    m.ended_stages = max(m.ended_stages, generation.ended_stage + 1)
    for record in waiting:
        if record.at_stage is not None and record.at_stage <= generation.ended_stage and record.connected:
            effects += once(record, ("end", record.at_stage), EndOk(generation.name, record.at_stage))
            record.standing = Standing.AFTER
            record.ended_stages = max(record.ended_stages, record.at_stage + 1)
    return effects


def ended_together(generation: Generation, waiting: list[Record]) -> bool:
    """Return whether all members stand at one end with one state.

    Args:
        generation: the current one.
        waiting: the members that wait at an end.
    """
    ends = {(record.at_stage, record.state) for record in waiting}
    return len(waiting) == len(generation.ids) and all(r.connected for r in waiting) and len(ends) == 1


def reconsider_finish(m: Membership, now: float) -> None:
    """Forget a Finished that nobody took: its pod was deleted before the operator could read it.

    It was in vain when the operator still wants workers a while later and nobody who holds state is alive.
    The job can then only start again, and says that its state is lost.

    Args:
        m: facts of the membership, which are changed.
        now: in unix seconds.
    """
    heard = m.operator_synced_at
    if not m.finished or heard is None or now - m.finished_at < m.settings.finish:
        return
    if heard < m.finished_at + m.settings.finish or m.deaf(now) or not m.target or not m.living:
        return
    holders = {record.info.id: record.info for record in m.members.values() if record.state is not None}
    if m.current is not None:
        holders.update((info.id, info) for info in m.current.members)
    if all(info.pod_uid not in m.living and proof_of_death(m, info) for info in holders.values()):
        m.finished = False

"""The next generation: who takes part, from which state, and why it is not made yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from springtide_coordinator.membership.boundary import hands_over_first, may_leave, send_away
from springtide_coordinator.membership.consistency import (
    CAUSE,
    describe_change,
    is_epoch_end,
    keeps_applied_batches,
    next_consistency,
    owners,
)
from springtide_coordinator.membership.events import Effect, EndStream, Made, Send
from springtide_coordinator.membership.failure import (
    complaint_in,
    paused_without_operator,
    proof_of_death,
    silent_pods,
    why_parked,
)
from springtide_coordinator.membership.generation import Generation, compose
from springtide_coordinator.membership.group_size import choose_parts, why_smaller
from springtide_coordinator.membership.hello import settle
from springtide_coordinator.membership.members import Record, once
from springtide_coordinator.membership.messages import Consistency, ParkReason, Refused, ServerInfo, Standing
from springtide_coordinator.membership.pods import is_half_lost, states_there, whole
from springtide_coordinator.membership.running_loop import forget_loop
from springtide_coordinator.membership.saving import before_leaving
from springtide_coordinator.membership.seats import former_after, most, seated, who_steps_in
from springtide_coordinator.membership.servers import (
    choose_servers,
    copies_kept,
    disconnect_unreached,
    still_holding,
)
from springtide_coordinator.membership.state import Membership, Status
from springtide_protocol.names import StateName


@dataclass(frozen=True, slots=True)
class Plan:
    """A generation to make."""

    participants: tuple[Record, ...]
    leavers: tuple[Record, ...]
    chosen: StateName | None
    cause: str
    reason: str
    state_lost: bool
    servers: tuple[ServerInfo, ...] = ()
    consistency: Consistency | None = None
    steps_in: str = ""  # which standbys take whose places, in words


def is_over(m: Membership, generation: Generation | None) -> bool:
    """Return whether a successor is wanted.

    Args:
        m: facts of the membership.
        generation: the current one; None: there is none.
    """
    if generation is None or generation.closing:
        return True
    if all(member in generation.lost for member in generation.ids):
        return not m.finished
    parked = (m.members[member].parked for member in generation.order if member in m.members)
    return any(parked)


def plan_next(m: Membership, now: float) -> Plan | Status | None:
    """Decide on the next generation.

    Args:
        m: facts of the membership, which are changed.
        now: in unix seconds.

    Returns:
        A plan, or what it waits for; None when no generation is wanted.
    """
    current = m.current
    if not is_over(m, current):
        return None
    missing = settle(m, now)
    waiting = not_parked(m, current, now) if current is not None else None
    if waiting is not None:
        return waiting
    if not m.settled:
        return Status(
            "WaitingForReports", "this coordinator is new and learns who holds the state", tuple(missing)
        )
    pool = whole(record for record in m.members.values() if is_candidate(m, record))
    chosen = choose_state(m, pool)
    staying = [record for record in pool if not record.leaving]
    if not staying and (saving := before_leaving(m, pool, chosen, now)) is not None:
        return saving
    holders = sum(record.state == chosen for record in staying)
    ready = [r for r in pool if r.leaving and not hands_over_first(m, r, chosen, bool(staying), now)]
    leavers = may_leave(m, ready, len(staying), holders, now)
    going = {record.info.id for record in leavers}
    pool = [record for record in pool if record.info.id not in going]
    chosen = choose_state(m, pool)
    if (risk := newer_state_at_risk(m, pool, chosen)) is not None:
        return risk
    participants = cap(m, pool, chosen)
    if not participants:
        return Plan((), tuple(leavers), None, "leave", "", False) if leavers else no_members(m)
    if chosen is None:
        waiting = may_start_fresh(m) or enough_to_start(m, len(pool), now)
    elif strength(m, participants) < max(1, m.minimum):
        waiting = Status(
            "BelowMinimum",
            f"{len(participants)} processes are ready, the job needs at least {m.minimum}",
        )
    if strength(m, participants) < max(1, m.minimum) and (limits := why_smaller(pool, most(m))):
        waiting = Status("BelowMinimum", f"the job needs at least {m.minimum} processes, and {limits}")
    servers = choose_servers(m, now)
    if waiting is None and isinstance(servers, Status):
        waiting = servers
    if waiting is not None:
        return waiting
    assert not isinstance(servers, Status)
    applied_known = chosen is not None and keeps_applied_batches(m)
    kept = all(
        record.opaque or applied_known or (record.keeps_applied_batches and chosen is not None)
        for record in participants
    )
    lost = m.state_existed and not kept and (chosen is None or rolls_back(m, pool))
    if chosen is None and m.put_away_with:
        lost = False
    following = next_consistency(m, participants, is_epoch_end(m, participants, chosen))
    cause, reason = why(m, participants, chosen, lost, servers, following)
    steps_in = who_steps_in(m, participants) if chosen is not None else ""
    reason += f"; {steps_in}" if steps_in else ""
    counts = lost and not still_begins_anew(m, chosen)
    return Plan(
        tuple(participants), tuple(leavers), chosen, cause, reason, counts, servers, following, steps_in
    )


def still_begins_anew(m: Membership, chosen: StateName | None) -> bool:
    """Return whether a generation that began without the job's state was never formed: one loss, tried again.

    Args:
        m: facts of the membership.
        chosen: the state to begin from; None: a fresh start.
    """
    current = m.current
    return chosen is None and current is not None and current.began_anew and not current.formed


def strength(m: Membership, participants: Sequence[Record]) -> int:
    """Return the number of processes, for the question whether the job may go on.

    A pod of which some processes are down, and are started again in it, counts in full.

    Args:
        m: facts of the membership.
        participants: records of the next generation's members.
    """
    pods = {record.info.pod_uid or record.info.id for record in participants}
    return max(len(participants), len(pods) * m.processes_per_pod)


def is_candidate(m: Membership, record: Record) -> bool:
    """Return whether a process may take part in the next generation.

    Args:
        m: facts of the membership.
        record: of the process.
    """
    if record.voided:
        return False
    return record.parked


def not_parked(m: Membership, generation: Generation, now: float) -> Status | None:
    """Return what is waited for: members of the old generation that may still commit in it.

    Args:
        m: facts of the membership.
        generation: the old one.
        now: in unix seconds.

    Returns:
        None when there are none.
    """
    waiting = []
    paused = []
    pauses = paused_without_operator(m, generation, now)
    for info in generation.members:
        record = m.members.get(info.id)
        if info.id in generation.lost or cannot_commit(record) or is_half_lost(record, generation):
            continue
        silent = record is not None and not record.connected and record.disconnected_at is not None
        if silent and pauses:
            paused.append(info.label)
        else:
            waiting.append(info.label)
    if paused:
        return Status(
            "OperatorUnreachable",
            "members fell silent and the operator has not been heard for"
            f" {m.patience:g} s: this coordinator may be the one that is cut off and waits",
            tuple(paused + waiting),
        )
    if waiting:
        return Status("Parking", "members of the last generation have not stopped yet", tuple(waiting))
    return None


def cannot_commit(record: Record | None) -> bool:
    """Whether a member of the old generation has stopped for certain. None: it has not reported yet."""
    return record is not None and record.parked


def choose_state(m: Membership, pool: Sequence[Record]) -> StateName | None:
    """Return the greatest state that a parked member holds; None where nobody holds any.

    A standby that was a member once holds what it had then. That is no state to go back to where a checkpoint
    is newer, and all can read it.

    Args:
        m: facts of the membership.
        pool: records of all that may take part.
    """
    best = max(states_there(pool), default=None)
    if best is None or m.saved is None or best >= m.saved or m.current is None:
        return best
    outside = not any(record.state == best and m.in_current(record.info.id) for record in pool)
    stale = outside and all(record.can_go_back and not record.stuck for record in pool)
    return None if stale else best


def rolls_back(m: Membership, pool: Sequence[Record]) -> bool:
    """Return whether steps may be lost: no member of the last generation brings its state along.

    Where one parked with it, no other member can be more than one step ahead: a step needs them all.

    Args:
        m: facts of the membership.
        pool: records of all that may take part.
    """
    current = m.current
    if current is None:
        return False
    return not any(
        m.in_current(record.info.id)
        and record.state is not None
        and (current.base is None or record.state >= current.base)
        for record in pool
    )


def newer_state_at_risk(m: Membership, pool: Sequence[Record], chosen: StateName | None) -> Status | None:
    """Return what is waited for before older state is taken: each member of the last generation takes part or
    is dead for certain.

    Args:
        m: facts of the membership.
        pool: records of all that may take part.
        chosen: the state to begin from; None: a fresh start.

    Returns:
        None when nothing is at risk.
    """
    current = m.current
    if chosen is None or current is None or not rolls_back(m, pool):
        return None
    alive = []
    for info in current.members:
        record = m.members.get(info.id)
        if not (record is not None and record.parked) and not proof_of_death(m, info):
            alive.append(info.label)
    if not alive:
        return None
    return Status(
        "WaitingForState",
        f"only {chosen} is left, and these may still hold newer state",
        tuple(alive),
    )


def cap(m: Membership, pool: list[Record], chosen: StateName | None) -> list[Record]:
    """Return at most `maximum` of the pool: holders of the state, then members of the last generation, then
    those that have waited longest, then by rank; of those as many as have seats, and room for each other.

    Leavers do not count: they are there to hand over their state, and go at the next boundary.

    Args:
        m: the state machine.
        pool: parked processes; it is sorted in place.
        chosen: the state that the next generation begins from; None: nobody has one.
    """
    pool.sort(
        key=lambda r: (
            chosen is not None and r.state != chosen,
            not m.in_current(r.info.id),
            r.parked_at if m.standby and not m.in_current(r.info.id) else 0.0,
            r.info.slot,
            r.info.pod_uid if r.together > 1 else "",
            r.info.rank_key,
        )
    )
    staying = [record for record in pool if not record.leaving]
    leaving = [record for record in pool if record.leaving]
    holders = [record for record in pool if chosen is not None and record.state == chosen]
    seats = seated(m, staying, {record.info.id for record in holders})
    return whole(choose_parts(seats, leaving, holders, most(m)))


def why_held_back(m: Membership) -> str:
    """Return why processes that are ready do not take part, and what to do; "" where all do that may.

    Args:
        m: facts of the membership.
    """
    ready = [r for r in m.connected() if not r.leaving and (r.parked or m.in_current(r.info.id))]
    return "" if m.finished else why_smaller(ready, most(m))


def no_members(m: Membership) -> Status:
    if m.finished:
        return Status("Finished", "a worker finished")
    return enough_to_start(m, 0, m.started_at) or Status("WaitingForWorkers", "no process is ready")


def why(
    m: Membership,
    participants: Sequence[Record],
    chosen: StateName | None,
    lost: bool,
    servers: tuple[ServerInfo, ...],
    following: Consistency | None,
) -> tuple[str, str]:
    """Return cause and reason of the generation to make.

    Args:
        m: facts of the membership.
        participants: records of the next generation's members.
        chosen: the state to begin from; None: a fresh start.
        lost: newer state is given up.
        servers: the next generation's.
        following: its consistency; None: it has no servers.
    """
    current = m.current
    if lost and chosen is None and current is not None and m.void_found_by == current.name:
        back = any(record.can_go_back for record in participants)
        what = "goes back to its newest checkpoint" if back else "starts again from nothing"
        return "failure", f"{m.void_reason}; the job {what}"
    if lost:
        what = "starts again from nothing" if chosen is None else f"goes back to {chosen}"
        return "failure", f"StateLost: every holder of newer state is gone, the job {what}"
    if chosen is None and m.put_away_with:
        return "start", f"the job goes on from checkpoint {m.put_away_with}"
    if current is None or chosen is None:
        return "start", f"first start with {len(participants)} processes"
    if current.closing:
        return "failure", current.closing
    complaining = [r for r in participants if r.park_reason.is_complaint and r.generation == current.name]
    if complaining:
        return "failure", why_parked(min(complaining, key=lambda record: record.parked_at))
    if current.ended_stage is not None:
        return "start", "the next training loop begins"
    if current.boundary:
        return current.boundary_cause, current.boundary
    if current.consistency is not None and following != current.consistency:
        return CAUSE, describe_change(current.consistency, following)
    if current.lost:
        member, reason = next(iter(current.lost.items()))
        return "failure", f"{member} is lost: {reason}"
    if [info.id for info in current.servers] != [info.id for info in servers]:
        return "join", "the parameter servers changed"
    return "join", "all members stopped at a step boundary"


def carry_out(m: Membership, plan: Plan, now: float) -> list[Effect]:
    """Make the planned generation: dismiss those that leave, start the others.

    Args:
        m: facts of the membership, which are changed.
        plan: made by `plan_next`.
        now: in unix seconds.
    """
    effects: list[Effect] = []
    for record in plan.leavers:
        effects += send_away(record, record.leave_reason)
    if not plan.participants:
        return effects
    participants = list(plan.participants)
    effects += judge_complaints(m, participants, now)
    participants = whole(participants)
    if not participants:
        return effects
    if plan.chosen is not None and not any(record.state == plan.chosen for record in participants):
        return effects  # the only holder was cut off: decide again
    if not all(m.server_connected(info.id) for info in plan.servers):
        return effects  # one of the servers was
    anew = plan.state_lost or still_begins_anew(m, plan.chosen)
    name = m.next_name()
    leaving = still_holding(m, plan.servers)
    start = compose(
        name,
        participants,
        plan.chosen,
        plan.reason,
        plan.servers,
        leaving,
        m.state_existed,
        plan.consistency,
        owners(participants, plan.chosen, plan.consistency),
    )
    start = replace(start, minimum=m.minimum)
    copies = copies_kept(m.current, start)
    m.former = former_after(m, participants)
    m.current = Generation(name, start.members, made_at=now, base=start.state, start=start)
    m.current.copies_before = copies
    m.current.servers, m.current.leaving_servers = start.servers, start.leaving_servers
    m.current.consistency, m.current.steps_in = start.consistency, plan.steps_in
    m.current.began_anew = anew and plan.chosen is None
    if plan.chosen is None or plan.state_lost:
        forget_loop(m)
    m.minimum_since = m.saving = None
    m.resumes = m.put_away_with if plan.chosen is None else ""
    m.states_lost += plan.state_lost
    for record in participants:
        record.standing, record.generation = Standing.ACTIVE, name
        record.park_reason, record.at_stage = ParkReason.UNKNOWN, None
        effects += once(record, ("start", name), start)
    effects.append(Made(start, plan.cause, plan.state_lost))
    return effects


def judge_complaints(m: Membership, participants: list[Record], now: float) -> list[Effect]:
    """Count a generation that ended by complaints alone; cut a member off after too many in a row.

    Args:
        m: facts of the membership, which are changed.
        participants: records of the next generation's members.
        now: in unix seconds.
    """
    current = m.current
    complained = current is not None and (current.complained or complaint_in(m, current))
    if current is None or not complained or current.lost or current.lost_servers:
        m.complaints.reset()
        return []
    members = [record for record in participants if m.in_current(record.info.id)]
    servers = [info.id for info in current.servers]
    m.complaints.record(members, now - current.made_at, m.settings.healthy_generation, servers)
    if m.complaints.length < m.settings.complaints:
        return []
    worst = m.complaints.worst(members)
    if worst is None:
        cut = disconnect_unreached(m, m.complaints.unreached(members, current.serving), now)
        if cut:
            m.complaints.reset()
        return cut
    record, reason = worst
    m.complaints.reset()
    m.excluded[record.info.id] = reason
    participants.remove(record)
    assert record.session is not None
    session = record.session
    m.sessions.pop(session, None)
    record.session, record.disconnected_at = None, now
    current.lost[record.info.id] = f"cut off: {reason}"
    return [
        Send(session, record.info.id, Refused(reason, retry=False)),
        EndStream(session, record.info.id, reason),
    ]


def enough_to_start(m: Membership, ready: int, now: float) -> Status | None:
    """Decide whether a fresh start has its members; otherwise say what it waits for.

    It starts when `target` processes are ready, or when `minimum` are and nobody else is coming, or the
    patience since `minimum` was reached is over: a pending worker never holds the others.

    Args:
        m: facts of the membership, which are changed.
        ready: processes that are parked and may take part.
        now: in unix seconds.

    Returns:
        The reason to wait; None when it may start.
    """
    minimum = max(1, m.minimum)
    if ready < minimum:
        m.minimum_since = None
        need = f"at least {minimum} {'is' if minimum == 1 else 'are'} needed"
        return waiting_for_workers(m, f"{_ready(ready)}, {need}")
    if m.minimum_since is None:
        m.minimum_since = now
    if ready >= max(minimum, m.target):
        return None
    starting = any(record.standing is Standing.STARTING for record in m.connected())
    nobody_is_coming = m.operator_synced and not starting and not silent_pods(m)
    if nobody_is_coming or now - m.minimum_since >= m.settings.first_start:
        return None
    return waiting_for_workers(m, f"{_ready(ready)}, {m.target} are wanted")


def _ready(count: int) -> str:
    return f"{count or 'no'} {'process is' if count < 2 else 'processes are'} ready"


def waiting_for_workers(m: Membership, text: str) -> Status:
    """Return the status of a start that waits for workers, with their names.

    Args:
        m: facts of the membership.
        text: in words.
    """
    names = [record.info.label for record in m.connected() if record.standing is Standing.STARTING]
    names += [name for _, name in silent_pods(m)]
    return Status("WaitingForWorkers", text, tuple(dict.fromkeys(names)))


def may_start_fresh(m: Membership) -> Status | None:
    """Decide whether it is certain that no process holds state; otherwise say who might."""
    if m.incarnation.is_first and not m.state_existed and m.current is None:
        return None
    if not m.operator_synced:
        return Status(
            "WaitingForOperator",
            "no state is left here; only the operator knows who else lives",
            ("the operator",),
        )
    might = [name for _, name in silent_pods(m)]
    might += [
        record.info.label
        for record in m.members.values()
        if record.state is not None and not record.parked and not proof_of_death(m, record.info)
    ]
    if might:
        return Status(
            "WaitingForState", "these may still hold the state of the job", tuple(dict.fromkeys(might))
        )
    return None

"""The state machine: one event in, effects out; and what it is at, in words for the operator and people.

Facts are written down first (hello, inbox), then all decisions are taken again from the facts (`decide`), so
that no decision depends on the way that led to it.
"""

from __future__ import annotations

from enum import StrEnum

from springtide_coordinator.membership.boundary import ask_for_boundary, dismiss, end_loop, reconsider_finish
from springtide_coordinator.membership.events import (
    Connected,
    Disconnected,
    Effect,
    EndStream,
    Event,
    FellSilent,
    ProcessEnded,
    Received,
    ServerConnected,
    StoodStill,
    Synced,
    Tick,
)
from springtide_coordinator.membership.failure import (
    ask_to_park,
    close_if_over,
    disconnect_ended,
    disconnect_hung,
    disconnect_silent,
    is_outranked,
    note_losses,
    paused_without_operator,
    proof_of_death,
    step_down,
)
from springtide_coordinator.membership.hello import SUSPENDED, greet, settle
from springtide_coordinator.membership.inbox import receive
from springtide_coordinator.membership.messages import Progressed, ServerLeaving, Standing
from springtide_coordinator.membership.pods import spread_leaving
from springtide_coordinator.membership.running_loop import tell_running_loop
from springtide_coordinator.membership.saving import ask_to_save
from springtide_coordinator.membership.servers import (
    forget_servers,
    greet_server,
    let_servers_go,
    mark_leaving,
    note_lost_servers,
)
from springtide_coordinator.membership.state import Membership, Status
from springtide_coordinator.membership.succession import Plan, carry_out, plan_next
from springtide_protocol.names import Incarnation


def take_in(m: Membership, event: Event, now: float) -> list[Effect]:
    """Write down an event's facts. Many may be taken in before the next `decide`, which costs O(members).

    Args:
        m: facts of the membership, which are changed.
        event: that happened.
        now: in unix seconds; must not go backwards.

    Returns:
        Answers that are given at once (Welcome, refusals), in the order in which they are to be carried out.
    """
    effects: list[Effect] = []
    m.undecided = m.undecided or changes_decisions(m, event)
    match event:
        case Connected():
            effects += greet(m, event.session, event.hello, now)
        case ServerConnected():
            effects += greet_server(m, event.session, event.hello, now)
        case Disconnected():
            member = m.sessions.pop(event.session, None)
            if member is not None:
                record = m.members[member]
                record.session, record.disconnected_at = None, now
            server = m.server_sessions.pop(event.session, None)
            if server is not None:
                m.servers[server].session, m.servers[server].disconnected_at = None, now
        case Received(message=ServerLeaving() as said):
            server = m.server_sessions.get(event.session)
            if server is not None:
                leaver = m.servers[server]
                leaver.leaving = leaver.leaving or said.reason or "it was asked to leave"
        case Received():
            member = m.sessions.get(event.session)
            if member is not None:
                effects += receive(m, m.members[member], event.message, now)
                for effect in effects:
                    drop_session(m, effect, now)
        case Synced():
            effects += take_in_sync(m, event, now)
        case StoodStill(seconds):
            m.asleep_since, m.awake_since = now - seconds, now
        case FellSilent():
            effects += disconnect_silent(m, event.session, event.seconds, now)
        case ProcessEnded():
            effects += disconnect_ended(m, event.member, event.session, now)
        case Tick():
            pass
    return effects


def is_due(m: Membership) -> bool:
    """Return whether `decide` could say anything now that it has not said already."""
    return m.undecided or not m.quiet


def changes_decisions(m: Membership, event: Event) -> bool:
    """Return whether an event brings facts that decisions look at while nothing else is going on.

    Args:
        m: facts of the membership.
        event: that happened.
    """
    if isinstance(event, Tick):
        return False
    if isinstance(event, Received) and isinstance(event.message, Progressed):
        member = m.sessions.get(event.session)
        return member is not None and m.members[member].standing is not Standing.ACTIVE
    return True


def is_quiet(m: Membership) -> bool:
    """Return whether time alone changes no decision: no wait is running that ends by itself.

    Args:
        m: facts of the membership, of which all decisions were just taken.
    """
    current = m.current
    if m.superseded:
        return True
    if current is None or current.closing or m.blocked is not None or not m.settled or m.finished:
        return False
    if any(member not in m.members for member in current.order):
        return False
    if any(not server.connected or server.leaving for server in m.servers.values()):
        return False
    if any(info.id not in m.servers for info in current.serving):
        return False
    starting = standing_by = False
    for record in m.members.values():
        if not record.connected or record.leaving or record.dismissed:
            return False
        starting = starting or record.standing is Standing.STARTING
        if record.standing is Standing.PARKED:
            if record.info.id in current.ids:
                return False
            standing_by = True
    return not (starting and standing_by)


def drop_session(m: Membership, effect: Effect, now: float) -> None:
    """Listen no more to a stream that is cut.

    Args:
        m: facts of the membership, which are changed.
        effect: that is being carried out.
        now: in unix seconds.
    """
    if isinstance(effect, EndStream) and m.sessions.get(effect.session) == effect.member:
        del m.sessions[effect.session]
        record = m.members[effect.member]
        record.session, record.disconnected_at = None, now


def take_in_sync(m: Membership, event: Synced, now: float) -> list[Effect]:
    """Take in sizes, the living pods, and which of them are going away.

    Args:
        m: facts of the membership, which are changed.
        event: the operator's word.
        now: in unix seconds.

    Returns:
        Effects for members that hang; all else follows from the facts.
    """
    if is_outranked(m, Incarnation(event.number)):
        return step_down(m, f"the operator has made incarnation {event.number}")
    m.target, m.minimum, m.maximum = event.target, event.minimum, event.maximum
    m.standby = event.standby
    before, m.living = m.living, {pod.uid: pod for pod in event.living}
    servers_before, m.living_servers = m.living_servers, {pod.uid: pod for pod in event.living_servers}
    m.gone = (m.gone | set(before) | set(servers_before)) - set(m.living) - set(m.living_servers)
    m.servers_wanted, m.consistency_wanted = event.servers, event.consistency
    mark_leaving(m)
    m.processes_per_pod = max(1, event.processes_per_pod)
    m.operator_synced_at, m.operator_pause = now, event.pause
    m.operator_synced = m.operator_synced or event.observed
    # Of the first coordinator's own generations the operator knows no more than it does.
    m.state_existed = m.state_existed or (event.trained and not m.incarnation.is_first)
    m.suspended, m.suspend_by, m.put_away_with = event.suspend, event.suspend_by, event.saved
    for record in m.members.values():
        if event.suspend:
            record.asked_to_leave(now, SUSPENDED, m.suspend_by)
        pod = m.living.get(record.info.pod_uid)
        if pod is not None and pod.leave_by:
            record.asked_to_leave(now, "its pod is going away", pod.leave_by)
    m.known_members = {
        key: info
        for key, info in m.known_members.items()
        if not info.pod_uid or info.pod_uid in m.living or (key in m.members and m.members[key].connected)
    }
    m.known_servers = {
        key: server
        for key, server in m.known_servers.items()
        if server.pod_uid in m.living_servers or (key in m.servers and m.servers[key].connected)
    }
    m.hung = event.hung
    return disconnect_hung(m, now)


def decide(m: Membership, now: float) -> list[Effect]:
    """Take all decisions that the facts allow.

    Args:
        m: facts of the membership, which are changed.
        now: in unix seconds.

    Returns:
        Effects, in the order in which they are to be carried out.
    """
    effects: list[Effect] = []
    m.undecided = False
    if m.superseded:
        m.quiet = True
        return effects
    m.blocked = None
    spread_leaving(m, now)
    settle(m, now)
    reconsider_finish(m, now)
    for _ in range(4):
        current = m.current
        if current is not None:
            effects += note_losses(m, current, now)
            effects += note_lost_servers(m, current, now)
            effects += end_loop(m, current)
            close_if_over(m, current, now)
        effects += ask_to_park(m, now)
        effects += dismiss(m, now)
        outcome = plan_next(m, now)
        if not isinstance(outcome, Plan):
            m.blocked = outcome
            break
        effects += carry_out(m, outcome, now)
    effects += ask_to_save(m)
    if m.current is not None:
        effects += ask_for_boundary(m, m.current, now)
    effects += let_servers_go(m)
    effects += tell_running_loop(m)
    forget(m)
    forget_servers(m)
    m.quiet = is_quiet(m)
    return effects


def forget(m: Membership) -> None:
    """Drop processes that are gone and of which nothing more can be learned."""
    for member, record in list(m.members.items()):
        if record.connected or m.in_current(member):
            continue
        harmless = record.state is None or record.standing is Standing.STARTING
        if harmless or proof_of_death(m, record.info):
            del m.members[member]
            there = m.places[record.info.place]
            there.discard(member)
            if not there:
                del m.places[record.info.place]


SILENT = "members fell silent and the operator too; this coordinator may be the one that is cut off"


class Phase(StrEnum):
    WAITING = "waiting"
    FORMING = "forming"
    RUNNING = "running"
    ENDING = "ending"
    AFTER_LOOP = "after_loop"


def after_loop(m: Membership) -> bool:
    """Whether a loop ended and nobody has begun another one: members run the script's code."""
    current = m.current
    if current is None or current.ended_stage is None:
        return False
    return not any(record.parked and m.in_current(record.info.id) for record in m.connected())


def describe(m: Membership, now: float) -> tuple[Phase, Status]:
    """Return the job's phase, and its reason in words.

    Args:
        m: the state machine.
        now: seconds on its clock.
    """
    if m.superseded:
        return Phase.WAITING, Status("Superseded", f"a newer coordinator lives: {m.superseded}")
    current = m.current
    if m.blocked is not None and not (m.blocked.reason == "Parking" and after_loop(m)):
        forming = m.blocked.reason == "Parking"
        return (Phase.FORMING if forming else Phase.WAITING), m.blocked
    if current is None:
        return Phase.WAITING, Status("WaitingForWorkers", "no process is ready")
    silent = [
        info.label
        for info in current.members
        if info.id not in current.lost and (info.id not in m.members or not m.members[info.id].connected)
    ]
    silent += [
        info.label
        for info in current.servers
        if info.id not in current.lost_servers and not m.server_connected(info.id)
    ]
    if current.ended_stage is not None:
        return Phase.AFTER_LOOP, Status("LoopEnded", f"training loop {current.ended_stage} ended")
    if silent and paused_without_operator(m, current, now) and not current.adopted:
        return Phase.RUNNING, Status("OperatorUnreachable", SILENT, tuple(silent))
    if any(record.standing is Standing.ENDED for record in m.connected()):
        late = [
            info.label
            for info in current.members
            if info.id not in m.members or m.members[info.id].standing is not Standing.ENDED
        ]
        return Phase.ENDING, Status("Ending", "members wait at the end of the loop", tuple(late))
    if not current.complete:
        late = [info.label for info in current.members if info.id not in current.formed]
        message = (
            f"generation {current.name} is being formed: {current.start.reason}" if current.start else ""
        )
        return Phase.FORMING, Status("Forming", message, tuple(late))
    if current.boundary:
        return Phase.RUNNING, Status("Rescaling", current.boundary)
    if silent:
        return Phase.RUNNING, Status("Reconnecting", "streams are broken", tuple(silent))
    word = "goes on as it was found" if current.adopted else "trains"
    return Phase.RUNNING, Status(
        "Running", f"generation {current.name} {word} with {len(current.ids)} processes"
    )

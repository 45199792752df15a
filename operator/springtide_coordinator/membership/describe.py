"""The machine's state in the words that the operator and people see."""

from __future__ import annotations

from enum import StrEnum

from springtide_coordinator.membership.liveness import paused_without_operator
from springtide_coordinator.membership.messages import Standing
from springtide_coordinator.membership.state import Membership, Status

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
    """Where the job stands, and why."""
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

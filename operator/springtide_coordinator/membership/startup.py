"""When to begin from nothing: how long to wait for others, and whether nobody can hold state."""

from __future__ import annotations

from springtide_coordinator.membership.liveness import proof_of_death, silent_pods
from springtide_coordinator.membership.messages import Standing
from springtide_coordinator.membership.state import Membership, Status


def enough_to_start(m: Membership, ready: int, now: float) -> Status | None:
    """Decide whether a fresh start has its members; otherwise say what it waits for.

    It starts when `target` processes are ready, or when `minimum` are and nobody else is coming, or the
    patience since `minimum` was reached is over: a pending worker never holds the others.
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
    nobody_is_coming = m.operator_word and not starting and not silent_pods(m)
    if nobody_is_coming or now - m.minimum_since >= m.settings.first_start:
        return None
    return waiting_for_workers(m, f"{_ready(ready)}, {m.target} are wanted")


def _ready(count: int) -> str:
    return f"{count or 'no'} {'process is' if count < 2 else 'processes are'} ready"


def waiting_for_workers(m: Membership, text: str) -> Status:
    names = [record.info.label for record in m.connected() if record.standing is Standing.STARTING]
    names += [name for _, name in silent_pods(m)]
    return Status("WaitingForWorkers", text, tuple(dict.fromkeys(names)))


def may_start_fresh(m: Membership) -> Status | None:
    """Decide whether it is certain that no process holds state; otherwise say who might."""
    if m.incarnation.is_first and not m.state_existed and m.current is None:
        return None
    if not m.rules.fresh_needs_word:
        return None
    if not m.operator_word:
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

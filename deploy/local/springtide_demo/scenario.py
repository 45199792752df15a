"""The story: which disturbance comes next, and when. Pure: time and what is seen are arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KILL_WORKER: Final = "kill-worker"
SCALE_UP: Final = "scale-up"
DRAIN_NODE: Final = "drain-node"
KILL_COORDINATOR: Final = "kill-coordinator"
KILL_OPERATOR: Final = "kill-operator"
SCALE_DOWN: Final = "scale-down"
ORDER: Final = (KILL_WORKER, SCALE_UP, DRAIN_NODE, KILL_COORDINATOR, KILL_OPERATOR, SCALE_DOWN)

WORKERS_AT_FIRST: Final = 3
WORKERS_SCALED_UP: Final = 5
WORKERS_AT_LAST: Final = 2

EXPLANATION: Final = {
    KILL_WORKER: "a worker dies (kill -9): the others drop the open step, form a new group and go on",
    SCALE_UP: "kubectl scale 3 -> 5: training goes on while new workers start; they join between two steps",
    DRAIN_NODE: "kubectl drain: its workers finish their step and leave; others start elsewhere",
    KILL_COORDINATOR: "the coordinator dies (kill -9): training goes on; the next one adopts what it finds",
    KILL_OPERATOR: "the operator dies (kill -9): only kubectl notices; the next one plans from what it sees",
    SCALE_DOWN: "kubectl scale 5 -> 2: three leave between two steps; the global batch stays the same",
}


@dataclass(frozen=True)
class Observation:
    """Facts for the decision. Times are unix seconds."""

    now: float
    active: int  # workers that commit
    generation_since: float | None  # first commit of the newest generation; None before the first commit
    coordinator_pid: int | None
    operator_pid: int | None
    operator_ready: bool
    seconds_left: float | None = None  # until training ends at its present speed; None while unknown
    finished: bool = False


@dataclass(frozen=True)
class Done:
    """An event that was carried out. `pid` is the process it killed, if any."""

    kind: str
    at: float
    pid: int | None = None


@dataclass(frozen=True)
class Pace:
    """Seconds. `patience` bounds the wait for the normal course of things; `tail` is kept for the end."""

    settle: float = 2.0
    quiet: float = 10.5  # after an event that causes no generation its pauses are counted for ten seconds
    patience: float = 30.0
    hurry: float = 2.5
    tail: float = 4.0


@dataclass(frozen=True)
class Decision:
    """The next event, or None to wait; and why."""

    kind: str | None
    reason: str


def decide(seen: Observation, done: tuple[Done, ...], pace: Pace | None = None) -> Decision:
    """Return the next event of the story, or the reason to wait.

    An event comes when its predecessor's effect is complete and training is calm again. It comes anyway when
    that takes longer than `patience`, or when training would end before the rest of the story is told.

    Args:
        seen: the job as it is now.
        done: the events so far, in order.
        pace: times of the story, in seconds; None: the usual ones.
    """
    pace = pace or Pace()
    if seen.finished:
        return Decision(None, "the job has ended")
    if len(done) == len(ORDER):
        return Decision(None, "waits for the job to finish")
    kind = ORDER[len(done)]
    if seen.generation_since is None:
        return Decision(None, "waits for the first commit")
    calm_for = seen.now - seen.generation_since
    if not done:
        if seen.active >= WORKERS_AT_FIRST and calm_for >= pace.settle:
            return Decision(kind, f"{seen.active} workers train")
        if calm_for >= pace.patience:
            return Decision(kind, f"only {seen.active} workers train after {pace.patience:.0f} s")
        return Decision(None, f"{seen.active} of {WORKERS_AT_FIRST} workers train")
    last = done[-1]
    since = seen.now - last.at
    missing = _missing(seen, last, pace)
    if missing is None and calm_for >= pace.settle and since >= pace.settle:
        return Decision(kind, "training is calm")
    if since >= pace.patience:
        return Decision(kind, f"patience is over: {missing or 'training is not calm'}")
    needed = pace.tail + sum(_least_wait(later, pace) for later in ORDER[len(done) :])
    if seen.seconds_left is not None and seen.seconds_left < needed and since >= _least_wait(last.kind, pace):
        return Decision(kind, f"training ends in {seen.seconds_left:.0f} s")
    return Decision(None, missing or "lets training calm down")


def _least_wait(kind: str, pace: Pace) -> float:
    return pace.quiet if kind in (KILL_COORDINATOR, KILL_OPERATOR) else pace.hurry


def _missing(seen: Observation, last: Done, pace: Pace) -> str | None:
    """Say what the last event's effect still lacks; None when it is complete."""
    since = seen.now - last.at
    went_on = seen.generation_since is not None and seen.generation_since > last.at
    if last.kind == KILL_WORKER:
        if not went_on:
            return "the survivors go on"
        return (
            None
            if seen.active >= WORKERS_AT_FIRST
            else f"the replacement joins ({seen.active} of {WORKERS_AT_FIRST})"
        )
    if last.kind in (SCALE_UP, DRAIN_NODE):
        if went_on and seen.active >= WORKERS_SCALED_UP:
            return None
        return f"workers join ({seen.active} of {WORKERS_SCALED_UP})"
    if since < pace.quiet:
        return f"watches for pauses ({since:.0f} of {pace.quiet:.0f} s)"
    if last.kind == KILL_COORDINATOR:
        return None if seen.coordinator_pid not in (None, last.pid) else "the coordinator comes back"
    if last.kind == KILL_OPERATOR:
        return (
            None
            if seen.operator_ready and seen.operator_pid not in (None, last.pid)
            else "the operator comes back"
        )
    return None

"""PURE: what becomes of the processes of one pod: who is started again, when the pod gives up, how it ends.

A process that fails is started again while others of the pod live, since their state is worth keeping; when
nobody is left the pod ends, and the operator's budgets decide.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field
from enum import Enum

from springtide.coordination.outcome import Finished, Left, Outcome


@dataclass(frozen=True, slots=True)
class Policy:
    """Seconds, and how often. restarts: of all processes together, until none has ended for `calm`."""

    restarts: int = 3
    backoff: float = 1.0
    backoff_most: float = 30.0
    calm: float = 600.0
    grace: float = 60.0
    """Time between SIGTERM and SIGKILL when the pod gives up, in seconds."""


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended. code: as Python's (negative: signal). tail: the last lines of its error stream."""

    code: int
    outcome: Outcome | None = None
    out_of_memory: bool = False
    tail: str = ""

    @property
    def well(self) -> bool:
        """A process that had said how it ended, and was killed by a signal on its way out, has ended so."""
        by_signal = self.code < 0 or 128 < self.code <= 128 + signal.SIGRTMAX
        return (self.code == 0 or by_signal) and isinstance(self.outcome, Finished | Left)

    @property
    def exit_code(self) -> int:
        """Return the exit code of a shell and the kubelet: 128 + n for signal n."""
        return 128 - self.code if self.code < 0 else self.code


@dataclass(frozen=True, slots=True)
class Spawn:
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Signal:
    rank: int
    number: int
    why: str


Action = Spawn | Signal


class Phase(Enum):
    RUNNING = "running"
    WAITING = "waiting"
    ENDED = "ended"


@dataclass(slots=True)
class Process:
    phase: Phase = Phase.RUNNING
    since: float = 0.0
    due: float = math.inf
    """Time at which it is started again (waiting), or killed (running and asked to end)."""
    end: End | None = None


@dataclass(slots=True)
class Supervisor:
    """`count` processes with local ranks from 0. Times are seconds of one clock that does not go back."""

    count: int
    policy: Policy = field(default_factory=Policy)
    processes: list[Process] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    """How often each process was started again, over the life of the pod."""
    spent: int = 0
    """Restarts that count against the limit."""
    failed_at: float = -math.inf
    stopping: str = ""
    """Why no process is started any more; "" while they are."""
    gave_up: int | None = None
    """Local rank whose end was one too many."""

    def begin(self, now: float) -> list[Action]:
        self.processes = [Process(since=now) for _ in range(self.count)]
        self.restarts = [0] * self.count
        return [Spawn(rank, "the pod begins") for rank in range(self.count)]

    def ended(self, rank: int, end: End, now: float, *, as_one: bool = False) -> list[Action]:
        """Note that a process has ended, and decide whether it is started again.

        Args:
            rank: its local rank.
            end: how it ended.
            now: monotonic time in seconds.
            as_one: the processes train one model together, so that none can go on without the others.

        Returns:
            Actions of now, in order; a start that waits for its time comes later.
        """
        process = self.processes[rank]
        process.phase, process.end, process.since, process.due = Phase.ENDED, end, now, math.inf
        if as_one and not end.well and self.gave_up is None:
            return self._end_all(rank, now)
        if end.well or self.stopping:
            return self._orphans(now)
        if now - self.failed_at > self.policy.calm:
            self.spent = 0
        self.failed_at = now
        if self.spent >= self.policy.restarts:
            return self._give_up(rank, f"it was one end too many after {self.spent} restarts", now)
        if not any(other.phase is Phase.RUNNING for other in self.processes):
            return self._give_up(rank, "no other process of the pod runs", now)
        pause = min(self.policy.backoff_most, self.policy.backoff * 2**self.spent)
        self.spent += 1
        process.phase, process.due = Phase.WAITING, now + pause
        return []

    def asked(self, number: int, now: float) -> list[Action]:
        """Note that the launcher got a signal that ends processes: it goes to all, and nobody is started any
        more.

        Args:
            number: of the signal.
            now: monotonic time in seconds.

        Returns:
            Actions, in order.
        """
        name = signal.Signals(number).name
        self.stopping = self.stopping or name
        return self._announce_all(number, name, now)

    def tick(self, now: float) -> list[Action]:
        """Return the actions that are due by now."""
        actions: list[Action] = []
        for rank, process in enumerate(self.processes):
            if process.due > now:
                continue
            if process.phase is Phase.WAITING:
                process.phase, process.since, process.due = Phase.RUNNING, now, math.inf
                self.restarts[rank] += 1
                actions.append(Spawn(rank, f"restart {self.spent} of {self.policy.restarts}"))
            elif process.phase is Phase.RUNNING:
                process.due = math.inf
                actions.append(
                    Signal(rank, signal.SIGKILL, f"it has not ended within {self.policy.grace:g} s")
                )
        return actions

    @property
    def next_at(self) -> float:
        """Return when `tick` has something to do; infinite when nothing is due."""
        return min((process.due for process in self.processes), default=math.inf)

    @property
    def over(self) -> bool:
        return all(process.phase is Phase.ENDED for process in self.processes)

    def _orphans(self, now: float) -> list[Action]:
        """Return the ends of ranks that wait to be started again, and have nobody left to join."""
        if any(process.phase is Phase.RUNNING for process in self.processes):
            return []
        waiting = [rank for rank, process in enumerate(self.processes) if process.phase is Phase.WAITING]
        if not waiting:
            return []
        return self._give_up(waiting[0], "no other process of the pod runs", now)

    def _end_all(self, rank: int, now: float) -> list[Action]:
        """Kill the others at once: they wait for the one that is gone, and hear no SIGTERM meanwhile."""
        self.gave_up = rank
        self.stopping = f"process {rank} has ended, and the processes of this pod train as one"
        return self._announce_all(signal.SIGKILL, self.stopping, now)

    def _give_up(self, rank: int, why: str, now: float) -> list[Action]:
        self.gave_up, self.stopping = rank, f"process {rank} failed and is not started again: {why}"
        actions = self._announce_all(signal.SIGTERM, self.stopping, now)
        for process in self.processes:
            if process.phase is Phase.RUNNING:
                process.due = now + self.policy.grace
        return actions

    def _announce_all(self, number: int, why: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for rank, process in enumerate(self.processes):
            if process.phase is Phase.WAITING:
                process.phase, process.due = Phase.ENDED, math.inf
            elif process.phase is Phase.RUNNING:
                actions.append(Signal(rank, number, why))
        return actions

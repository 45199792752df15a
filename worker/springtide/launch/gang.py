"""PURE: processes that live and end together, as torchrun's do: the launcher of a script outside of a job."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field

from springtide.launch.supervision import Action, End, Policy, Signal, Spawn


@dataclass(slots=True)
class Gang:
    """`count` processes; when one fails all are ended and begin again. Times: seconds of one clock."""

    count: int
    policy: Policy = field(default_factory=Policy)
    restart: int = 0
    """Rounds before this one."""
    running: set[int] = field(default_factory=set)
    cause: tuple[int, End] | None = None
    """Rank and end of the first process of this round that failed."""
    stopping: str = ""
    due: float = math.inf
    over: bool = False
    code: int = 0
    _failed_at: float = -math.inf
    _spent: int = 0

    def begin(self, now: float) -> list[Action]:
        return self._spawn("the gang begins")

    def ended(self, rank: int, end: End, now: float) -> list[Action]:
        """Note that a process has ended; the first one that fails ends all others.

        Args:
            rank: its local rank.
            end: how it ended.
            now: monotonic time in seconds.

        Returns:
            Actions, in order.
        """
        self.running.discard(rank)
        actions: list[Action] = []
        if end.code and self.cause is None and not self.stopping:
            self.cause = (rank, end)
            self.due = now + self.policy.grace
            why = f"process {rank} failed"
            actions += [Signal(other, signal.SIGTERM, why) for other in sorted(self.running)]
        if end.code and self.stopping and not self.code:
            self.code = end.exit_code
        if not self.running:
            self._round_over(now)
        return actions

    def asked(self, number: int, now: float) -> list[Action]:
        """Note that the launcher got a signal that ends processes.

        Args:
            number: of the signal.
            now: monotonic time in seconds; not looked at.

        Returns:
            The signal to each process that runs.
        """
        name = signal.Signals(number).name
        self.stopping = self.stopping or name
        self.code = self.code or (128 + number if self.cause is not None else 0)
        if not self.running:
            self.over, self.due = True, math.inf
        return [Signal(rank, number, name) for rank in sorted(self.running)]

    def tick(self, now: float) -> list[Action]:
        if now < self.due or self.over:
            return []
        self.due = math.inf
        if self.running:
            why = f"it has not ended within {self.policy.grace:g} s"
            return [Signal(rank, signal.SIGKILL, why) for rank in sorted(self.running)]
        self.cause = None
        self.restart += 1
        return self._spawn(f"round {self.restart + 1}: restart {self._spent} of {self.policy.restarts}")

    def _round_over(self, now: float) -> None:
        self.due = math.inf
        if self.stopping or self.cause is None:
            self.over = True
            return
        if now - self._failed_at > self.policy.calm:
            self._spent = 0
        self._failed_at = now
        if self._spent >= self.policy.restarts:
            self.over, self.code = True, self.cause[1].exit_code
            return
        self.due = now + min(self.policy.backoff_most, self.policy.backoff * 2**self._spent)
        self._spent += 1

    def _spawn(self, why: str) -> list[Action]:
        self.running = set(range(self.count))
        return [Spawn(rank, why) for rank in range(self.count)]

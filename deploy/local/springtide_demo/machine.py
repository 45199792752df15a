"""The share of the machine that others took: promises about seconds, and limits of patience, depend on it.

Read from /proc/stat (all processors) and from the processes below this one (ours: the cluster, its pods, the
undisturbed run). Time that is neither ours nor idle belongs to others, time stolen from a virtual machine
too. Where /proc/stat says nothing, others took nothing: nothing is excused.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

# A machine is busy when others take so much of it, and so little is left over.
OTHERS_SHARE = 0.2
IDLE_SHARE = 0.1
SAMPLE_SECONDS = 1.0


@dataclass(frozen=True)
class Reading:
    """Processor seconds since some beginning, of all processors together."""

    at: float  # unix s
    total: float
    idle: float
    ours: float


@dataclass(frozen=True)
class Load:
    """Shares of the machine's processor time over a while, 0 to 1."""

    others: float = 0.0
    idle: float = 1.0

    @property
    def busy(self) -> bool:
        """Say whether others took so much that nothing was left."""
        return self.others >= OTHERS_SHARE and self.idle <= IDLE_SHARE

    def __str__(self) -> str:
        return f"others took {self.others:.0%} of its processors, {self.idle:.0%} was idle"


def load(before: Reading, after: Reading) -> Load:
    """Return the load between two readings; that of a quiet machine where nothing was counted.

    Args:
        before: the first reading.
        after: a later one.
    """
    total = after.total - before.total
    if total <= 0:
        return Load()
    idle = min(1.0, max(0.0, (after.idle - before.idle) / total))
    ours = max(0.0, (after.ours - before.ours) / total)
    return Load(others=max(0.0, 1.0 - idle - ours), idle=idle)


class Machine:
    """Readings over time. `read` returns the reading of now."""

    def __init__(self, read: Callable[[], Reading] | None = None, every: float = SAMPLE_SECONDS) -> None:
        self._read = read or reading
        self._every = every
        self._readings = [self._read()]

    def sample(self) -> None:
        """Take a reading if the last one is old enough."""
        if time.time() - self._readings[-1].at >= self._every:
            self._readings.append(self._read())

    def lately(self) -> Load:
        """Return the load between the last two readings."""
        return load(*self._readings[-2:]) if len(self._readings) > 1 else Load()

    def between(self, begin: float, end: float) -> Load:
        """Return the load of a time.

        Args:
            begin: in unix seconds; it is counted from the last reading before this.
            end: in unix seconds; it is counted up to the first reading after this.
        """
        times = [one.at for one in self._readings]
        first = max(0, bisect_right(times, begin) - 1)
        last = min(len(times) - 1, bisect_left(times, end))
        return load(self._readings[first], self._readings[last]) if first < last else Load()


def reading() -> Reading:
    """Read /proc. Values that cannot be read count as zero."""
    at = time.time()
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        words = []
    ticks = [int(word) for word in words]
    if len(ticks) < 8:
        return Reading(at, 0.0, 0.0, 0.0)
    second = os.sysconf("SC_CLK_TCK")
    # user, nice, system, idle, iowait, irq, softirq, steal: guests' time is in user's already
    return Reading(at, sum(ticks) / second, (ticks[3] + ticks[4]) / second, own_ticks(os.getpid()) / second)


def own_ticks(root: int) -> int:
    """Return the processor time of a process and of all below it, those included that have ended."""
    found = dict(_processes())
    return sum(ticks for pid, (_, ticks) in found.items() if _below(root, pid, found))


def _below(root: int, pid: int, found: dict[int, tuple[int, int]]) -> bool:
    for _ in range(64):  # a tree that changes while it is read has no circle, and this takes no chance
        if pid == root:
            return True
        if pid not in found:
            return False
        pid = found[pid][0]
    return False


def _processes() -> Iterable[tuple[int, tuple[int, int]]]:
    """Yield (pid, (parent, ticks)) of every process."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text()
        except OSError:
            continue  # it has just ended
        fields = text.rpartition(")")[2].split()
        # utime, stime, and those of children that were waited for
        yield int(entry.name), (int(fields[1]), sum(int(word) for word in fields[11:15]))

"""How a global batch is cut by the members' speed: a pure function of figures that all members know alike.

A member's sample time is the time that it computes per sample, in picoseconds. Every decision is made in
whole numbers, so that all members come to the same cut, to the sample.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import NamedTuple

UNKNOWN = 0
"""The sample time of a member that has not been measured; it counts as the mean of the others."""
EVEN = -1
"""The sample time of a member whose job wants even parts; one such member decides for all."""
MIN_GAIN_PERCENT = 5
"""Gain that a new cut must promise, in percent of a step."""
NO_BOUND = 0
EVEN_PERMILLE = 1000

_LONGEST = 1 << 52  # picoseconds, more than an hour: float64 has all whole numbers up to there
_FINE = 1 << 20  # samples of the imagined batch by which cuts are compared
_LEFT_OUT_STEPS = 2  # of a generation: caches are cold
_WINDOW_STEPS = 3  # one slow step among them does not count
_NEWEST_WEIGHT = 0.3


class Figure(NamedTuple):
    """One member's figures, as they travel in a step's commit vote.

    Attributes:
        sample_time: picoseconds per sample; UNKNOWN or EVEN.
        room: the most samples that the member may be given, in thousandths of an even part; NO_BOUND where
            it computes a part of any size in pieces that fit.
    """

    sample_time: int = UNKNOWN
    room: int = NO_BOUND

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return json.dumps([self.sample_time, self.room]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Figure:
        """Read it from JSON. Raise ValueError."""
        sample_time, room = json.loads(text)
        return cls(int(sample_time), int(room))


@dataclass(frozen=True, slots=True)
class Proportions:
    """Say in which proportion members share a batch, by rank.

    Attributes:
        sample_times: picoseconds per sample, each at least 1.
        rooms: as in `Figure`.
    """

    sample_times: tuple[int, ...]
    rooms: tuple[int, ...]

    def sizes(self, n: int, least: int = 1) -> list[int]:
        """Return the members' samples of a batch: those for which the one that takes longest is done first.

        A slower member never gets more than a faster one with as much room.

        Args:
            n: samples of the batch, at least `least` for each member.
            least: fewest samples of a member.

        Raises:
            ValueError: there are not enough samples.
        """
        if n < least * len(self.sample_times):
            raise ValueError(
                f"{n} samples are not {least} or more for each of {len(self.sample_times)} members"
            )
        return list(_sizes(self.sample_times, self.rooms, n, least))

    def takes(self, sample_times: Sequence[int]) -> int:
        """Return how long a large batch cut this way takes members of these sample times; a relative time.

        Args:
            sample_times: by rank.
        """
        sizes = _sizes(self.sample_times, self.rooms, _FINE, 1)
        return max(size * sample_time for size, sample_time in zip(sizes, sample_times, strict=True))

    def is_done_in(self, time: int) -> bool:
        """Return whether a large batch can be cut so that all are done in a time, as `takes` has it."""
        return sum(_done_in(time, self.sample_times, _most(self.rooms, _FINE), 1)) >= _FINE


@functools.lru_cache(maxsize=64)  # asked for in each step, and mostly for the same
def _sizes(sample_times: tuple[int, ...], rooms: tuple[int, ...], n: int, least: int) -> tuple[int, ...]:
    if least * len(sample_times) == n:
        return (least,) * len(sample_times)
    most, low, high = _most(rooms, n), 0, max(sample_times) * n
    while high - low > 1:
        middle = (low + high) // 2
        if sum(_done_in(middle, sample_times, most, least)) < n:
            low = middle
        else:
            high = middle
    sizes = _done_in(low, sample_times, most, least)
    left = n - sum(sizes)
    for rank, size in enumerate(_done_in(high, sample_times, most, least)):
        if left and size > sizes[rank]:
            sizes[rank] += 1
            left -= 1
    return tuple(sizes)


def _most(rooms: Sequence[int], n: int) -> list[int]:
    even = -(-n // len(rooms))
    return [even * max(room, EVEN_PERMILLE) // EVEN_PERMILLE if room else n for room in rooms]


def _done_in(time: int, sample_times: Sequence[int], most: Sequence[int], least: int) -> list[int]:
    """Return how many samples each member computes in a time, within its bounds."""
    return [
        max(least, min(bound, time // sample_time))
        for sample_time, bound in zip(sample_times, most, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class OwnShare:
    """Say what this process has of each global batch.

    Attributes:
        samples: of a whole global batch.
        part: of it, 0-1.
        sample_seconds: of computing, smoothed; 0 before it is known.
        balanced: whether the parts follow speed now.
    """

    samples: int = 0
    part: float = 0.0
    sample_seconds: float = 0.0
    balanced: bool = False


def next_proportions(current: Proportions | None, figures: Sequence[Figure]) -> Proportions | None:
    """Return the cut of the step that follows the one whose vote had these figures.

    Args:
        current: of the step that was voted on; None: even parts.
        figures: of all members, by rank.

    Returns:
        The cut; None for even parts. It stays as it is unless another one would make steps shorter by
        MIN_GAIN_PERCENT; even parts are preferred to any that gain less than that over them.
    """
    known = [figure.sample_time for figure in figures if figure.sample_time > 0]
    if len(figures) < 2 or not known or any(figure.sample_time == EVEN for figure in figures):
        return None
    mean = sum(known) // len(known)
    sample_times = tuple(figure.sample_time if figure.sample_time > 0 else mean for figure in figures)
    rooms = tuple(figure.room for figure in figures)
    best = Proportions(sample_times, rooms)
    even = Proportions((1,) * len(sample_times), rooms)
    kept = even if current is None else current if current.rooms == rooms else replace(current, rooms=rooms)

    def much_shorter_than(proportions: Proportions) -> bool:
        return best.is_done_in((proportions.takes(sample_times) * 100 - 1) // (100 + MIN_GAIN_PERCENT))

    if not much_shorter_than(kept):
        return None if current is None else kept
    return best if much_shorter_than(even) else None


class SpeedMeter:
    """smooth one member's sample time. A step that took much longer than its neighbours does not count."""

    def __init__(self) -> None:
        self._left_out = _LEFT_OUT_STEPS
        self._window: list[float] = []
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Return the smoothed seconds per sample; 0 before it is known."""
        return self._seconds

    @property
    def sample_time(self) -> int:
        """Return it in picoseconds, UNKNOWN before it is known."""
        return min(max(round(self._seconds * 1e12), 1), _LONGEST) if self._seconds else UNKNOWN

    def begin_generation(self) -> None:
        """Leave the next steps out, because members came or went; keep what was measured until then."""
        self._left_out, self._window = _LEFT_OUT_STEPS, []

    def measured(self, seconds: float, samples: int) -> None:
        """Take in a committed step.

        Args:
            seconds: that this member computed.
            samples: that it computed on; 0: the step tells nothing.
        """
        if samples <= 0 or not seconds > 0:
            return
        if self._left_out:
            self._left_out -= 1
            return
        self._window = [*self._window[-(_WINDOW_STEPS - 1) :], seconds / samples]
        typical = median_low(self._window)
        self._seconds += (typical - self._seconds) * (_NEWEST_WEIGHT if self._seconds else 1.0)

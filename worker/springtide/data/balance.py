"""How a global batch is cut by the members' speed: a pure function of figures that all members know alike.

A member's pace is the time that it computes per sample. Paces are whole numbers of picoseconds, and every
decision is made in whole numbers, so that all members come to the same cut, to the sample.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import NamedTuple

UNKNOWN = 0
"""The pace of a member that has not been measured; it counts as the mean of the others."""
EVEN = -1
"""The pace of a member whose job wants even parts; one such member decides for all."""
MIN_GAIN_PERCENT = 5
"""By how much a step must be expected to become shorter for a new cut."""
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
        pace: picoseconds per sample; UNKNOWN or EVEN.
        room: the most samples that the member may be given, in thousandths of an even part; NO_BOUND where
            it computes a part of any size in pieces that fit.
    """

    pace: int = UNKNOWN
    room: int = NO_BOUND

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return json.dumps([self.pace, self.room]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Figure:
        """Read it from JSON. Raise ValueError."""
        pace, room = json.loads(text)
        return cls(int(pace), int(room))


@dataclass(frozen=True, slots=True)
class Cut:
    """Say in which proportion members share a batch, by rank.

    Attributes:
        paces: picoseconds per sample, each at least 1.
        rooms: as in `Figure`.
    """

    paces: tuple[int, ...]
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
        count = len(self.paces)
        if n < least * count:
            raise ValueError(f"{n} samples are not {least} or more for each of {count} members")
        even = -(-n // count)
        most = [even * max(room, EVEN_PERMILLE) // EVEN_PERMILLE if room else n for room in self.rooms]

        def done_in(time: int) -> list[int]:
            return [
                max(least, min(bound, time // pace)) for pace, bound in zip(self.paces, most, strict=True)
            ]

        low, high = 0, max(self.paces) * n
        if least * count == n:
            return [least] * count
        while high - low > 1:
            middle = (low + high) // 2
            if sum(done_in(middle)) < n:
                low = middle
            else:
                high = middle
        sizes, at_the_end = done_in(low), done_in(high)
        left = n - sum(sizes)
        for rank, size in enumerate(at_the_end):
            if left and size > sizes[rank]:
                sizes[rank] += 1
                left -= 1
        return sizes

    def takes(self, paces: Sequence[int]) -> int:
        """Return how long a large batch cut this way takes members that have these paces; a relative time.

        Args:
            paces: by rank.
        """
        return max(size * pace for size, pace in zip(self.sizes(_FINE), paces, strict=True))


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


def next_cut(current: Cut | None, figures: Sequence[Figure]) -> Cut | None:
    """Return the cut of the step that follows the one whose vote had these figures.

    Args:
        current: of the step that was voted on; None: even parts.
        figures: of all members, by rank.

    Returns:
        The cut; None for even parts. It stays as it is unless another one would make steps shorter by
        MIN_GAIN_PERCENT; even parts are preferred to any that gain less than that over them.
    """
    known = [figure.pace for figure in figures if figure.pace > 0]
    if len(figures) < 2 or not known or any(figure.pace == EVEN for figure in figures):
        return None
    mean = sum(known) // len(known)
    paces = tuple(figure.pace if figure.pace > 0 else mean for figure in figures)
    rooms = tuple(figure.room for figure in figures)
    best = Cut(paces, rooms)
    even = Cut((1,) * len(paces), rooms)
    kept = even if current is None else replace(current, rooms=rooms)
    shortest = best.takes(paces)
    if not _much_longer(kept.takes(paces), shortest):
        return None if current is None else kept
    return best if _much_longer(even.takes(paces), shortest) else None


def _much_longer(time: int, shortest: int) -> bool:
    return time * 100 > shortest * (100 + MIN_GAIN_PERCENT)


class PaceMeter:
    """Smooth one member's pace. A step that took much longer than its neighbours does not count."""

    def __init__(self) -> None:
        self._left_out = _LEFT_OUT_STEPS
        self._window: list[float] = []
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Return the smoothed seconds per sample; 0 before it is known."""
        return self._seconds

    @property
    def pace(self) -> int:
        """Return it in picoseconds, UNKNOWN before it is known."""
        return min(max(round(self._seconds * 1e12), 1), _LONGEST) if self._seconds else UNKNOWN

    def begin_generation(self) -> None:
        """Leave the next steps out, because members came or went; keep the pace until then."""
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

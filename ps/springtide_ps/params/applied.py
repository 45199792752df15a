"""Sets of batches, as intervals; and which batches are in the values of a chunk. PURE.

A batch is one global batch, named by its number in the job's whole run from 0. Batches are given out lowest
first, so a set of them is nearly one interval, whatever their number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, Final

from springtide_ps.wire.keys import INTERVALS_KEY

BATCH_NUMBER_LIMIT: Final = 1 << 53
INTERVALS_LIMIT: Final = 2000  # its JSON fits a frame


class BatchNumberError(ValueError):
    """Raised for intervals that are no set of batch numbers, or a batch number that cannot be."""


class IntervalSet:
    """Numbers from 0. Equal sets have equal intervals."""

    __slots__ = ("_starts", "_stops")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        """intervals: (first, one after the last), sorted, neither empty nor touching each other.

        Raise BatchNumberError.
        """
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in intervals:
            if not 0 <= start < stop <= BATCH_NUMBER_LIMIT or (self._stops and start <= self._stops[-1]):
                raise BatchNumberError(f"{start}..{stop} does not follow {self.intervals()[-3:]}")
            self._starts.append(start)
            self._stops.append(stop)

    def intervals(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._stops, strict=True))

    def add(self, number: int) -> bool:
        """False: it was there. Raise BatchNumberError for a number that cannot be, or for too many gaps."""
        if not 0 <= number < BATCH_NUMBER_LIMIT:
            raise BatchNumberError(f"{number} is no batch number")
        at = bisect_right(self._starts, number)
        if at and number < self._stops[at - 1]:
            return False
        left = at > 0 and self._stops[at - 1] == number
        right = at < len(self._starts) and self._starts[at] == number + 1
        if left and right:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]
        elif left:
            self._stops[at - 1] = number + 1
        elif right:
            self._starts[at] = number
        elif len(self._starts) >= INTERVALS_LIMIT:
            raise BatchNumberError(f"batch {number} would be the set's gap number {INTERVALS_LIMIT}")
        else:
            self._starts.insert(at, number)
            self._stops.insert(at, number + 1)
        return True

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number)
        return at > 0 and number < self._stops[at - 1]

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and self.intervals() == other.intervals()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"IntervalSet({self.intervals()})"

    def copy(self) -> IntervalSet:
        return IntervalSet(self.intervals())

    def missing(self, first: int, stop: int) -> Iterator[int]:
        """Yield the numbers that are not in the set, in order.

        Args:
            first: the first number that is asked about.
            stop: the number after the last.
        """
        while first < stop:
            at = bisect_right(self._starts, first)
            if at and first < self._stops[at - 1]:
                first = self._stops[at - 1]
                continue
            end = min(stop, self._starts[at]) if at < len(self._starts) else stop
            yield from range(first, end)
            first = end

    def count(self, first: int, stop: int) -> int:
        """Return how many numbers are in the set.

        Args:
            first: the first number that is asked about.
            stop: the number after the last.
        """
        return sum(
            max(0, min(stop, end) - max(first, begin))
            for begin, end in zip(self._starts, self._stops, strict=True)
        )

    def intersection(self, other: IntervalSet) -> IntervalSet:
        found, mine, theirs = [], self.intervals(), other.intervals()
        i = j = 0
        while i < len(mine) and j < len(theirs):
            start, stop = max(mine[i][0], theirs[j][0]), min(mine[i][1], theirs[j][1])
            if start < stop:
                found.append((start, stop))
            if mine[i][1] < theirs[j][1]:
                i += 1
            else:
                j += 1
        return IntervalSet(found)

    def to_json(self) -> list[int]:
        return [end for interval in self.intervals() for end in interval]

    @classmethod
    def from_json(cls, value: Any) -> IntervalSet:
        """Raise BatchNumberError for what is none."""
        if (
            not isinstance(value, list)
            or len(value) % 2
            or len(value) > 2 * INTERVALS_LIMIT
            or not all(type(number) is int for number in value)
        ):
            raise BatchNumberError("a set of batch numbers is a list of at most 2000 pairs of numbers")
        return cls(zip(value[::2], value[1::2], strict=True))


class AppliedBatches:
    """Say which batches are in a chunk's values.

    applied: updates since the beginning, which is also the chunk's version. skipped: those of them that
    changed nothing, since a gradient was not finite. intervals: the numbers of the batches.
    """

    __slots__ = ("applied", "intervals", "skipped")

    def __init__(self, intervals: IntervalSet | None = None, applied: int = 0, skipped: int = 0) -> None:
        self.intervals = IntervalSet() if intervals is None else intervals
        self.applied, self.skipped = applied, skipped

    def copy(self) -> AppliedBatches:
        return AppliedBatches(self.intervals.copy(), self.applied, self.skipped)

    def enter(self, number: int, skipped: bool = False) -> bool:
        """Write a batch down.

        Args:
            number: of the batch.
            skipped: it changes nothing, since a gradient is not finite.

        Returns:
            False: it is in the values already, and must not be applied.
        """
        if not self.intervals.add(number):
            return False
        self.applied += 1
        self.skipped += skipped
        return True

    def to_json(self) -> dict[str, Any]:
        skipped = {"skipped": self.skipped} if self.skipped else {}
        return {"applied": self.applied, INTERVALS_KEY: self.intervals.to_json(), **skipped}

    @classmethod
    def from_json(cls, value: Any) -> AppliedBatches:
        """Raise BatchNumberError for what is none."""
        counts = (value.get("applied"), value.get("skipped", 0)) if isinstance(value, dict) else (None,)
        if not all(type(count) is int and count >= 0 for count in counts):
            raise BatchNumberError(
                "a chunk's record says how many updates were applied, and of which batches"
            )
        return cls(IntervalSet.from_json(value.get(INTERVALS_KEY)), *counts)

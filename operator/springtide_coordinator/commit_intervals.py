"""Intervals between the commits of one generation, for whoever measures how fast a job trains. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from springtide_protocol.names import GenerationName

WARM_STEPS = 3
"""The first steps of a generation pay for the change, and are left out."""


class Interval(NamedTuple):
    """The time since the commit before, and how many steps were committed in it."""

    steps: int
    seconds: float


@dataclass(slots=True)
class CommitIntervals:
    """Feed it with `begun` and `committed`, in order."""

    _generation: GenerationName | None = None
    _size: int = 0
    _skip: int = 0
    _last: tuple[int, float] | None = None  # step and unix time of the newest commit

    def begun(self, generation: GenerationName, size: int) -> bool:
        """Note that a generation was made, or is heard of for the first time.

        Args:
            generation: its name.
            size: its workers.

        Returns:
            Whether the number of workers is another one now.
        """
        if generation == self._generation:
            return False
        changed = size != self._size
        self._generation, self._size = generation, size
        self._skip, self._last = WARM_STEPS, None
        return changed

    def committed(self, step: int, unix_time: float) -> Interval | None:
        """Note that a step of the generation was committed.

        Args:
            step: its number.
            unix_time: of its reporter, in unix seconds.

        Returns:
            None where there is nothing to measure: it was told before, is one of the first, or comes from a
            clock that was set back.
        """
        last = self._last
        if last is not None and step <= last[0]:
            return None
        self._last = (step, unix_time)
        if self._skip > 0 or last is None:
            self._skip -= 1
            return None
        if unix_time < last[1]:
            return None
        return Interval(step - last[0], unix_time - last[1])

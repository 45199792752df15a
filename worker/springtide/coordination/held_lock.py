"""Tell gaps in which this process computed, and its threads waited for the interpreter, from those in which
it stood still. PURE: times are arguments.

A C call may hold the interpreter's lock for seconds, in which no heartbeat is said. A process that was
stopped took no time of a processor meanwhile, and this one did. Gaps that began before the first commit of a
generation do not count: nobody is found late then, and imports and compilers hold the lock once.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_GAP = 0.2
"""Seconds between two looks that are worth telling."""
COMPUTED = 0.5
"""Part of a gap that the process had a processor, at least, if it computed."""


@dataclass(slots=True)
class HeldLock:
    """The longest gap so far, in `seconds`, in which this process computed; call `look` regularly."""

    now: float
    processor: float
    watched: bool = False
    seconds: float = 0.0

    def look(self, now: float, processor: float, watched: bool) -> None:
        """Take in the times of a look.

        Args:
            now: monotonic seconds.
            processor: seconds that all threads of the process have had a processor.
            watched: whether the gap that begins now would count.
        """
        gap, had = now - self.now, processor - self.processor
        counts = self.watched
        self.now, self.processor, self.watched = now, processor, watched
        if counts and gap >= LEAST_GAP and had >= COMPUTED * gap:
            self.seconds = max(self.seconds, gap)

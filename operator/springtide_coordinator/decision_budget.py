"""How soon the next decisions may be taken: a share of the process's time, which a calm job saves up.

PURE.
"""

from __future__ import annotations

SHARE = 0.04
"""Part of the process's time that decisions may take on average."""
SAVED_SECONDS = 0.02
"""Time of decisions that can be saved up at most: what a calm job has after half a second."""
MOST_PAUSE = 1.0
"""Seconds between two rounds of decisions at most: what took long may have been the whole machine, standing
still.
"""


class DecisionBudget:
    """The seconds that decisions may take, which grow with time and are spent by each round (a token bucket).

    In a small job a round takes less than a millisecond, and those that follow a loss (a stream broke, the
    others parked, all have formed) come one after the other without a pause. In a job of a thousand members a
    round takes so long that it has to wait, and then decides on everything that came meanwhile.
    """

    def __init__(self) -> None:
        self._saved = SAVED_SECONDS
        self._at: float | None = None

    def pause(self, now: float) -> float:
        """Return in how many seconds the next round may begin.

        Args:
            now: in seconds, of a clock that never goes backwards.
        """
        self._grow(now)
        return max(0.0, -self._saved / SHARE)

    def spend(self, seconds: float, now: float) -> None:
        """Note that a round has been taken.

        Args:
            seconds: that it took.
            now: its end, in seconds of the same clock.
        """
        self._grow(now)
        self._saved = max(self._saved - seconds, -MOST_PAUSE * SHARE)

    def _grow(self, now: float) -> None:
        if self._at is not None:
            self._saved = min(SAVED_SECONDS, self._saved + SHARE * max(0.0, now - self._at))
        self._at = now

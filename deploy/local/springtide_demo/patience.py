"""How long to wait: as long as something moves. A limit of the wall clock would fail on slower machines."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

# Of a machine that others have to themselves, a little still counts: no wait is endless.
LEAST_SHARE = 0.05


@dataclass
class Patience:
    """Counts how long nothing has moved, in seconds of a machine of our own; pure: time is an argument.

    limit: after so many of these seconds without anything new, patience is over.
    """

    limit: float
    still: float = 0.0
    moved_at: float | None = None  # when something moved last, or the wait began
    _looked_at: float | None = None
    _seen: set[Hashable] = field(default_factory=set)

    def look(self, marks: Iterable[Hashable], now: float, others: float = 0.0) -> bool:
        """Take what is seen now; say whether patience is over.

        Args:
            marks: what is there. Only what was never there before counts as movement: pods that come and go
                in a circle are none, steps made again are none.
            now: seconds of any clock that goes forward.
            others: the share of the machine that others took since the last look.
        """
        fresh = set(marks) - self._seen
        self._seen |= fresh
        if fresh or self.moved_at is None:
            self.still, self.moved_at = 0.0, now
        elif self._looked_at is not None:
            self.still += (now - self._looked_at) * max(LEAST_SHARE, 1.0 - others)
        self._looked_at = now
        return self.still > self.limit

    def since(self, now: float) -> float:
        """Return for how many seconds of the clock nothing has moved."""
        return 0.0 if self.moved_at is None else now - self.moved_at

"""Events of one job that were posted lately: the same one again is counted, instead of being a new object.

As Kubernetes' own controllers do: type, reason and message are the same, and the last one was less than ten
minutes ago. A condition that comes and goes would else fill etcd with Warnings.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from springtide_operator.plan.actions import Event

SAME_SECONDS = 600.0
MOST = 64


@dataclass(frozen=True)
class Posted:
    """An Event object. at: when it was posted or counted last; seconds on a clock that never jumps."""

    name: str
    count: int
    at: float


class RepeatedEvents:
    """The latest events, by what they say."""

    def __init__(self) -> None:
        self._posted: OrderedDict[Event, Posted] = OrderedDict()

    def known(self, event: Event, now: float) -> Posted | None:
        """Return the object of the same event; None where there is none, or it is too old.

        Args:
            event: that is to be told.
            now: by the clock of `put`.
        """
        found = self._posted.get(event)
        return found if found is not None and now - found.at < SAME_SECONDS else None

    def put(self, event: Event, name: str, count: int, now: float) -> None:
        """Remember an event that was posted or counted.

        Args:
            event: that was told.
            name: of its object.
            count: how often it has been told.
            now: seconds on a clock that never jumps.
        """
        self._posted[event] = Posted(name, count, now)
        self._posted.move_to_end(event)
        while len(self._posted) > MOST:
            self._posted.popitem(last=False)

"""The heartbeat limit: the longest time from a peer's last sign of life until it counts as lost.

Three waits follow each other after that sign, and the limit is their sum: until the next ping, for its
answer, and (at the coordinator alone) for the process to come back on a new stream. So a peer that hangs is
lost within the limit, whenever in between two pings it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 2.0
"""Seconds, unless SPRINGTIDE_KEEPALIVE_SECONDS says otherwise."""

MOST_RETURN = 0.5
"""A process that lost its connection has found the coordinator again within it."""

MOST_PINGS = 400
"""A second, of one coordinator: each costs it some 40 microseconds."""

LEAST_LIMIT = 0.5
"""Seconds of silence that are never held against a process that trains."""

BEAT_SECONDS = 0.1
"""Time between two heartbeats of a process that trains."""

GAPS = 3.0
"""A process's limit is so many times the longest gap between its heartbeats of late."""

RETURN_AFTER_STANDSTILL = 2.0
"""Heartbeat limits within which all find a coordinator again that stood still: they try once a second."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Seconds. ping_every: of silence, until a ping. answer_within: of no answer, until the stream is broken.
    return_within: of a broken stream, until its member is lost; 0 where nobody waits for a return.
    """

    ping_every: float
    answer_within: float
    return_within: float = 0.0

    @property
    def limit(self) -> float:
        """Return the longest time from a member's last sign of life until it counts as lost, in seconds."""
        return self.ping_every + self.answer_within + self.return_within

    @property
    def return_after_standstill(self) -> float:
        """Return for how many seconds after a standstill the coordinator holds nobody's broken stream against
        them.
        """
        return RETURN_AFTER_STANDSTILL * self.limit

    @property
    def patience(self) -> float:
        """Return for how many seconds a process may be silent without being lost."""
        return self.answer_within + self.return_within


def of_members(limit: float, processes: int = 0) -> Heartbeat:
    """Return how the coordinator watches workers and servers.

    Its pings are what an idle job costs it, so it sends MOST_PINGS a second at most: with more processes each
    is asked less often, and the limit is longer by as much. A process that ends closes its stream, which is
    seen at once; the limit is for machines that fall silent.

    Args:
        limit: in seconds, positive; that of a job whose pings are not too many.
        processes: that the job wants.
    """
    back = min(MOST_RETURN, limit / 4)
    return Heartbeat(max(limit / 4, processes / MOST_PINGS), limit - limit / 4 - back, back)


def of_coordinator(limit: float) -> Heartbeat:
    """Return how workers, servers and the operator watch the coordinator: they look for it again at once.

    Its pings are signs of life. They come more often than a client would ask unless the job is very large, so
    that clients ask only one that is silent, and do not double what an idle job costs it. Since training goes
    on without it, it has half as long again as a member has.

    Args:
        limit: in seconds, positive; that of members.
    """
    return Heartbeat(limit * 3 / 4, limit * 3 / 4)


def beat_every(processes: int) -> float:
    """Return after how many seconds a process that trains says its next heartbeat; 0: it says none.

    They are MOST_PINGS a second at most for all processes together. Where that makes them so rare that the
    transport would find a silent process earlier, there are none.

    Args:
        processes: that the job wants.
    """
    every = max(BEAT_SECONDS, processes / MOST_PINGS)
    return every if GAPS * every < LIMIT else 0.0

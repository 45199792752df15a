"""Heartbeats: who has said none for longer than its own heartbeats make likely. PURE: time is an argument.

Each process that trains says a heartbeat every tenth of a second. Its limit is three times the longest gap
between two of them of late, and never below half a second. So regular heartbeats make a short limit; those of
a machine with more work than cores, or of a script that holds the interpreter's lock, make a long one. Of the
latter a process tells itself, also after it was cut off for it, so that it happens to it once.

Nobody is blamed without evidence. Seconds count only as far as this process looked on, since its own
standstill leaves all heartbeats unread, and only after a generation's first step, which may compile and hold
the interpreter's lock. A process with few heartbeats so far has no limit here, and where several pods are
late at once, and more than a third of them, the machine or the network is to blame: then the transport's
keepalive decides, which has two seconds and is answered without the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide_protocol.heartbeat import GAPS, LEAST_LIMIT

ENOUGH = 15
"""Heartbeats in a row that tell how regular a process's heartbeats are."""

MEMORY_SECONDS = 60.0
"""A gap counts for so long at least, and for twice as long at most."""


@dataclass(slots=True)
class Rhythm:
    """Heartbeats of one stream. Times are attended seconds."""

    last: float
    watched: bool = False  # the last heartbeat came after a step of its generation
    count: int = 1  # of watched ones; what they tell of a process outlives generations
    longest: float = 0.0  # gap since `since`
    longest_before: float = 0.0  # gap in the span before that
    since: float = 0.0
    held: float = 0.0  # longest gap, by its own word, in which the process computed; it outlives streams

    def beat(self, at: float, watched: bool) -> None:
        """Take in a heartbeat; the gap before it counts if it began while the stream was watched.

        Args:
            at: when it came.
            watched: whether silence counts from then on.
        """
        if at - self.since >= MEMORY_SECONDS:
            self.longest_before, self.longest, self.since = self.longest, 0.0, at
        if self.watched:
            self.longest = max(self.longest, at - self.last)
            self.count += 1
        self.last, self.watched = at, watched

    @property
    def limit(self) -> float:
        """Return the silence in seconds that shows a standstill; infinite without enough heartbeats."""
        if self.count < ENOUGH:
            return math.inf
        return max(LEAST_LIMIT, GAPS * max(self.longest, self.longest_before, self.held))


@dataclass(slots=True)
class Heartbeats:
    """The rhythms of all streams, and the seconds in which this process has looked on.

    Attributes:
        most: Seconds between two looks that count, at most; more was a standstill of this process.
    """

    most: float = 0.1
    rhythms: dict[int, Rhythm] = field(default_factory=dict)
    attended: float = 0.0
    looked_at: float = math.inf

    def look(self, now: float) -> None:
        """Let time pass: call it at each tick.

        Args:
            now: in seconds, not less than before.
        """
        self.attended = self._attended_at(now)
        self.looked_at = now

    def beat(self, session: int, now: float, watched: bool = True, held: float = 0.0) -> None:
        """Take in a heartbeat.

        Args:
            session: the stream on which it came.
            now: in seconds.
            watched: whether the running generation has committed a step, so that silence counts from now on.
            held: seconds of the longest gap in which the process computed without its interpreter.
        """
        at = self._attended_at(now)
        rhythm = self.rhythms.get(session)
        if rhythm is None:
            rhythm = self.rhythms[session] = Rhythm(at, watched, since=at)
        else:
            rhythm.beat(at, watched)
        rhythm.held = held

    def pause(self, session: int) -> None:
        """Expect no heartbeats on a stream for a while; its process stays as regular as it was."""
        if (rhythm := self.rhythms.get(session)) is not None:
            rhythm.watched = False

    def forget(self, session: int) -> None:
        """Expect no more heartbeats on a stream; the next one begins anew."""
        self.rhythms.pop(session, None)

    def silent(self, pods: Mapping[int, str], now: float) -> dict[int, float]:
        """Return how long those have been silent that stand still, in seconds by stream.

        Args:
            pods: by stream, of all that train now.
            now: in seconds.
        """
        at = self._attended_at(now)
        silence = {
            session: (at - rhythm.last, rhythm.limit)
            for session, rhythm in self.rhythms.items()
            if session in pods and rhythm.watched
        }
        late = {pods[session] for session, (seconds, limit) in silence.items() if seconds > limit / 2}
        if len(late) > 1 and 3 * len(late) > len(set(pods.values())):
            return {}
        return {session: seconds for session, (seconds, limit) in silence.items() if seconds > limit}

    def _attended_at(self, now: float) -> float:
        return self.attended + min(max(0.0, now - self.looked_at), self.most)

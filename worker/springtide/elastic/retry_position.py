"""PURE: where members stand when a generation forms in the middle of a block of the script's own collectives.

A block ends with a reduction that all its members take part in. Whoever has passed it proves that every
member had come to the block's end, so a member that failed in that last reduction is done as well. Otherwise
all that stand in the same block run it again, together; a member that is elsewhere (it joins) does without
them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[int, int, int]
"""A block's name, equal on all members: loops that have ended, committed steps, number since either moved."""


@dataclass(frozen=True, slots=True)
class Place:
    """at: the block that the member is in; None: in none. ready: it came to its end. past: the last one that
    it completed."""

    at: Key | None = None
    ready: bool = False
    past: Key | None = None

    def to_json(self) -> bytes:
        return json.dumps([self.at, self.ready, self.past]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Place:
        """Raise ValueError."""
        at, ready, past = json.loads(text)
        return cls(_key(at), bool(ready), _key(past))


@dataclass(frozen=True, slots=True)
class Verdict:
    """done: the block is complete. companions: ranks, in order, with which this member's next block runs;
    None: all members stand together."""

    done: bool
    companions: tuple[int, ...] | None


def agree(places: Sequence[Place], rank: int) -> Verdict:
    """places: by rank. All members that stand in one block come to the same answer."""
    mine = places[rank]
    together = all(place.at == mine.at for place in places)
    if mine.at is None:
        return Verdict(False, None if together else (rank,))
    if mine.ready and any(place.past == mine.at for place in places):
        return Verdict(True, None if together else (rank,))
    if together:
        return Verdict(False, None)
    return Verdict(False, tuple(other for other, place in enumerate(places) if place.at == mine.at))


def _key(value: object) -> Key | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"not a block: {value!r}")
    ended, step, number = (int(part) for part in value)
    return ended, step, number

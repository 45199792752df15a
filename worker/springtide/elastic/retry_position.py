"""Say where members stand when a generation forms in the middle of a block of the script's own collectives.

This is pure. A block ends with a reduction that all its members take part in. A member that has passed it
proves that every member had come to the block's end, so one that failed in it is done as well. Otherwise all
that stand in the same block run it again, together; a member that is elsewhere (it joins) does without them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

RetryKey = tuple[int, int, int]
"""A block's name, equal on all members: loops that have ended, committed steps, number since either moved."""


@dataclass(frozen=True, slots=True)
class RetryPosition:
    """Say where a member stands.

    at: the block that it is in; None: in none. ready: it came to its end. past: the last one that it
    completed.
    """

    at: RetryKey | None = None
    ready: bool = False
    past: RetryKey | None = None

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return json.dumps([self.at, self.ready, self.past]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RetryPosition:
        """Read it from JSON. Raise ValueError."""
        at, ready, past = json.loads(text)
        return cls(_parse_key(at), bool(ready), _parse_key(past))


@dataclass(frozen=True, slots=True)
class RetryVerdict:
    """Say how a member goes on.

    done: the block is complete. companions: ranks, in order, with which this member's next block runs; None:
    all members stand together.
    """

    done: bool
    companions: tuple[int, ...] | None


def agree(positions: Sequence[RetryPosition], rank: int) -> RetryVerdict:
    """Return how a member goes on. All members that stand in one block come to the same answer.

    Args:
        positions: of all members, by rank.
        rank: of the member.
    """
    mine = positions[rank]
    together = all(position.at == mine.at for position in positions)
    if mine.at is None:
        return RetryVerdict(False, None if together else (rank,))
    if mine.ready and any(position.past == mine.at for position in positions):
        return RetryVerdict(True, None if together else (rank,))
    if together:
        return RetryVerdict(False, None)
    return RetryVerdict(
        False, tuple(other for other, position in enumerate(positions) if position.at == mine.at)
    )


def _parse_key(value: object) -> RetryKey | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"not a block: {value!r}")
    ended, step, number = (int(part) for part in value)
    return ended, step, number

"""How the members of a generation tell each other what they are and have, while they form it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from springtide.comm.process_group import Group
from springtide.comm.store import StreamStore
from springtide.coordination.park_reply import Start
from springtide.data.balance import Figure
from springtide.data.salvage import Claim
from springtide.elastic.retry_position import RetryPosition

Connect = Callable[[StreamStore, int, int], Group]
"""Forms a group: (store of its members, rank of this one among them, how many they are)."""


class Rendezvous:
    """Exchange entries with the other members in the generation's store, in which each has one of a kind.

    A question waits until the other member has told, or raises when the generation ends first.

    Attributes:
        start: of the generation.
        store: of all its members.
        rank: of this process.
        size: members.
        lacking: ranks of those that receive the state.
        leader: the lowest rank that holds the state.
    """

    def __init__(self, start: Start, me: str) -> None:
        """Tell nothing yet.

        Args:
            start: of the generation.
            me: id of this process.
        """
        assert isinstance(start.store, StreamStore)
        ids = [member.id for member in start.message.members]
        self.start, self.store = start, start.store
        self.rank, self.size = ids.index(me), len(ids)
        self.lacking = {ids.index(transfer.receiver) for transfer in start.message.transfers}
        self.leader = min(set(range(self.size)) - self.lacking)

    @property
    def fresh(self) -> bool:
        """Return whether no member held a state: the first one's, or a checkpoint's, is the job's."""
        return self.start.message.fresh

    @property
    def receives(self) -> bool:
        """Return whether this process gets the state from another."""
        return self.rank in self.lacking

    def announce(self, position: RetryPosition, figure: Figure, claim: Claim | None) -> None:
        """Tell what others need to know of this process before the group is formed.

        Args:
            position: in the script's blocks that are tried again.
            figure: its speed.
            claim: what it has kept of a dropped step; None: members keep nothing.
        """
        self._set("position", position.to_json())
        self._set("figure", figure.to_json())
        if claim is not None:
            self._set("claim", claim.to_json())

    def positions(self) -> list[RetryPosition]:
        """Return all members' positions, by rank."""
        return [RetryPosition.from_json(text) for text in self._all("position")]

    def figures(self) -> list[Figure]:
        """Return all members' speeds, by rank."""
        return [Figure.from_json(text) for text in self._all("figure")]

    def claims(self) -> list[Claim]:
        """Return what all members have kept of a dropped step, by rank."""
        return [Claim.from_json(text) for text in self._all("claim")]

    def announce_ended_loops(self, count: int) -> None:
        """Tell how many training loops of the job have ended; for members that hold the state."""
        self._set("ended-loops", json.dumps(count).encode())

    def ended_loops(self) -> int:
        """Return how many training loops have ended, as any of those that hold the state knows."""
        holders = (rank for rank in range(self.size) if rank not in self.lacking)
        return max(int(json.loads(self._of("ended-loops", rank))) for rank in holders)

    def announce_line(self, line: bytes) -> None:
        """Tell which generations the job's experiment trackers have seen; for the leader alone."""
        self._set("line", line)

    def line(self) -> bytes:
        """Return what the leader has told of the job's experiment trackers."""
        return self._of("line", self.leader)

    def connect_some(self, connect: Connect, ranks: Sequence[int]) -> Group:
        """Form a group of those members whose scripts are at one place, and return it.

        Args:
            connect: forms it.
            ranks: of its members, this one among them.
        """
        return connect(self.store.with_prefix("retry-block/"), ranks.index(self.rank), len(ranks))

    def _set(self, what: str, value: bytes) -> None:
        self.store.set(f"{what}/{self.rank}", value)

    def _of(self, what: str, rank: int) -> bytes:
        return self.store.get(f"{what}/{rank}")

    def _all(self, what: str) -> list[bytes]:
        return [self._of(what, rank) for rank in range(self.size)]

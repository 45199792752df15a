"""Which worker holds which shard: a pure function of the members and of what they hold already.

The flat layout of the gradients is cut into shards once, for the life of the job. Each shard lies at two
members: its owner sums and sends, its buddy keeps an equal copy, on another node where there is one. In every
bucket each member has about as many shards as any other, so that all connections carry all buckets.

Where members come or go, a shard stays where it is unless its member has more than its part; nothing else
moves. The order of preference is a chain: the members stand in a row in which neighbours are on different
nodes, a bucket is cut along that row, and the buddy of a part is the next member. So what a member owns is in
few pieces, and what one that is lost has held is spread over its two neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

SHARDS = 256
"""About how many a model is cut into."""
ALIGN_ELEMENTS = 256


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements start..stop-1 of the flat gradient of a bucket."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Say which members hold each shard.

    Attributes:
        owners: By shard, the rank that sums it and sends its values.
        buddies: By shard, the rank that holds it too; the owner's, where there is only one member.
    """

    owners: tuple[int, ...]
    buddies: tuple[int, ...]

    def holders(self, shard: int) -> tuple[int, ...]:
        """Return the ranks that hold a shard: two, or one where there is one member."""
        owner, buddy = self.owners[shard], self.buddies[shard]
        return (owner,) if owner == buddy else (owner, buddy)

    def held_by(self, rank: int) -> list[int]:
        """Return the shards of a member, ascending."""
        pairs = enumerate(zip(self.owners, self.buddies, strict=True))
        return [shard for shard, pair in pairs if rank in pair]


class LostShardsError(Exception):
    """Say that nobody holds some shards any more."""

    def __init__(self, shards: Sequence[int], count: int) -> None:
        """Name them.

        Args:
            shards: The lost ones.
            count: How many there are in all.
        """
        self.shards = list(shards)
        super().__init__(
            f"{len(shards)} of {count} shards of the optimizer's state are at no worker any more: both that "
            "held them are lost"
        )


def cut(sizes: Sequence[int], itemsizes: Sequence[int], count: int = SHARDS) -> tuple[Shard, ...]:
    """Cut a layout into shards of about equal bytes, which begin at multiples of 256 elements. PURE.

    Args:
        sizes: Elements of each bucket.
        itemsizes: Bytes of an element, by bucket.
        count: Shards wanted. Each bucket has one at least.

    Returns:
        The shards, in the order of the buckets and ascending in each.
    """
    total = sum(size * itemsize for size, itemsize in zip(sizes, itemsizes, strict=True)) or 1
    shards = []
    for bucket, (size, itemsize) in enumerate(zip(sizes, itemsizes, strict=True)):
        units = -(-size // ALIGN_ELEMENTS)
        parts = max(1, min(units, round(count * size * itemsize / total)))
        edges = [units * number // parts * ALIGN_ELEMENTS for number in range(parts)] + [size]
        shards += [Shard(bucket, start, stop) for start, stop in pairwise(edges)]
    return tuple(shards)


def plan(shards: Sequence[Shard], nodes: Sequence[str], held: Sequence[Collection[int]]) -> ShardMap:
    """Return who is to hold what from here on. PURE.

    Args:
        shards: Of `cut`.
        nodes: Name of each member's node, by rank.
        held: The shards that each member holds, by rank.

    Raises:
        LostShardsError: A shard is held by nobody.
    """
    size, all_held = len(nodes), [frozenset(own) for own in held]
    lost = [shard for shard in range(len(shards)) if not any(shard in own for own in all_held)]
    if lost:
        raise LostShardsError(lost, len(shards))
    if size == 1:
        return ShardMap((0,) * len(shards), (0,) * len(shards))
    chain = _chain(nodes)
    owners, buddies = [0] * len(shards), [0] * len(shards)
    turn = 0
    for bucket in sorted({shard.bucket for shard in shards}):
        numbers = [number for number, shard in enumerate(shards) if shard.bucket == bucket]
        # The remainder of a cut goes to other members in the next bucket.
        row = chain[turn:] + chain[:turn]
        turn = (turn + len(numbers)) % size
        copies = _Bucket(numbers, row, nodes, all_held).copies()
        for number, (owner, buddy) in zip(numbers, copies, strict=True):
            owners[number], buddies[number] = owner, buddy
    return ShardMap(tuple(owners), tuple(buddies))


def _chain(nodes: Sequence[str]) -> list[int]:
    """Return the ranks in a row in which neighbours are on different nodes, as far as that is possible.

    A member's place is its number on its node over how many that node has, so that large nodes are spread.
    """
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    places = {
        rank: ((number + 0.5) / len(ranks), order)
        for order, ranks in enumerate(by_node.values())
        for number, rank in enumerate(ranks)
    }
    return sorted(range(len(nodes)), key=places.__getitem__)


class _Bucket:
    """The shards of one bucket, being given out."""

    def __init__(
        self, numbers: Sequence[int], row: Sequence[int], nodes: Sequence[str], held: Sequence[frozenset[int]]
    ) -> None:
        self._numbers, self._row, self._nodes, self._held = numbers, row, nodes, held
        count, size = len(numbers), len(row)
        places = [place * size // count for place in range(count)]
        self._ideal = [(row[place], row[(place + 1) % size]) for place in places]
        self._room = dict.fromkeys(row, 0)
        for pair in self._ideal:
            for rank in pair:
                self._room[rank] += 1
        self._found: list[list[int]] = [[] for _ in numbers]

    def copies(self) -> list[tuple[int, int]]:
        """Return (owner, buddy) of each shard."""
        self._keep()
        self._fill()
        self._spread_over_nodes()
        return self._with_owners()

    def _keep(self) -> None:
        """Leave shards where they are: first those that would come there anyway."""
        for place, number in enumerate(self._numbers):
            for rank in self._ideal[place]:
                if number in self._held[rank]:
                    self._give(place, rank)
        for place, number in enumerate(self._numbers):
            # Of members that hold it, those with most room, so that no one is left with shards of others.
            holders = [rank for rank in self._row if number in self._held[rank]]
            for rank in sorted(holders, key=lambda rank: -self._room[rank]):
                if len(self._found[place]) < 2 and rank not in self._found[place] and self._room[rank] > 0:
                    self._give(place, rank)

    def _fill(self) -> None:
        """Give out what is missing."""
        for place in range(len(self._numbers)):
            while len(self._found[place]) < 2:
                rank = self._best(place)
                if self._room[rank] <= 0:
                    rank = self._make_room(place) or rank
                self._give(place, rank)

    def _best(self, place: int) -> int:
        found, nodes = self._found[place], {self._nodes[rank] for rank in self._found[place]}
        ideal = self._ideal[place]

        def worth(rank: int) -> tuple[bool, bool, bool, int]:
            has_room = self._room[rank] > 0
            return has_room, self._nodes[rank] not in nodes, rank in ideal, self._room[rank]

        return max((rank for rank in self._row if rank not in found), key=worth)

    def _make_room(self, place: int) -> int | None:
        """Have one that holds this shard, and has room, take over another's; return the other, None if none.

        Only members that hold the shard have room, then: so the other gets it instead.
        """
        for full in self._found[place]:
            if self._room[full] <= 0:
                continue
            for other, pair in enumerate(self._found):
                for rank in pair:
                    if rank not in self._found[place] and full not in pair:
                        pair.remove(rank)
                        self._room[rank] += 1
                        self._give(other, full)
                        return rank
        return None

    def _give(self, place: int, rank: int) -> None:
        self._found[place].append(rank)
        self._room[rank] -= 1

    def _spread_over_nodes(self) -> None:
        """Exchange a copy where both of a shard are on one node, if a partner is found."""
        nodes = self._nodes
        for place, (first, second) in enumerate(self._found):
            if nodes[first] != nodes[second]:
                continue
            for other, pair in enumerate(self._found):
                if swap := self._swap(place, other):
                    mine, theirs = swap
                    self._found[place] = [first if mine == second else second, theirs]
                    self._found[other] = [mine, pair[0] if theirs == pair[1] else pair[1]]
                    break

    def _swap(self, place: int, other: int) -> tuple[int, int] | None:
        """Return (copy of `place`, copy of `other`) to exchange so that both are on two nodes."""
        nodes = self._nodes
        for mine in self._found[place]:
            stays = sum(self._found[place]) - mine
            for theirs in self._found[other]:
                left = sum(self._found[other]) - theirs
                apart = nodes[theirs] != nodes[stays] and nodes[mine] != nodes[left]
                if apart and theirs not in self._found[place] and mine not in self._found[other]:
                    return mine, theirs
        return None

    def _with_owners(self) -> list[tuple[int, int]]:
        """Say which of the two sums: the one that would come first, then changed until all sum as much.

        A shard can change its owner to its buddy; a row of such changes takes one from a member that has too
        many to one that has too few (an augmenting path).
        """
        owners = [
            self._ideal[place][0] if self._ideal[place][0] in pair else pair[0]
            for place, pair in enumerate(self._found)
        ]
        owned = {rank: owners.count(rank) for rank in self._row}
        while path := self._path(owners, owned):
            for place in path:
                first, second = self._found[place]
                owned[owners[place]] -= 1
                owners[place] = second if owners[place] == first else first
                owned[owners[place]] += 1
        return [
            (owner, pair[1] if owner == pair[0] else pair[0])
            for owner, pair in zip(owners, self._found, strict=True)
        ]

    def _path(self, owners: Sequence[int], owned: dict[int, int]) -> list[int]:
        """Return shards to change the owners of, from the member that has most; empty when nothing helps."""
        most = max(self._row, key=owned.__getitem__)
        came: dict[int, tuple[int, int]] = {}
        queue = [most]
        for rank in queue:
            for place, owner in enumerate(owners):
                if owner != rank:
                    continue
                first, second = self._found[place]
                buddy = second if owner == first else first
                if buddy in came or buddy == most:
                    continue
                came[buddy] = rank, place
                queue.append(buddy)
                if owned[buddy] < owned[most] - 1:
                    path = []
                    while buddy != most:
                        buddy, place = came[buddy]
                        path.append(place)
                    return path
        return []

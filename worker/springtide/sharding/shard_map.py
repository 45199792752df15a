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

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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


def divide(sizes: Sequence[int], itemsizes: Sequence[int], count: int = SHARDS) -> tuple[Shard, ...]:
    """ShardPart a layout into shards of about equal bytes, which begin at multiples of 256 elements. PURE.

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
        shards: Of `divide`.
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
    members = _Members(nodes, all_held, _chain(nodes))
    owners, buddies = [0] * len(shards), [0] * len(shards)
    by_bucket: dict[int, list[int]] = {}
    for number, shard in enumerate(shards):
        by_bucket.setdefault(shard.bucket, []).append(number)
    for bucket in sorted(by_bucket):
        copies = _Bucket(by_bucket[bucket], members).copies()
        for number, (owner, buddy) in zip(by_bucket[bucket], copies, strict=True):
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


class _Shares:
    """Parts of a whole that does not divide evenly: who gets one more, so that all get as much at last."""

    def __init__(self, row: Sequence[int], nodes: Sequence[str]) -> None:
        self._row, self._nodes = row, nodes
        self._more = dict.fromkeys(row, 0)

    def of(self, count: int, has: Mapping[int, int], most: int) -> dict[int, int]:
        """Return the part of each member in `count` things.

        Those that have more than the smaller part already get the larger one, unless they were given it in
        more buckets than others.

        Args:
            count: Things to give out.
            has: Those that a member has now.
            most: Things that the members of a node get together, as far as that is possible.
        """
        small, rest = divmod(count, len(self._row))
        limit = -(-(sum(self._more.values()) + rest) // len(self._row))
        order = sorted(
            self._row, key=lambda rank: (self._more[rank] >= limit, has[rank] <= small, self._more[rank])
        )
        shares = dict.fromkeys(self._row, small)
        # A node with most of the members cannot be kept below it: its members have their part like others.
        of_node = Counter(
            {n: small * ranks for n, ranks in Counter(self._nodes).items() if 2 * ranks <= len(self._row)}
        )
        chosen: list[int] = []
        for rank in order:
            node = self._nodes[rank]
            if len(chosen) < rest and of_node.get(node, -1) < most:
                chosen.append(rank)
                if node in of_node:
                    of_node[node] += 1
        taken = frozenset(chosen)
        chosen += [rank for rank in order if rank not in taken][: rest - len(chosen)]
        for rank in chosen:
            shares[rank] += 1
            self._more[rank] += 1
        return shares


class _Members:
    """The members, and what they were given in the buckets so far."""

    def __init__(self, nodes: Sequence[str], held: Sequence[frozenset[int]], row: Sequence[int]) -> None:
        self.nodes, self.held, self.row = nodes, held, row
        self.holders: dict[int, list[int]] = {}
        for rank in row:
            for number in held[rank]:
                self.holders.setdefault(number, []).append(rank)
        self.copies, self.owned = _Shares(row, nodes), _Shares(row, nodes)
        self.turn = 0


class _Bucket:
    """The shards of one bucket, being given out."""

    def __init__(self, numbers: Sequence[int], members: _Members) -> None:
        self._numbers, self._members = numbers, members
        self._nodes, self._held = members.nodes, members.held
        count, size = len(numbers), len(members.row)
        # The remainder of a cut goes to other members in the next bucket.
        row = self._row = [*members.row[members.turn :], *members.row[: members.turn]]
        members.turn = (members.turn + count) % size
        places = [place * size // count for place in range(count)]
        self._ideal = [(row[place], row[(place + 1) % size]) for place in places]
        has = dict.fromkeys(row, 0)
        for number in numbers:
            for rank in members.holders[number]:
                has[rank] += 1
        self._room = members.copies.of(2 * count, has, count)
        self._of_node: dict[str, int] = {}
        for rank, room in self._room.items():
            self._of_node[self._nodes[rank]] = self._of_node.get(self._nodes[rank], 0) + room
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
                if number in self._held[rank] and self._room[rank] > 0:
                    self._give(place, rank)
        for place, number in enumerate(self._numbers):
            # Of members that hold it, those with most room, so that no one is left with shards of others.
            for rank in sorted(self._members.holders[number], key=lambda rank: -self._room[rank]):
                if len(self._found[place]) < 2 and rank not in self._found[place] and self._room[rank] > 0:
                    self._give(place, rank)

    def _fill(self) -> None:
        """Give out what is missing."""
        for place, found in enumerate(self._found):
            while len(found) < 2:
                rank = self._best(place)
                if self._room[rank] <= 0 and (other := self._make_room(place)) is not None:
                    rank = other
                self._give(place, rank)

    def _best(self, place: int) -> int:
        found, nodes = self._found[place], {self._nodes[rank] for rank in self._found[place]}
        ideal = self._ideal[place]

        def worth(rank: int) -> tuple[bool, bool, bool, int]:
            has_room = self._room[rank] > 0
            return has_room, self._nodes[rank] not in nodes, rank in ideal, self._room[rank]

        best = max((rank for rank in ideal if rank not in found), key=worth, default=None)
        if best is not None and worth(best)[:2] == (True, True):
            return best
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
        """Move a copy of each shard whose copies are on one node, as far as the sizes of nodes allow.

        A node that has to hold more copies than there are shards holds both of some.
        """
        together: dict[str, list[int]] = {}
        for place, (first, second) in enumerate(self._found):
            if self._nodes[first] == self._nodes[second]:
                together.setdefault(self._nodes[first], []).append(place)
        for node, places in together.items():
            allowed = max(0, self._of_node[node] - len(self._numbers))
            for place in places[allowed:]:
                self._move_away(place)

    def _move_away(self, place: int) -> None:
        """Give a copy to a member of another node, and others' copies on until all have their part.

        A row of members, each of which takes over a copy from the one before (an augmenting path), from those
        of other nodes to one of the two that have this shard.
        """
        nodes, found = self._nodes, self._found
        first, second = found[place]
        node = nodes[first]
        if nodes[second] != node:
            return  # it was helped on the way to another one
        came: dict[
            int, tuple[int, int]
        ] = {}  # by member: the one before it, and the shard that it takes over
        gives: dict[int, int] = {}  # by shard: who gives its copy on, so that a row has it once
        queue = [rank for rank in self._row if nodes[rank] != node]
        starts = frozenset(queue)
        of_rank: dict[int, list[int]] = {}
        for number, pair in enumerate(found):
            for rank in pair:
                of_rank.setdefault(rank, []).append(number)
        for rank in queue:
            for other in of_rank.get(rank, ()):
                if other == place or gives.setdefault(other, rank) != rank:
                    continue
                stays = sum(found[other]) - rank
                for following in (second, first, *(self._row if len(queue) < len(self._row) else ())):
                    known = following in came or following in starts
                    if known or following == stays or nodes[following] == nodes[stays]:
                        continue
                    came[following] = rank, other
                    queue.append(following)
                    if following in (first, second):
                        self._pass_along(place, following, came)
                        return

    def _pass_along(self, place: int, gives: int, came: Mapping[int, tuple[int, int]]) -> None:
        rank = gives
        while rank in came:
            before, other = came[rank]
            self._found[other] = [rank if own == before else own for own in self._found[other]]
            rank = before
        self._found[place] = [rank if own == gives else own for own in self._found[place]]

    def _with_owners(self) -> list[tuple[int, int]]:
        """Say which of the two sums: the one that would come first, then changed until all sum as much.

        A shard can change its owner to its buddy; a row of such changes takes one from a member that has too
        many to one that has too few (an augmenting path).
        """
        owners = [
            self._ideal[place][0] if self._ideal[place][0] in pair else pair[0]
            for place, pair in enumerate(self._found)
        ]
        owned = Counter(dict.fromkeys(self._row, 0))
        owned.update(owners)
        shares = self._members.owned.of(len(self._numbers), owned, len(self._numbers))
        while path := self._path(owners, owned, shares):
            for place in path:
                first, second = self._found[place]
                owned[owners[place]] -= 1
                owners[place] = second if owners[place] == first else first
                owned[owners[place]] += 1
        return [
            (owner, pair[1] if owner == pair[0] else pair[0])
            for owner, pair in zip(owners, self._found, strict=True)
        ]

    def _path(self, owners: Sequence[int], owned: Mapping[int, int], shares: Mapping[int, int]) -> list[int]:
        """Return shards to change the owners of, from members with too many to one with too few."""
        came: dict[int, tuple[int, int]] = {}
        queue = [rank for rank in self._row if owned[rank] > shares[rank]]
        starts = frozenset(queue)
        of_owner: dict[int, list[int]] = {}
        for place, owner in enumerate(owners):
            of_owner.setdefault(owner, []).append(place)
        for rank in queue:
            for place in of_owner.get(rank, ()):
                first, second = self._found[place]
                buddy = second if owners[place] == first else first
                if buddy in came or buddy in starts:
                    continue
                came[buddy] = rank, place
                queue.append(buddy)
                if owned[buddy] < shares[buddy]:
                    path = []
                    while buddy in came:
                        buddy, place = came[buddy]
                        path.append(place)
                    return path
        return []

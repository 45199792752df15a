"""Maps of shards: each is held twice, as much at each member, and little moves when members come and go."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import hypothesis
import pytest
from hypothesis import strategies as st

from springtide.sharding.migration import moves
from springtide.sharding.shard_map import (
    ALIGN_ELEMENTS,
    LostShardsError,
    Shard,
    ShardMap,
    divide,
    plan,
)

# Shards over the mean that a member holds, and under it: what is left over is dealt with by whole buckets.
MOST_OVER, MOST_UNDER = 2, 6
MOST_OWNED_OVER = 8
MOVED_OVER_NEEDED = {True: 1.05, False: 1.2}
"""Copies that move over those that have to, by whether each member is alone on its node: where several are on
one, some copies move away from it."""

BUCKETS = st.lists(st.sampled_from([100, 5000, 65_536, 300_000, 1_000_000]), min_size=1, max_size=12)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    sizes=st.lists(st.integers(0, 3_000_000), max_size=12),
    widths=st.lists(st.sampled_from([2, 4, 8, 16]), min_size=12, max_size=12),
    count=st.integers(1, 600),
)
def test_cut_covers_each_bucket_once_and_aligned(sizes: list[int], widths: list[int], count: int) -> None:
    widths = widths[: len(sizes)]
    shards = divide(sizes, widths, count)
    by_bucket: dict[int, list[Shard]] = {}
    for shard in shards:
        by_bucket.setdefault(shard.bucket, []).append(shard)
    assert list(by_bucket) == list(range(len(sizes)))
    for bucket, own in by_bucket.items():
        assert (own[0].start, own[-1].stop) == (0, sizes[bucket])
        assert all(one.stop == other.start for one, other in pairwise(own))
        assert all(shard.start % ALIGN_ELEMENTS == 0 for shard in own)
        if sizes[bucket]:
            units = [-(-(shard.stop - shard.start) // ALIGN_ELEMENTS) for shard in own]
            assert min(units) > 0
            assert max(units) - min(units) <= 1
    # Each bucket has one at least, and rounding adds half of one to each.
    assert len(shards) <= count + 1.5 * len(sizes)


class Job:
    """Members that come and are lost, each of which holds what the last plan has given it."""

    def __init__(self, sizes: Sequence[int], nodes: Sequence[str]) -> None:
        self.shards = divide(sizes, [4] * len(sizes))
        self.nodes = list(nodes)
        self.held: list[set[int]] = [set(range(len(self.shards))), *(set() for _ in nodes[1:])]
        self.moved = self.needed = 0

    def plan(self) -> ShardMap:
        """Plan, check what is promised, and hold it."""
        found = plan(self.shards, self.nodes, self.held)
        self.check(found)
        planned = moves(self.held, found)
        self.moved += len(planned)
        self.needed += self.fewest_moves()
        self.held = [set(found.held_by(rank)) for rank in range(len(self.nodes))]
        return found

    def fewest_moves(self) -> int:
        """Return the moves that no plan can do without: each member gets its part, each shard two copies."""
        copies = min(2, len(self.nodes))
        part = len(self.shards) * copies // len(self.nodes)
        to_members = sum(max(0, part - len(own)) for own in self.held)
        count = Counter(shard for own in self.held for shard in own)
        return max(to_members, sum(max(0, copies - count[shard]) for shard in range(len(self.shards))))

    def check(self, found: ShardMap) -> None:
        count, size = len(self.shards), len(self.nodes)
        assert len(found.owners) == len(found.buddies) == count
        assert {*found.owners, *found.buddies} <= set(range(size))
        copies = min(2, size)
        assert all(len(set(found.holders(shard))) == copies for shard in range(count))
        loads = [len(found.held_by(rank)) for rank in range(size)]
        assert sum(loads) == copies * count
        mean = copies * count / size
        assert max(loads) <= mean + MOST_OVER
        assert min(loads) >= mean - MOST_UNDER
        owned = Counter(found.owners)
        assert max(owned.values()) <= count / size + MOST_OWNED_OVER
        self.check_nodes(found)

    def check_nodes(self, found: ShardMap) -> None:
        """No node has both copies, but where it has most of the members: then no more than it must."""
        if len(self.nodes) == 1:
            return
        both = Counter(
            self.nodes[owner]
            for owner, buddy in zip(found.owners, found.buddies, strict=True)
            if self.nodes[owner] == self.nodes[buddy]
        )
        sizes = Counter(self.nodes)
        for node, number in both.items():
            assert 2 * sizes[node] > len(self.nodes), f"{number} shards are on {node} alone"
            part = sum(len(found.held_by(rank)) for rank, own in enumerate(self.nodes) if own == node)
            buckets = len({shard.bucket for shard in self.shards})
            assert number <= part - len(self.shards) + buckets

    def join(self, node: str, place: int) -> None:
        place %= len(self.nodes) + 1
        self.nodes.insert(place, node)
        self.held.insert(place, set())

    def lose(self, rank: int) -> None:
        del self.nodes[rank % len(self.nodes)], self.held[rank % len(self.held)]


CHANGES = st.lists(
    st.tuples(st.sampled_from(["join", "join two", "lose", "lose"]), st.integers(0, 50), st.integers(0, 50)),
    max_size=8,
)


@pytest.mark.slow
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    sizes=BUCKETS, size=st.integers(1, 12), spread=st.sampled_from([1, 2, 3, 6, 50]), changes=CHANGES
)
def test_every_history_keeps_two_even_copies(
    sizes: list[int], size: int, spread: int, changes: list[tuple[str, int, int]]
) -> None:
    job = Job(sizes, [f"n{number * 7 % spread}" for number in range(size)])
    job.plan()
    for change, number, other in changes:
        if change == "lose" and len(job.nodes) > 1:
            job.lose(number)
        else:
            job.join(f"n{other % spread}", number)
            if change == "join two":
                job.join(f"n{number % spread}", other)
        before = len(job.nodes)
        job.plan()
        assert len(job.nodes) == before


def test_what_moves_is_close_to_what_has_to() -> None:
    """Over many histories; alone on its node, a member's coming or loss moves next to nothing else."""
    draw = random.Random(5)
    totals = {True: [0, 0], False: [0, 0]}
    for _ in range(20):
        alone = draw.random() < 0.5
        job = Job(
            [draw.choice([100, 65_536, 1_000_000]) for _ in range(draw.choice([1, 3, 10]))],
            [str(n if alone else n % 3) for n in range(draw.choice([2, 3, 5, 8, 16]))],
        )
        job.plan()
        job.moved = job.needed = 0
        for number in range(100, 112):
            if draw.random() < 0.5 and len(job.nodes) > 1:
                job.lose(draw.randrange(50))
            else:
                job.join(str(number if alone else number % 3), draw.randrange(50))
            job.plan()
        totals[alone][0] += job.moved
        totals[alone][1] += job.needed
    for alone, bound in MOVED_OVER_NEEDED.items():
        moved, needed = totals[alone]
        assert needed <= moved <= bound * needed, (alone, moved, needed)


def test_unchanged_members_move_nothing() -> None:
    job = Job([300_000, 5000, 65_536], ["a", "a", "b", "c", "c", "c"])
    first = job.plan()
    assert job.plan() == first
    assert not moves(job.held, first)


@hypothesis.given(
    size=st.integers(1, 6), count=st.integers(1, 30), seed=st.integers(0, 1000), lost=st.integers(0, 4)
)
def test_lost_shards_are_named_exactly(size: int, count: int, seed: int, lost: int) -> None:
    draw = random.Random(seed)
    shards = [Shard(0, 256 * number, 256 * (number + 1)) for number in range(count)]
    gone = sorted(draw.sample(range(count), min(lost, count)))
    held: list[set[int]] = [set() for _ in range(size)]
    for shard in set(range(count)) - set(gone):
        for rank in draw.sample(range(size), draw.randrange(1, size + 1)):
            held[rank].add(shard)
    if not gone:
        assert len(plan(shards, ["a"] * size, held).owners) == count
        return
    with pytest.raises(LostShardsError, match=rf"^{len(gone)} of {count} shards") as raised:
        plan(shards, ["a"] * size, held)
    assert raised.value.shards == gone


@hypothesis.settings(max_examples=25)
@hypothesis.given(seed=st.integers(0, 1000), size=st.integers(1, 8))
def test_plan_follows_from_its_arguments_alone(seed: int, size: int) -> None:
    """Other objects, other orders in sets, other names of nodes: all members have to come to the same map."""
    draw = random.Random(seed)
    shards = divide([draw.randrange(1, 500_000) for _ in range(4)], [4] * 4)
    nodes = [draw.choice("abcd") for _ in range(size)]
    held = [{n for n in range(len(shards)) if draw.random() < 0.4} for _ in range(size)]
    held[draw.randrange(size)] |= set(range(len(shards)))
    found = plan(shards, nodes, held)
    shuffled = []
    for own in held:
        order = list(own)
        draw.shuffle(order)
        shuffled.append(order)
    copies = [Shard(shard.bucket, shard.start, shard.stop) for shard in shards]
    renamed = [f"the node of all that say {node}" for node in nodes]
    assert plan(copies, renamed, shuffled) == plan(copies, nodes, [frozenset(own) for own in held]) == found
    assert held == [set(own) for own in shuffled]  # nothing of its arguments is changed


def test_holders_that_have_all_keep_what_would_come_to_them() -> None:
    """A restore by all members leaves everything at everyone, so that no shard moves."""
    shards = divide([1_000_000, 5000], [4, 4])
    for size in (1, 2, 3, 7):
        held = [set(range(len(shards)))] * size
        found = plan(shards, [f"n{rank % 3}" for rank in range(size)], held)
        assert moves(held, found) == []

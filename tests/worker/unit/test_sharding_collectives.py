"""The exchanges of a sharded step: who sends what to whom, and the sums and values that come of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
from fake_groups import FakeGroup, on_members
from hypothesis import strategies as st

from springtide.comm.layout import Field, Layout, plan_layout
from springtide.sharding.collectives import (
    LAG,
    LEAST_UNDER_WAY,
    VALUES_FACTOR,
    WINDOW,
    Exchanges,
    Flat,
    HeldSums,
    Interval,
    Memory,
    Outgoing,
    Part,
    agreed_least,
    chunks_of,
    merged,
    most_under_way,
    route,
)
from springtide.sharding.pieces import Cells
from springtide.sharding.shard_map import Shard, ShardMap, divide, plan

SHAPES = st.sampled_from([(), (1,), (0, 3), (17,), (3, 5), (300,), (31, 33), (257, 4), (256,)])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])
FIELDS = st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=9)


def layout_of(fields: Sequence[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int) -> Layout:
    return plan_layout([Field(f"p{n}", *field) for n, field in enumerate(fields)], bucket_bytes)


def shards_of(layout: Layout, count: int = 40) -> tuple[Shard, ...]:
    return divide(layout.sizes, [dtype.itemsize for dtype in layout.dtypes], count)


def map_for(shards: Sequence[Shard], size: int, draw: random.Random) -> ShardMap:
    """Return a planned map, or a random one."""
    if size == 1 or draw.random() < 0.5:
        held = [set(range(len(shards))), *(set() for _ in range(size - 1))]
        return plan(shards, [f"n{draw.randrange(3)}" for _ in range(size)], held)
    pairs = [draw.sample(range(size), 2) for _ in shards]
    return ShardMap(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))


def parts_of(shards: Sequence[Shard], bucket: int) -> list[Part]:
    own = [(number, shard) for number, shard in enumerate(shards) if shard.bucket == bucket]
    return [(number, shard.start, shard.stop) for number, shard in own if shard.start < shard.stop]


def whole_numbers(layout: Layout, seed: int) -> list[torch.Tensor]:
    """Return buckets full of small whole numbers, gaps included: their sums are exact in every dtype."""
    draw = torch.Generator().manual_seed(seed)
    sizes = zip(layout.sizes, layout.dtypes, strict=True)
    return [torch.randint(-8, 9, (size,), generator=draw).to(dtype) for size, dtype in sizes]


@hypothesis.settings(max_examples=40)
@hypothesis.given(fields=FIELDS, size=st.integers(1, 5), seed=st.integers(0, 1 << 20))
def test_routes_carry_each_element_as_often_as_needed(fields: Any, size: int, seed: int) -> None:
    layout = layout_of(fields, 4096)
    shards = shards_of(layout)
    assigned = map_for(shards, size, random.Random(seed))
    owners, buddies, members = assigned.owners, assigned.buddies, range(size)
    ways = {
        "to owners": lambda s: [(rank, owners[s]) for rank in members if rank != owners[s]],
        "to buddies": lambda s: [(owners[s], buddies[s])] if owners[s] != buddies[s] else [],
        "to all": lambda s: [(owners[s], r) for r in members if r not in (owners[s], buddies[s])],
    }
    moved = 0
    for bucket, elements in enumerate(layout.sizes):
        for way in ways.values():
            routes = [route(parts_of(shards, bucket), rank, size, way) for rank in members]
            counts = {(a, b): torch.zeros(elements, dtype=torch.int) for a in members for b in members}
            for rank, own in enumerate(routes):
                assert own.used == any(other.sent_sizes != [0] * size for other in routes)
                assert own.sent_sizes[rank] == own.received_sizes[rank] == 0
                moved += sum(own.sent_sizes)
                for other in members:
                    assert own.sent[other] == routes[other].received[rank]
                    for start, stop in own.sent[other]:
                        counts[rank, other][start:stop] += 1
            for number, shard in enumerate(shards):
                if shard.bucket == bucket:
                    wanted = set(way(number))
                    for pair, count in counts.items():
                        assert set(count[shard.start : shard.stop].tolist()) <= {int(pair in wanted)}
    # What all-reduce in a ring moves: 2 (n - 1) / n of each bucket at each of n members.
    assert moved == 2 * (size - 1) * sum(layout.sizes)


class Run:
    """One member in a step: gradients in, sums and values out."""

    def __init__(
        self,
        layout: Layout,
        shards: Sequence[Shard],
        assigned: ShardMap,
        apart: bool,
        most: int = LEAST_UNDER_WAY,
        sums_whole: bool = False,
    ) -> None:
        self.sums_whole = sums_whole
        self.layout, self.shards, self.assigned, self.apart, self.most = layout, shards, assigned, apart, most
        self.cells = Cells(layout)

    def __call__(self, group: FakeGroup) -> None:
        layout, rank = self.layout, group.rank
        exchanges = Exchanges(
            group,  # type: ignore[arg-type]
            self.shards,
            self.assigned,
            whole_numbers(layout, 0),
            self.most,
            self.sums_whole,
        )
        mine = self.assigned.held_by(rank)
        for step in range(2):
            exchanges.begin_step()
            flats = whole_numbers(layout, 10 * step + rank)
            truth = [sum(parts) for parts in zip(*self.all_gradients(step, group.size), strict=True)]
            sums: list[Any] = list(flats)
            if self.apart:
                sums = [
                    HeldSums(merged([self.span(n) for n in mine if self.shards[n].bucket == b]), flat)
                    for b, flat in enumerate(flats)
                ]
            for bucket, flat in reversed(list(enumerate(flats))):
                if self.sums_whole:
                    assert exchanges.sum_whole(flat) == flat.nbytes
                else:
                    exchanges.reduce(bucket, Flat(flat), sums[bucket], self.apart)
                if self.apart:
                    flat.zero_()
            exchanges.finish_sums()
            if self.sums_whole:
                assert all(torch.equal(own, true) for own, true in zip(flats, truth, strict=True))
            for number in mine:
                start, stop = self.span(number)
                bucket = self.shards[number].bucket
                assert torch.equal(sums[bucket][start:stop], truth[bucket][start:stop])
            self.gather(exchanges, mine, step)

    def gather(self, exchanges: Exchanges, mine: Sequence[int], step: int) -> None:
        """Send values of parameters, without gaps between them; all come, and nothing else is written."""
        truth = whole_numbers(self.layout, 100 + step)
        values = [torch.full_like(flat, 77) for flat in truth]
        for number in mine:
            span = slice(*self.span(number))
            bucket = self.shards[number].bucket
            values[bucket][span] = truth[bucket][span]

        def parts(bucket: int, interval: Interval) -> list[torch.Tensor]:
            return [values[bucket][start:stop] for start, stop, _ in self.cells.between(bucket, interval)]

        came = [torch.zeros(flat.numel(), dtype=torch.int) for flat in values]

        def take(bucket: int, interval: Interval, piece: torch.Tensor) -> None:
            came[bucket][slice(*interval)] += 1
            values[bucket][slice(*interval)] = piece

        exchanges.gather(
            [
                Outgoing(bucket, partial(parts, bucket), flat, partial(take, bucket))
                for bucket, flat in enumerate(values)
            ]
        )
        assert exchanges.gathering == list(range(len(values)))
        for bucket in reversed(range(len(values))):
            exchanges.receive(bucket)
        assert exchanges.gathering == []
        for number, shard in enumerate(self.shards):
            assert set(came[shard.bucket][slice(*self.span(number))].tolist()) <= {int(number not in mine)}
        assert all(torch.equal(own, true) for own, true in zip(values, truth, strict=True))

    def span(self, number: int) -> Interval:
        return self.shards[number].start, self.shards[number].stop

    def all_gradients(self, step: int, size: int) -> list[list[torch.Tensor]]:
        return [whole_numbers(self.layout, 10 * step + rank) for rank in range(size)]


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    fields=FIELDS,
    size=st.integers(1, 5),
    seed=st.integers(0, 1 << 20),
    apart=st.booleans(),
    bucket_bytes=st.sampled_from([64, 2048, 1 << 20]),
    most=st.sampled_from([LEAST_UNDER_WAY, 1, 700, 5000]),
)
def test_sums_and_values_of_any_layout_are_right(
    fields: Any, size: int, seed: int, apart: bool, bucket_bytes: int, most: int
) -> None:
    layout = layout_of(fields, bucket_bytes)
    shards = shards_of(layout)
    assigned = map_for(shards, size, random.Random(seed))
    _, network = on_members(size, Run(layout, shards, assigned, apart, most), seed)
    nbytes = sum(n * dtype.itemsize for n, dtype in zip(layout.sizes, layout.dtypes, strict=True))
    assert sum(network.sent) == 2 * 2 * (size - 1) * nbytes  # of two steps


@pytest.mark.parametrize("size", [1, 2, 3])
def test_whole_sums_are_at_all_members(size: int) -> None:
    layout = layout_of([((257, 4), torch.float32), ((31, 33), torch.bfloat16), ((17,), torch.float32)], 2048)
    shards = shards_of(layout)
    assigned = map_for(shards, size, random.Random(size))
    on_members(size, Run(layout, shards, assigned, False, sums_whole=True))


def test_each_member_sends_what_an_all_reduce_would() -> None:
    """Nobody sends more than the others, by a planned map where it divides evenly."""
    layout = layout_of([((256, 60), torch.float32)], 1 << 20)
    shards = shards_of(layout, 60)
    for size in (2, 3, 4, 5):
        held = [set(range(len(shards))), *(set() for _ in range(size - 1))]
        assigned = plan(shards, [f"n{rank}" for rank in range(size)], held)
        _, network = on_members(size, Run(layout, shards, assigned, False))
        assert network.sent == [2 * 2 * (size - 1) * 256 * 60 * 4 // size] * size


def test_sums_go_on_while_buckets_leave() -> None:
    """The sums of a chunk are passed to the buddies when `LAG` later ones have left."""
    count = 24
    layout = layout_of([((512,), torch.float32)] * count, 64)
    shards = shards_of(layout)
    assert len(layout.sizes) == count
    assigned = map_for(shards, 2, random.Random(1))
    begun: dict[int, list[int]] = {}

    def call(group: FakeGroup) -> None:
        flats = whole_numbers(layout, group.rank)
        exchanges = Exchanges(group, shards, assigned, flats)  # type: ignore[arg-type]
        exchanges.begin_step()
        begun[group.rank] = []
        for bucket, flat in enumerate(flats):
            exchanges.reduce(bucket, Flat(flat), flat, False)
            begun[group.rank].append(len(group.network.operations))
        exchanges.finish_sums()

    _, network = on_members(2, call)
    assert network.exchanges == 2 * count
    # The member that was first; the other one may have gone on meanwhile.
    assert min(own[-1] for own in begun.values()) == 2 * count - LAG


def test_values_that_cannot_leave_fail_where_they_are_awaited() -> None:
    layout = layout_of([((600,), torch.float32)], 1 << 20)
    shards = shards_of(layout)
    assigned = map_for(shards, 3, random.Random(1))

    def call(group: FakeGroup) -> None:
        flats = whole_numbers(layout, 0)
        exchanges = Exchanges(group, shards, assigned, flats)  # type: ignore[arg-type]
        group.shut()
        exchanges.gather(
            [
                Outgoing(
                    0,
                    lambda interval: [flats[0][slice(*interval)]],
                    flats[0],
                    lambda interval, came: pytest.fail("nothing can come"),
                )
            ]
        )
        for _ in range(2):
            with pytest.raises(RuntimeError, match="closed"):
                exchanges.receive(0)
        assert exchanges.gathering == [0]
        with pytest.raises(RuntimeError, match="closed"):
            exchanges.reduce(0, Flat(flats[0]), flats[0], False)

    on_members(3, call)


def test_memory_is_used_again_and_never_twice_at_once() -> None:
    memory, like = Memory(1000), torch.zeros(1)
    large, small = memory.take(100, like), memory.take(10, like)
    large.fill_(1)
    small.fill_(2)
    assert large.unique().tolist() == [1.0]
    where = large.data_ptr(), small.data_ptr()
    memory.give_back(small)
    memory.give_back(large)
    assert memory.take(10, like).data_ptr() == where[1]  # the smallest that fits
    assert memory.take(10, like).data_ptr() == where[0]
    assert memory.take(10, like).data_ptr() not in where
    assert memory.take(3, torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


def test_held_sums_refuse_what_is_not_held() -> None:
    sums = HeldSums([(0, 10), (20, 25)], torch.zeros(1))
    sums[20:25].copy_(torch.arange(5.0))
    assert sums[21:23].tolist() == [1.0, 2.0]
    assert sums.nbytes == 60
    for wrong in (slice(5, 12), slice(12, 14), slice(19, 21), slice(24, 26)):
        with pytest.raises(KeyError, match="not held here"):
            sums[wrong]


@pytest.mark.parametrize("most", [LEAST_UNDER_WAY, 1000, 6000])
@pytest.mark.parametrize("seed", range(6))
def test_members_that_need_other_values_first_meet_in_one_order(seed: int, most: int) -> None:
    """Each member asks for some buckets in an order of its own, sums something, and asks for the rest.

    A few buckets are on their way at a time; those that are left begin before anything else does.
    """
    buckets, size = 9, 4
    layout = layout_of([((700,), torch.float32)] * buckets, 700 * 4)
    shards = shards_of(layout)
    assigned = map_for(shards, size, random.Random(seed))

    def call(group: FakeGroup) -> None:
        draw = random.Random(f"{seed} {group.rank}")
        flats = whole_numbers(layout, 3)
        exchanges = Exchanges(group, shards, assigned, flats, most)  # type: ignore[arg-type]
        held = {number for number in range(len(shards)) if group.rank in assigned.holders(number)}
        values = [torch.zeros_like(flat) for flat in flats]
        for number in held:
            shard = shards[number]
            span = slice(shard.start, shard.stop)
            values[shard.bucket][span] = flats[shard.bucket][span]

        def parts(bucket: int, interval: Interval) -> list[torch.Tensor]:
            return [values[bucket][slice(*interval)]]

        def take(bucket: int, interval: Interval, came: torch.Tensor) -> None:
            values[bucket][slice(*interval)] = came

        exchanges.gather(
            [
                Outgoing(bucket, partial(parts, bucket), flats[bucket], partial(take, bucket))
                for bucket in range(buckets)
            ]
        )
        order = draw.sample(range(buckets), buckets)
        first = draw.randrange(buckets + 1)
        for bucket in order[:first]:
            exchanges.receive(bucket)
        total = torch.ones(1)
        group.start_sum(total).wait()
        assert total.item() == size
        for bucket in order[first:]:
            exchanges.receive(bucket)
        assert exchanges.gathering == []
        assert group.before_next is None
        for value, flat in zip(values, flats, strict=True):
            assert torch.equal(value, flat)

    on_members(size, call, seed)


@pytest.mark.parametrize(("most", "at_a_time"), [(1 << 20, WINDOW), (6000, WINDOW), (500, 1)])
def test_values_of_few_chunks_are_on_their_way_at_a_time(most: int, at_a_time: int) -> None:
    """Few are sent before the first is awaited: `WINDOW`, and what there is memory for."""
    count = 40
    layout = layout_of([((768,), torch.float32)] * count, 768 * 4)
    shards = shards_of(layout, 3 * count)
    assigned = map_for(shards, 3, random.Random(1))

    def call(group: FakeGroup) -> None:
        flats = whole_numbers(layout, 0)
        exchanges = Exchanges(group, shards, assigned, flats, most)  # type: ignore[arg-type]
        before = group.points

        def parts(bucket: int, interval: Interval) -> list[torch.Tensor]:
            return [flats[bucket][slice(*interval)]]

        exchanges.gather(
            [Outgoing(b, partial(parts, b), flats[b], lambda interval, came: None) for b in range(count)]
        )
        assert group.points - before == at_a_time
        for bucket in range(count):
            exchanges.receive(bucket)

    on_members(3, call)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    sizes=st.lists(st.integers(0, 3000), max_size=20),
    size=st.integers(1, 5),
    most=st.integers(1, 9000),
    seed=st.integers(0, 1 << 20),
)
def test_chunks_have_equal_parts_of_all_owners(sizes: list[int], size: int, most: int, seed: int) -> None:
    draw, at = random.Random(seed), 0
    parts = []
    for number, elements in enumerate(sizes):
        parts.append((number, at, at + elements))
        at += elements
    owners = [draw.randrange(size) for _ in sizes]
    chunks = chunks_of(parts, owners, most)
    assert all(list(chunk) == sorted(chunk, key=lambda part: part[1]) for chunk in chunks)
    there = sorted((start, stop, number) for chunk in chunks for number, start, stop in chunk)
    assert [stop for _, stop, _ in there[:-1]] == [start for start, _, _ in there[1:]]
    assert (there[0][0], there[-1][1]) == (0, at) if there else at == 0
    for start, stop, number in there:
        assert parts[number][1] <= start < stop <= parts[number][2]
    for rank in range(size):
        own = [sum(stop - start for n, start, stop in chunk if owners[n] == rank) for chunk in chunks]
        total = sum(stop - start for number, start, stop in parts if owners[number] == rank)
        assert max(own, default=0) <= total * min(1.0, most / max(1, at)) + 2 * 64


class CountedGroup:
    """A member's end of a group; it counts what exchanges have in memory of their own.

    Attributes:
        most: The largest bytes so far.
    """

    def __init__(self, group: FakeGroup, shown: Sequence[torch.Tensor]) -> None:
        self.group, self.most = group, 0
        self._shown = {tensor.untyped_storage().data_ptr() for tensor in shown}
        self._under_way: list[tuple[Any, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def start_exchange(self, received: torch.Tensor, sent: torch.Tensor, *sizes: Sequence[int]) -> Any:
        work = self.group.start_exchange(received, sent, *sizes)
        own = sum(t.nbytes for t in (received, sent) if t.untyped_storage().data_ptr() not in self._shown)
        self._under_way = [each for each in self._under_way if not each[0].is_completed()] + [(work, own)]
        self.most = max(self.most, sum(nbytes for _, nbytes in self._under_way))
        return work


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("elements", [[300_001], [90_000, 64, 7, 210_000], [2_000] * 150])
def test_memory_for_what_is_on_its_way_is_bounded(size: int, elements: list[int]) -> None:
    """However large a bucket is."""
    layout = layout_of([((n,), torch.float32) for n in elements], 40_000)
    shards = shards_of(layout, 100)
    assigned = map_for(shards, size, random.Random(3))
    most = 60_000

    def call(group: FakeGroup) -> tuple[int, int, int]:
        flats = whole_numbers(layout, group.rank)
        counted: Any = CountedGroup(group, flats)
        exchanges = Exchanges(counted, shards, assigned, flats, most)
        exchanges.begin_step()
        for bucket, flat in enumerate(flats):
            exchanges.reduce(bucket, Flat(flat), flat, False)
        exchanges.finish_sums()
        gradients, counted.most = counted.most, 0

        def parts(bucket: int, interval: Interval) -> list[torch.Tensor]:
            return [flats[bucket][slice(*interval)]]

        def take(bucket: int, interval: Interval, came: torch.Tensor) -> None:
            flats[bucket][slice(*interval)] = came

        exchanges.gather([Outgoing(b, partial(parts, b), f, partial(take, b)) for b, f in enumerate(flats)])
        group_sum = torch.ones(1)
        counted.start_sum(group_sum).wait()  # all values begin before it
        for bucket in range(len(flats)):
            exchanges.receive(bucket)
        return gradients, counted.most, exchanges.memory.nbytes

    results, _ = on_members(size, call)
    for gradients, values, kept in results:
        assert most / 4 < gradients <= most
        assert values <= VALUES_FACTOR * most
        assert kept <= most


def test_share_of_the_model_on_its_way_has_limits() -> None:
    assert most_under_way(0) == most_under_way(60 << 20) == 5 << 20
    assert most_under_way(120 << 20) == 10 << 20
    assert most_under_way(1 << 40) == 64 << 20
    assert most_under_way(12000, 700) == 1000
    assert most_under_way(12000, 4096) == 4096


def test_members_agree_on_the_least_memory_that_is_under_way() -> None:
    assert agreed_least([4096, 1024, 2048]) == 1024
    assert agreed_least([4096, None, 2048]) == LEAST_UNDER_WAY


def test_memory_that_is_kept_is_limited() -> None:
    memory, like = Memory(1000), torch.zeros(1)
    small = [memory.take(50, like) for _ in range(5)]
    for part in small:
        memory.give_back(part)
    assert memory.nbytes == 1000
    large = memory.take(200, like)
    assert memory.nbytes <= 1000 + 800
    memory.give_back(large)
    assert memory.nbytes <= 1000

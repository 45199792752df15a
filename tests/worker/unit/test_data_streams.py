"""Streams of shards: whatever becomes of the members, each batch and each account is that of one process."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_job import Endless, StreamJob, keys

from springtide.data import Cursor, Shards, contribution, plan_loop, streams
from springtide.data.stream_order import StreamOrder
from springtide.data.streams import Finding, StreamPosition, share_batch
from springtide.errors import SpringtideError
from springtide.loading.streams import make_stream_loader

LENGTHS = st.lists(st.one_of(st.just(0), st.integers(1, 3), st.integers(1, 25)), min_size=1, max_size=12)


@st.composite
def jobs(draw: Any) -> tuple[list[int], dict[str, Any], bool]:
    lengths = draw(LENGTHS.filter(sum))
    unknown = draw(st.booleans())
    options = {
        "batch_size": draw(st.integers(3, 30)),
        "epochs": draw(st.integers(1, 2)),
        "shuffle": draw(st.booleans()),
        "shuffle_buffer": draw(st.sampled_from([0, 1, 12, 100])),
        "streams": draw(st.none() | st.integers(1, len(lengths))),
    }
    return lengths, options, unknown


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "commit", "commit", "drop", "save", "restore"]),
        st.integers(1, 5),
        st.sampled_from([(), (1,), (1, 3), (5, 2, 2)]),
    ),
    max_size=30,
)


def alone(lengths: list[int], options: dict[str, Any], unknown: bool = False) -> StreamJob:
    job = StreamJob(lengths, options, unknown)
    job.resize(1)
    while not job.ended:
        job.step()
    return job


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(jobs(), EVENTS, st.booleans())
def test_each_sample_is_trained_once_whatever_happens(
    made: tuple[list[int], dict[str, Any], bool], events: list[Any], seeks: bool
) -> None:
    lengths, options, unknown = made
    expected = alone(lengths, options, unknown)
    job = StreamJob(lengths, options, unknown, seeks)
    for what, size, speeds in [*events, *[("commit", 2, ())] * 2000]:
        if job.ended:
            break
        if what == "save":
            job.save()
        elif what == "restore":
            job.restore(size)
        else:
            job.resize(size)
            job.step(speeds, commits=what == "commit")
    assert job.steps == expected.steps
    assert job.ledger == expected.ledger
    assert (job.ledger.repeated, job.ledger.lost) == (0, 0)
    everything = sorted((shard, n) for shard, length in enumerate(lengths) for n in range(length))
    for epoch in range(options["epochs"]):
        assert job.samples(epoch) == everything
        sizes = [len(batch) for own, batch in job.steps if own == epoch]
        assert set(sizes[:-1]) <= {options["batch_size"]}, "only the last batch of a pass may be short"


@settings(max_examples=40, deadline=None)
@given(jobs(), st.integers(1, 12))
def test_intervals_are_those_of_the_samples_taken(
    made: tuple[list[int], dict[str, Any], bool], count: int
) -> None:
    lengths, options, unknown = made
    job = StreamJob(lengths, options | {"epochs": 1}, unknown)
    job.resize(2)
    while not job.ended and len(job.steps) < count:
        job.step()
    if job.ended:
        return
    order = plan_loop(
        Shards(Endless(len(lengths)) if unknown else list(range(len(lengths))), lambda _: []),
        **(options | {"seed": 3, "min_part": 1}),
    ).streams
    assert order is not None
    whole, parts = order.intervals(3, job.cursor)
    found = [(shard, n) for shard in whole for n in range(lengths[shard])]
    found += [(part.shard, n) for part in parts for n in range(part.start, part.stop)]
    assert sorted(found) == job.samples(0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 200), st.integers(0, 19))
def test_a_batch_is_dealt_as_evenly_as_streams_allow(counts: list[int], batch: int, first: int) -> None:
    dealt = share_batch(counts, batch, first % len(counts))
    assert sum(dealt) == min(batch, sum(counts))
    assert all(0 <= own <= count for own, count in zip(dealt, counts, strict=True))
    most = max(dealt)
    assert all(own >= most - 1 or own == count for own, count in zip(dealt, counts, strict=True))


@given(
    st.integers(0, 2**39 - 1),
    st.lists(st.integers(0, 2**39 - 1) | st.just(0), max_size=3),
    st.integers(0, 30),
    st.booleans(),
)
def test_a_finding_survives_a_float_sum(added: int, ends: list[int], empty: int, over: bool) -> None:
    finding = Finding(added, (*ends, *[0] * empty), over)
    total = torch.tensor(finding.to_numbers(), dtype=torch.float64) + torch.zeros(streams.FINDING_NUMBERS)
    assert Finding.from_numbers(total.tolist()) == finding
    assert Finding.from_json(finding.to_json()) == finding


def test_a_source_that_never_ends_goes_on_in_one_pass() -> None:
    class Squares:
        shards = Endless()

        def read_shard(self, shard: int, start: int) -> Any:
            return iter(range(start, 3 + shard % 4))

    plan = plan_loop(Squares(), batch_size=16, seed=1, min_part=1)
    loader = make_stream_loader(plan, collate_fn=list)
    assert plan.streams is not None
    cursor, seen = Cursor(), set[tuple[int, int]]()
    for _ in range(60):
        if not plan.is_known(cursor):
            cursor = plan.streams.opened(cursor)
        while not plan.is_known(cursor):
            cursor = plan.streams.extended(cursor, loader.look(cursor, 0, 1))
        loader.stand_at(cursor, 0, 1)
        ids = plan.global_ids(cursor)
        loader.read(cursor.step, ids)
        assert len(ids) == 16
        assert seen.isdisjoint(keys(ids))
        seen |= set(keys(ids))
        cursor = plan.advance(cursor, loader.found())
    assert (cursor.epoch, cursor.position, plan.total_steps) == (0, 960, 0)


def test_a_pass_shuffles_shards_and_samples() -> None:
    options = {"batch_size": 8, "epochs": 2, "streams": 2, "shuffle_buffer": 40}
    job = alone([25] * 8, options)
    passes = [[sample for own, batch in job.steps if own == epoch for sample in batch] for epoch in (0, 1)]
    assert passes[0] != passes[1]
    assert passes[0][:8] != sorted(passes[0][:8]), "samples are mixed"
    plain = alone([25] * 8, options | {"shuffle": False})
    first = [sample for own, batch in plain.steps if own == 0 for sample in batch]
    assert [sample for sample in first if sample[0] % 2 == 0] == [
        (s, n) for s in (0, 2, 4, 6) for n in range(25)
    ]


def test_a_stream_that_is_taken_over_is_read_from_its_position() -> None:
    def reads(seeks: bool) -> int:
        options = {"batch_size": 8, "streams": 1, "shuffle": False}
        job = StreamJob([1000], options, seeks=seeks)
        job.resize(1)
        for _ in range(50):
            job.step()
        job.save()
        before = job.read
        job.restore(1)
        job.step()
        return job.read - before

    assert reads(seeks=True) < 50
    assert reads(seeks=False) > 400


def test_a_member_reads_its_own_streams_only() -> None:
    job = StreamJob([100] * 16, {"batch_size": 32, "streams": 16, "shuffle": False}, seeks=True)
    job.resize(4)
    for _ in range(20):
        job.step()
    assert job.read < 1.5 * 20 * 32


class Changing:
    """Shards that are shorter when they are read again."""

    shards = tuple("abcd")

    def __init__(self) -> None:
        self.length = 30

    def read_shard(self, shard: str, start: int) -> Any:
        return iter(range(start, self.length))


def test_a_shard_that_changes_is_named() -> None:
    dataset = Changing()
    plan = plan_loop(dataset, batch_size=40, min_part=1, shuffle=False)
    assert plan.streams is not None

    def loader() -> Any:
        return make_stream_loader(plan, collate_fn=list)

    first = loader()
    cursor = plan.streams.opened(Cursor())
    cursor = plan.streams.extended(cursor, first.look(cursor, 0, 1))
    dataset.length = 5
    second = loader()
    second.stand_at(cursor, 0, 1)
    with pytest.raises(SpringtideError, match="shard 'a' ends before sample 5"):
        second.read(1, plan.global_ids(cursor))


def test_members_with_other_lists_of_shards_are_told() -> None:
    def of(names: list[str], **options: Any) -> Any:
        return plan_loop(Shards(names, lambda name: []), batch_size=4, **options)

    mine = of(["/a/1.tar", "/a/2.tar"])
    of(["/b/1.tar", "/b/2.tar"]).check_same(mine.fingerprint())
    for other in (of(["/a/2.tar", "/a/1.tar"]), of(["/a/1.tar"]), of(["/a/1.tar", "/a/2.tar"], streams=1)):
        with pytest.raises(ValueError, match="the workers do not agree"):
            mine.check_same(other.fingerprint())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"drop_last": True}, "drop_last leaves out samples of a pass whose end nobody knows"),
        ({"weights": [1.0]}, "weights= draws samples by number"),
        ({"streams": 9}, "streams=9 of 2 shards"),
        ({"streams": 0}, "streams must be an integer from 1"),
        ({"shuffle_buffer": -1}, "shuffle_buffer must be an integer >= 0"),
        ({"shuffle": 1}, "shuffle must be True or False"),
    ],
)
def test_arguments_that_shards_cannot_have_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan_loop(Shards([1, 2], lambda shard: []), batch_size=4, **options)


def test_what_is_no_list_of_shards_is_refused() -> None:
    with pytest.raises(TypeError, match="can be read once"):
        Shards(iter([1, 2]), lambda shard: [])
    with pytest.raises(TypeError, match="must be a list"):
        Shards("part-*.tar", lambda shard: [])
    with pytest.raises(TypeError, match="a function of a shard"):
        Shards([1], lambda *, shard: [])
    with pytest.raises(ValueError, match="it has no shards"):
        plan_loop(Shards([], lambda shard: []), batch_size=4)
    with pytest.raises(ValueError, match="streams= is for data in shards"):
        plan_loop(torch.arange(4), batch_size=4, streams=2)


def test_function_with_a_default_takes_a_shard() -> None:
    assert list(Shards([[1, 2]], list).read_shard([1, 2], 1)) == [2]
    assert list(Shards([3], lambda shard=0, start=0: range(start, shard)).read_shard(3, 1)) == [1, 2]


def test_a_position_survives_json_and_a_wrong_one_is_refused() -> None:
    position = StreamPosition(3, 7, 2, 1, 9, (12, 0), True)
    cursor = Cursor(1, 0, 5, 9, (position, StreamPosition()))
    assert Cursor.from_json(cursor.to_json()) == cursor
    for wrong in ([], [0] * 5, [0, 0, 0, 3, 2, 0], [0, 0, 0, 0, -1, 0], [0, 0, 0, 0, 1, 2]):
        with pytest.raises(ValueError, match="streams"):
            StreamPosition.from_json(wrong)


def test_a_ledger_finds_a_sample_that_went_in_twice() -> None:
    job = StreamJob([20, 20], {"batch_size": 8})
    job.resize(1)
    job.step()
    cursor = job.dealt()
    plan = plan_loop(Shards([0, 1], lambda shard: []), batch_size=8, seed=3, min_part=1)
    ids = plan.global_ids(cursor)
    for went_in, repeated, lost in ((torch.cat((ids, ids[:1])), 1, 0), (ids[1:], 0, 1), (ids + 1, 1, 1)):
        sums = [float(number) for number in contribution(went_in, 0, 0)]
        _, ledger = plan.commit(job.ledger, cursor, *sums)
        assert (ledger.repeated, ledger.lost) == (repeated, lost)


def test_too_many_empty_shards_in_a_row_are_an_error() -> None:
    position, shards = StreamPosition(), 5 * streams.MAX_EMPTY
    with pytest.raises(OverflowError, match="shards in a row are empty"):
        streams.find(position, 1, lambda shard: 0, lambda shard: shard < shards, bounded=True)
    assert streams.find(position, 1, lambda shard: 0, lambda shard: shard < shards, bounded=False).over


def test_streams_are_as_many_as_shards_up_to_a_limit() -> None:
    def of(count: int) -> int:
        order = plan_loop(Shards(range(count), lambda shard: []), batch_size=4).streams
        assert isinstance(order, StreamOrder)
        return order.streams

    assert [of(count) for count in (1, 10, 64, 1000)] == [1, 10, 64, 64]

"""The account of shards in status is what the committed steps have taken, however long a pass is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_job import Endless, StreamJob

from springtide.data import Cursor, Shards, plan_loop
from springtide.data.streams import StreamPosition
from springtide.data.taken import MAX_TEXT, taken


def places(text: str) -> list[int]:
    """Return the places that a text of intervals tells of."""
    parts = (part.partition("-") for part in text.split(",") if part)
    return [place for start, _, last in parts for place in range(int(start), int(last or start) + 1)]


def counts(text: str) -> dict[int, int]:
    """Return samples by place, of shards that were begun."""
    parts = (part.partition(":") for part in text.split(",") if part)
    return {int(place): int(count) for place, _, count in parts}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=14).filter(sum),
    unknown=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "batch_size": st.integers(1, 12),
            "shuffle": st.booleans(),
            "shuffle_buffer": st.sampled_from([0, 1, 12]),
            "streams": st.none() | st.just(1),
        }
    ),
    steps=st.integers(1, 12),
)
def test_the_account_is_that_of_the_samples_taken(
    lengths: list[int], unknown: bool, options: dict[str, Any], steps: int
) -> None:
    job = StreamJob(lengths, options, unknown)
    assert taken(job.cursor) is None, "nobody has looked at the pass yet"
    job.resize(2)
    while not job.ended and len(job.steps) < steps:
        job.step()
    found = taken(job.cursor)
    if job.ended:
        assert found is None
        return
    assert found is not None
    order = plan_loop(
        Shards(Endless(len(lengths)) if unknown else list(range(len(lengths))), lambda _: []),
        **(options | {"seed": 3, "min_part": 1}),
    ).streams
    assert order is not None
    samples = job.samples(0)
    assert (found.step, found.samples, job.ledger.count) == (len(job.steps), len(samples), len(samples))
    numbers = {place: order.number(3, 0, place % order.streams, place // order.streams)
               for place in range(len(lengths))}  # fmt: skip
    whole = {numbers[place] for place in places(found.shards)}
    assert len(whole) == len(places(found.shards)), "no place is told of twice"
    for shard in whole:
        assert shard is not None
        assert {(shard, n) for n in range(lengths[shard])} <= set(samples)
    begun = counts(found.begun)
    assert set(begun).isdisjoint(places(found.shards))
    assert sum(lengths[shard or 0] for shard in whole) + sum(begun.values()) == len(samples)


def cursor_at(*shards: int, offset: int = 0) -> Cursor:
    """Return a cursor whose streams stand in these of their shards."""
    return Cursor(0, 0, 7, 3, tuple(StreamPosition(shard, offset) for shard in shards))


def test_streams_that_are_apart_are_told_of_in_intervals() -> None:
    found = taken(cursor_at(3, 2, 4, offset=5))
    assert found is not None
    assert found.to_json() == {"step": 3, "samples": 7, "shards": "0-6,8,11", "begun": "9:5,7:5,14:5"}


def test_a_long_account_is_cut_and_says_how_much_is_left_out() -> None:
    found = taken(cursor_at(0, *[500_000] * 2, *[100_000] * 600, offset=1))
    assert found is not None
    assert len(found.shards) <= MAX_TEXT
    assert len(found.begun) <= MAX_TEXT
    shown, _, more = found.shards.partition(" and ")
    assert len(places(shown)) + int(more.removesuffix(" more")) == 2 * 500_000 + 600 * 100_000
    shown, _, more = found.begun.partition(" and ")
    assert len(counts(shown)) + int(more.removesuffix(" more")) == 603

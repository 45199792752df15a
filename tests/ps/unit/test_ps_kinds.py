"""Servers that count steps in one generation and keep books in the next: nothing counts twice or is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_ps.params.applied import AppliedBatches, IntervalSet
from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.server.shard import Shard
from springtide_ps.server.shard_store import ShardStore
from springtide_ps.server.step_protocol import Effect, StepProtocol, StepProtocolError

STEP_SPEC = StepSpec(1.0, False, ({"lr": 1.0},))


def chunk_with(applied_batches: AppliedBatches | None = None) -> Chunk:
    chunk = Chunk(torch.zeros(2), [(0, 0, 0, 2)], "sgd", [{"lr": 1.0}])
    chunk.applied_batches = applied_batches
    return chunk


def up_to(count: int) -> IntervalSet:
    return IntervalSet([(0, count)]) if count else IntervalSet()


def test_entering_in_another_kind_turns_one_into_the_other() -> None:
    rounds = StepProtocol()
    assert rounds.enter((1, 0, 1), ("a",), 7, "L") == [Effect.FENCE, Effect.FORGET]
    rounds.stage((1, 0, 1), 8, "a", "k")
    rounds.prepare((1, 0, 1), 8, "a", 1)
    assert rounds.enter((1, 0, 2), ("a",), 0, "L", in_batches=True) == [
        Effect.FENCE,
        Effect.BEGIN_APPLIED_BATCHES,
    ]
    assert (rounds.in_batches, rounds.version, rounds.staged) == (True, 0, {})
    assert rounds.enter((1, 0, 2), ("a",), 0, "L", in_batches=True) == []
    assert rounds.enter((1, 0, 3), ("a",), 0, "L", in_batches=True) == [Effect.FENCE, Effect.DROP]
    assert rounds.enter((1, 0, 4), ("a",), 9, "L") == [Effect.FENCE, Effect.COUNT]
    assert (rounds.in_batches, rounds.version) == (False, 9)
    assert rounds.enter((1, 0, 5), ("a",), 0, "other", in_batches=True) == [Effect.FENCE, Effect.FORGET]


def test_a_step_that_was_only_tried_is_in_no_book() -> None:
    rounds = StepProtocol()
    rounds.enter((1, 0, 1), ("a", "b"), 0, "L")
    for member in ("a", "b"):
        rounds.stage((1, 0, 1), 1, member, "k")
    for member in ("a", "b"):
        rounds.prepare((1, 0, 1), 1, member, 1)
    rounds.commit((1, 0, 1), 1, "a", STEP_SPEC)
    assert rounds.try_step((1, 0, 1), 1, "a") == [Effect.TRY]
    effects = rounds.enter((1, 0, 2), ("b",), 0, "L", in_batches=True)
    assert effects == [Effect.FENCE, Effect.ROLL_BACK, Effect.BEGIN_APPLIED_BATCHES]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5), st.integers(0, 5))
def test_books_of_the_first_steps_and_their_number_mean_the_same(version: int, skipped: int) -> None:
    held = Shard(chunk_with(), version)
    assert held.begin_applied_batches(skipped)
    chunk = held.chunk
    assert isinstance(chunk, Chunk)
    assert chunk.applied_batches is not None
    assert (
        chunk.applied_batches.intervals,
        chunk.applied_batches.applied,
        chunk.applied_batches.skipped,
    ) == (up_to(version), version, skipped)
    assert held.version == 0
    assert held.begin_applied_batches(skipped + 1)
    assert chunk.applied_batches.skipped == skipped  # what has a book keeps it
    assert held.count_steps(version)
    assert (held.version, chunk.applied_batches) == (version, None)


@pytest.mark.parametrize("ranges", [[(0, 3)], [(0, 5)], [(0, 3), (4, 5)], [(1, 4)], []])
def test_a_chunk_with_other_ranges_is_at_no_step(ranges: list[tuple[int, int]]) -> None:
    held = Shard(
        chunk_with(AppliedBatches(IntervalSet(ranges), sum(stop - start for start, stop in ranges))), 0
    )
    assert not held.count_steps(4)
    assert isinstance(held.chunk, Chunk)
    assert held.chunk.applied_batches is not None


def test_no_range_is_taken_where_steps_are_counted() -> None:
    shards = ShardStore(forward, forward)
    try:
        shards.enter((1, 0, 1), ["a"], 0, "L")
        with pytest.raises(StepProtocolError, match="step together: it has no batches"):
            shards.check_token((1, 0, 1), in_batches=True)
        shards.enter((1, 0, 2), ["a"], 0, "L", True)
        shards.check_token((1, 0, 2), in_batches=True)
    finally:
        shards.close()


def forward(*_: Any) -> None:
    raise AssertionError("there are no copies")


class Server:
    """Real shards, and beside them what is to be in the chunk: each step or range once."""

    def __init__(self) -> None:
        self.shards = ShardStore(forward, forward)
        self.number, self.in_batches, self.done = 0, False, 0
        self.truth: set[int] = set()
        self.enter(False)
        self.shards.load(self.token, "k", 0, chunk_with())

    @property
    def token(self) -> tuple[int, int, int]:
        return (1, 0, self.number)

    def enter(self, in_batches: bool) -> None:
        """The next generation. Into steps only from where all ranges up to one are there."""
        if self.in_batches and not in_batches:
            self.fill()
        self.number += 1
        self.in_batches = in_batches
        step = 0 if in_batches else self.done
        self.shards.enter(self.token, ["a", "b"], step, "L", in_batches, skipped=0)
        if not in_batches:
            assert self.number == 1 or self.shards.inventory(self.token) == ["k"]

    def fill(self) -> None:
        self.done = max(self.truth, default=-1) + 1
        for number in range(self.done):
            self.push(number)

    def push(self, number: int) -> None:
        """Apply a batch's gradients once, the way a worker's push of a batch does."""
        with self.shards.locked(self.token, "k") as held:
            applied_batches = held.chunk.applied_batches
            assert applied_batches is not None
            if applied_batches.enter(number):
                held.chunk.apply(torch.ones(2), STEP_SPEC)
        self.truth.add(number)

    def step(self, commits: int) -> None:
        """A common step of which so many of two members commit it, before the generation ends."""
        step = self.done + 1
        for member in ("a", "b"):
            self.shards.stage(self.token, step, member, "k", torch.full((2,), 0.5))
        for member in ("a", "b"):
            self.shards.prepare(self.token, step, member, 1, False, lambda *_: None)
        for member in ("a", "b")[:commits]:
            self.shards.commit(self.token, step, member, STEP_SPEC, lambda *_: None)
        if commits == 2:
            self.truth.add(self.done)
            self.done += 1

    def holds(self) -> tuple[float, IntervalSet | None]:
        """How often the chunk was updated, and its book."""
        self.shards.inventory(self.token)  # waits for what is decided
        with self.shards.locked(self.token, "k") as held:
            return -float(held.chunk.values[0]), copy.deepcopy(
                held.chunk.applied_batches and held.chunk.applied_batches.intervals
            )

    def check(self) -> None:
        updates, ranges = self.holds()
        assert updates == len(self.truth)
        if ranges is not None:
            assert {n for n in range(200) if n in ranges} == self.truth


Word = tuple[str, int]


def live_through(words: list[Word]) -> None:
    server = Server()
    try:
        for word, number in words:
            if word == "enter":
                server.enter(bool(number % 2))
            elif server.in_batches:
                first = min(set(range(len(server.truth) + 1)) - server.truth)
                server.push(first + number % 3)
            else:
                server.step(number % 3)
                if number % 3 != 2:
                    server.enter(bool(number % 2))  # nobody goes on in a step that one has left
            server.check()
    finally:
        server.shards.close()


WORDS = st.lists(st.tuples(st.sampled_from(["enter", "train", "train"]), st.integers(0, 11)), max_size=15)


@settings(max_examples=40, deadline=None)
@given(WORDS)
def test_any_sequence_of_kinds_puts_everything_in_chunks_once(words: list[Word]) -> None:
    live_through(words)


WALK: list[Word] = [
    ("train", 2),
    ("train", 2),
    ("enter", 1),
    ("train", 1),
    ("train", 0),
    ("enter", 0),
    ("train", 2),
    ("train", 1),
    ("train", 0),
]


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (Shard, "begin_applied_batches", lambda held, skipped: True),
        (Shard, "count_steps", lambda held, version: True),
        (ShardStore, "keep_where", lambda shards, change: None),
    ],
    ids=["books begin with the steps", "steps begin with the books", "all that is held goes over"],
)
def test_without_one_of_the_rules_it_goes_wrong(
    owner: type, name: str, instead: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    live_through(WALK)
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises((AssertionError, StepProtocolError)):
        live_through(WALK)

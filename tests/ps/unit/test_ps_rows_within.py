"""Rows of tables within a step of several parts: what they will be, while nothing of it is made."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_ps.params.chunk import StepSpec
from springtide_ps.params.embedding import TableSpec
from springtide_ps.params.embedding_shard import Slice, records
from springtide_ps.params.frequencies import heads_of
from springtide_ps.server.intermediate import make_substeps
from springtide_ps.server.intermediate_rows import ChangedRows
from springtide_ps.server.shard_store import ShardStore
from springtide_ps.server.step_protocol import StaleError, StepProtocolError

TOKEN = (1, 0, 1)
EVERYTHING = np.arange(-6, 12)
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.3},
    "adagrad": {"lr": 0.3, "lr_decay": 0.1},
    "adam": {"lr": 0.1, "betas": [0.8, 0.9]},
}
IDS = st.lists(st.integers(-6, 11), unique=True, max_size=6)


def make(optimizer: str = "sgd", **more: Any) -> Slice:
    return Slice(TableSpec(2, optimizer, seed=7, **more), 1, 0, [{"lr": 0.1}])


def total(ids: list[int], seed: int, counted: bool = False) -> torch.Tensor:
    gradients = torch.randn(len(ids), 2, generator=torch.Generator().manual_seed(seed))
    names = torch.tensor(ids, dtype=torch.int64)
    heads = heads_of(names, torch.full_like(names, 1 + seed), seed) if counted else names
    return records(heads, gradients).view(-1)


def step_spec(optimizer: str, parts: list[tuple[int, bool]]) -> StepSpec:
    """substeps: (round, whether the table's parameter rests in it)."""
    made = [
        StepSpec(0.5 + n, False, (OPTIONS[optimizer],), frozenset({1} if rests else ()), backward_pass=number)
        for n, (number, rests) in enumerate(parts)
    ]
    return replace(made[-1], before=tuple(made[:-1]))


@given(
    st.sampled_from(sorted(OPTIONS)),
    st.lists(IDS, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=4),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_they_are_what_the_step_would_make_of_them(
    optimizer: str, rounds: list[list[int]], parts: list[tuple[int, bool]], counted: bool
) -> None:
    """Intermediate rows equal those that the step's first parts would make, and leave the slice unchanged."""
    parts = [(number % len(rounds), rests) for number, rests in parts]
    piece = make(optimizer, max_norm=0.8, by_frequency=counted)
    piece.apply(total([1, 2, 3], 9, counted), step_spec(optimizer, [(0, False)]))
    totals = {number: total(ids, number, counted) for number, ids in enumerate(rounds)}
    kept, before = {n: t.clone() for n, t in totals.items()}, piece.dump()
    changed = ChangedRows()
    for count in range(1, len(parts) + 1):
        made = step_spec(optimizer, parts[:count])
        found = changed.rows(piece, totals, 4, made, EVERYTHING)
        reference = Slice.load(*piece.dump())
        make_substeps(reference, totals, made, keep=True)
        torch.testing.assert_close(found, reference.rows(EVERYTHING))
        assert changed.reach(piece, totals, 4, made) is changed.piece  # not made again for the next who asks
    about, memory = piece.dump()
    assert about == before[0]
    assert torch.equal(memory, before[1])
    assert all(torch.equal(totals[number], kept[number]) for number in totals)
    found = changed.rows(piece, totals, 5, step_spec(optimizer, parts[:1]), EVERYTHING)  # of another step
    assert changed.step == 5
    assert found.isfinite().all()


def test_rows_are_let_go_when_the_step_is_made_and_not_before() -> None:
    piece = make(max_rows=2)
    piece.apply(total([1, 2], 0), step_spec("sgd", [(0, False)]))
    was = piece.rows(np.array([1, 2]))
    seen = ChangedRows().rows(
        piece, {0: total([3, 4], 1)}, 2, step_spec("sgd", [(0, False)]), np.array([1, 2, 3, 4])
    )
    assert torch.equal(seen[:2], was)
    piece.apply(total([3, 4], 1), step_spec("sgd", [(0, False)]))
    assert torch.equal(seen[2:], piece.rows(np.array([3, 4])))


def test_sums_that_are_gone_are_named() -> None:
    with pytest.raises(StepProtocolError, match="the sums of backward pass 1 of step 4 are not here"):
        ChangedRows().reach(make(), {0: total([1], 0)}, 4, step_spec("sgd", [(0, False), (1, False)]))


Answer = tuple[Any, Exception | None]


class World:
    """A server with two slices and two members."""

    def __init__(self) -> None:
        self.shards = ShardStore(lambda *_: None, lambda *_: None)
        self.shards.enter(TOKEN, ["a", "b"], 0, "run")
        for number in range(2):
            self.shards.load(TOKEN, f"t1.{number}", 0, make())

    def round(self, step: int, number: int = 0) -> None:
        for member in "ab":
            for piece in range(2):
                sent = total([piece, 5], 10 * step + number)
                self.shards.stage(TOKEN, step, member, f"t1.{piece}", sent, number)
            self.shards.prepare(TOKEN, step, member, 2, False, lambda *_: None, number)

    def ask(self, step: int, count: int) -> queue.Queue[Answer]:
        answers: queue.Queue[Answer] = queue.Queue()
        wanted = [("t1.0", np.array([0, 5])), ("t1.1", np.array([5, 6, 1]))]
        self.shards.fetch_intermediate_rows(TOKEN, step, wanted, count, lambda *answer: answers.put(answer))
        return answers

    def expected(self, pieces: list[Slice]) -> torch.Tensor:
        return torch.cat((pieces[0].rows(np.array([0, 5])), pieces[1].rows(np.array([5, 6, 1]))))


def test_a_member_sees_its_parts_and_the_commit_makes_the_same() -> None:
    world, pieces = World(), [make(), make()]
    try:
        with pytest.raises(StepProtocolError, match="nobody has told of"):
            world.ask(1, 1)
        for step in (1, 2):
            world.round(step)
            first = step_spec("sgd", [(0, False)])
            world.shards.add_substeps(TOKEN, step, "a", first)
            # In the second step the one before may still have to be made.
            seen = world.ask(step, 1).get(timeout=60)
            world.round(step, 1)
            whole = step_spec("sgd", [(0, False), (1, False)])
            world.shards.add_substeps(TOKEN, step, "b", whole)
            both = world.ask(step, 2).get(timeout=60)
            for number, piece in enumerate(pieces):
                sums = [piece.add(t, t, None) for t in (total([number, 5], 10 * step + n) for n in (0, 1))]
                piece.apply(sums[0], first)
                pieces[number] = piece
            torch.testing.assert_close(seen, (world.expected(pieces), None))
            for number, piece in enumerate(pieces):
                late = total([number, 5], 10 * step + 1)
                piece.apply(piece.add(late, late, None), whole.substeps[1])
            torch.testing.assert_close(both, (world.expected(pieces), None))
            assert torch.equal(world.ask(step, 2).get(timeout=60)[0], both[0])
            for member in "ab":
                world.shards.commit(TOKEN, step, member, whole, lambda *_: None)
        committed: queue.Queue[Answer] = queue.Queue()
        wanted = [("t1.0", np.array([0, 5])), ("t1.1", np.array([5, 6, 1]))]
        world.shards.fetch_rows(TOKEN, 2, wanted, lambda *answer: committed.put(answer))
        assert torch.equal(committed.get(timeout=60)[0], both[0])
        assert all(held.changed.piece is None for held in map(world.shards.shard, world.shards.keys))
    finally:
        world.shards.close()


def test_dropped_step_leaves_nothing_and_later_asks_are_refused() -> None:
    world = World()
    try:
        world.round(1)
        world.shards.add_substeps(TOKEN, 1, "a", step_spec("sgd", [(0, False)]))
        assert world.ask(1, 1).get(timeout=60)[1] is None
        world.shards.enter((1, 0, 2), ["a"], 0, "run")
        with pytest.raises(StaleError):
            world.ask(1, 1)
        for key in ("t1.0", "t1.1"):
            assert torch.equal(world.shards.slice_of(key).rows(EVERYTHING), make().rows(EVERYTHING))
        assert all(held.changed.piece is None for held in map(world.shards.shard, world.shards.keys))
    finally:
        world.shards.close()

"""Slices of embedding tables: sums of records, sparse optimizers, copies; and how servers answer for rows."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_ps.params.chunk import ChunkError, StepSpec
from springtide_ps.params.embedding import TableSpec
from springtide_ps.params.embedding_shard import Slice, records, slice_numbers, unpack
from springtide_ps.params.optim import UpdateError
from springtide_ps.server.shard_store import ShardStore
from springtide_ps.server.step_protocol import StaleError, StepProtocolError

TOKEN = (1, 0, 1)
IDS = st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-4, 4)), unique=True, max_size=12)


def record(ids: list[int], dim: int, seed: int = 0) -> torch.Tensor:
    gradients = torch.randn(len(ids), dim, generator=torch.Generator().manual_seed(seed))
    return records(torch.tensor(ids, dtype=torch.int64), gradients).view(-1)


def make(optimizer: str = "sgd", dim: int = 3, **spec: Any) -> Slice:
    return Slice(TableSpec(dim, optimizer, seed=7, **spec), 2, 0, [{"lr": 0.1}])


def step_spec(
    scale: float = 1.0, unused: tuple[int, ...] = (), skip: bool = False, **options: Any
) -> StepSpec:
    return StepSpec(scale, skip, ({"lr": 0.1, **options},), frozenset(unused))


@given(st.lists(IDS, min_size=1, max_size=4), st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_sums_are_those_of_a_dictionary(batches: list[list[int]], dim: int) -> None:
    piece, total, expected = make(dim=dim), None, dict[int, torch.Tensor]()
    for number, ids in enumerate(batches):
        gradient = record(ids, dim, number)
        total = piece.add(total, gradient, None)
        for i, row in zip(ids, unpack(gradient, dim)[1], strict=True):
            expected[i] = expected.get(i, torch.zeros(dim)) + row
    assert total is not None
    ids, rows = unpack(total, dim)
    assert sorted(ids.tolist()) == sorted(expected)
    for i, row in zip(ids.tolist(), rows, strict=True):
        torch.testing.assert_close(row, expected[i])
    norm = sum(float(row.double().square().sum()) for row in expected.values())
    assert piece.square_norm(total) == pytest.approx(norm, rel=1e-5)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}, {}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.2}),
    "adam": (torch.optim.SparseAdam, {"betas": [0.8, 0.9], "eps": 1e-6}, {}),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_torch_s_sparse_ones_and_copies_go_on_alike(name: str) -> None:
    kind, options, initial = OPTIMIZERS[name]
    piece = make(name, options=initial, max_rows=0)
    everything = np.arange(-5, 20)
    reference = torch.nn.Embedding.from_pretrained(piece.rows(everything), freeze=False, sparse=True)
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    optimizer = kind(reference.parameters(), lr=0.1, **arguments, **initial)
    for step in range(1, 7):
        ids = [int(i) for i in np.random.default_rng(step).choice(everything, 6, replace=False)]
        gradient, rate = record(ids, 3, step), 0.1 / step
        optimizer.param_groups[0]["lr"] = rate
        if step not in (3, 4):
            rows = unpack(gradient, 3)[1] * 0.5
            reference.weight.grad = torch.sparse_coo_tensor(
                torch.tensor([ids]) + 5, rows, (25, 3), check_invariants=True
            )
            optimizer.step()
        # Nobody used the table in step 3, and step 4 was skipped: no clock may move.
        piece.apply(gradient, step_spec(0.5, (2,) if step == 3 else (), step == 4, **{**options, "lr": rate}))
        piece = Slice.load(*piece.dump())
        torch.testing.assert_close(piece.rows(everything), reference.weight.detach())


def test_slice_touched_longest_ago_goes_whatever_was_looked_up() -> None:
    piece = make(max_rows=4)
    for i in range(4):
        piece.apply(record([i], 3), step_spec())
    piece.rows(np.array([0]))
    piece.apply(record([9], 3), step_spec())
    assert piece.table.held()[0].tolist() == [1, 2, 3, 9]
    assert torch.equal(piece.rows(np.array([0])), make().rows(np.array([0])))


@given(IDS, st.integers(1, 9))
@settings(deadline=None, max_examples=50)
def test_any_number_of_slices_makes_the_same_table(ids: list[int], count: int) -> None:
    names = np.array(ids, np.int64)
    numbers = slice_numbers(names, count)
    assert ((numbers >= 0) & (numbers < count)).all()
    whole, parts = make("adagrad"), [make("adagrad") for _ in range(count)]
    gradients = torch.randn(len(ids), 3)
    for _ in range(2):
        whole.apply(records(torch.from_numpy(names), gradients).view(-1), step_spec())
        for number, part in enumerate(parts):
            own = torch.from_numpy(numbers == number)
            part.apply(records(torch.from_numpy(names)[own], gradients[own]).view(-1), step_spec())
    for number, part in enumerate(parts):
        own = names[numbers == number]
        assert torch.equal(part.rows(own), whole.rows(own))
        assert len(part.table) == len(own)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 1}, "parameter group 1"),
        ({"rows": 3}, "not 3 rows"),
        ({"rows": -1}, "not -1 rows"),
        ({"groups": 1 << 40}, "parameter group 0, and there are"),
        ({"options": 3}, "no slice"),
        ({"table": {"dim": 3, "color": 1}}, "no slice"),
        ({"table": {"dim": -3}}, "dim is -3"),
        ({"table": 7}, "an object"),
    ],
)
def test_what_is_no_slice_is_refused(change: dict[str, Any], message: str) -> None:
    piece = make()
    piece.apply(record([1, 2], 3), step_spec())
    about, payload = piece.dump()
    with pytest.raises(ValueError, match=message):
        Slice.load({**about, **change}, payload)
    with pytest.raises(ChunkError, match="20 bytes each"):
        piece.check_gradient(21, None)
    with pytest.raises(ChunkError, match="2 parameter groups, not 1"):
        piece.apply(record([1], 3), StepSpec(1.0, False, ({"lr": 1.0}, {"lr": 1.0})))


class Answers:
    """Answers to fetches, in the order in which they came; `next` waits for one."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, Exception | None]] = []
        self._came = threading.Condition()

    def __call__(self, result: Any, error: Exception | None) -> None:
        with self._came:
            self.all.append((result, error))
            self._came.notify_all()

    def next(self) -> tuple[Any, Exception | None]:
        with self._came:
            assert self._came.wait_for(lambda: bool(self.all), 30)
            return self.all.pop(0)


def test_rows_are_those_after_the_step_that_is_asked_for() -> None:
    shards = ShardStore(lambda *_: None, lambda *_: None)
    try:
        shards.enter(TOKEN, ["a", "b"], 0, "L")
        for number in range(2):
            shards.load(TOKEN, f"t2.{number}", 0, make())
        assert sorted(shards.inventory(TOKEN)) == ["t2.0", "t2.1"]
        ids, answers = np.array([4, 5]), Answers()
        first = make().rows(ids)
        shards.fetch_rows(TOKEN, 0, [("t2.0", ids), ("t2.1", ids[:1])], answers)
        assert torch.equal(answers.next()[0], torch.cat((first, first[:1])))
        # A prefetch: answered when the step is made.
        shards.fetch_rows(TOKEN, 1, [("t2.0", ids), ("t2.1", ids)], answers)
        for member, own in (("a", [4, 6]), ("b", [4])):
            shards.stage(TOKEN, 1, member, "t2.0", record(own, 3, 1))
            shards.stage(TOKEN, 1, member, "t2.1", record([], 3))
            shards.prepare(TOKEN, 1, member, 2, True, answers)
        norms = [answers.next() for _ in "ab"]
        expected = make()
        total = expected.add(record([4, 6], 3, 1), record([4], 3, 1), None)
        assert norms[0] == norms[1] == ({0: pytest.approx(expected.square_norm(total))}, None)
        assert not answers.all
        for member in "ab":
            shards.commit(TOKEN, 1, member, step_spec(0.5), lambda *_: None)
        expected.apply(total, step_spec(0.5))
        rows, error = answers.next()
        assert error is None
        torch.testing.assert_close(rows, torch.cat((expected.rows(ids), first)))
        # Whoever waits when the generation ends is sent away once.
        shards.fetch_rows(TOKEN, 2, [("t2.0", ids), ("t2.1", ids)], answers)
        shards.enter((1, 0, 2), ["a"], 1, "L")
        assert isinstance(answers.next()[1], StaleError)
        assert not answers.all
        with pytest.raises(StepProtocolError, match="not held here"):
            shards.fetch_rows((1, 0, 2), 1, [("t3.0", ids)], answers)
        with pytest.raises(StepProtocolError, match="read by rows"):
            shards.fetch((1, 0, 2), 1, "t2.0", answers)
    finally:
        shards.close()


def test_a_tried_step_is_there_and_can_be_undone_or_kept() -> None:
    shards, answers = ShardStore(lambda *_: None, lambda *_: None), Answers()
    ids = np.array([4, 5])

    def one_commits(token: tuple[int, int, int], step: int) -> torch.Tensor:
        for member in "ab":
            shards.stage(token, step, member, "t2.0", record([4], 3, step))
            shards.prepare(token, step, member, 1, False, lambda *_: None)
        shards.commit(token, step, "a", step_spec(0.5), lambda *_: None)
        shards.fetch_rows(token, step, [("t2.0", ids)], answers)
        shards.try_step(token, step, "a")
        found = answers.next()[0]
        assert isinstance(found, torch.Tensor)
        return found

    try:
        shards.enter(TOKEN, ["a", "b"], 0, "L")
        shards.load(TOKEN, "t2.0", 0, make("adagrad"))
        first = make("adagrad").rows(ids)
        tried = one_commits(TOKEN, 1)
        assert not torch.equal(tried, first)
        # a dies before anybody else holds its state.
        shards.enter((1, 0, 2), ["b"], 0, "L")
        assert shards.inventory((1, 0, 2)) == ["t2.0"]
        shards.fetch_rows((1, 0, 2), 0, [("t2.0", ids)], answers)
        assert torch.equal(answers.next()[0], first)
        shards.enter((1, 0, 3), ["a", "b"], 0, "L")
        assert torch.equal(one_commits((1, 0, 3), 1), tried)
        # a lives, and the next generation begins from its state.
        shards.enter((1, 0, 4), ["a", "b"], 1, "L")
        assert shards.inventory((1, 0, 4)) == ["t2.0"]
        shards.resolve((1, 0, 4), step_spec(0.5))
        assert shards.inventory((1, 0, 4)) == ["t2.0"]
        shards.fetch_rows((1, 0, 4), 1, [("t2.0", ids)], answers)
        assert torch.equal(answers.next()[0], tried)
        assert shards.shard("t2.0").before is None
        assert not torch.equal(one_commits((1, 0, 4), 2), tried)
    finally:
        shards.close()


def test_options_of_a_step_reach_the_rows() -> None:
    piece = make()
    before = piece.rows(np.array([1]))
    piece.apply(record([1], 3), step_spec(maximize=True, lr=2.0))
    torch.testing.assert_close(piece.rows(np.array([1])), before + 2.0 * unpack(record([1], 3), 3)[1])
    assert issubclass(UpdateError, ValueError)

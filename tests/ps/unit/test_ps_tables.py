"""Embedding tables without sockets: the id map, first values, sparse optimizers against torch, eviction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_ps.params.embedding import Table, TableError, TableSpec
from springtide_ps.params.idmap import IdMap
from springtide_ps.params.row_init import first_rows

IDS = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.slow
@given(st.lists(st.lists(st.one_of(IDS, st.integers(-5, 5)), max_size=60), max_size=8))
@settings(deadline=None, max_examples=200)
def test_the_map_is_a_dictionary(batches: list[list[int]]) -> None:
    ids, model = IdMap(4), dict[int, int]()
    for batch in batches:
        wanted = np.array(batch, np.int64)
        assert ids.find(wanted).tolist() == [model.get(i, -1) for i in batch]
        new = sorted({i for i in batch if i not in model})
        for i, row in zip(new, ids.add(np.array(new, np.int64)).tolist(), strict=True):
            model[i] = row
    everything = np.array(list(model), np.int64)
    assert ids.count == len(model)
    assert ids.find(everything).tolist() == list(model.values())
    kept = everything[::2]
    ids.rebuild(kept)
    assert ids.find(kept).tolist() == list(range(len(kept)))
    assert (ids.find(everything[1::2]) == -1).all()


def test_first_values_depend_on_seed_and_id_alone() -> None:
    ids = np.array([5, -7, 2**62, 5], np.int64)
    rows = first_rows("normal", 0.1, 3, ids, 7)
    assert torch.equal(rows[0], rows[3])
    assert torch.equal(rows[1:2], first_rows("normal", 0.1, 3, ids[1:2], 7))
    assert not torch.equal(rows, first_rows("normal", 0.1, 4, ids, 7))
    many = first_rows("normal", 2.0, 0, np.arange(20_000, dtype=np.int64), 8)
    assert abs(float(many.mean())) < 0.03
    assert abs(float(many.std()) - 2.0) < 0.03
    assert float(torch.corrcoef(many.T).sub(torch.eye(8)).abs().max()) < 0.04
    flat = first_rows("uniform", 0.5, 0, np.arange(20_000, dtype=np.int64), 3)
    assert float(flat.abs().max()) <= 0.5
    assert abs(float(flat.var()) - 1 / 12) < 0.003
    assert not first_rows("zeros", 1.0, 0, ids, 3).any()


OPTIMIZERS: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {"lr": 0.1}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    ("adam", torch.optim.SparseAdam, {"lr": 0.05, "betas": (0.8, 0.95)}),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("name", "kind", "options"), OPTIMIZERS)
def test_sparse_optimizers_equal_torch(
    name: str, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    table = Table(TableSpec(5, name, options))
    reference = torch.nn.Embedding(30, 5, sparse=True)
    with torch.no_grad():
        reference.weight.copy_(table.lookup(np.arange(30, dtype=np.int64)))
    optimizer = kind(list(reference.parameters()), **options)  # type: ignore[call-arg]
    for _ in range(6):
        ids = torch.randint(0, 30, (20,), generator=generator)
        gradients = torch.randn(20, 5, generator=generator)
        optimizer.zero_grad()
        (reference(ids) * gradients).sum().backward()
        optimizer.step()
        table.push(ids.numpy(), gradients)
    rows = table.lookup(np.arange(30, dtype=np.int64))
    torch.testing.assert_close(rows, reference.weight.detach(), rtol=1e-5, atol=1e-6)


def test_rows_that_nobody_touches_go_first() -> None:
    table = Table(TableSpec(2, init="zeros", max_rows=8, options={"lr": 1.0}))
    for number in range(8):
        table.push(np.array([number], np.int64), torch.ones(1, 2))
    table.lookup(np.array([0], np.int64))  # a look is a touch
    table.push(np.array([100], np.int64), torch.ones(1, 2))
    assert len(table) == 7
    assert table.evicted == 2
    ids, rows = table.page(0, 100)
    assert sorted(ids.tolist()) == [0, 3, 4, 5, 6, 7, 100]
    assert (rows == -1).all()
    # One that comes back begins anew, also in its optimizer.
    assert table.lookup(np.array([1], np.int64)).tolist() == [[0, 0]]


def test_rows_age() -> None:
    table = Table(TableSpec(2, max_age=8))
    table.push(np.array([1, 2], np.int64), torch.ones(2, 2))
    for _ in range(10):
        table.push(np.array([1], np.int64), torch.ones(1, 2))
    assert table.page(0, 10)[0].tolist() == [1]
    assert table.evicted == 1


def test_evicted_rows_leave_their_optimizer_state_behind() -> None:
    table = Table(TableSpec(1, "adagrad", {"lr": 1.0}, init="zeros", max_rows=2))
    for _ in range(3):
        table.push(np.array([1], np.int64), torch.ones(1, 1))
    table.push(np.array([2, 3], np.int64), torch.ones(2, 1))
    assert 1 not in table.page(0, 9)[0].tolist()
    table.push(np.array([1], np.int64), torch.ones(1, 1))
    assert table.lookup(np.array([1], np.int64)).item() == pytest.approx(-1.0)


def test_memory_is_bounded() -> None:
    table = Table(TableSpec(16), memory_limit=20_000)
    table.lookup(np.arange(200, dtype=np.int64))
    with pytest.raises(TableError, match=r"no room for 300 rows .*set max_rows"):
        table.lookup(np.arange(300, dtype=np.int64))
    assert len(table) == 200
    assert table.nbytes <= 20_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim is 0, expected 1 to"),
        ({"dim": 4, "optimizer": "lamb"}, "no optimizer 'lamb': choose one of sgd, adagrad, adam"),
        ({"dim": 4, "options": {"momentum": 0.9}}, "sgd has no option momentum: its options are lr"),
        ({"dim": 4, "options": {"lr": float("nan")}}, "lr is nan"),
        ({"dim": 4, "options": {"lr": "x"}}, "lr is 'x'"),
        ({"dim": 4, "init": "ones"}, "no initialisation 'ones'"),
        ({"dim": 4, "max_age": -1}, "max_age is -1"),
        ({"dim": 4, "scale": float("inf")}, "scale is inf"),
    ],
)
def test_tables_that_cannot_be_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TableError, match=message):
        TableSpec(**arguments)

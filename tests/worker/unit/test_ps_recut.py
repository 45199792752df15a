"""Tables of a checkpoint come back in as many slices as the script has now, or not at all with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import springtide
from springtide.errors import SpringtideError
from springtide.ps.row_reads import TableState
from springtide.ps.tables import TableIndex

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3, lr_decay=0.1, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


def train(table: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.arange(7) * (step + 1) - 3
        table(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(table: Any, index: int = 0) -> dict[str, Any]:
    """Return the table's slices in the form that a checkpoint has."""
    return {
        f"t{index}.{number}": {"about": json.dumps(piece.about()), "memory": piece.dump()[1]}
        for number, piece in enumerate(table.table.local.slices)
    }


def load(table: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    TableState(TableIndex({0: table.table}, ["users.weight"], [optimizer])).load_state_dict(state)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("slices", [1, 3, 12])
def test_rows_and_state_come_back_in_other_number_of_slices(name: str, slices: int) -> None:
    first = springtide.Embedding(None, 3, seed=1, slices=12 if slices == 3 else 3)
    optimizer = OPTIMIZERS[name](first.parameters())
    train(first, optimizer, range(4))
    second = springtide.Embedding(None, 3, seed=2, slices=slices)
    again = OPTIMIZERS[name](second.parameters())
    load(second, again, saved(first))
    assert len(second.table.local.slices) == slices
    for _ in range(2):
        for one, other in zip(first.export(), second.export(), strict=True):
            assert torch.equal(one, other)
        train(first, optimizer, range(4, 6))
        train(second, again, range(4, 6))


@pytest.mark.parametrize("slices", [2, 5])
def test_how_many_rows_may_stay_is_what_the_script_says_now(slices: int) -> None:
    first = springtide.Embedding(None, 3, seed=1, slices=2)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    train(first, optimizer, range(3))
    second = springtide.Embedding(None, 3, seed=1, slices=slices, max_rows=20, max_age=9)
    load(second, torch.optim.SGD(second.parameters(), lr=0.1), saved(first))
    specs = [piece.table.spec for piece in second.table.local.slices]
    assert [(spec.max_rows, spec.max_age) for spec in specs] == [(20 // slices, 9)] * slices


@pytest.mark.parametrize(
    ("dim", "index", "optimizer", "message"),
    [
        (3, 1, "sgd", "it has 1 tables and this script 1, of other parameters"),
        (4, 0, "sgd", "users.weight has rows of 3 elements trained by sgd, and in this script of 4 by sgd"),
        (3, 0, "adam", "in this script of 3 by adam"),
    ],
)
def test_another_table_is_refused(dim: int, index: int, optimizer: str, message: str) -> None:
    first = springtide.Embedding(None, 3, seed=1)
    train(first, OPTIMIZERS["sgd"](first.parameters()), range(2))
    second = springtide.Embedding(None, dim, seed=1)
    with pytest.raises(SpringtideError, match=message):
        load(second, OPTIMIZERS[optimizer](second.parameters()), saved(first, index))

"""Zeroed gradients after `zero_grad(set_to_none=False)` move unused parameters the same as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_alone import library
from worker_ranks import Rank, on_ranks, seeded

import springtide
from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop

SAMPLES, BATCH, EPOCHS = 24, 4, 2
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :2].sum(1, keepdim=True)

Make = Callable[[Any], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}


class Branches(torch.nn.Module):
    """A body, and heads of which a step takes one: the second one from the third step on, the third never."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.body = torch.nn.Linear(4, 6)
            self.heads = torch.nn.ModuleList([torch.nn.Linear(6, 1) for _ in range(3)])

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        head = 0 if number < 3 or number % 3 == 0 else 1
        result: torch.Tensor = self.heads[head](torch.tanh(self.body(x)))
        return result


def one_optimizer(make: Make) -> Callable[[Branches], list[torch.optim.Optimizer]]:
    return lambda model: [make(model.parameters())]


def two_optimizers(model: Branches) -> list[torch.optim.Optimizer]:
    return [MAKES["sgd"](model.body.parameters()), MAKES["adam"](model.heads.parameters())]


class Script:
    """zeroing: when, and by which means, gradients are zeroed. frozen: steps that do not train the body."""

    def __init__(
        self,
        make: Callable[[Branches], list[torch.optim.Optimizer]],
        zeroing: str,
        frozen: range = range(0),
    ) -> None:
        self.model = Branches()
        self.optimizers = make(self.model)
        self._zeroing, self._frozen = zeroing, frozen

    def zero(self, when: str) -> None:
        if not self._zeroing.startswith(when):
            return
        if self._zeroing.endswith("model"):
            self.model.zero_grad(set_to_none=False)
        elif self._zeroing.endswith("hand"):
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=self._zeroing.endswith("none"))

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int, disturb: Callable[[], None]) -> None:
        self.model.body.requires_grad_(number not in self._frozen)
        self.zero("first")
        loss = (self.model(x, number) - y).square().mean()
        disturb()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero("last")

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).clone()


def alone(script: Script) -> torch.Tensor:
    cursor, number = Cursor(), 0
    plan = plan_loop((X, Y), batch_size=BATCH, epochs=EPOCHS, seed=0)
    while not plan.ended(cursor):
        number += 1
        ids = plan.global_ids(cursor)
        script.step(X[ids], Y[ids], number, lambda: None)
        cursor = plan.advance(cursor)
    return script.values()


def trained(
    size: int, how: dict[str, Any], make: Callable[[], Script], drops: bool = False, joins: bool = False
) -> torch.Tensor:
    """drops: one body is dropped. joins: before a step, the last rank is like one that has just come."""
    store, on_servers = Store(), how.get("strategy") == "ParameterServer"

    def run(rank: Rank) -> torch.Tensor:
        script, number, dropped = make(), 1, False
        rank.distribute(script.model, script.optimizers)
        if on_servers:
            rank.enter_servers(names(running), store)
        for batch in rank.batches((X, Y), batch_size=BATCH, epochs=EPOCHS, seed=0):
            if "consistency" not in how:
                number = rank.step_number  # in exact mode several bodies make a step
            if joins and number == 8 and rank.rank == size - 1:
                for parameter in script.model.parameters():
                    parameter.grad = None
            drop = drops and number == 8 and not dropped
            with rank.step():
                script.step(*batch, number, rank.drop if drop else lambda: None)
            dropped, number = dropped or drop, number + (not drop)
        rank.runtime.settle(None)
        return script.values()

    with servers(2 if on_servers else 0) as running:
        results = on_ranks(size, run, **how, **({"token": TOKEN} if on_servers else {}))
    assert all(torch.equal(values, results[0]) for values in results)
    first: torch.Tensor = results[0]
    return first


ALL_REDUCE: dict[str, Any] = {}
EXACT: dict[str, Any] = {"logical_workers": 4}
SYNCHRONOUS: dict[str, Any] = {"strategy": "ParameterServer"}
RANGES: dict[str, Any] = {"strategy": "ParameterServer", "consistency": "Asynchronous"}
GROUPS: dict[str, Any] = {"strategy": "ParameterServer", "group_size": 2}
TEAMS: dict[str, Any] = {**RANGES, "group_size": 2}


def check(size: int, how: dict[str, Any], make: Callable[[], Script], **more: bool) -> None:
    found, expected = trained(size, how, make, **more), alone(make())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zeroing", "make"),
    [
        ("last", "sgd"),
        ("last", "adam"),
        ("first", "sgd"),
        ("last-model", "sgd"),
        ("first-hand", "sgd"),
        ("last-hand", "sgd"),
        ("first-none", "sgd"),
        ("last-none", "sgd"),
    ],
)
@pytest.mark.parametrize(("size", "how"), [(2, ALL_REDUCE), (2, SYNCHRONOUS), (1, RANGES)])
def test_zeros_move_what_a_step_does_not_use(size: int, how: dict[str, Any], zeroing: str, make: str) -> None:
    check(size, how, lambda: Script(one_optimizer(MAKES[make]), zeroing))


@pytest.mark.parametrize("zeroing", ["last", "first"])
@pytest.mark.parametrize("how", [EXACT, GROUPS, TEAMS])
def test_so_they_do_in_exact_mode_and_with_groups(how: dict[str, Any], zeroing: str) -> None:
    check(2, how, lambda: Script(one_optimizer(MAKES["sgd"]), zeroing))


@pytest.mark.parametrize("zeroing", ["last", "first"])
@pytest.mark.parametrize(
    ("size", "how", "more"),
    [
        (2, ALL_REDUCE, {"drops": True}),
        (2, SYNCHRONOUS, {"drops": True}),
        (1, RANGES, {"drops": True}),
        (2, ALL_REDUCE, {"joins": True}),
        (2, SYNCHRONOUS, {"joins": True}),
    ],
)
def test_members_that_begin_anew_or_come(
    size: int, how: dict[str, Any], more: dict[str, bool], zeroing: str
) -> None:
    check(size, how, lambda: Script(one_optimizer(MAKES["sgd"]), zeroing), **more)


@pytest.mark.parametrize(("size", "how"), [(2, ALL_REDUCE), (2, SYNCHRONOUS), (1, RANGES)])
def test_frozen_for_a_while(size: int, how: dict[str, Any]) -> None:
    check(size, how, lambda: Script(one_optimizer(MAKES["sgd"]), "last", range(4, 7)))


@pytest.mark.slow
@pytest.mark.parametrize("zeroing", ["last", "first", "first-none"])
@pytest.mark.parametrize(("size", "how"), [(2, ALL_REDUCE), (2, SYNCHRONOUS), (1, RANGES)])
def test_several_optimizers(size: int, how: dict[str, Any], zeroing: str) -> None:
    check(size, how, lambda: Script(two_optimizers, zeroing))


def test_the_rows_of_tables_rest_as_with_sparse_gradients() -> None:
    """Rows of tables that were not used stay as they are, however gradients are zeroed, the same as with
    sparse gradients.
    """
    with library():
        with seeded(3):
            table, layer = springtide.Embedding(SAMPLES, 2, seed=4, scale=0.5), torch.nn.Linear(2, 1)
        model = torch.nn.Sequential(table, layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        theirs = torch.nn.Embedding.from_pretrained(table.to_dense(), freeze=False, sparse=True)
        twin = torch.nn.Sequential(theirs, copy.deepcopy(layer))
        reference = torch.optim.SGD(twin.parameters(), lr=0.1)
        springtide.distribute(model, optimizer)
        for batch in springtide.batches(torch.arange(SAMPLES), batch_size=BATCH, epochs=1, seed=0):
            with springtide.step():
                model(batch.data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            twin(batch.data).square().mean().backward()
            reference.step()
            reference.zero_grad()
        torch.testing.assert_close(table.to_dense(), theirs.weight.detach(), rtol=0, atol=1e-6)

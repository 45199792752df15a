"""torch.compile with parameters on servers: the compiled code has the last values, and is one graph."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from ps_late import Late
from ps_members import Store
from ps_servers import TOKEN, names, servers
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from worker_ranks import Rank, on_ranks, seeded

from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop

SAMPLES, BATCH, LAYERS = 24, 4, 4
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :2].sum(1, keepdim=True)

Forward = Callable[[torch.Tensor], torch.Tensor]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return result


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
            self.last = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.last(x)
        return result


def around(model: Net) -> Forward:
    return torch.compile(model, backend="eager")


def in_place(model: Net) -> Forward:
    model.compile(backend="eager")
    return model


def with_the_caller(model: Net) -> Forward:
    return torch.compile(lambda x: model(x) * 1.0, backend="eager")


def parts(model: Net) -> Forward:
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def parts_around(model: Net) -> Forward:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    return model


def parts_without_the_model(model: Net) -> Forward:
    def blocks(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x)
        return x

    compiled = torch.compile(blocks, backend="eager")
    return lambda x: F.linear(compiled(x), model.last.weight, model.last.bias)


# How many graphs there are, where the model is one for the compiler or each of its parts is.
WAYS = [
    (around, 1),
    (in_place, 1),
    (with_the_caller, 2),  # its own operation is another
    (parts, 2),  # the first block's input needs no gradient
    (parts_around, 2),
    (parts_without_the_model, None),
]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it compiles
        yield
    torch.compiler.reset()


def step(forward: Forward, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    loss = (forward(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def alone() -> tuple[list[float], torch.Tensor]:
    model, cursor, losses = Net(), Cursor(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    plan = plan_loop((X, Y), batch_size=BATCH, epochs=1, seed=0)
    while not plan.ended(cursor):
        ids = plan.global_ids(cursor)
        losses.append(step(model, optimizer, X[ids], Y[ids]))
        cursor = plan.advance(cursor)
    return losses, parameters_to_vector(model.parameters()).detach()


def on_servers(way: Callable[[Net], Forward], **how: Any) -> tuple[list[float], torch.Tensor]:
    store = Store()

    def run(rank: Rank) -> tuple[list[float], torch.Tensor]:
        model = Net()
        forward, losses = way(model), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        rank.distribute(model, optimizer)
        rank.enter_servers(names(running), store)
        exchange = rank.trainer.servers
        assert exchange is not None
        late = Late(exchange, running, SAMPLES // BATCH)
        with contextlib.ExitStack() as stack:
            stack.callback(late.let_go)
            for x, y in rank.batches((X, Y), batch_size=BATCH, epochs=1, seed=0):
                with rank.step():
                    losses.append(step(forward, optimizer, x, y))
        rank.runtime.settle(None)
        return losses, parameters_to_vector(model.parameters()).detach()

    with servers(2) as running:
        [found] = on_ranks(1, run, strategy="ParameterServer", token=TOKEN, **how)
    assert isinstance(found, tuple)
    return found


CASES = [(way, graphs, "Synchronous") for way, graphs in WAYS]
CASES += [(around, 1, "Asynchronous"), (parts, 2, "Asynchronous")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "graphs", "consistency"), CASES, ids=[f"{way.__name__}-{mode}" for way, _, mode in CASES]
)
def test_compiled_code_has_the_last_steps_values(
    way: Callable[[Net], Forward], graphs: int | None, consistency: str
) -> None:
    losses, values = on_servers(way, consistency=consistency)
    found = dict(counters["stats"])
    expected, expected_values = alone()
    assert losses == pytest.approx(expected, abs=2e-5)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=2e-5)
    assert graphs is None or found["unique_graphs"] == graphs, found

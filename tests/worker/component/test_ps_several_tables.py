"""Several optimizers whose parameters are tables and dense layers: the numbers of plain torch."""

from __future__ import annotations

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

SAMPLES, BATCH, EPOCHS, ROWS = 24, 8, 3, 9
X = torch.randint(0, ROWS, (SAMPLES, 2), generator=torch.Generator().manual_seed(1))
Y = torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(2))
IDS = torch.arange(SAMPLES)


class Tables:
    """Two models, each a table and a layer, with an optimizer each. plain: of torch's own modules alone."""

    def __init__(self, plain: bool = False) -> None:
        self.tables: list[Any] = [
            springtide.Embedding(ROWS, 3, seed=4 + n, scale=0.5, slices=3) for n in (0, 1)
        ]
        if plain:
            self.tables = [
                torch.nn.Embedding.from_pretrained(t.to_dense(), freeze=False) for t in self.tables
            ]
        with seeded(7):
            self.layers = [torch.nn.Linear(3, 1) for _ in range(2)]
        self.models = [torch.nn.Sequential(*pair) for pair in zip(self.tables, self.layers, strict=True)]
        first, second = (model.parameters() for model in self.models)
        self.sgd = torch.optim.SGD(first, lr=0.2)
        self.adagrad = torch.optim.Adagrad(
            [{"params": self.layers[1].parameters(), "lr": 0.02}, {"params": self.tables[1].parameters()}],
            lr=0.1,
        )
        del second
        self.optimizers: list[torch.optim.Optimizer] = [self.sgd, self.adagrad]
        self.scaler = torch.amp.GradScaler("cpu", 256.0, growth_interval=2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.adagrad, 0.9)

    def values(self) -> torch.Tensor:
        rows = [t.to_dense() if hasattr(t, "to_dense") else t.weight for t in self.tables]
        dense = [p for layer in self.layers for p in layer.parameters()]
        return torch.cat([item.detach().reshape(-1) for item in (*rows, *dense)]).clone()


Clip = Callable[[torch.optim.Optimizer], None]
Body = Callable[[Tables, torch.Tensor, Clip], None]


def one_backward(script: Tables, ids: torch.Tensor, clip: Clip) -> None:
    """Every third step is of one optimizer alone."""
    out = script.models[0](X[ids, 0]) + script.models[1](X[ids, 1])
    (out - Y[ids]).square().mean().backward()
    for optimizer in script.optimizers[: 1 if script.schedule.last_epoch % 3 == 2 else 2]:
        clip(optimizer)
        optimizer.step()
    script.schedule.step()
    for optimizer in script.optimizers:
        optimizer.zero_grad()


def scaled(script: Tables, ids: torch.Tensor, clip: Clip) -> None:
    """A sample breaks the gradients of the second model."""
    out = script.models[0](X[ids, 0]).mean() + script.models[1](X[ids, 1]).mean()
    if bool((ids == 5).any()):
        out = out + float("inf") * script.models[1](X[ids, 1]).sum()
    script.scaler.scale(out).backward()
    for optimizer in script.optimizers:
        script.scaler.step(optimizer)
        optimizer.zero_grad()
    script.scaler.update()


def two_rounds(script: Tables, ids: torch.Tensor, clip: Clip) -> None:
    """Run a body in which the second backward pass adds to gradients left by the first one."""
    (script.models[0](X[ids, 0]) + script.models[1](X[ids, 1]) - Y[ids]).square().mean().backward()
    clip(script.sgd)
    script.sgd.step()
    script.sgd.zero_grad()
    (
        script.models[1](X[ids, 1]) * script.layers[0](torch.ones(1, 3)).detach() - Y[ids]
    ).square().mean().backward()
    clip(script.adagrad)
    script.adagrad.step()
    script.adagrad.zero_grad()


def looked_up(script: Tables, ids: torch.Tensor, clip: Clip) -> None:
    """Rows are looked up again after steps have changed them, and the next steps depend on what they are."""
    one_backward(script, ids, clip)
    for model in script.models:
        (model(X[ids, 0]).tanh() * Y[ids]).mean().backward()
    for optimizer in script.optimizers:
        clip(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen = script.tables[1](X[ids[:2], 1])
    assert bool(seen.isfinite().all())


def rows_alone(script: Tables, ids: torch.Tensor, clip: Clip) -> None:
    """The second backward pass reaches tables and nothing else, and gradients are zeroed where they are."""
    (script.models[0](X[ids, 0]) + script.models[1](X[ids, 1]) - Y[ids]).square().mean().backward()
    for optimizer in script.optimizers:
        clip(optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    # The other table's gradient is left, and added to.
    ((script.tables[0](X[ids, 1]) - Y[ids]) * script.tables[1](X[ids, 0])).square().mean().backward()
    clip(script.sgd)
    script.sgd.step()
    script.sgd.zero_grad()
    script.tables[1](X[ids, 1]).sin().mean().backward()
    clip(script.adagrad)
    script.adagrad.step()
    script.adagrad.zero_grad()


def left_alone(script: Tables, ids: torch.Tensor, clip: Clip) -> None:
    """Two steps with the same gradients; others are left by a round and not reached by the next one."""
    (script.models[0](X[ids, 0]) + script.models[1](X[ids, 1]) - Y[ids]).square().mean().backward()
    for _ in range(2):
        clip(script.sgd)
        script.sgd.step()
    script.sgd.zero_grad()
    (script.models[0](X[ids, 1]) - Y[ids]).square().mean().backward()
    clip(script.adagrad)
    script.adagrad.step()
    for optimizer in script.optimizers:
        optimizer.zero_grad()


def closures(script: Tables, ids: torch.Tensor, clip: Clip) -> None:
    """Each optimizer twice, each time with what the rows are then."""

    def loss() -> torch.Tensor:
        for optimizer in script.optimizers:
            optimizer.zero_grad()
        out = script.models[0](X[ids, 0]) + script.models[1](X[ids, 1])
        found: torch.Tensor = (out - Y[ids]).square().mean()
        found.backward()
        return found

    for optimizer in (*script.optimizers, *script.optimizers):
        optimizer.step(loss)
    for optimizer in script.optimizers:
        optimizer.zero_grad()


def twice_scaled(script: Tables, ids: torch.Tensor, clip: Clip) -> None:
    """Two rounds with a scaler; the second one of some bodies is not finite in the rows alone."""
    for number in range(2):
        out = (script.models[0](X[ids, 0]) + script.models[1](X[ids, 1]) - Y[ids]).square().mean()
        if number and bool((ids == 5).any()):
            out = out + float("inf") * script.tables[1](X[ids, 1]).sum()
        script.scaler.scale(out).backward()
        for optimizer in script.optimizers:
            script.scaler.step(optimizer)
            optimizer.zero_grad()
        script.scaler.update()


def plain(body: Body, clip_norm: float | None) -> Tables:
    script = Tables(plain=True)

    def clip(optimizer: torch.optim.Optimizer) -> None:
        if clip_norm is not None:
            own = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(own, clip_norm)

    plan, cursor = plan_loop(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0), Cursor()
    while not plan.ended(cursor):
        body(script, plan.global_ids(cursor), clip)
        cursor = plan.advance(cursor)
    return script


def tracked(script: Tables, body: Body) -> dict[str, Any]:
    return {"schedule": script.schedule} | (
        {"scaler": script.scaler} if body in (scaled, twice_scaled) else {}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "strategy", "size", "clip_norm"),
    [
        (one_backward, "ParameterServer", 1, None),
        (one_backward, "ParameterServer", 3, 0.05),
        (one_backward, "Hybrid", 2, None),
        (one_backward, "Hybrid", 3, 0.05),
        (scaled, "ParameterServer", 2, None),
        (scaled, "Hybrid", 2, None),
        (one_backward, "Asynchronous", 1, 0.05),
        (scaled, "Asynchronous", 1, None),
        (two_rounds, "ParameterServer", 2, None),
        (two_rounds, "ParameterServer", 3, 0.05),
        (looked_up, "ParameterServer", 1, None),
        (looked_up, "ParameterServer", 3, 0.05),
        (rows_alone, "ParameterServer", 2, None),
        (two_rounds, "Hybrid", 2, None),
        (two_rounds, "Hybrid", 3, 0.05),
        (looked_up, "Hybrid", 3, None),
        (looked_up, "Hybrid", 2, 0.05),
        (rows_alone, "Hybrid", 2, 0.05),
        (left_alone, "Hybrid", 2, 0.05),
        (left_alone, "ParameterServer", 2, 0.05),
        (closures, "Hybrid", 2, None),
        (closures, "ParameterServer", 2, None),
        (twice_scaled, "Hybrid", 2, None),
        (twice_scaled, "ParameterServer", 2, None),
        (two_rounds, "groups", 3, 0.05),
        (looked_up, "groups", 3, None),
        (rows_alone, "groups", 3, None),
        (left_alone, "groups", 3, 0.05),
        (closures, "groups", 3, None),
        (twice_scaled, "groups", 3, None),
    ],
)
def test_the_numbers_of_plain_torch(body: Body, strategy: str, size: int, clip_norm: float | None) -> None:
    store = Store()

    def run(rank: Rank) -> torch.Tensor:
        script = Tables()
        rank.distribute(script.models, script.optimizers, clip_norm=clip_norm, **tracked(script, body))
        rank.enter_servers(names(running), store)
        for batch in rank.batches(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0):
            with rank.step():
                body(script, batch.data, lambda optimizer: None)
        rank.runtime.settle(None)
        return script.values()

    how: dict[str, Any] = {"strategy": strategy}
    if strategy == "groups":
        how = {"strategy": "ParameterServer", "group_size": 2}
    if strategy == "Asynchronous":
        how = {"strategy": "ParameterServer", "consistency": strategy}
    with servers(2) as running:
        results = on_ranks(size, run, token=TOKEN, **how)
    expected = plain(body, clip_norm)
    for values in results:
        assert torch.equal(values, results[0])
        torch.testing.assert_close(values, expected.values(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("body", "clip_norm"),
    [
        (one_backward, None),
        (one_backward, 0.05),
        (scaled, None),
        (two_rounds, 0.05),
        (looked_up, 0.05),
        (rows_alone, None),
        (left_alone, 0.05),
        (closures, None),
        (twice_scaled, None),
    ],
)
def test_the_numbers_of_plain_torch_without_a_job(body: Body, clip_norm: float | None) -> None:
    with library():
        script = Tables()
        springtide.distribute(script.models, script.optimizers, clip_norm=clip_norm, **tracked(script, body))
        for batch in springtide.batches(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0):
            with springtide.step():
                body(script, batch.data, lambda optimizer: None)
        values = script.values()
    torch.testing.assert_close(values, plain(body, clip_norm).values(), rtol=0, atol=2e-5)

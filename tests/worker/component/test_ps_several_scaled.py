"""Several optimizers on servers with a GradScaler, and where workers do not step together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop

SAMPLES, BATCH, EPOCHS = 24, 8, 3
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :2].sum(1, keepdim=True)
IDS = torch.arange(SAMPLES)


class Scaled:
    """Two models with an optimizer each, and one scaler. Some samples break the gradients of one of them."""

    def __init__(self, scaled: bool) -> None:
        with seeded(7):
            self.body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh())
            self.head = torch.nn.Linear(6, 1)
        self.models = [self.body, self.head]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adam(self.body.parameters(), lr=0.01),
            torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
        ]
        # Only powers of two, so that scaled gradients have the bits of plain ones.
        self.scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2, enabled=scaled)
        self.scales: list[float] = []
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[1], 0.9)

    def backward(self, ids: torch.Tensor, broken: dict[int, int]) -> None:
        """broken: number of the model whose gradients a sample breaks."""
        loss = (self.head(self.body(X[ids])) - Y[ids]).square().mean()
        for which in {broken[int(i)] for i in ids if int(i) in broken}:
            loss = loss + float("inf") * next(self.models[which].parameters()).sum()
        self.scaler.scale(loss).backward()

    def finish(self, clip_norm: float | None = None) -> None:
        for optimizer in self.optimizers:
            if clip_norm is not None:
                self.scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip_norm)
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.schedule.step()
        self.scales.append(self.scaler.get_scale())

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for m in self.models for p in m.parameters()]).clone()


def global_batches() -> list[torch.Tensor]:
    plan, cursor, found = plan_loop(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0), Cursor(), []
    while not plan.ended(cursor):
        found.append(plan.global_ids(cursor))
        cursor = plan.advance(cursor)
    return found


def breaking() -> dict[int, int]:
    """Samples of two batches of the first epoch, which come again: each breaks another model's gradients, and
    the third one, in the batch of the first, the other's."""
    first, _, third = global_batches()[:3]
    return {int(first[0]): 0, int(third[-1]): 1, int(third[0]): 1}


def plain(scaled: bool, clip_norm: float | None) -> Scaled:
    training = Scaled(scaled)
    for ids in global_batches():
        training.backward(ids, breaking() if scaled else {})
        training.finish(clip_norm)
    return training


def train(
    size: int, scaled: bool, clip_norm: float | None, **settings: Any
) -> list[tuple[Scaled, dict[str, int]]]:
    store = Store()

    def script(rank: Rank) -> tuple[Scaled, dict[str, int]]:
        training = Scaled(scaled)
        rank.distribute(
            training.models,
            training.optimizers,
            clip_norm=clip_norm,
            scaler=training.scaler,
            schedule=training.schedule,
        )
        rank.enter_servers(names(running), store)
        for batch in rank.batches(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0):
            with rank.step():
                training.backward(batch.data, breaking() if scaled else {})
                training.finish()
        rank.runtime.settle(None)
        return training, rank.runtime.position.ledger.audit()

    with servers(2) as running:
        return on_ranks(size, script, strategy="ParameterServer", token=TOKEN, **settings)


@pytest.mark.parametrize(
    ("size", "clip_norm", "settings"),
    [(1, None, {}), (3, 0.05, {}), (2, None, {"group_size": 2}), (2, 0.05, {"compression": "BF16"})],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_optimizer_with_infinite_gradients_leaves_out_its_step(
    size: int, clip_norm: float | None, settings: dict[str, Any]
) -> None:
    """An optimizer with infinite gradients leaves its step out, while the other one steps, the same as in
    plain torch.
    """
    expected = plain(True, clip_norm)
    results = train(size, True, clip_norm, **settings)
    exact = "compression" not in settings
    for training, audit in results:
        assert torch.equal(training.values(), results[0][0].values())
        torch.testing.assert_close(training.values(), expected.values(), rtol=0, atol=2e-5 if exact else 2e-2)
        assert training.scales == expected.scales
        assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (SAMPLES * EPOCHS, 0, 0)
        assert audit["skipped"] == sum(any(int(i) in breaking() for i in ids) for ids in global_batches())
    assert min(expected.scales) < 1024
    if exact:
        # Both optimizers made steps that the other one left out.
        whole = Scaled(True)
        for ids in global_batches():
            whole.backward(ids, {})
            whole.finish(clip_norm)
        assert not torch.allclose(whole.values(), expected.values(), atol=1e-3)


@pytest.mark.parametrize(("scaled", "clip_norm"), [(False, None), (True, 0.05)])
@pytest.mark.parametrize("how", [{"consistency": "Asynchronous"}, {"consistency": "BoundedStaleness"}])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_worker_without_common_steps_equals_one_process(
    scaled: bool, clip_norm: float | None, how: dict[str, Any]
) -> None:
    expected = plain(scaled, clip_norm)
    training, audit = train(1, scaled, clip_norm, **how)[0]
    torch.testing.assert_close(training.values(), expected.values(), rtol=0, atol=2e-5)
    assert training.scales == expected.scales
    assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (SAMPLES * EPOCHS, 0, 0)
    if scaled:
        assert audit["skipped"] > 0


def test_three_without_common_steps_put_each_batch_in_once() -> None:
    """Three workers without common steps put each batch in exactly once.

    The gradients do not depend on the values, so the order of the batches does not matter.
    """
    store = Store()

    def script(rank: Rank) -> tuple[torch.Tensor, dict[str, int]]:
        with seeded(3):
            models = [torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(4, 1, bias=False)]
        optimizers = [
            torch.optim.SGD(models[0].parameters(), lr=0.5),
            torch.optim.SGD(models[1].parameters(), lr=0.25),
        ]
        rank.distribute(models, optimizers)
        rank.enter_servers(names(running), store)
        for batch in rank.batches(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0):
            with rank.step():
                (models[0](X[batch.data]) + models[1](X[batch.data])).mean().backward()
                for optimizer in optimizers[:: 1 if int(batch.data.sum()) % 2 else -1]:
                    optimizer.step()
                    optimizer.zero_grad()
        rank.runtime.settle(None)
        values = torch.cat([model.weight.detach().clone() for model in models])
        return values, rank.runtime.position.ledger.audit()

    with servers(2) as running:
        results = on_ranks(3, script, strategy="ParameterServer", token=TOKEN, consistency="Asynchronous")
    with seeded(3):
        models = [torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(4, 1, bias=False)]
    moved = EPOCHS * (SAMPLES // BATCH) * X.mean(0)
    expected = torch.stack(
        [m.weight.detach()[0] - lr * moved for m, lr in zip(models, (0.5, 0.25), strict=True)]
    )
    for values, audit in results:
        torch.testing.assert_close(values, expected, rtol=0, atol=2e-5)
        assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (SAMPLES * EPOCHS, 0, 0)

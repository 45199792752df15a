"""Tables on servers with a GradScaler, and on a GPU: rows count with the scale, and make all skip a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_capabilities import cuda_param
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

import springtide

torch.set_num_threads(1)

on_cuda = cuda_param("servers")

IDS = torch.randint(0, 20, (24, 3), generator=torch.Generator().manual_seed(1))
WANTED = torch.randn(24, generator=torch.Generator().manual_seed(2))
BAD = 13  # the sample whose rows' gradients are not finite, in the first epoch only


class Clicks(torch.nn.Module):
    """A table in a model of its own; torch's module with the same values where `dense`."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        table = springtide.Embedding(20, 4, seed=3)
        self.table: Any = table
        if dense:
            self.table = torch.nn.Embedding.from_pretrained(table.to_dense(), freeze=False)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).mean(1)).squeeze(1)


class Trains:
    """One script, with rows on servers or dense in one process. broken: how often a sample was bad."""

    def __init__(self, dense: bool, device: str, fused: bool = False, scale: float = 64.0) -> None:
        with seeded(4):
            self.model = Clicks(dense).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, fused=fused)
        self.scaler = torch.amp.GradScaler(device, init_scale=scale, growth_interval=3)
        self.device = device

    def step(self, ids: torch.Tensor, wanted: torch.Tensor, bad: torch.Tensor) -> None:
        ids, wanted = ids.to(self.device), wanted.to(self.device)
        loss = (self.model(ids) - wanted).square().mean()
        rows = self.model.table(ids)[:, 0].sum(1) * (bad * 1e38).to(self.device)
        self.scaler.scale(loss + rows.sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def result(self) -> list[torch.Tensor]:
        table = self.model.table
        rows = table.weight.detach() if isinstance(table, torch.nn.Embedding) else table.to_dense()
        head = [parameter.detach() for parameter in self.model.head.parameters()]
        return [item.cpu() for item in (rows, *head, torch.tensor(self.scaler.get_scale()))]


def run(
    strategy: str, device: str, clip_norm: float | None, running: Any, **options: Any
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """(the result of each of two members, the samples of each step). strategy: "Asynchronous" is one member
    of a ParameterServer job of that consistency.
    """
    store, seen = Store(), dict[int, list[torch.Tensor]]()
    compression = options.pop("compression", "None")

    def script(rank: Rank) -> list[torch.Tensor]:
        trains = Trains(False, device, **options)
        rank.distribute(trains.model, trains.optimizer, scaler=trains.scaler, clip_norm=clip_norm)
        rank.enter_servers(names(running), store)
        samples = (IDS, WANTED, torch.arange(24))
        for step, batch in enumerate(rank.batches(samples, batch_size=8, epochs=2, seed=0), 1):
            with rank.step():
                ids, wanted, numbers = batch
                bad = (numbers == BAD).float() * float(step <= 3)
                seen.setdefault(step, []).append(numbers)
                trains.step(ids, wanted, bad)
        rank.runtime.settle(None)
        return trains.result()

    rows = {"rows_compression" if strategy == "Hybrid" else "compression": compression}
    more: dict[str, Any] = rows if compression != "None" else {}
    members = 2
    if strategy == "Asynchronous":
        members, strategy, more = 1, "ParameterServer", more | {"consistency": strategy}
    results = on_ranks(members, script, strategy=strategy, token=TOKEN, **more)
    return results, [torch.cat(seen[step]) for step in sorted(seen)]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", on_cuda])
@pytest.mark.parametrize("strategy", ["ParameterServer", "Hybrid", "Asynchronous"])
@pytest.mark.parametrize(("clip_norm", "fused"), [(None, False), (0.05, False), (0.05, True)])
def test_as_with_a_dense_table_in_one_process(
    strategy: str, device: str, clip_norm: float | None, fused: bool
) -> None:
    with servers(2) as running:
        results, order = run(strategy, device, clip_norm, running, fused=fused)
    reference = Trains(True, device, fused=fused)
    model = reference.model

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if clip_norm is None:
            return
        scale = float(getattr(optimizer, "grad_scale", None) or 1.0)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= scale

    reference.optimizer.register_step_pre_hook(clip)
    for step, numbers in enumerate(order, 1):
        assert len(numbers) == 8
        # One process sums what the members average, sample by sample.
        bad = (numbers == BAD).float() * float(step <= 3)
        reference.step(IDS[numbers], WANTED[numbers], bad)
    expected = reference.result()
    assert float(expected[-1]) == 64.0  # it backed off once, and grew after three good steps
    for result in results:
        for found, whole in zip(result, expected, strict=True):
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("strategy", ["ParameterServer", "Asynchronous"])
def test_rows_that_overflow_in_sixteen_bits_are_skipped_by_all(strategy: str) -> None:
    with servers(1) as running:
        results, _ = run(strategy, "cpu", None, running, scale=2.0**20, compression="FP16")
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)
        assert one.isfinite().all()
    assert float(results[0][-1]) < 2.0**20

"""Metrics that servers show of their jobs, and counts that reach the coordinator where workers do not step
together.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

import springtide
from springtide_ps.server.metrics import ServerCollector
from springtide_ps.server.server import Server

IDS = torch.randint(-20, 20, (40, 3), generator=torch.Generator().manual_seed(1))
BATCH, EPOCHS, SLICES = 8, 2, 3
STEPS = EPOCHS * len(IDS) // BATCH


class Clicks(torch.nn.Module):
    """A table and a layer."""

    def __init__(self, max_rows: int) -> None:
        super().__init__()
        with seeded(4):
            self.table = springtide.Embedding(None, 2, seed=1, slices=SLICES, max_rows=max_rows)
            self.head = torch.nn.Linear(6, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.table(ids).flatten(1))
        return found


def scraped(server: Server) -> dict[str, float]:
    """Return the value of each of the server's metrics, by name without `springtide_ps_`."""
    samples = (sample for metric in ServerCollector(server).collect() for sample in metric.samples)
    return {sample.name.removeprefix("springtide_ps_"): float(sample.value) for sample in samples}


def summed(running: list[Server]) -> dict[str, float]:
    pages = [scraped(server) for server in running]
    return {name: sum(page[name] for page in pages) for name in pages[0]}


@pytest.mark.parametrize("consistency", ["Synchronous", "Asynchronous"])
@pytest.mark.parametrize("max_rows", [0, 18])
def test_a_job_is_in_the_metrics_of_its_servers(consistency: str, max_rows: int) -> None:
    used = 0

    def script(rank: Rank) -> torch.Tensor:
        nonlocal used
        model = Clicks(max_rows)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank.distribute(model, optimizer)
        rank.enter_servers(names(running), Store())
        for [samples] in rank.batches((torch.arange(40),), batch_size=BATCH, epochs=EPOCHS, seed=0):
            with rank.step():
                used += IDS[samples].unique().numel()
                model(IDS[samples]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        rank.runtime.settle(None)
        return model.table.export()[0]

    how: dict[str, Any] = {"consistency": consistency, "strategy": "ParameterServer", "token": TOKEN}
    with servers(2) as running:
        [ids] = on_ranks(1, script, **how)
        found = summed(running)
        assert found["keys"] > SLICES  # chunks beside them
        assert found["table_rows"] == len(ids)
        assert found["value_bytes"] == sum(server.sync_handler.store.held_bytes for server in running) > 0
        assert found["pushes_total"] == STEPS * found["keys"]
        assert found["pulls_total"] > 0
        assert found["updated_rows_total"] == used
        assert found["looked_up_rows_total"] >= used
        assert (found["evicted_rows_total"] > 0) == (max_rows > 0)
        for server in running:
            shards = server.sync_handler.store
            shards.arrange(shards.token, {}, {}, shards.keys)
        after = summed(running)
        assert after["keys"] == after["value_bytes"] == after["table_rows"] == 0
        assert after["evicted_rows_total"] == found["evicted_rows_total"]


def test_samples_told_to_coordinator_are_those_of_the_batches() -> None:
    """Workers without common steps report the samples of each batch, also of each epoch's short last one."""

    def script(rank: Rank) -> tuple[list[int], list[int]]:
        model = Clicks(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank.distribute(model, optimizer)
        rank.enter_servers(names(running), Store())
        told, seen = list[int](), list[int]()
        for [samples] in rank.batches((torch.arange(40),), batch_size=16, epochs=3, seed=0):
            with rank.step():
                model(IDS[samples]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            told += [commit.samples for commit in rank.runtime.accounting.commits.take()]
            seen.append(rank.runtime.position.ledger.total_seen)
        rank.runtime.settle(None)
        return told, seen

    how: dict[str, Any] = {"consistency": "Asynchronous", "strategy": "ParameterServer", "token": TOKEN}
    with servers(1) as running:
        [(told, seen)] = on_ranks(1, script, **how)
    assert sum(told) == seen[-1] > 2 * 40

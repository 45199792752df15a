"""A body that reads what its step has made, when another member does not commit that step."""

from __future__ import annotations

import threading
from typing import Any

import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from torch.optim.swa_utils import AveragedModel
from worker_ranks import Rank, on_ranks, seeded

import springtide

X = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(8)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = springtide.Embedding(None, 3, seed=3, scale=0.5, slices=4)
        self.dense = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(x) * self.table(ids)


def test_parameters_averages_and_rows_are_those_of_the_step() -> None:
    has_read, store = threading.Event(), Store()

    def script(rank: Rank) -> dict[str, torch.Tensor]:
        with seeded(2):
            model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        average = AveragedModel(torch.nn.Linear(5, 3))
        rank.distribute(model, optimizer, average=average)
        rank.enter_servers(names(running), store)
        exchange, found = rank.trainer.servers, {}
        assert exchange is not None
        commit = exchange.commit

        def first(*arguments: Any) -> None:
            commit(*arguments)
            exchange.connections.over("the other member is dead")

        def late(*arguments: Any) -> None:
            """Commit only once the other member has read its values, like a member that dies at this
            moment.
            """
            assert has_read.wait(30)
            commit(*arguments)

        exchange.commit = late if rank.rank else first  # type: ignore[method-assign]
        for x, ids in rank.batches((X, IDS), batch_size=8, epochs=1, seed=0, shuffle=False):
            with rank.step():
                model(x, ids).sum(1).mean().backward()
                optimizer.step()
                if rank.rank == 0:
                    average.update_parameters(model.dense)
                    found = {
                        "rows": model.table(IDS).detach(),
                        "all": model.table.export()[1],
                        "average": average.module.weight.detach().clone(),
                        "dense": model.dense.weight.detach().clone(),
                    }
                    has_read.set()
        return found

    with servers(2) as running:
        found, _ = on_ranks(2, script, strategy="ParameterServer", token=TOKEN)
    with seeded(2):
        model = Net()
    rows = model.table(IDS).detach()
    # The gradient of the mean over the samples of the sum of table * (weight x + bias).
    expected = model.dense.weight.detach() - 0.5 * rows.T @ X / 8
    torch.testing.assert_close(found["dense"], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found["average"], found["dense"])
    moved = rows - 0.5 * model.dense(X).detach() / 8
    torch.testing.assert_close(found["rows"], moved, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["all"], moved, rtol=1e-5, atol=1e-6)

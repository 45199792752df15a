"""A model that trains can be copied and saved whole, and takes nothing of the job along."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

SAMPLES, BATCH = 24, 8
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("strategy", ["AllReduce", "ParameterServer"])
def test_a_model_is_saved_whole_and_copied_between_its_steps(strategy: str) -> None:
    store = Store()

    def run(rank: Rank) -> None:
        with seeded(3):
            model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank.distribute(model, optimizer)
        if strategy == "ParameterServer":
            rank.enter_servers(names(running), store)
        saved: list[tuple[bytes, torch.nn.Module, torch.Tensor]] = []
        for batch in rank.batches(torch.arange(SAMPLES), batch_size=BATCH, epochs=1, seed=0):
            with rank.step():
                model(X[batch.data]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            file = io.BytesIO()
            torch.save(model, file)
            saved.append((file.getvalue(), copy.deepcopy(model), model(X).detach()))
        assert len(saved) == SAMPLES // BATCH
        for written, copied, expected in saved:
            assert b"springtide" not in written
            loaded = torch.load(io.BytesIO(written), weights_only=False)
            for other in (loaded, copied):
                assert all(type(parameter) is torch.nn.Parameter for parameter in other.parameters())
                assert torch.equal(other(X), expected)
        assert not torch.equal(saved[0][2], saved[1][2])

    with servers(1) as running:
        on_ranks(1, run, strategy=strategy, token=TOKEN)

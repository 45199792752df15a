"""A parameter without a gradient holds up no other one's way to the servers."""

from __future__ import annotations

import time

import pytest
import torch
from ps_members import Store, build, gradients_of, members, together
from ps_servers import TOKEN, names, servers
from torch.nn import functional as F
from worker_ranks import Rank, on_ranks, seeded

from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop
from springtide_ps.server.server import Server

SAMPLES, BATCH = 24, 8
X = torch.randn(SAMPLES, 20, generator=torch.Generator().manual_seed(1))


class Pooled(torch.nn.Module):
    """Layers, and a pooler after them that the loss does not use; in the second epoch it does."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.layers = torch.nn.ModuleList(torch.nn.Linear(20, 20) for _ in range(4))
            self.pooler = torch.nn.Linear(20, 20)

    def loss(self, x: torch.Tensor, pooled: bool) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return F.mse_loss(self.pooler(y) if pooled else y, torch.ones_like(y))


def global_batches() -> list[torch.Tensor]:
    plan, cursor, found = plan_loop(X, batch_size=BATCH, epochs=2, seed=0), Cursor(), []
    while not plan.ended(cursor):
        found.append(plan.global_ids(cursor))
        cursor = plan.advance(cursor)
    return found


def here(server: Server, asynchronous: bool) -> int:
    """How many gradients of chunks the server has got."""
    if asynchronous:
        return sum(len(client.stash.stashed) for client in server.connections)
    return server.counters.pushes


def await_gradients(server: Server, asynchronous: bool, count: int) -> None:
    deadline = time.monotonic() + 30
    while here(server, asynchronous) < count:
        assert time.monotonic() < deadline, f"{here(server, asynchronous)} of {count} gradients have come"
        time.sleep(0.002)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_unused_parameter_holds_up_its_own_bucket_only(asynchronous: bool) -> None:
    size, store = 1 if asynchronous else 2, Store()

    def train(rank: Rank, server: Server) -> list[torch.Tensor]:
        model = Pooled()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        rank.distribute(model, optimizer)
        rank.enter_servers(names([server]), store)
        home = rank.trainer.servers
        assert home is not None
        last = {name: i for i, (name, _) in enumerate(model.named_parameters())}["pooler.bias"]
        held = {chunk.bucket for chunk in home.chunks if any(piece[0] >= last - 1 for piece in chunk.pieces)}
        free = sum(chunk.bucket not in held for chunk in home.chunks)
        assert free
        for number, batch in enumerate(rank.batches(X, batch_size=BATCH, epochs=2, seed=0)):
            with rank.step():
                pooled = number >= 3
                before = 0 if asynchronous else size * number * len(home.chunks)
                model.loss(batch.data, pooled).backward()
                if number and not pooled:
                    # Before optimizer.step(), which sends what is held up (all of it in the first body).
                    await_gradients(server, asynchronous, before + size * free)
                optimizer.step()
                optimizer.zero_grad()
        rank.runtime.settle(None)
        return [parameter.detach().clone() for parameter in model.parameters()]

    with servers(1) as [server]:
        found = on_ranks(
            size,
            lambda rank: train(rank, server),
            strategy="ParameterServer",
            replication=1,
            token=TOKEN,
            consistency="Asynchronous" if asynchronous else "Synchronous",
        )
    alone = Pooled()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)

    for number, ids in enumerate(global_batches()):
        alone.loss(X[ids], number >= 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values in found:
        for mine, expected in zip(values, alone.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("early", [False, True])
def test_values_do_not_depend_on_the_order_of_pushes(early: bool) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    with servers(2) as running, members(2, make, early=early) as (a, b):
        store, both = Store(), ["m0", "m1"]
        together(
            lambda: a.begin(1, both, running, store, fresh=True),
            lambda: b.begin(1, both, running, store, fresh=True, holds=False),
        )
        reference = build(seed=sum(map(ord, "m0")))
        optimizer = make(reference)
        for member in (a, b):
            assert member.exchange.takes_any_order
            member.exchange.resolve()
        for step in range(1, 5):
            count = len(a.layout.sizes)
            b.order = sorted(range(count), key=lambda bucket, step=step: (bucket * 7 + step) % count)
            together(lambda: a.push(0, 2), lambda: b.push(1, 2))
            for member in (a, b):
                member.commit()
            gradients_of(reference, step, 0, 1)
            optimizer.step()
        for mine, theirs, expected in zip(a.values(), b.values(), reference.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-4, atol=5e-5)

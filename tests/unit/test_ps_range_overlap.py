"""Pushes and values of ranges that are on their way while the worker computes, through real servers."""

from __future__ import annotations

from typing import Any

import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

from springtide.servers.asynchronous import AsynchronousExchange

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(48, 2, generator=torch.Generator().manual_seed(2))
WIDTH = 256


def build() -> torch.nn.Sequential:
    with seeded(3):
        layers = [torch.nn.Linear(6, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 2)]
        return torch.nn.Sequential(*layers)


def exchange_of(rank: Rank) -> AsynchronousExchange:
    servers_here = rank.trainer.servers
    assert isinstance(servers_here, AsynchronousExchange)
    return servers_here


def test_the_next_body_begins_before_all_values_are_there_and_each_layer_waits_for_its_own() -> None:
    """In the first body the server's chunk with the last layer is locked until the second body's first layer
    was used: whoever waits for more than that waits in vain.
    """
    store = Store()

    def script(rank: Rank) -> list[int]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rank.distribute(model, optimizer)
        rank.enter_servers(names(running), store)
        exchange = exchange_of(rank)
        last = exchange._of_parameter[2][0]
        assert {chunk.key for chunk in exchange.chunks} > {last}
        lock = running[0].steps.shards._held[last].lock
        under_way, locked = [], False
        try:
            for number, (x, y) in enumerate(rank.batches((X, Y), batch_size=8, epochs=1, seed=0)):
                with rank.step():
                    if number == 3:
                        model[0](x)  # its values are there, or come
                        under_way.append(len(exchange._pending))
                        lock.release()
                        locked = False
                    loss = (model(x) - y).square().mean()
                    if number == 3:
                        assert not exchange._fetches  # all layers are used
                    loss.backward()
                    if number == 2:
                        locked = lock.acquire()
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            if locked:
                lock.release()
        rank.runtime.settle(None)
        assert rank.runtime.position.ledger.audit()["totalSeen"] == 48
        return under_way

    with servers(1) as running:
        how: dict[str, Any] = {"consistency": "Asynchronous", "strategy": "ParameterServer", "token": TOKEN}
        [[under_way]] = on_ranks(1, script, **how)
    assert under_way > 0

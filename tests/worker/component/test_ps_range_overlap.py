"""Gradients and values of ranges that are on their way while the worker computes, through real servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ps_loose import Loose, arrived, cut, undisturbed, until
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

from springtide.ps.backend import PsBackend

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(48, 2, generator=torch.Generator().manual_seed(2))
WIDTH = 256
HOW: dict[str, Any] = {"consistency": "Asynchronous", "strategy": "ParameterServer", "token": TOKEN}


def build() -> torch.nn.Sequential:
    with seeded(3):
        layers = [torch.nn.Linear(6, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 2)]
        return torch.nn.Sequential(*layers)


def exchange_of(rank: Rank) -> PsBackend:
    servers_here = rank.trainer.servers
    assert servers_here is not None
    assert servers_here.asynchronous
    return servers_here


@pytest.mark.parametrize("early", [True, False])
def test_next_body_begins_early_and_each_layer_awaits_its_values(
    early: bool,
) -> None:
    """The next body begins early, and each of its layers waits for its own values only.

    In the first body the server's chunk with the last layer is locked until the second body has used its
    first layer: a wait for more values than those of the first layer would not end.
    """
    store = Store()

    def script(rank: Rank) -> list[int]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rank.distribute(model, optimizer)
        rank.enter_servers(names(running), store)
        exchange = exchange_of(rank)
        batches = exchange.async_backend
        assert batches is not None
        last = exchange.context.sharding.keys_of([2])[0]
        assert {chunk.key for chunk in exchange.chunks} > {last}
        lock = running[0].sync_handler.store.shard(last).lock
        everything = sum(chunk.nbytes for chunk in exchange.chunks)
        under_way, locked = [], False
        try:
            for number, (x, y) in enumerate(rank.batches((X, Y), batch_size=8, epochs=1, seed=0)):
                with rank.step():
                    if number == 3:
                        model[0](x)  # its values are there, or come
                        under_way.append(len(batches.unanswered))
                        lock.release()
                        locked = False
                    loss = (model(x) - y).square().mean()
                    if number == 3:
                        assert len(exchange.context.values.held_keys) == len(
                            exchange.chunks
                        )  # all layers are used
                        assert early or not batches.under_way
                    loss.backward()
                    if number == 2:
                        # Else an offer would wait for the lock, and the question for a range behind it.
                        until(lambda: running[0].stashed_bytes == everything, "all gradients at the server")
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
        [[under_way]] = on_ranks(1, script, **HOW, early_values=early)
    assert under_way > 0


def test_gradients_leave_in_backward_and_the_push_brings_none() -> None:
    """Each time that backward has come to the first layer, the last one's gradient is at the server.

    But in the first body, which shows how often backward is called.
    """
    store = Store()

    def script(rank: Rank) -> tuple[int, int]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rank.distribute(model, optimizer, clip_norm=0.5)
        rank.enter_servers(names(running), store)
        size = sum(chunk.nbytes for chunk in exchange_of(rank).chunks)
        last = model[2].weight.nbytes

        def until_offered(_: torch.Tensor) -> None:
            if not rank.trainer.buckets.patient:
                until(lambda: running[0].stashed_bytes >= last, "the last layer's gradient at the server")

        model[0].weight.register_hook(until_offered)
        before = running[0].counters.bytes_in
        for x, y in rank.batches((X, Y), batch_size=8, epochs=1, seed=0):
            with rank.step():
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert not rank.trainer.buckets.patient
        rank.runtime.settle(None)
        assert running[0].stashed_bytes == 0
        return running[0].counters.bytes_in - before, 6 * size

    with servers(1) as running:
        [(received, gradients)] = on_ranks(1, script, **HOW)
    assert received == gradients


# ---- what becomes of offers

EARLY = pytest.mark.parametrize("early", [False, True])


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["None", "BF16", "TopK"])
@pytest.mark.parametrize("event", ["cut", "generation", "no room"])
@EARLY
def test_numbers_are_the_same_whatever_comes_before_the_push(
    early: bool, event: str, compression: str
) -> None:
    wanted = undisturbed(4, compression)
    with servers(2) as running:
        loose = Loose(running, compression, early)
        loose.begin()
        for body in range(4):
            loose.body()
            if body == 1 and event == "cut":
                cut(loose)
                loose.exchange.commit((1.0,), ())  # it stays committed, and is sent in the next generation
                loose.begin()
                continue
            if body == 1 and event == "no room":
                for server in running:
                    until(lambda server=server: arrived(loose, server), "all offers")
                    for client in server.connections:
                        client.stash.forget()
            loose.exchange.commit((1.0,), ())
            if body == 1 and event == "generation":
                loose.begin()  # perhaps with some of the pushes answered
        assert torch.equal(loose.values(), wanted)
        assert loose.applied_batches() == {(0, 4)}
        assert sum(server.counters.batches for server in running) == 4 * len(loose.exchange.chunks)
        loose.exchange.close()


@EARLY
def test_a_body_that_is_left_counts_nothing_and_owes_nothing(early: bool) -> None:
    wanted = undisturbed(3, "TopK")
    with servers(2) as running:
        loose = Loose(running, "TopK", early)
        loose.begin()
        for body in range(3):
            loose.body()
            if body:
                before = loose.values()
                loose.begin()  # the members have changed: its range is given out anew
                assert torch.equal(loose.values(), before)
                loose.body()
            loose.exchange.commit((1.0,), ())
        assert torch.equal(loose.values(), wanted)
        assert loose.applied_batches() == {(0, 3)}
        loose.exchange.close()


def test_offers_of_a_left_body_are_never_taken_for_the_next() -> None:
    """Though the servers have room for no other offer."""
    wanted = undisturbed(1, "None")
    with servers(2) as running:
        loose = Loose(running)
        loose.begin()
        right = loose.member.gradients

        def twice(model: torch.nn.Module, *where: int) -> None:
            right(model, *where)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= 2

        loose.member.gradients = twice
        loose.body()
        for server in running:
            until(lambda server=server: arrived(loose, server), "all offers")
            server.sync_handler.memory_limit = 1
        loose.member.gradients = right
        loose.body()
        loose.exchange.commit((1.0,), ())
        assert torch.equal(loose.values(), wanted)
        loose.exchange.close()

"""The optimizer's step on a chunk fails on its server: who asks for it is told what failed, where and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ps_members import Store, members, together
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

from springtide.ps.generation import ServersLackState
from springtide_ps.params.chunk import Chunk
from springtide_ps.wire.client import ServerClient

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(48, 2, generator=torch.Generator().manual_seed(2))
TOLD = r"chunk '.*' is lost, .*failed there: RuntimeError: no memory for it; its log has more"


@contextmanager
def failing(which: Callable[[Chunk], bool]) -> Iterator[None]:
    """Servers have done half of a step when they fail."""
    apply = Chunk.apply

    def half(self: Chunk, gradient: torch.Tensor, *args: Any, **named: Any) -> None:
        if which(self):
            self.values[: len(self.values) // 2] = 7.0
            raise RuntimeError("no memory for it")
        apply(self, gradient, *args, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Chunk, "apply", half)
        yield


@pytest.mark.parametrize(
    "how",
    [
        {"early_values": False},
        {"early_values": True},
        {"consistency": "Asynchronous", "early_values": False},
        {"consistency": "Asynchronous", "early_values": True},
        {"consistency": "BoundedStaleness", "staleness": 1},
    ],
)
def test_worker_hears_what_failed_and_parameters_stay_whole(how: dict[str, Any]) -> None:
    store = Store()
    seen: list[bool] = []

    def script(rank: Rank) -> None:
        with seeded(3):
            model = torch.nn.Sequential(torch.nn.Linear(6, 256), torch.nn.Tanh(), torch.nn.Linear(256, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rank.distribute(model, optimizer)
        rank.enter_servers(names(running), store)
        try:
            for number, (x, y) in enumerate(rank.batches((X, Y), batch_size=8, epochs=1, seed=0)):
                with rank.step():
                    if number == 2:
                        broken.append(3)
                    (model(x) - y).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            exchange = rank.trainer.servers
            assert exchange is not None
            exchange.connections.over("the test ends")
            seen.append(any(bool((value == 7.0).any()) for value in exchange.context.memory.values))

    broken: list[int] = []
    with servers(2) as running:
        told = rf"newest values of 2\.bias to 2\.weight at parameter server 127\.0\.0\.1:\d+: .*{TOLD}"
        broke = failing(lambda chunk: any(piece[0] in broken for piece in chunk.pieces))
        with broke, pytest.raises(RuntimeError, match=told):
            on_ranks(1, script, strategy="ParameterServer", token=TOKEN, **how)
        # The servers serve on.
        client = ServerClient(("127.0.0.1", running[0].port), TOKEN)
        client.update("sgd", lr=0.1).result(30)
        client.close()
    assert seen == [False]


def test_the_next_generation_hears_why_the_state_is_not_there() -> None:
    broken: list[int] = []
    with servers(1) as running, members(2, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)) as both:
        store, ids = Store(), [member.name for member in both]
        together(*(lambda m=m: m.begin(1, ids, running, store, fresh=m is both[0]) for m in both))
        for member in both:
            member.exchange.resolve()
        together(*(lambda m=m, n=n: m.push(n, 2) for n, m in enumerate(both)))
        broken.append(0)
        with failing(lambda chunk: any(piece[0] in broken for piece in chunk.pieces)):
            for member in both:
                member.commit()
            with pytest.raises(RuntimeError, match=TOLD):
                both[0].values()
        store = Store()
        with pytest.raises(ServersLackState, match=rf"held by no server, .*; {TOLD} at parameter server 127"):
            both[0].begin(2, ids[:1], running, store, step=1)

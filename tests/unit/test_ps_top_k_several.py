"""Top-k where a body has several optimizers, steps and backward passes.

What is left out is owed if a step has taken the rest. Losses are linear in the parameters, so that gradients
are those of the data alone: what has been made of the parameters and what all workers still owe are together
what one process without top-k makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop
from springtide.servers.exchange import ServerExchange

torch.set_num_threads(1)
SAMPLES, BATCH, EPOCHS, RATE = 24, 8, 3, 0.1
X = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1))
Y = torch.randn(SAMPLES, 20, generator=torch.Generator().manual_seed(2))
IDS = torch.arange(SAMPLES)


class Game:
    def __init__(self) -> None:
        with seeded(5):
            self.generator, self.critic = torch.nn.Linear(12, 20), torch.nn.Linear(12, 20)
        self.models = [self.generator, self.critic]
        self.first, self.second = (torch.optim.SGD(model.parameters(), lr=RATE) for model in self.models)
        self.scaler = torch.amp.GradScaler("cpu", 256.0, growth_interval=2)
        self.bodies = 0

    def loss(self, model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (model(X[ids]) * Y[ids]).sum(1).mean()
        return found

    def zero(self) -> None:
        for model in self.models:
            model.zero_grad()

    def values(self) -> torch.Tensor:
        return torch.cat(
            [p.detach().reshape(-1) for model in self.models for p in model.parameters()]
        ).clone()


Body = Callable[[Game, torch.Tensor], None]


def both(game: Game, ids: torch.Tensor) -> None:
    (game.loss(game.generator, ids) + game.loss(game.critic, ids)).backward()
    game.first.step()
    game.second.step()
    game.zero()


def rests(game: Game, ids: torch.Tensor) -> None:
    """One of them steps in every second body only."""
    (game.loss(game.generator, ids) + game.loss(game.critic, ids)).backward()
    game.first.step()
    if game.bodies % 2 == 0:
        game.second.step()
    game.zero()


def looked_at(game: Game, ids: torch.Tensor) -> None:
    (game.loss(game.generator, ids) + game.loss(game.critic, ids)).backward()
    game.first.step()
    with torch.no_grad():
        game.generator(X[:2])
    game.second.step()
    game.zero()


def gan(game: Game, ids: torch.Tensor) -> None:
    """The second backward makes gradients of the critic, too, which no step takes."""
    game.loss(game.critic, ids).backward()
    game.second.step()
    game.zero()
    (game.loss(game.generator, ids) + 0.5 * game.loss(game.critic, ids)).backward()
    game.first.step()
    game.zero()


def carried(game: Game, ids: torch.Tensor) -> None:
    """Gradients that are left are added to, whether a step has taken them or not; two steps take the same."""
    (game.loss(game.generator, ids) + game.loss(game.critic, ids)).backward()
    game.second.step()
    (0.5 * game.loss(game.critic, ids) + game.loss(game.generator, ids)).backward()
    for _ in range(2):
        game.first.step()
    game.second.step()
    game.zero()


def scaled(game: Game, ids: torch.Tensor) -> None:
    """One sample breaks the critic's round, whose step is left out."""
    loss = game.loss(game.critic, ids)
    game.scaler.scale(loss * float("inf") if bool((ids == 5).any()) else loss).backward()
    game.scaler.step(game.second)
    game.zero()
    game.scaler.scale(game.loss(game.generator, ids)).backward()
    game.scaler.step(game.first)
    game.scaler.update()
    game.zero()


def batches() -> Iterator[torch.Tensor]:
    plan, cursor = plan_loop(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0), Cursor()
    while not plan.ended(cursor):
        yield plan.global_ids(cursor)
        cursor = plan.advance(cursor)


def owed(exchange: ServerExchange) -> torch.Tensor:
    """By parameter's element, flat."""
    assert exchange.wire.residuals is not None
    flats = [torch.zeros(size) for size in exchange._layout.sizes]
    for chunk in exchange.chunks:
        if (kept := exchange.wire.residuals.kept(chunk.key)) is not None:
            flats[chunk.bucket][chunk.start : chunk.stop] = kept
    slots = zip(exchange._layout.fields, exchange._layout.slots, strict=True)
    return torch.cat([flats[slot.bucket][slot.offset : slot.offset + item.numel] for item, slot in slots])


def train(
    body: Body, size: int, how: dict[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """By worker: the values, and what it owes in the end and owed in the beginning."""
    store = Store()

    def script(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        game = Game()
        tracked = {"scaler": game.scaler} if body is scaled else {}
        rank.distribute(game.models, [game.first, game.second], **tracked)
        rank.enter_servers(names(running), store)
        exchange = rank.trainer.servers
        assert exchange is not None
        assert exchange.wire.residuals is not None
        for number, chunk in enumerate(exchange.chunks):
            generator = torch.Generator().manual_seed(100 * rank.rank + number)
            debt = torch.zeros(chunk.stop - chunk.start)
            for _, _, start, stop in chunk.pieces:
                debt[start:stop] = torch.randn(stop - start, generator=generator)
            exchange.wire.residuals._keep(chunk.key, debt)
        before = owed(exchange)
        for batch in rank.batches(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0):
            with rank.step():
                game.bodies = rank.trainer._running().deal.number
                body(game, batch.data)
        rank.runtime.settle(None)
        return game.values(), owed(exchange), before

    settings = {"compression": "TopK", "top_k_ratio": 0.2, **how}
    with servers(2) as running:
        return on_ranks(size, script, strategy="ParameterServer", token=TOKEN, **settings)


@pytest.mark.parametrize(
    ("body", "size", "how"),
    [
        *((body, 2, {}) for body in (both, rests, looked_at, gan, carried, scaled)),
        *((body, 3, {"group_size": 2}) for body in (rests, gan, carried, scaled)),
        *((body, 1, {"consistency": "Asynchronous"}) for body in (both, rests, looked_at, gan, scaled)),
        *((body, 2, {"consistency": "BoundedStaleness", "group_size": 2}) for body in (both, rests)),
    ],
)
def test_what_is_not_sent_is_owed(body: Body, size: int, how: dict[str, Any]) -> None:
    plain = Game()
    for number, ids in enumerate(batches(), start=1):
        plain.bodies = number
        body(plain, ids)
    results = train(body, size, how)
    left = torch.zeros(0)
    for values, after, before in results:
        assert torch.equal(values, results[0][0])
        left = after - before if not len(left) else left + after - before
    assert float(left.abs().max()) > 0.01
    assert not torch.allclose(results[0][0], plain.values(), rtol=0, atol=1e-3)
    torch.testing.assert_close(results[0][0] - RATE * left, plain.values(), rtol=0, atol=2e-5)

"""Two models with an optimizer each, whose gradients are those of the data alone, and bodies that train them.

The parameters after compression with error feedback, plus the residuals of all workers, equal the parameters
of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from worker_ranks import seeded

from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop

SAMPLES, BATCH, EPOCHS, RATE = 24, 8, 3, 0.1
X = torch.randn(SAMPLES, 24, generator=torch.Generator().manual_seed(1))
Y = torch.randn(SAMPLES, 20, generator=torch.Generator().manual_seed(2))
IDS = torch.arange(SAMPLES)


class Game:
    def __init__(self) -> None:
        with seeded(5):
            self.generator, self.critic = torch.nn.Linear(24, 20), torch.nn.Linear(24, 20)
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


def left(game: Game, ids: torch.Tensor) -> None:
    """Add gradients to some that no step has taken yet, and step."""
    (game.loss(game.generator, ids) + game.loss(game.critic, ids)).backward()
    game.second.step()
    game.second.zero_grad()
    (0.5 * game.loss(game.critic, ids) + game.loss(game.generator, ids)).backward()
    for _ in range(2):
        game.first.step()
    game.zero()


def counted(body: Body, owed: torch.Tensor) -> torch.Tensor:
    """Return the residuals, multiplied by how many steps take each.

    Args:
        owed: the residuals, flat, with an element per parameter's element.
    """
    often = torch.ones_like(owed)
    often[: len(owed) // 2] = 2.0 if body in (carried, left) else 1.0
    return owed * often


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


def alone(body: Body) -> Game:
    """Return the models after all batches in one process."""
    game = Game()
    for number, ids in enumerate(batches(), start=1):
        game.bodies = number
        body(game, ids)
    return game

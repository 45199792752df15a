"""A game of two optimizers, one of which trains a table, in bodies with several backward passes and steps; in
plain torch, and without common steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from ps_members import Store
from ps_servers import names
from torch.nn import functional as F
from worker_ranks import Rank, seeded

import springtide
from springtide_ps.server.server import Server

SAMPLES, BATCH, EPOCHS, ROWS = 24, 8, 2, 7
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
WORDS = torch.randint(0, ROWS, (SAMPLES, 2), generator=torch.Generator().manual_seed(2))


class Game:
    """A generator of points from words, which has a table, and a critic. plain: of torch's own modules."""

    def __init__(self, plain: bool = False) -> None:
        words: Any = springtide.Embedding(ROWS, 3, seed=4, slices=3)
        if plain:
            words = torch.nn.Embedding.from_pretrained(words.to_dense(), freeze=False)
        with seeded(5):
            layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)]
            self.critic = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.words = words
        self.generator = torch.nn.Sequential(words, torch.nn.Flatten(), *layers)
        self.models = [self.generator, self.critic]
        self.adagrad = torch.optim.Adagrad(self.generator.parameters(), lr=0.05)
        self.sgd = torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", 256.0, growth_interval=2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.sgd, 0.8)
        self.seen: list[torch.Tensor] = []
        self.rank = 0

    def judge(self, x: torch.Tensor, real: bool) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(self.critic(x), torch.full((len(x), 1), float(real)))

    def values(self) -> torch.Tensor:
        rows = self.words.to_dense() if hasattr(self.words, "to_dense") else self.words.weight
        dense = [p for model in self.models for p in model.parameters() if p is not self.words.weight]
        return torch.cat([item.detach().reshape(-1) for item in (rows, *dense)]).clone()


Clip = Callable[[torch.optim.Optimizer], None]
Body = Callable[[Game, torch.Tensor, Clip], None]


def gan(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """The critic's step, then the generator's, judged by what that has made."""
    fake = game.generator(WORDS[ids])
    game.sgd.zero_grad()
    (game.judge(X[ids], True) + game.judge(fake.detach(), False)).backward()
    clip(game.sgd)
    game.sgd.step()
    game.adagrad.zero_grad()
    game.judge(fake, True).backward()
    clip(game.adagrad)
    game.adagrad.step()
    game.schedule.step()


def carried(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """The critic's gradients are zeroed where they are, the generator's are added to."""
    (game.judge(X[ids], True) + game.judge(game.generator(WORDS[ids]), False)).backward()
    clip(game.sgd)
    game.sgd.step()
    game.sgd.zero_grad(set_to_none=False)
    game.judge(game.generator(WORDS[ids]), True).backward()
    clip(game.adagrad)
    game.adagrad.step()
    game.adagrad.zero_grad()
    game.sgd.zero_grad()


def looked_at(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """One backward; what its steps have made is looked at after each, rows too."""
    (game.judge(X[ids], True) + game.judge(game.generator(WORDS[ids]), False)).backward()
    for optimizer in (game.adagrad, game.sgd):
        clip(optimizer)
        optimizer.step()
        with torch.no_grad():
            game.seen += [game.words(WORDS[ids]).flatten(), game.critic(X[ids]).flatten()]
    game.sgd.zero_grad()
    game.adagrad.zero_grad()


def scaled(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """One sample breaks the critic's round, and not the generator's."""
    fake = game.generator(WORDS[ids])
    game.sgd.zero_grad()
    loss = game.judge(X[ids], True) + game.judge(fake.detach(), False)
    game.scaler.scale(loss * float("inf") if bool((ids == 5).any()) else loss).backward()
    game.scaler.step(game.sgd)
    game.adagrad.zero_grad()
    game.scaler.scale(game.judge(fake, True)).backward()
    game.scaler.step(game.adagrad)
    game.scaler.update()


def one_rests(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """One optimizer makes no step, and the other's is looked at."""
    (game.judge(X[ids], True) + game.judge(game.generator(WORDS[ids]), False)).backward()
    clip(game.sgd)
    game.sgd.step()
    with torch.no_grad():
        game.seen.append(game.critic(X[ids]).flatten())
    game.sgd.zero_grad()
    game.adagrad.zero_grad()


def one_word(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """The second round reaches a row of one slice; all others had gradients in the first one."""
    (game.judge(X[ids], True) + game.judge(game.generator(WORDS[ids]), False)).backward()
    clip(game.sgd)
    game.sgd.step()
    game.adagrad.zero_grad()
    game.judge(game.generator(torch.full((2, 2), 3)), True).backward()
    clip(game.adagrad)
    game.adagrad.step()
    game.sgd.zero_grad()
    game.adagrad.zero_grad()


def recovers(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """Overflow in the first backward pass, which the scaler leaves out, and step after the second one."""
    for number in range(2):
        game.sgd.zero_grad()
        loss = game.judge(X[ids], True)
        game.scaler.scale(loss if number else loss * float("inf")).backward()
        game.scaler.step(game.sgd)
        game.scaler.update()
    game.scaler.update(256.0)


def closures(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    def loss(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        found = game.judge(X[ids], True) + game.judge(game.generator(WORDS[ids]), False)
        found.backward()
        clip(optimizer)
        return found

    for optimizer in (game.sgd, game.adagrad):
        optimizer.step(partial(loss, optimizer))
    game.sgd.zero_grad()


def plain(body: Body, order: Sequence[torch.Tensor], clip_norm: float | None) -> Game:
    game = Game(plain=True)

    def clip(optimizer: torch.optim.Optimizer) -> None:
        if clip_norm is not None:
            own = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(own, clip_norm)

    for ids in order:
        body(game, ids, clip)
    return game


def play(
    rank: Rank, body: Body, clip_norm: float | None, running: list[Server], store: Store
) -> tuple[Game, torch.Tensor, list[torch.Tensor], dict[str, int]]:
    game, order = Game(), list[torch.Tensor]()
    game.rank = rank.rank
    tracked: dict[str, Any] = {"schedule": game.schedule} if body is gan else {}
    tracked |= {"scaler": game.scaler} if body in (scaled, recovers) else {}
    rank.distribute(game.models, [game.adagrad, game.sgd], clip_norm=clip_norm, **tracked)
    rank.enter_servers(names(running), store)
    for batch in rank.batches(torch.arange(SAMPLES), batch_size=BATCH, epochs=EPOCHS, seed=0):
        with rank.step():
            order.append(batch.data)
            body(game, batch.data, lambda optimizer: None)
    rank.runtime.settle(None)
    return game, game.values(), order, rank.runtime.position.ledger.audit()

"""Several backward passes and steps in one body, with parameters on servers: the numbers of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from ps_snapshots import states_on
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from worker_ranks import Rank, on_ranks, seeded

from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop
from springtide_ps.server.server import Server

SAMPLES, BATCH, EPOCHS = 24, 8, 2
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2))
IDS = torch.arange(SAMPLES)


class Game:
    """Generator and critic, an average of the generator, and a schedule; how they play, a test says."""

    def __init__(self) -> None:
        with seeded(5):
            self.generator = torch.nn.Sequential(
                torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
            )
            self.critic = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.models = [self.generator, self.critic]
        self.adam = torch.optim.Adam(self.generator.parameters(), lr=0.02)
        self.sgd = torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.9)
        self.average = AveragedModel(self.generator, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        self.scaler = torch.amp.GradScaler("cpu", 256.0, growth_interval=2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.sgd, 0.8)

    def judge(self, x: torch.Tensor, real: bool) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(self.critic(x), torch.full((len(x), 1), float(real)))

    def values(self) -> torch.Tensor:
        parts = [*self.models, self.average.module]
        return torch.cat([p.detach().reshape(-1) for model in parts for p in model.parameters()]).clone()


Clip = Callable[[torch.optim.Optimizer], None]
Body = Callable[[Game, torch.Tensor, Clip], None]


def gan(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """The usual two rounds; the average is of what the generator's step has made."""
    fake = game.generator(NOISE[ids])
    game.sgd.zero_grad()
    (game.judge(X[ids], True) + game.judge(fake.detach(), False)).backward()
    clip(game.sgd)
    game.sgd.step()
    game.adam.zero_grad()
    game.judge(fake, True).backward()
    clip(game.adam)
    game.adam.step()
    game.average.update_parameters(game.generator)
    game.schedule.step()


def critics(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """Three steps of the critic for one of the generator, which every second body leaves out."""
    for _ in range(3):
        game.sgd.zero_grad(set_to_none=False)
        (game.judge(X[ids], True) + game.judge(game.generator(NOISE[ids]).detach(), False)).backward()
        clip(game.sgd)
        game.sgd.step()
    if int(game.schedule.last_epoch) % 2 == 0:
        game.adam.zero_grad()
        game.judge(game.generator(NOISE[ids]), True).backward()
        clip(game.adam)
        game.adam.step()
    game.schedule.step()


def carried(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """Gradients that are not zeroed are added to, and a step is made twice with the same ones."""
    (game.judge(X[ids], True) + game.judge(game.generator(NOISE[ids]), False)).backward()
    clip(game.sgd)
    game.sgd.step()
    game.sgd.zero_grad()
    game.judge(game.generator(NOISE[ids]), True).backward()
    clip(game.adam)
    game.adam.step()
    game.adam.step()
    clip(game.sgd)
    game.sgd.step()
    game.adam.zero_grad()
    game.sgd.zero_grad()


def closures(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    losses = []

    def closure() -> torch.Tensor:
        game.sgd.zero_grad()
        loss = game.judge(X[ids], True) + game.judge(game.generator(NOISE[ids]).detach(), False)
        loss.backward()
        clip(game.sgd)
        return loss

    for _ in range(2):
        losses.append(float(game.sgd.step(closure).detach()))
    assert losses[1] < losses[0]


def averages(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """One backward, and values that are read after each step."""
    (game.judge(X[ids], True) + game.judge(game.generator(NOISE[ids]), False)).backward()
    for optimizer in (game.sgd, game.adam):
        clip(optimizer)
        optimizer.step()
        game.average.update_parameters(game.generator)
    game.sgd.zero_grad()
    game.adam.zero_grad()


def scaled(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """A GradScaler for both rounds; one sample breaks the critic's first."""
    fake = game.generator(NOISE[ids])
    game.sgd.zero_grad()
    loss = game.judge(X[ids], True) + game.judge(fake.detach(), False)
    game.scaler.scale(loss * float("inf") if bool((ids == 5).any()) else loss).backward()
    game.scaler.step(game.sgd)
    game.adam.zero_grad()
    game.scaler.scale(game.judge(fake, True)).backward()
    game.scaler.step(game.adam)
    game.scaler.update()


def left_twice(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """Two steps with the same gradients, which are then added to."""
    game.judge(X[ids], True).backward()
    for _ in range(2):
        clip(game.sgd)
        game.sgd.step()
    game.judge(game.generator(NOISE[ids]), False).backward()
    clip(game.sgd)
    game.sgd.step()
    game.sgd.zero_grad()
    game.adam.zero_grad()


def scaled_twice(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """The second step finds the gradients as the scaler has left them."""
    game.sgd.zero_grad()
    game.scaler.scale(game.judge(X[ids], True)).backward()
    game.scaler.step(game.sgd)
    game.sgd.step()
    game.scaler.update()


def batches() -> Iterator[torch.Tensor]:
    plan, cursor = plan_loop(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0), Cursor()
    while not plan.ended(cursor):
        yield plan.global_ids(cursor)
        cursor = plan.advance(cursor)


def plain(body: Body, clip_norm: float | None) -> Game:
    game = Game()

    def clip(optimizer: torch.optim.Optimizer) -> None:
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip_norm)

    for ids in batches():
        body(game, ids, clip)
    return game


def play(
    rank: Rank, body: Body, clip_norm: float | None, running: list[Server], store: Store
) -> tuple[torch.Tensor, dict[str, int], Any]:
    game = Game()
    tracked: dict[str, Any] = {"schedule": game.schedule}
    if body in (gan, averages):
        tracked["average"] = game.average
    if body in (scaled, scaled_twice):
        tracked["scaler"] = game.scaler
    rank.distribute(game.models, [game.adam, game.sgd], clip_norm=clip_norm, **tracked)
    if rank.trainer.servers is not None:
        rank.enter_servers(names(running), store)
    for batch in rank.batches(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0):
        with rank.step():
            body(game, batch.data, lambda optimizer: None)
    rank.runtime.settle(None)
    state = states_on(rank.trainer.servers) if rank.trainer.servers is not None and rank.rank == 0 else {}
    return game.values(), rank.runtime.position.ledger.audit(), state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "size", "clip_norm", "group_size"),
    [
        (gan, 1, None, 1),
        (gan, 3, None, 1),
        (gan, 2, 0.05, 1),
        (critics, 2, 0.05, 1),
        (critics, 3, None, 1),
        (carried, 2, None, 1),
        (carried, 2, 0.05, 1),
        (closures, 2, None, 1),
        (averages, 2, 0.05, 1),
        (averages, 3, None, 1),
        (scaled, 2, None, 1),
        (left_twice, 2, 0.05, 1),
        (scaled_twice, 2, None, 1),
        # Of three, two are in one group and one is in another.
        (gan, 3, None, 2),
        (gan, 2, 0.05, 2),
        (critics, 3, 0.05, 2),
        (critics, 3, None, 3),
        (carried, 3, 0.05, 2),
        (carried, 2, None, 2),
        (closures, 3, None, 2),
        (averages, 3, 0.05, 2),
        (averages, 3, None, 3),
        (scaled, 3, None, 2),
        (left_twice, 3, 0.05, 2),
        (scaled_twice, 3, None, 2),
    ],
)
def test_the_numbers_of_plain_torch(body: Body, size: int, clip_norm: float | None, group_size: int) -> None:
    expected = plain(body, clip_norm)
    with servers(2) as running:
        store = Store()
        results = on_ranks(
            size,
            lambda rank: play(rank, body, clip_norm, running, store),
            strategy="ParameterServer",
            token=TOKEN,
            group_size=group_size,
        )
    wanted = [expected.adam.state[p] for p in expected.generator.parameters()]
    wanted += [expected.sgd.state[p] for p in expected.critic.parameters()]
    wanted = [entry for entry in wanted if entry]
    for values, audit, _ in results:
        assert torch.equal(values, results[0][0])
        torch.testing.assert_close(values, expected.values(), rtol=0, atol=2e-5)
        # A sample counts once, although its gradients went into several rounds.
        assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (SAMPLES * EPOCHS, 0, 0)
        assert audit["skipped"] == (EPOCHS if body is scaled else 0)
    state = results[0][2]
    for ours, theirs in zip([state[index] for index in sorted(state)], wanted, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("body", [gan, critics, carried, closures, averages])
def test_the_numbers_of_all_reduce(body: Body) -> None:
    store, how = Store(), {"strategy": "ParameterServer", "token": TOKEN}
    with servers(2) as running:
        ours = on_ranks(2, lambda rank: play(rank, body, 0.05, running, store), **how)
    theirs = on_ranks(2, lambda rank: play(rank, body, 0.05, [], store))
    torch.testing.assert_close(ours[0][0], theirs[0][0], rtol=0, atol=2e-5)


def plainly(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    (game.judge(X[ids], True) + game.judge(game.generator(NOISE[ids]), False)).backward()
    game.sgd.step()
    game.adam.step()
    game.sgd.zero_grad()
    game.adam.zero_grad()


@pytest.mark.parametrize(
    ("body", "group_size", "call"),
    [
        (plainly, 1, ""),
        (gan, 1, ""),
        (averages, 1, ""),
        (closures, 1, "the same optimizer's step() twice"),
        (critics, 1, "the same optimizer's step() twice"),
        (plainly, 2, ""),
        (gan, 2, ""),
        (averages, 2, ""),
        (critics, 2, "the same optimizer's step() twice"),
    ],
)
def test_a_body_says_when_it_needs_common_steps(body: Body, group_size: int, call: str) -> None:
    """A body that needs common steps says so, and its job is never asked for another consistency."""
    store, said = Store(), list[str]()

    def script(rank: Rank) -> None:
        game = Game()
        rank.distribute(game.models, [game.adam, game.sgd])
        rank.enter_servers(names(running), store)
        servers_of: Any = rank.trainer.servers
        servers_of.call_when_bound_to_steps(said.append)
        for batch in rank.batches(IDS, batch_size=BATCH, epochs=1, seed=0):
            with rank.step():
                body(game, batch.data, lambda optimizer: None)
        rank.runtime.settle(None)

    with servers(1) as running:
        on_ranks(1, script, strategy="ParameterServer", token=TOKEN, group_size=group_size)
    assert bool(said) is bool(call)
    assert call in "".join(said[:1])


@pytest.mark.parametrize("who", [0, 1])
def test_values_looked_at_by_one_member_reach_its_group_too(who: int) -> None:
    """A member that looks at a step's values fetches those itself; the group passes the other ones on."""
    store, seen = Store(), list[torch.Tensor]()

    def script(rank: Rank) -> torch.Tensor:
        game = Game()
        rank.distribute(game.models, [game.adam, game.sgd])
        rank.enter_servers(names(running), store)
        for batch in rank.batches(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0):
            with rank.step():
                plainly(game, batch.data, lambda optimizer: None)
                if rank.rank == who:
                    with torch.no_grad():
                        seen.append(game.critic(X[:2]))
        rank.runtime.settle(None)
        return game.values()

    with servers(2) as running:
        results = on_ranks(3, script, strategy="ParameterServer", token=TOKEN, group_size=3)
    expected, game = list[torch.Tensor](), Game()
    for ids in batches():
        game.adam.zero_grad()
        game.sgd.zero_grad()
        plainly(game, ids, lambda optimizer: None)
        with torch.no_grad():
            expected.append(game.critic(X[:2]))
    for values in results:
        assert torch.equal(values, results[0])
        torch.testing.assert_close(values, game.values(), rtol=0, atol=2e-5)
    for mine, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


def unseen(game: Game, ids: torch.Tensor) -> None:
    """Train the way `gan` does, but do not look at the values that the generator's step makes."""
    fake = game.generator(NOISE[ids])
    game.sgd.zero_grad()
    (game.judge(X[ids], True) + game.judge(fake.detach(), False)).backward()
    game.sgd.step()
    game.adam.zero_grad()
    game.judge(fake, True).backward()
    game.adam.step()


def test_servers_send_what_is_not_looked_at_once_for_a_group() -> None:
    """Each member of a group fetches the critic within the body; the generator is passed along."""

    def sent(group_size: int) -> tuple[int, int]:
        store = Store()

        def script(rank: Rank) -> int:
            game = Game()
            rank.distribute(game.models, [game.adam, game.sgd])
            rank.enter_servers(names(running), store)
            for batch in rank.batches(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0):
                with rank.step():
                    unseen(game, batch.data)
            rank.runtime.settle(None)
            exchange = rank.trainer.servers
            assert exchange is not None
            return sum(chunk.nbytes for chunk in exchange.chunks if chunk.optimizer == 0)

        with servers(2) as running:
            how = {"strategy": "ParameterServer", "token": TOKEN, "early_values": False}
            generator = on_ranks(4, script, group_size=group_size, **how)[0]
        return sum(server.counters.bytes_out for server in running), generator

    alone, generator = sent(1)
    steps = EPOCHS * SAMPLES // BATCH
    for size in (2, 4):
        assert alone - sent(size)[0] == steps * (4 - 4 // size) * generator

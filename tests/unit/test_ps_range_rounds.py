"""Several backward passes and steps in a body without common steps: one worker makes the numbers of plain
torch, and each range is once in each chunk and slice, whatever becomes of a body between two of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from ps_members import Member, Store, together
from ps_servers import TOKEN, names, servers
from torch.nn import functional as F
from worker_ranks import Rank, on_ranks, seeded

import springtide
from springtide.errors import UsageError
from springtide.servers.asynchronous import AsynchronousExchange
from springtide.servers.links import ServerError
from springtide.servers.wire import RangeWire
from springtide.tables.local import merged
from springtide_ps.server import Server

torch.set_num_threads(1)
SAMPLES, BATCH, EPOCHS, ROWS = 24, 8, 2, 7
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
WORDS = torch.randint(0, ROWS, (SAMPLES, 2), generator=torch.Generator().manual_seed(2))
HOW: dict[str, Any] = {"strategy": "ParameterServer", "token": TOKEN}


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
    """What the scaler has left out in the first round steps in the second one."""
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


@pytest.mark.parametrize(
    ("body", "consistency", "clip_norm"),
    [
        (gan, "Asynchronous", None),
        (gan, "BoundedStaleness", 0.05),
        (carried, "Asynchronous", None),
        (carried, "Asynchronous", 0.05),
        (looked_at, "Asynchronous", 0.05),
        (looked_at, "BoundedStaleness", None),
        (scaled, "Asynchronous", None),
        (one_rests, "Asynchronous", 0.05),
        (one_word, "Asynchronous", None),
        (recovers, "Asynchronous", None),
        (closures, "Asynchronous", 0.05),
    ],
)
def test_one_worker_makes_the_numbers_of_plain_torch(
    body: Body, consistency: str, clip_norm: float | None
) -> None:
    with servers(2) as running:
        [(game, values, order, audit)] = on_ranks(
            1,
            lambda rank: play(rank, body, clip_norm, running, Store()),
            consistency=consistency,
            **HOW,
        )
    expected = plain(body, order, clip_norm)
    torch.testing.assert_close(values, expected.values(), rtol=0, atol=2e-5)
    assert len(game.seen) == len(expected.seen)
    for mine, theirs in zip(game.seen, expected.seen, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)
    assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (SAMPLES * EPOCHS, 0, 0)
    assert audit["skipped"] == (EPOCHS if body is scaled else 0)


@pytest.mark.parametrize(
    ("body", "consistency"),
    [(gan, "Asynchronous"), (looked_at, "BoundedStaleness"), (carried, "Asynchronous")],
)
def test_of_two_workers_each_range_is_once_in_all(body: Body, consistency: str) -> None:
    store = Store()
    with servers(2) as running:
        results = on_ranks(
            2, lambda rank: play(rank, body, None, running, store), consistency=consistency, **HOW
        )
        pushed = sum(server.counters.ranges for server in running)
    chunks = len(running_chunks(results[0][0]))
    assert pushed == chunks * EPOCHS * SAMPLES // BATCH
    for _, values, _, audit in results:
        assert torch.equal(values, results[0][1])
        assert values.isfinite().all()
        assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (SAMPLES * EPOCHS, 0, 0)
    taken = sorted(tuple(ids.tolist()) for _, _, order, _ in results for ids in order)
    assert len(taken) == EPOCHS * SAMPLES // BATCH  # nobody computed a range that another one had


def running_chunks(game: Game) -> set[str]:
    """Names of all chunks and slices of the game: the same for all workers."""
    rank_free: dict[str, set[str]] = {}

    def script(rank: Rank) -> None:
        other = Game()
        rank.distribute(other.models, [other.adagrad, other.sgd])
        servers_of: Any = rank.trainer.servers
        rank_free["keys"] = set(servers_of._keys_in_order())

    on_ranks(1, script, consistency="Asynchronous", **HOW)
    return rank_free["keys"]


def twice(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    gan(game, ids, clip)
    game.judge(X[ids], True).backward()
    game.sgd.step()


def test_an_optimizer_makes_one_step_in_a_body() -> None:
    with (
        servers(1) as running,
        pytest.raises(UsageError, match=r"a second step of the same optimizer \(SGD\) in one body"),
    ):
        on_ranks(1, lambda rank: play(rank, twice, None, running, Store()), consistency="Asynchronous", **HOW)


def test_a_backward_through_what_a_step_has_changed_fails_as_in_torch() -> None:
    def stale(game: Game, ids: torch.Tensor, clip: Clip) -> None:
        loss = game.judge(game.generator(WORDS[ids]), True)
        game.judge(X[ids], True).backward()
        game.sgd.step()
        loss.backward()

    with servers(1) as running, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        on_ranks(1, lambda rank: play(rank, stale, None, running, Store()), consistency="Asynchronous", **HOW)


# ---- by hand


class Net(torch.nn.Module):
    """A table and a layer, an optimizer each."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.words = springtide.Embedding(None, 3, seed=1, slices=2)
            self.layer = torch.nn.Linear(3, 40)


def gradients_of(model: Net, step: int, part: int, parts: int) -> None:
    """Of both, whatever the values are. part: number of the round."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(100 * step + part)
    (model.words(torch.arange(step, step + 4)) * torch.randn(4, 3, generator=generator)).sum().backward()
    model.layer.weight.grad = torch.randn(40, 3, generator=generator)
    model.layer.bias.grad = torch.randn(40, generator=generator)


class Loose:
    """A worker by hand. Its bodies step the table first, or the layer, see that, and step the other one."""

    def __init__(self, name: str = "m0", table_first: bool = False, replication: int = 1) -> None:
        made: list[torch.optim.Optimizer] = []

        def exchange(named: Mapping[str, torch.nn.Parameter], layout: Any, _: Any, **how: Any) -> Any:
            tables = [p for n, p in named.items() if n.startswith("words")]
            layers = [p for n, p in named.items() if n.startswith("layer")]
            made.extend(torch.optim.SGD(own, lr=0.1) for own in (tables, layers))
            return AsynchronousExchange(named, layout, made, **how)

        self.member = Member(
            name,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            kind=exchange,
            build=Net,
            gradients=gradients_of,
            replication=replication,
            wire=RangeWire,
        )
        self.exchange: Any = self.member.exchange
        self.first, self.second = made if table_first else reversed(made)
        self.generation = 0
        for index, handle in self.exchange.tables.handles.items():
            handle.managed, handle.read = True, partial(self.exchange.read_rows, index)
            handle.read_all = partial(self.exchange.all_rows, index)

    def begin(self, running: list[Server], members: tuple[str, ...] = ("m0",), store: Any = None) -> None:
        self.generation += 1
        fresh = self.generation == 1
        self.member.begin(self.generation, list(members), running, store or Store(), fresh=fresh)

    def backward(self, number: int) -> None:
        """A round's gradients leave."""
        exchange, model = self.exchange, self.member.model
        gradients_of(model, self.member.step + 1, number, 1)  # type: ignore[arg-type]
        for bucket, size in enumerate(self.member.layout.sizes):
            flat = torch.zeros(size)
            for index in self.member.layout.members[bucket]:
                gradient = list(model.parameters())[index].grad
                offset = self.member.layout.slots[index].offset
                if gradient is not None:
                    flat[offset : offset + gradient.numel()] = gradient.flatten()
            exchange.push(flat)
        for index, handle in exchange.tables.handles.items():
            exchange.stage_rows(index, *merged(handle.take(), handle.dim))
        exchange.prepare()

    def half(self, wanted: int | None = None, see: bool = True) -> None:
        """The body's first round, and its step. see: what that made is looked at."""
        lease = self.exchange.lease(0, 100)
        assert lease.number is not None
        assert wanted in (None, lease.number)
        self.exchange.settle()
        self.member.step = lease.number
        self.exchange.begin_step()
        self.backward(0)
        self.exchange.stage(self.first, None, 1.0, 1.0, (), ())
        if see:
            self.exchange.settle()

    def rest(self) -> None:
        self.exchange.begin_round()
        self.backward(1)
        self.exchange.stage(self.second, None, 1.0, 1.0, (), ())
        self.exchange.commit(1.0, ())

    @property
    def first_keys(self) -> list[str]:
        """What the first step of a body changes."""
        number = self.exchange.optimizers.all.index(self.first)
        keys = self.exchange._keys_in_order()
        return [key for key in keys if self.exchange._owner_of(key) == number]

    def books(self) -> set[tuple[int, ...]]:
        return {tuple(book.ranges.to_json()) for book in self.exchange._books().values()}

    def values(self) -> list[torch.Tensor]:
        self.exchange.settle()
        model: Any = self.member.model
        dense = [item.detach().clone() for item in model.layer.parameters()]
        return [*model.words.export(), *dense]


def undisturbed(bodies: int, table_first: bool) -> list[torch.Tensor]:
    with servers(2) as running:
        loose = Loose(table_first=table_first)
        loose.begin(running)
        loose.exchange.resolve()
        for number in range(bodies):
            loose.half(number, see=number % 2 == 0)
            loose.rest()
        values = loose.values()
        assert loose.books() == {(0, bodies)}
        assert sum(server.counters.repeated for server in running) == 0
        loose.exchange.close()
        return values


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("table_first", [False, True])
@pytest.mark.parametrize("event", ["generation", "cut", "no room", "unanswered"])
def test_whatever_happens_between_two_steps_each_range_is_once_in_each(event: str, table_first: bool) -> None:
    wanted = undisturbed(3, table_first)
    with servers(2) as running:
        loose = Loose(table_first=table_first)
        loose.begin(running)
        loose.exchange.resolve()
        total = len(loose.exchange._keys_in_order())
        loose.half(0)
        loose.rest()
        loose.half(1, see=event == "generation")
        if event == "no room":
            # What was offered is gone: it is asked for whole. Offers are noted by the thread that reads.
            for server in running:
                for client in list(server._clients.values()):
                    client.offers.take = lambda *_: None  # type: ignore[method-assign]
        if event == "cut":
            for server in running:
                for client in list(server._clients.values()):
                    client.stream.abort()
            with pytest.raises((ServerError, ConnectionError)):
                loose.exchange.settle()
        if event == "unanswered":
            # The push is on its way when the generation ends.
            loose.exchange._receive = lambda key, end: (_ for _ in ()).throw(ServerError("it is over"))
            with pytest.raises(ServerError, match="it is over"):
                loose.exchange.settle()
            del loose.exchange._receive
        if event != "no room":
            loose.begin(running)  # the body is left, and its range given out anew
            loose.exchange.resolve()
            loose.half(1)
        loose.rest()
        loose.half(2)
        loose.rest()
        assert_equal(loose.values(), wanted)
        assert loose.books() == {(0, 3)}
        assert sum(server.counters.ranges for server in running) == 3 * total
        if event == "generation":
            assert sum(server.counters.repeated for server in running) == len(loose.first_keys)
        loose.exchange.close()


@pytest.mark.parametrize("replication", [1, 2])
def test_a_worker_dies_between_two_steps_and_another_one_completes_its_range(replication: int) -> None:
    wanted = undisturbed(3, table_first=False)
    with servers(2) as running:
        first, second = Loose("m0", replication=replication), Loose("m1", replication=replication)
        both, store = ("m0", "m1"), Store()
        together(lambda: first.begin(running, both, store), lambda: second.begin(running, both, store))
        together(first.exchange.resolve, second.exchange.resolve)
        first.half(0)
        first.exchange.close()
        second.half(1)
        second.rest()
        second.exchange.settle()
        running_on = running
        if replication == 2:  # one of the two servers dies too
            running[0].close(30.0)
            running_on = running[1:]
        second.begin(running_on, ("m1",))
        second.exchange.resolve()
        second.half(0)
        second.rest()
        second.half(2)
        second.rest()
        assert_equal(second.values(), wanted)
        assert second.books() == {(0, 3)}
        second.exchange.close()

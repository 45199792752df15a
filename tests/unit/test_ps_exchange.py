"""Steps through real servers over real sockets: members are threads, their side reduction is a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ps_servers import TOKEN, servers
from torch.nn import functional as F

from springtide.errors import UsageError
from springtide.exchange.groups import Group
from springtide.exchange.layout import Field, plan_layout
from springtide.exchange.store import StreamStore
from springtide.servers.exchange import ServerExchange, ServersLackState
from springtide.servers.leading import Place
from springtide.servers.links import ServerError
from springtide.servers.plan import LackError, arrange, place_fresh
from springtide.servers.recipe import optimizer_name
from springtide_ps.server import Server

torch.set_num_threads(1)


def build(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(5, 40), torch.nn.Tanh()]
    for _ in range(5):
        layers += [torch.nn.Linear(40, 40), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(40, 3))


def gradients_of(model: torch.nn.Module, step: int, part: int, parts: int) -> None:
    """Gradients of the mean over a seeded batch of 12, from this part's samples only."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 5, generator=generator), torch.randn(12, 3, generator=generator)
    own = slice(part * 12 // parts, (part + 1) * 12 // parts)
    model.zero_grad()
    (F.mse_loss(model(x[own]), y[own], reduction="sum") / y.numel()).backward()


class Store(StreamStore):
    """One store that all members share."""

    def __init__(self) -> None:
        super().__init__(lambda key, value: None, ["all"], 30.0)


class Member:
    """What a worker does around the exchange, in a few lines."""

    def __init__(self, name: str, optimizer: Callable[[Any], torch.optim.Optimizer], **options: Any) -> None:
        self.name = name
        self.model = build(seed=sum(map(ord, name)))
        self.optimizer = optimizer(self.model)
        named = dict(self.model.named_parameters())
        self.layout = plan_layout([Field(n, tuple(p.shape), p.dtype) for n, p in named.items()], 256)
        self.exchange = ServerExchange(
            named,
            self.layout,
            self.optimizer,
            me=name,
            token=TOKEN,
            replication=options.get("replication", 1),
            with_norm=options.get("with_norm", False),
            connect_seconds=10.0,
            answer_seconds=20.0,
        )
        self.step = 0

    def begin(
        self, number: int, members: list[str], running: list[Server], store: StreamStore, **how: Any
    ) -> None:
        group = Group(None, members.index(self.name), len(members), 10.0)
        place = Place(
            (1, 0, number),
            tuple(members),
            {f"s{server.port}": f"127.0.0.1:{server.port}" for server in running},
            frozenset(how.get("leaving", ())),
            how.get("step", 0),
        )
        self.exchange.begin_generation(
            place,
            group,
            store,
            holds=how.get("holds", True),
            leader=how.get("leader", 0),
            fresh=how.get("fresh", False),
        )
        self.step = place.step

    def push(self, part: int, parts: int) -> float | None:
        self.exchange.settle()
        gradients_of(self.model, self.step + 1, part, parts)
        self.exchange.begin_step()
        for bucket, size in enumerate(self.layout.sizes):
            flat = torch.zeros(size)
            for index in self.layout.members[bucket]:
                gradient = list(self.model.parameters())[index].grad
                offset = self.layout.slots[index].offset
                flat[offset : offset + gradient.numel()] = gradient.flatten()
            self.exchange.push(flat)
        return self.exchange.prepare()

    def commit(self, scale: float = 1.0, unused: tuple[int, ...] = ()) -> None:
        self.exchange.commit(scale, unused)
        self.step += 1

    def values(self) -> list[torch.Tensor]:
        self.exchange.settle()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@contextmanager
def members(
    count: int, optimizer: Callable[[Any], torch.optim.Optimizer], **options: Any
) -> Iterator[list[Member]]:
    made = [Member(f"m{number}", optimizer, **options) for number in range(count)]
    try:
        yield made
    finally:
        for member in made:
            member.exchange.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make the calls at the same time; raise the first error."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(
        [{"params": m[0].parameters(), "lr": 0.02}, {"params": m[1:].parameters(), "weight_decay": 0.3}],
        lr=0.01,
    ),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), amsgrad=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, lr_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_members_and_two_servers_equal_one_process(name: str) -> None:
    make = OPTIMIZERS[name]
    with servers(2) as running, members(2, make) as (a, b):
        store = Store()
        names = ["m0", "m1"]
        together(
            lambda: a.begin(1, names, running, store, fresh=True),
            lambda: b.begin(1, names, running, store, fresh=True, holds=False),
        )
        reference = build(seed=sum(map(ord, "m0")))
        optimizer = make(reference)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        schedules = [torch.optim.lr_scheduler.StepLR(m.optimizer, 2, gamma=0.5) for m in (a, b)]
        for member in (a, b):
            member.exchange.resolve()
        for step in range(1, 6):
            together(lambda: a.push(0, 2), lambda: b.push(1, 2))
            unused = (3,) if step == 3 else ()
            for member, own in zip((a, b), schedules, strict=True):
                member.commit(scale=0.5, unused=unused)
                member.optimizer.zero_grad()
                member.optimizer.step()
                own.step()
            gradients_of(reference, step, 0, 1)
            for index, parameter in enumerate(reference.parameters()):
                assert parameter.grad is not None
                parameter.grad = None if index in unused else parameter.grad * 0.5
            optimizer.step()
            schedule.step()
        for mine, theirs, expected in zip(a.values(), b.values(), reference.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-4, atol=5e-5)


def test_a_step_that_one_survivor_committed_counts_and_any_other_does_not() -> None:
    make = OPTIMIZERS["adam"]
    with servers(2) as running, members(3, make, with_norm=True) as (a, b, c):
        store, names = Store(), ["m0", "m1"]
        together(
            lambda: a.begin(1, names, running, store, fresh=True),
            lambda: b.begin(1, names, running, store, fresh=True, holds=False),
        )
        for member in (a, b):
            member.exchange.resolve()
        first, second = together(lambda: a.push(0, 2), lambda: b.push(1, 2))
        assert first == second > 0
        for member in (a, b):
            member.commit()
        before = a.values()
        # Both have prepared step 2; only a has the result of its side reduction, and b is no more.
        together(lambda: a.push(0, 2), lambda: b.push(1, 2))
        a.commit()
        a.exchange.links.over("b is gone")
        with pytest.raises(ServerError, match="b is gone"):
            a.exchange.settle()
        store, names = Store(), ["m0", "m2"]
        together(
            lambda: a.begin(2, names, running, store, step=2),
            lambda: c.begin(2, names, running, store, step=2, holds=False),
        )
        c.exchange.load_state_dict(a.exchange.state_dict())
        together(a.exchange.resolve, c.exchange.resolve)
        assert all(torch.equal(x, y) for x, y in zip(a.values(), c.values(), strict=True))
        assert not any(torch.equal(x, y) for x, y in zip(a.values(), before, strict=True))
        # Step 3 is prepared by both and committed by nobody: it is dropped.
        at_two = a.values()
        together(lambda: a.push(0, 2), lambda: c.push(1, 2))
        a.begin(3, ["m0"], running, Store(), step=2)
        a.exchange.resolve()
        assert all(torch.equal(x, y) for x, y in zip(a.values(), at_two, strict=True))
        # What the old generation still says is refused.
        c.commit()
        with pytest.raises(ServerError, match="is over"):
            c.exchange.settle()


def test_copies_take_over_and_a_lack_is_told_to_all() -> None:
    make = OPTIMIZERS["momentum"]
    with servers(3) as running, members(1, make, replication=2) as (a,):
        a.begin(1, ["m0"], running[:2], Store(), fresh=True)
        a.exchange.resolve()
        for _ in range(3):
            a.push(0, 1)
            a.commit()
        before = a.values()
        # A third server takes the place of the first: it is filled while training goes on.
        a.begin(2, ["m0"], running[1:], Store(), step=3)
        assert not a.exchange.settled
        a.exchange.resolve()
        assert all(torch.equal(x, y) for x, y in zip(a.values(), before, strict=True))
        for _ in range(20):
            a.push(0, 1)
            a.commit()
        number, at = 3, a.step
        for number in range(3, 100):
            a.begin(number, ["m0"], running[1:], Store(), step=a.step)
            a.exchange.resolve()
            if a.exchange.settled:
                break
            a.push(0, 1)
            a.commit()
        assert a.exchange.settled
        a.push(0, 1)
        a.commit()
        at, before = a.step, a.values()
        a.begin(200, ["m0"], running[2:], Store(), step=at)
        a.exchange.resolve()
        for key in a.exchange.chunks:
            a.exchange._clean.discard(key.key)
        a.begin(201, ["m0"], running[2:], Store(), step=at, holds=True)
        a.exchange._clean = set()
        a.exchange.resolve()
        assert all(torch.equal(x, y) for x, y in zip(a.values(), before, strict=True))
        reference = build(seed=sum(map(ord, "m0")))
        optimizer = make(reference)
        for step in range(1, at + 1):
            gradients_of(reference, step, 0, 1)
            optimizer.step()
        for mine, expected in zip(a.values(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-4, atol=5e-5)
        with pytest.raises(ServersLackState, match="held by no server"):
            a.begin(202, ["m0"], running[:1], Store(), step=at)


def test_an_optimizer_that_servers_do_not_have_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="do not have the optimizer Adamax: use one of SGD, Adam"):
        optimizer_name(torch.optim.Adamax(build().parameters()))


def test_copies_are_kept_until_those_that_take_over_have_theirs() -> None:
    sizes = {str(number): 4 + number % 3 for number in range(9)}
    holders = {key: list(home) for key, home in place_fresh(sizes, ["a", "b", "c"], 2).homes.items()}
    for gone, names in (("a", ["b", "c", "d"]), ("b", ["c", "d", "e", "f"]), ("", ["c"])):
        for having in holders.values():
            having[:] = [server for server in having if server != gone]
        leaving = sorted({server for having in holders.values() for server in having} - set(names))
        for _ in range(3):
            decided = arrange(sizes, names, holders, 2, leaving)
            for key, having in holders.items():
                assert key not in decided.fills or key not in decided.drops
                assert set(decided.homes[key]) <= set(having)
                assert len(decided.homes[key]) >= min(2, len(having), len(names))
                having[:] = sorted({*having, *decided.fills.get(key, ())} - set(decided.drops.get(key, ())))
            if decided.settled:
                break
        assert decided.settled
        load = {
            server: sum(sizes[k] for k, home in decided.homes.items() if home[0] == server)
            for server in names
        }
        assert max(load.values()) <= 1.05 * sum(sizes.values()) / len(names) + max(sizes.values())
    with pytest.raises(LackError, match="1 of 9 chunks are held by no server, 4 for one"):
        arrange(sizes, ["c"], {**holders, "4": []}, 2)


def test_a_server_that_takes_a_place_gets_its_share_while_others_give_theirs_up() -> None:
    with servers(4) as running, members(1, OPTIMIZERS["momentum"], replication=2) as (a,):
        a.begin(1, ["m0"], running[:3], Store(), fresh=True)
        a.exchange.resolve()
        for number, there in ((2, running[1:3]), (3, running[1:4])):
            a.begin(number, ["m0"], there, Store(), step=a.step)
            a.exchange.resolve()
            assert not a.exchange.settled
            for _ in range(1000):
                a.push(0, 1)
                a.commit()
                if a.exchange.copied():
                    break
            else:
                raise AssertionError("the copies do not come")
        a.begin(4, ["m0"], running[1:4], Store(), step=a.step)
        assert a.exchange.settled
        a.exchange.resolve()
        reference = build(seed=sum(map(ord, "m0")))
        optimizer = OPTIMIZERS["momentum"](reference)
        for step in range(1, a.step + 1):
            gradients_of(reference, step, 0, 1)
            optimizer.step()
        for mine, expected in zip(a.values(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-4, atol=5e-5)

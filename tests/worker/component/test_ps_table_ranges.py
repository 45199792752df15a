"""Tables without common steps: one worker makes the numbers of one process, and each range is in each slice
once, whatever happens to workers and servers while it is pushed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ps_loose import batches_of
from ps_members import Member, Store, together
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

import springtide
from springtide.embedding.local import merged
from springtide.errors import UsageError
from springtide.ps.compression import GradientCompression
from springtide.ps.connections import ServerError
from springtide.ps.generation import ServersLackState
from springtide.ps.row_gradients import slices_by_table
from springtide.train_step.validation import declare
from springtide_ps.server.server import Server
from springtide_ps.wire.frames import Kind

torch.set_num_threads(1)
HOW: dict[str, Any] = {"consistency": "Asynchronous", "strategy": "ParameterServer", "token": TOKEN}
IDS = torch.randint(-20, 20, (40, 3), generator=torch.Generator().manual_seed(1))
X = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3, lr_decay=0.1, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9)),
}


class Clicks(torch.nn.Module):
    """Two tables beside a dense layer; one of them is used in every second step only."""

    def __init__(self, seed: int = 0, max_rows: int = 0) -> None:
        super().__init__()
        with seeded(4 + seed):
            self.wide = springtide.EmbeddingBag(None, 2, mode="sum", seed=1, slices=3, max_rows=max_rows)
            self.deep = springtide.Embedding(None, 4, seed=2, slices=2)
            self.head = torch.nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor, x: torch.Tensor, deep: bool) -> torch.Tensor:
        own = self.deep(ids[:, 0]) if deep else torch.zeros(len(ids), 4)
        return self.wide(ids) + self.head(torch.cat((own, x), 1))


def state(model: Clicks) -> list[torch.Tensor]:
    found = [item for table in (model.wide, model.deep) for item in table.export()]
    return [*found, *(item.detach().clone() for item in model.head.parameters())]


@pytest.mark.parametrize(
    ("name", "max_rows"), [("sgd", 0), ("sgd", 18), ("adagrad", 0), ("adagrad", 18), ("adam", 0)]
)
def test_one_worker_makes_the_numbers_of_one_process(name: str, max_rows: int) -> None:
    """One worker on servers gets the numbers of one process.

    The training has schedules, rows that are let go, and a table that some batches do not use.
    """
    order: list[torch.Tensor] = []

    def train(model: Clicks, optimizer: torch.optim.Optimizer, schedule: Any, number: int) -> None:
        samples = order[number]
        model(IDS[samples], X[samples], number % 2 == 0).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    def made() -> tuple[Clicks, torch.optim.Optimizer, Any]:
        model = Clicks(max_rows=max_rows)
        optimizer = OPTIMIZERS[name](model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def script(rank: Rank) -> tuple[list[torch.Tensor], dict[str, Any]]:
        model, optimizer, schedule = made()
        rank.distribute(model, optimizer, schedule=schedule)
        rank.enter_servers(names(running), Store())
        for [samples] in rank.batches((torch.arange(40),), batch_size=8, epochs=2, seed=0):
            with rank.step():
                order.append(samples)
                train(model, optimizer, schedule, len(order) - 1)
        rank.runtime.settle(None)
        return state(model), rank.runtime.position.ledger.audit()

    with servers(2) as running:
        [(found, audit)] = on_ranks(1, script, **HOW)
    assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (80, 0, 0)
    alone = made()
    for number in range(10):
        train(*alone, number)
    expected = state(alone[0])
    assert len(expected[0]) <= (max_rows or 40)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


# ---- by hand


def gradients_of(model: Clicks, step: int, part: int, parts: int) -> None:
    """Gradients that do not depend on what is trained, so that it does not matter on which values."""
    model.zero_grad()
    own = slice(4 * step, 4 * step + 4)
    weights = torch.arange(1.0, 9.0).view(4, 2)
    (model(IDS[own], X[own], False) * weights).sum().backward()
    (model.deep(IDS[own, 1]) * weights[:, :1]).sum().backward()


class Loose:
    """A worker by hand: generations, ranges, bodies; on servers over which the test has power."""

    def __init__(self, name: str = "m0", compression: str = "None", replication: int = 1) -> None:
        self.member = Member(
            name,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            asynchronous=True,
            replication=replication,
            build=Clicks,
            gradients=gradients_of,
            compression=lambda: GradientCompression(compression),
        )
        exchange = self.member.exchange
        self.exchange, self.generation = exchange, 0
        self.batches = batches_of(self.member)
        for index, handle in exchange.tables.handles.items():
            handle.managed, handle.read = True, partial(exchange.read_rows, index)
            handle.read_all = partial(exchange.all_rows, index)

    def begin(self, running: list[Server], members: tuple[str, ...] = ("m0",), store: Any = None) -> None:
        """The next generation."""
        self.generation += 1
        fresh = self.generation == 1
        self.member.begin(self.generation, list(members), running, store or Store(), fresh=fresh)

    def body(self, wanted: int | None = None) -> None:
        """Take a range (which is to be `wanted`); its gradients leave."""
        lease = self.batches.lease(0, 100)
        assert lease.number is not None
        assert wanted in (None, lease.number)
        self.member.step = lease.number - 1
        self.member.send(0, 1)
        for index, handle in self.exchange.tables.handles.items():
            self.exchange.stage_rows(index, *merged(handle.take(), handle.dim))
        self.exchange.prepare()

    def applied_batches(self) -> set[tuple[int, ...]]:
        return {
            tuple(applied_batches.intervals.to_json())
            for applied_batches in self.batches.applied_batches().values()
        }

    def values(self) -> list[torch.Tensor]:
        self.exchange.settle()
        model = self.member.model
        assert isinstance(model, Clicks)
        return state(model)


def undisturbed(bodies: int, compression: str = "None") -> list[torch.Tensor]:
    with servers(2) as running:
        loose = Loose(compression=compression)
        loose.begin(running)
        loose.exchange.resolve()
        for _ in range(bodies):
            loose.body()
            loose.exchange.commit((1.0,), ())
        values = loose.values()
        loose.exchange.close()
        return values


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["None", "BF16"])
@pytest.mark.parametrize("event", ["cut", "generation", "no room", "left"])
def test_each_batch_is_once_in_each_slice_whatever_comes_between(event: str, compression: str) -> None:
    wanted = undisturbed(4, compression)
    with servers(2) as running:
        loose = Loose(compression=compression)
        loose.begin(running)
        loose.exchange.resolve()
        for body in range(4):
            loose.body()
            if body == 1 and event == "left":
                loose.begin(running)  # the members have changed: its range is given out anew
                loose.exchange.resolve()
                loose.body(1)
            if body == 1 and event == "cut":
                for server in running:
                    for client in server.connections:
                        client.stream.abort()
                until(partial(broken, loose), "the connections' end")
            if body == 1 and event == "no room":
                until(lambda: offered(running) == offers(loose), "all offers")
                for server in running:
                    for client in server.connections:
                        client.stash.forget()
            loose.exchange.commit((1.0,), ())
            if body == 1 and event in ("cut", "generation"):
                loose.begin(running)  # perhaps with some of the pushes answered
                loose.exchange.resolve()
        assert_equal(loose.values(), wanted)
        assert loose.applied_batches() == {(0, 4)}
        assert sum(server.counters.batches for server in running) == 4 * len(
            loose.exchange.context.generation.homes
        )
        loose.exchange.close()


def broken(loose: Loose) -> bool:
    """Whether the worker knows that none of its connections is there any more."""
    return all(loose.exchange.connections[server].broken for server in loose.exchange.connections)


def offered(running: list[Server]) -> set[str]:
    """The chunks and slices of which servers have gradients."""
    clients = [client for server in running for client in server.connections]
    return {key for client in clients for _, key in list(client.stash.stashed)}


def offers(loose: Loose) -> set[str]:
    """Return the keys of the gradients that the open body has pushed early."""
    return set(loose.batches.early_push.keys)


def half(loose: Loose, other_half: Callable[[], None]) -> None:
    """Commit; when one half of what is pushed was answered, something happens instead of the other one."""
    connections, batches = loose.exchange.connections, loose.batches
    ask, sent = connections.ask, list[str]()
    count = len(batches.keys_in_order()) // 2

    def some(server: str, kind: Kind, token: Any, meta: dict[str, Any], *args: Any, **named: Any) -> Any:
        if kind is not Kind.PUSH_BATCH:
            return ask(server, kind, token, meta, *args, **named)
        if len(sent) < count:
            sent.append(meta["k"])
            return ask(server, kind, token, meta, *args, **named)
        for key in sent:
            future, home = batches.under_way[key]
            connections.answer(future, home, "a push")
        return other_half()

    connections.ask = some  # type: ignore[method-assign]
    loose.exchange.commit((1.0,), ())
    connections.ask = ask  # type: ignore[method-assign]
    assert 0 < len(sent) < len(batches.keys_in_order())


def test_push_of_a_worker_dying_in_it_is_completed_by_another() -> None:
    wanted = undisturbed(3)
    with servers(2) as running:
        first, second = Loose("m0"), Loose("m1")
        both = ("m0", "m1")
        store = Store()
        together(lambda: first.begin(running, both, store), lambda: second.begin(running, both, store))
        together(first.exchange.resolve, second.exchange.resolve)
        first.body(0)
        second.body(1)
        half(first, lambda: None)
        first.exchange.close()
        second.exchange.commit((1.0,), ())
        second.begin(running, ("m1",))
        second.exchange.resolve()
        second.body(0)
        second.exchange.commit((1.0,), ())
        second.body(2)
        second.exchange.commit((1.0,), ())
        assert_equal(second.values(), wanted)
        assert second.applied_batches() == {(0, 3)}
        assert sum(server.counters.batches for server in running) == 3 * len(
            second.exchange.context.generation.homes
        )
        assert sum(server.counters.repeated for server in running) >= len(second.batches.keys_in_order()) // 2
        second.exchange.close()


def test_rest_of_push_goes_to_copies_when_its_server_dies() -> None:
    wanted = undisturbed(3)
    with servers(2) as running:
        loose = Loose(replication=2)
        loose.begin(running)
        loose.exchange.resolve()
        loose.body(0)
        loose.exchange.commit((1.0,), ())
        loose.body(1)

        def dies() -> None:
            running[0].close(30.0)
            raise ServerError("the server is gone")

        half(loose, dies)
        loose.begin(running[1:])
        loose.exchange.resolve()
        loose.body(2)
        loose.exchange.commit((1.0,), ())
        assert_equal(loose.values(), wanted)
        assert loose.applied_batches() == {(0, 3)}
        loose.exchange.close()


def test_rows_without_copy_are_lost_with_server_not_remade(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with servers(2) as running:
        loose = Loose()
        loose.begin(running)
        loose.exchange.resolve()
        loose.body(0)
        loose.exchange.commit((1.0,), ())
        loose.exchange.settle()
        running[0].close(30.0)
        with pytest.raises(ServersLackState, match="held by no server"):
            loose.begin(running[1:])
        assert "slices of tables are on no server any more" in caplog.text
        assert "begin again from what this worker pulled last" not in caplog.text
        loose.exchange.close()


def test_worker_sees_its_pushes_before_awaiting_their_answers() -> None:
    with servers(2) as running:
        loose = Loose()
        loose.begin(running)
        loose.exchange.resolve()
        model = loose.member.model
        assert isinstance(model, Clicks)
        before = model.deep(IDS[4:8, 1]).detach()
        for number in range(3):
            loose.body(number)
            loose.exchange.commit((1.0,), ())
            with torch.no_grad():
                own = slice(4 * number, 4 * number + 4)
                after = model.deep(IDS[own, 1])
            assert not any(
                key in loose.batches.under_way for key in slices_by_table(loose.exchange.tables)[1]
            )
            assert not torch.equal(after, before)
            before = model.deep(IDS[4 * number + 4 : 4 * number + 8, 1]).detach()
        loose.exchange.close()


def test_hybrid_is_for_common_steps() -> None:
    model = Clicks()
    with pytest.raises(UsageError, match=r"consistency Synchronous, or strategy\.type ParameterServer"):
        declare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            None,
            {},
            in_job=True,
            exact=False,
            strategy="Hybrid",
            consistency="Asynchronous",
        )

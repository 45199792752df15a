"""Teams of workers that take ranges, through real servers: whole scripts on several ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

import springtide
from springtide.ps.worker_groups import GroupRoute
from springtide_ps.server.async_handler import AsyncHandler
from springtide_ps.server.gradient_stash import GradientStash
from springtide_ps.wire.frames import Header, Kind

torch.set_num_threads(1)
SAMPLES, EPOCHS, PER_EPOCH = 50, 3, 7
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2))
IDS = torch.randint(-20, 20, (SAMPLES, 3), generator=torch.Generator().manual_seed(3))
HOW: dict[str, Any] = {"consistency": "Asynchronous", "strategy": "ParameterServer", "token": TOKEN}


class Model(torch.nn.Module):
    """Dense layers, beside tables in one kind; a table is used in every second range only."""

    def __init__(self, tables: bool) -> None:
        super().__init__()
        with seeded(2):
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(6, 120), torch.nn.Tanh(), torch.nn.Linear(120, 3)
            )
            if tables:
                self.wide = springtide.EmbeddingBag(None, 3, mode="sum", seed=1, slices=3)
                self.deep = springtide.Embedding(
                    None, 6, seed=2, slices=2, scale_grad_by_freq=True, max_norm=0.5
                )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, number: int) -> torch.Tensor:
        if not hasattr(self, "wide"):
            out: torch.Tensor = self.layers(x)
            return out
        if number % 2:
            x = x + self.deep(ids[:, 0])
        return self.wide(ids) + self.layers(x)

    def state(self) -> list[torch.Tensor]:
        tables = [self.wide, self.deep] if hasattr(self, "wide") else []
        found = [item for table in tables for item in table.export()]
        return [*found, *(item.detach().clone() for item in self.layers.parameters())]


def train(
    size: int, tables: bool = False, scaled: bool = False, two: bool = False, **settings: Any
) -> tuple[list[list[torch.Tensor]], list[list[int]]]:
    """Train on worker groups.

    Returns:
        for each rank, the model's parameters at the end and the numbers of the batches that it took part in.
    """
    store = Store()

    def script(rank: Rank) -> tuple[list[torch.Tensor], list[int]]:
        model = Model(tables)
        own = list(model.parameters())
        own, rest = (own[:2], own[2:]) if two else (own, [])
        optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.0 if tables else 0.9)
        others = [torch.optim.Adam(rest, lr=0.01)] if two else []
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        # Of each rank its own, until the members of a group agree.
        scaler = torch.amp.GradScaler("cpu", 2.0 ** (8 + rank.rank), growth_interval=9, enabled=scaled)
        all_of_them = [optimizer, *others] if two else optimizer
        rank.distribute(
            [model] if two else model, all_of_them, clip_norm=0.5, schedule=schedule, scaler=scaler
        )
        rank.enter_servers(names(running), store)
        assert rank.trainer.servers is not None
        assert isinstance(rank.trainer.servers.route, GroupRoute) == ("group_size" in settings)
        ranges = []
        for x, y, ids in rank.batches((X, Y, IDS), batch_size=8, epochs=EPOCHS, seed=0):
            with rank.step():
                number = rank.trainer.batch_number
                scaler.scale((model(x, ids, number) - y).square().mean()).backward()
                for each in (optimizer, *others):
                    scaler.step(each)
                scaler.update()
                schedule.step()
                model.zero_grad()
                ranges.append(number)
        rank.runtime.settle(None)
        audit = rank.runtime.position.ledger.audit()
        assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (EPOCHS * SAMPLES, 0, 0)
        return model.state(), ranges

    with servers(2) as running:
        results = on_ranks(size, script, **(HOW | settings))
    return [values for values, _ in results], [ranges for _, ranges in results]


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "tables"])
def alone(request: pytest.FixtureRequest) -> tuple[bool, list[torch.Tensor]]:
    """(whether it has tables, what one process makes of the model)"""
    [values], [ranges] = train(1, request.param)
    assert ranges == list(range(1, EPOCHS * PER_EPOCH + 1))
    return request.param, values


@pytest.mark.slow
@pytest.mark.parametrize(("size", "scaled"), [(1, False), (2, True), (3, False)])
def test_one_group_makes_the_numbers_of_a_single_process(
    alone: tuple[bool, list[torch.Tensor]], size: int, scaled: bool
) -> None:
    """The last batch of an epoch has two samples, so that some of three have none of it."""
    tables, expected = alone
    found, ranges = train(size, tables, scaled and not tables, group_size=4)
    assert ranges == [list(range(1, EPOCHS * PER_EPOCH + 1))] * size
    for values in found:
        for own, theirs in zip(values, expected, strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)


def test_a_group_makes_the_steps_of_two_optimizers() -> None:
    [expected], _ = train(1, two=True)
    found, _ = train(2, two=True, scaled=True, group_size=2)
    for values in found:
        for own, theirs in zip(values, expected, strict=True):
            torch.testing.assert_close(own, theirs, rtol=0, atol=2e-3)


def test_a_server_without_room_early_gets_each_sum_whole(
    alone: tuple[bool, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, expected = alone
    asked: list[str] = []

    def none(self: GradientStash, token: Any, owner: str, key: str, number: int) -> None:
        asked.append(key)

    monkeypatch.setattr(GradientStash, "take", none)
    found, _ = train(2, tables, group_size=2)
    assert len(asked) >= 2 * EPOCHS * PER_EPOCH
    for own, theirs in zip(found[1], expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tables", [False, True])
def test_each_range_is_worked_on_by_one_group_and_pushed_once(
    tables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[str, int]] = []
    answer = AsyncHandler.answer

    def note(self: AsyncHandler, header: Header, meta: Any, *rest: Any) -> None:
        if header.kind in (Kind.PUSH_BATCH, Kind.COPY_BATCH):
            pushed.append((meta["k"], meta["r"]))
        answer(self, header, meta, *rest)

    monkeypatch.setattr(AsyncHandler, "answer", note)
    values, ranges = train(4, tables, group_size=2)
    for own in values:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(own, values[0], strict=True))
    assert ranges[0] == ranges[1]
    assert ranges[2] == ranges[3]
    assert sorted(ranges[0] + ranges[2]) == list(range(1, EPOCHS * PER_EPOCH + 1))
    assert len(pushed) == len(set(pushed))
    assert {number for _, number in pushed} == set(range(EPOCHS * PER_EPOCH))


@pytest.mark.parametrize("reader", [0, 1])
def test_committed_member_reads_new_values_after_its_groups_end(reader: int) -> None:
    store, sent, has_read = Store(), threading.Event(), threading.Event()

    def script(rank: Rank) -> list[torch.Tensor]:
        model = Model(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        rank.distribute(model, optimizer)
        rank.enter_servers(names(running), store)
        exchange = rank.trainer.servers
        assert exchange is not None
        assert exchange.route.group is not None
        for x, y, ids in rank.batches((X, Y, IDS), batch_size=SAMPLES, epochs=1, seed=0):
            with rank.step():
                (model(x, ids, 0) - y).square().mean().backward()
                optimizer.step()
                if rank.rank != reader:
                    if rank.rank == 0:
                        rank.runtime.settle(None)
                        sent.set()
                    assert has_read.wait(60)
                    return []
                if reader:
                    assert sent.wait(60)
                exchange.route.group.shut()
                exchange.connections.over("the other member is dead")
                try:
                    return [value.clone() for value in model.state_dict().values()]
                finally:
                    has_read.set()
        raise AssertionError("there was no range")

    with servers(2) as running:
        found = on_ranks(2, script, group_size=2, **HOW)[reader]
    model = Model(False)
    (model(X, IDS, 0) - Y).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for own, theirs in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("size", "settings"), [(1, {}), (2, {}), (4, {"group_size": 2})])
def test_a_schedule_that_is_stepped_at_an_epochs_last_batch(size: int, settings: dict[str, Any]) -> None:
    """All workers have the same rate after an epoch, whichever of them computed its last batch."""
    store = Store()

    def script(rank: Rank) -> tuple[list[float], float]:
        model = Model(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        rank.distribute(model, optimizer, schedule=schedule)
        rank.enter_servers(names(running), store)
        rates = []
        for x, y, ids in rank.batches((X, Y, IDS), batch_size=8, epochs=EPOCHS, seed=0):
            with rank.step():
                number = rank.trainer.batch_number
                if number > PER_EPOCH:
                    rates.append(optimizer.param_groups[0]["lr"] * 2 ** ((number - 1) // PER_EPOCH))
                (model(x, ids, 0) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if number % PER_EPOCH == 0:
                    schedule.step()
        return rates, schedule.get_last_lr()[0]

    with servers(1) as running:
        results = on_ranks(size, script, **(HOW | settings))
    for rates, last in results:
        assert rates == pytest.approx([0.1] * len(rates))
        assert last == pytest.approx(0.1 * 0.5**EPOCHS)


def test_options_of_the_first_of_a_group_count_for_the_batch() -> None:
    """The others' schedules may have gone past other ranges than its own."""
    store = Store()

    def script(rank: Rank) -> list[torch.Tensor]:
        model = Model(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank.distribute(model, optimizer)
        rank.enter_servers(names(running), store)
        for x, y, ids in rank.batches((X, Y, IDS), batch_size=25, epochs=1, seed=0):
            with rank.step():
                optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank.rank)
                torch.nn.functional.mse_loss(model(x, ids, 0), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        rank.runtime.settle(None)
        return model.state()

    with servers(1) as running:
        first, second = on_ranks(2, script, **HOW, group_size=2)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)

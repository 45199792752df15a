"""Bodies that a joiner tries out: none of it is sent, and none of it stays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from worker_alone import Script, library

import springtide
from springtide.data.loop import plan_loop
from springtide.elastic.loop import TrainingLoops
from springtide.elastic.runtime import Runtime
from springtide.elastic.warm_up import WarmUp
from springtide.train_step.rollback import Snapshot


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with library() as runtime:
        yield runtime


class Newcomer:
    """A process that comes to a job in which so many train."""

    generation = None

    def __init__(self, others: int, stands_by: bool = False) -> None:
        self._others = others
        self.stands_by = stands_by

    def await_welcome(self, seconds: float) -> int:
        return self._others


def batches_of_newcomer(
    runtime: Runtime, others: int, data: Any, batch_size: int, rehearsals: int, stands_by: bool = False
) -> Iterator[Any]:
    """Deal as `springtide.batches` does in a process that comes to a job; it goes on alone."""
    newcomer = Newcomer(others, stands_by)
    warm_up = WarmUp(runtime.settings, runtime.state, runtime.trainers, runtime.steps, newcomer)
    loops = TrainingLoops(replace(runtime.loop_parts, warm_up=warm_up))
    return loops.batches(plan_loop(data, batch_size=batch_size), rehearsals=rehearsals)


def randomness() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]


@pytest.mark.parametrize("multi_step", [False, True])
def test_warm_up_leaves_nothing_behind(runtime: Runtime, multi_step: bool) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
    head = torch.nn.Linear(8, 2)
    modules = torch.nn.ModuleList([model, head])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=1)
    springtide.distribute(
        [model, head] if multi_step else modules,
        [optimizer] if multi_step else optimizer,
        scheduler=scheduler,
        scaler=scaler,
    )
    x, y = torch.randn(24, 4), torch.randn(24, 2)
    kept = [Snapshot(item.state_dict(), whole=True) for item in (modules, optimizer, scheduler, scaler)]
    loop = batches_of_newcomer(runtime, 2, (x, y), batch_size=12, rehearsals=2)
    before = randomness()
    sizes, ranks, ends = [], [], []

    def body(batch: Any) -> None:
        with springtide.step():
            inputs, labels = batch
            random.random()
            np.random.rand()
            loss = (head(model(inputs)) - labels).square().mean()
            scaler.scale(loss).backward()
            springtide.report(loss=loss)
            scaler.unscale_(optimizer)
            ends.append("unscaled")
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()

    for _ in range(2):
        batch = next(loop)
        sizes.append(len(batch.ids))
        body(batch)
        ranks.append((springtide.rank(), springtide.world_size()))
        springtide.report(seen=1.0)
        assert runtime.steps.failed_step == (0, "")
    first = next(loop)
    assert randomness() == before
    assert (sizes, ranks) == ([4, 4], [(2, 3), (2, 3)])
    assert len(first.ids) == 12
    assert ends == []
    for item, snapshot in zip((modules, optimizer, scheduler, scaler), kept, strict=True):
        expected = snapshot.state()
        torch.testing.assert_close(dict(item.state_dict()), dict(expected), rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in modules.parameters())
    assert runtime.state.values == {}
    assert runtime.position.cursor.step == 0
    assert (springtide.rank(), springtide.world_size()) == (0, 1)
    body(first)
    for batch in loop:
        body(batch)
    assert runtime.position.cursor.step == 2
    assert runtime.position.ledger.audit()["totalSeen"] == 24
    assert len(ends) == 2


def test_job_without_others_has_no_warm_up(runtime: Runtime) -> None:
    script = Script()
    steps = 0
    for batch in batches_of_newcomer(runtime, 0, (script.x, script.y), batch_size=8, rehearsals=3):
        with springtide.step():
            script.loss(batch).backward()
            script.finish()
        steps += 1
    assert steps == 3


def test_standby_tries_a_part_as_large_as_the_one_it_is_to_get(runtime: Runtime) -> None:
    script = Script()
    loop = batches_of_newcomer(runtime, 2, (script.x, script.y), batch_size=8, rehearsals=1, stands_by=True)
    assert len(next(loop).ids) == 4
    assert (springtide.rank(), springtide.world_size()) == (1, 2)
    loop.close()


def test_evaluation_in_a_warm_up_is_refused(runtime: Runtime) -> None:
    script = Script()
    loop = batches_of_newcomer(runtime, 1, (script.x, script.y), batch_size=8, rehearsals=1)
    batch = next(loop)
    with springtide.step():
        script.loss(batch).backward()
        script.finish()
    with pytest.raises(springtide.UsageError, match="leave rehearsals= out"):
        next(iter(springtide.batches((script.x,), batch_size=8, train=False)))


def test_batch_without_a_step_in_a_warm_up_is_refused(runtime: Runtime) -> None:
    script = Script()
    loop = batches_of_newcomer(runtime, 1, (script.x, script.y), batch_size=8, rehearsals=1)
    next(loop)
    with pytest.raises(springtide.UsageError, match="was not trained"):
        next(loop)
    assert not runtime.state.warming_up


@pytest.mark.parametrize("number", [-1, 11, True, 1.0])
def test_wrong_number_of_rehearsals_is_refused(runtime: Runtime, number: Any) -> None:
    script = Script()
    with pytest.raises(ValueError, match="rehearsals must be an integer from 0 to 10"):
        script.batches(rehearsals=number)

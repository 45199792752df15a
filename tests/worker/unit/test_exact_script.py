"""Exact mode seen from the script: its body runs once per logical part, and what follows the step once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from worker_alone import Script, library

import springtide
from springtide.elastic.runtime import Runtime
from springtide.errors import Dropped, PartDone, UsageError
from springtide.train_step.transaction import Phase, Transaction


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with library(logical_workers=4) as runtime:
        yield runtime


def train(script: Script, epochs: int = 2) -> int:
    """Number of bodies that were entered."""
    bodies = 0
    for batch in script.batches(epochs=epochs):
        bodies += 1
        with springtide.step():
            script.loss(batch).backward()
            springtide.report(loss=1.0)
            script.finish()
    return bodies


def test_the_step_is_that_of_the_whole_batch() -> None:
    with library(logical_workers=4) as runtime:
        script = Script(clip_norm=0.3)
        # Four parts of two samples in each step, and the first step twice.
        assert train(script) == 7 * 4
        assert runtime.position.cursor.step == 6
        assert script.scheduler.last_epoch == 6
        assert runtime.position.ledger.audit()["totalSeen"] == 48
    with library():
        plain = Script(clip_norm=0.3)
        assert train(plain) == 6
    torch.testing.assert_close(script.parameters(), plain.parameters(), rtol=0, atol=1e-6)


def test_what_a_part_moves_before_the_step_is_put_back(runtime: Runtime) -> None:
    """BatchNorm's count of batches begins each part at the committed one."""
    script = Script(norm=True)
    norm = script.model[1]
    assert isinstance(norm, torch.nn.BatchNorm1d)
    tracked: list[int] = []
    for batch in script.batches():
        tracked.append(int(norm.num_batches_tracked))
        with springtide.step():
            script.loss(batch).backward()
            assert int(norm.num_batches_tracked) == tracked[-1] + 1
            script.finish()
    committed = [0] * 4 + [0] * 4 + [1] * 4 + [2] * 4
    assert tracked == committed
    assert int(norm.num_batches_tracked) == 3


def layout(logical_workers: int) -> str:
    with library(logical_workers=logical_workers) as runtime:
        Script()
        assert runtime.trainer is not None
        return runtime.trainer.layout_hash


def test_members_whose_bits_could_differ_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members compare the layout, so one of another machine is refused."""
    known = {layout(4), layout(4)}
    assert len(known) == 1
    known.add(layout(5))
    plain = layout(0)
    for owner, name, value in (
        (torch, "get_num_threads", lambda: 97),
        (torch, "__version__", "0.1"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "another"),
    ):
        monkeypatch.setattr(owner, name, value)
        known.add(layout(4))
        assert layout(0) == plain
    assert len(known) == 5


def train_without_step(script: Script) -> None:
    for batch in script.batches():
        with springtide.step():
            script.loss(batch).backward()


def test_a_body_without_a_step_is_told(runtime: Runtime) -> None:
    script = Script()
    with pytest.raises(UsageError, match="ended without optimizer"):
        train_without_step(script)


def test_weights_other_than_samples(runtime: Runtime) -> None:
    """The gradient is the mean over all items, whichever part they are in."""
    script = Script(samples=8)
    seen: list[torch.Tensor] = []
    tokens = iter([1, 5, 2, 0] * 2)
    for batch in script.batches():
        with springtide.step():
            n = next(tokens)
            batch.weight(n)
            seen.append(n * torch.autograd.grad(script.loss(batch), [script.model[0].weight])[0])
            script.loss(batch).backward()
            script.optimizer.step()
            gradient = script.model[0].weight.grad
            assert gradient is not None
            expected = sum(seen[-4:]) / 8
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
            script.optimizer.zero_grad()
    assert runtime.position.cursor.step == 1


def test_a_part_that_is_over_is_left_and_can_still_be_dropped() -> None:
    transaction = Transaction()
    transaction.begin()
    transaction.set_aside()
    for call in (transaction.check_alive, lambda: transaction.require_open("backward()")):
        with pytest.raises(PartDone):
            call()
    assert transaction.drop("a member is gone")
    transaction.end()
    transaction.begin()
    assert transaction.phase is Phase.DROPPED
    with pytest.raises(Dropped, match="a member is gone"):
        transaction.set_aside()

"""Dealing as a whole: whatever happens to the workers, update and account are those of one process."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.data import Cursor, Ledger, LoopPlan, contribution, plan_loop
from springtide.data.balance import Proportions
from springtide.data.batch import Batch

SAMPLES = 41
X = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(SAMPLES) % 7


def plan(**options: Any) -> LoopPlan:
    return plan_loop((X, TOKENS), **({"batch_size": 16, "epochs": 2} | options))


def backward(batch: Batch, parameter: torch.Tensor, by_tokens: bool) -> torch.Tensor:
    """Add up the gradients of the micro-batches, each with its weight, the way the runtime does on one
    worker.
    """
    total = torch.zeros_like(parameter)
    for piece in batch.split():
        x, tokens = piece
        values = (x @ parameter).square()
        n = int(tokens.sum()) if by_tokens else len(x)
        if by_tokens:
            piece.weight(n)
        loss = (values * tokens).sum() / n if by_tokens else values.mean()
        batch.micro.contribute()
        if batch.micro.scale:
            (gradient,) = torch.autograd.grad(loss, parameter)
            total += gradient * batch.micro.scale
    assert batch.micro.remaining_samples == 0
    return total


def global_step(
    loop: LoopPlan,
    cursor: Cursor,
    world: int,
    parameter: torch.Tensor,
    by_tokens: bool,
    speeds: tuple[int, ...] = (1,),
) -> tuple[torch.Tensor, list[float]]:
    gradient, sums, weight = torch.zeros_like(parameter), [0.0, 0.0, 0.0], 0.0
    sample_times = tuple(speeds[rank % len(speeds)] for rank in range(world))
    proportions = Proportions(sample_times, (0,) * world) if len(speeds) > 1 else None
    for rank in range(world):
        batch = loop.batch(cursor, rank, world, proportions=proportions)
        gradient += backward(batch, parameter, by_tokens)
        weight += batch.micro.contributed_weight
        added = contribution(batch.micro.contributed_ids, cursor.stage, cursor.epoch)
        sums = [a + float(b) for a, b in zip(sums, added, strict=True)]
    return gradient * batch.micro.correction(weight), sums


def reference(loop: LoopPlan, cursor: Cursor, parameter: torch.Tensor, by_tokens: bool) -> torch.Tensor:
    ids = loop.global_ids(cursor)
    values, tokens = (X[ids] @ parameter).square(), TOKENS[ids]
    loss = (values * tokens).sum() / tokens.sum() if by_tokens else values.mean()
    return torch.autograd.grad(loss, parameter)[0]


@pytest.mark.slow
@settings(deadline=None)
@given(
    worlds=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    batch_size=st.integers(1, 50),
    micro_batch=st.sampled_from([None, 5, 9]),
    min_part=st.integers(1, 3),
    dropped=st.lists(st.booleans(), min_size=1, max_size=8),
    by_tokens=st.booleans(),
    speeds=st.sampled_from([(1,), (1, 2), (5, 1, 3)]),
)
def test_any_number_of_workers_gives_the_update_of_one(
    worlds: list[int],
    batch_size: int,
    micro_batch: int | None,
    min_part: int,
    dropped: list[bool],
    by_tokens: bool,
    speeds: tuple[int, ...],
) -> None:
    if by_tokens:
        batch_size = max(8, batch_size)  # so that no batch is without tokens
    loop = plan(batch_size=batch_size, micro_batch=micro_batch, min_part=min_part, seed=3)
    parameter = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    cursor, ledger, turn = Cursor(), Ledger(), 0
    while not loop.ended(cursor):
        world, turn = worlds[turn % len(worlds)], turn + 1
        if turn < 10 and dropped[turn % len(dropped)]:
            global_step(loop, cursor, world, parameter, by_tokens, speeds)  # its results are thrown away
            continue
        if by_tokens and not TOKENS[loop.global_ids(cursor)].sum():
            by_tokens = False
        gradient, sums = global_step(loop, cursor, world, parameter, by_tokens, speeds)
        torch.testing.assert_close(
            gradient, reference(loop, cursor, parameter, by_tokens), rtol=1e-9, atol=1e-12
        )
        cursor, ledger = loop.commit(ledger, cursor, *sums)
    assert cursor == Cursor(0, 2, 0, loop.total_steps)
    assert (ledger.repeated, ledger.lost, ledger.total_seen, ledger.count) == (0, 0, 2 * SAMPLES, 0)


def test_the_order_is_that_of_one_process_at_any_size() -> None:
    loop = plan(seed=5)
    cursor = Cursor(epoch=1, position=16)
    alone = loop.batch(cursor, 0, 1).ids
    shared = torch.cat([loop.batch(cursor, rank, 5).ids for rank in range(5)])
    assert torch.equal(alone, shared)
    assert alone.numel() == 16


def test_worker_with_missing_gradients_shows_in_the_ledger() -> None:
    loop, cursor, ledger = plan(epochs=1), Cursor(), Ledger()
    while not loop.ended(cursor):
        sums = [0.0, 0.0, 0.0]
        for rank in range(3):
            batch = loop.batch(cursor, rank, 3)
            if (cursor.step, rank) != (1, 2):
                batch.micro.contribute()
            added = contribution(batch.micro.contributed_ids, cursor.stage, cursor.epoch)
            sums = [a + float(b) for a, b in zip(sums, added, strict=True)]
        cursor, ledger = loop.commit(ledger, cursor, *sums)
    assert (ledger.lost, ledger.repeated) == (5, 0)


@pytest.mark.parametrize(("batch_size", "steps"), [(16, 3), (41, 1), (100, 1), (1, 41), (40, 2)])
def test_the_last_batch_is_short_and_nothing_is_dropped(batch_size: int, steps: int) -> None:
    loop = plan(batch_size=batch_size)
    assert (loop.steps_per_epoch, loop.total_steps) == (steps, 2 * steps)


def test_a_loop_of_no_epochs_has_ended() -> None:
    loop = plan(epochs=0)
    assert loop.ended(Cursor())
    assert loop.total_steps == 0
    with pytest.raises(ValueError, match="ended after 0 epochs"):
        loop.batch(Cursor(), 0, 1)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_of_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="of a world of 3"):
        plan().batch(Cursor(), rank, 3)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be"),
        ({"batch_size": True}, "batch_size must be"),
        ({"epochs": -1}, "epochs must be an integer >= 0"),
        ({"min_part": 0}, "min_part must be"),
        ({"micro_batch": 0}, "micro_batch must be"),
        ({"micro_batch": 2}, "use micro_batch >= 3, or a smaller min_part"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"seed": 2**63}, "seed must be an integer of 64 bits"),
    ],
)
def test_bad_arguments_are_refused_by_name(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        plan(**options)


def test_one_sample_micro_batches_need_a_min_part_of_one() -> None:
    batch = plan(micro_batch=1, min_part=1, batch_size=3).batch(Cursor(), 0, 1)
    assert [piece.samples for piece in batch.split()] == [1, 1, 1]


def test_workers_with_other_data_are_told_the_difference() -> None:
    mine = plan()
    mine.check_same(plan(micro_batch=9).fingerprint())
    with pytest.raises(ValueError, match=r"samples is 41 here and 40 there.*same dataset"):
        mine.check_same(plan_loop(X[:40], batch_size=16, epochs=2).fingerprint())
    with pytest.raises(ValueError, match="seed is 0 here and 1 there"):
        mine.check_same(plan(seed=1).fingerprint())
    with pytest.raises(ValueError, match="batch_size is 16 here and None there"):
        mine.check_same({"samples": 41})
    assert plan().describe() == "batch_size=16, epochs=2, seed=0, micro_batch=None, min_part=2"

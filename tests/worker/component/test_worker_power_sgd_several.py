"""PowerSGD where a body has several optimizers, steps and backward passes.

A part of the gradients that is left out becomes a residual if a step has taken the rest, and is sent with the
last body before members stop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from linear_game import (
    BATCH,
    EPOCHS,
    IDS,
    RATE,
    Body,
    Game,
    alone,
    both,
    counted,
    gan,
    left,
    looked_at,
    rests,
)
from worker_ranks import Rank, on_ranks

from springtide.comm.compression import LowRankBuckets
from springtide.errors import UsageError

torch.set_num_threads(1)
Run = tuple[torch.Tensor, torch.Tensor]
LAST = EPOCHS * 3
"""Number of the last body."""


def debt(rank: int) -> torch.Tensor:
    """Return the residual of each matrix with which this rank begins."""
    return torch.randint(-4, 5, (20, 24), generator=torch.Generator().manual_seed(rank)) / 4


def train(
    body: Body, size: int, ends: bool = False, drop: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train with PowerSGD.

    Args:
        ends: all are asked to stop after the last body but one.
        drop: number of a body that is dropped once; 0 for none.

    Returns:
        for each worker, the values, and by how much its residuals have grown from the beginning to the end.
    """

    def script(rank: Rank) -> Run:
        game, dropped = Game(), not drop
        rank.distribute(game.models, [game.first, game.second])
        buckets = rank.trainer.buckets
        assert isinstance(buckets, LowRankBuckets)
        names = [name for name, _ in torch.nn.ModuleList(game.models).named_parameters()]
        for index in buckets.matrices:
            buckets.residuals[index] = debt(rank.rank)
        assert sorted(names[index] for index in buckets.matrices) == ["0.weight", "1.weight"]

        def owed() -> torch.Tensor:
            parts = []
            for index, parameter in enumerate(p for model in game.models for p in model.parameters()):
                parts.append(buckets.residuals.get(index, torch.zeros_like(parameter)).detach().reshape(-1))
            return torch.cat(parts).clone()

        before = owed()
        for batch in rank.batches(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0):
            game.bodies = rank.step_number
            rank.trainer.want_change(ends and game.bodies == LAST - 1 and rank.rank == 0)
            with rank.step():
                body(game, batch.data)
                if game.bodies == drop and not dropped:
                    dropped = True
                    rank.drop()
        assert buckets.closing is ends
        assert rank.runtime.state.boundary is ends
        return game.values(), owed() - before

    return on_ranks(size, script, compression="PowerSGD")


@pytest.mark.slow
@pytest.mark.parametrize("body", [both, rests, looked_at, gan, left])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_not_sent_is_owed(body: Body, size: int) -> None:
    plain, results = alone(body), train(body, size)
    for values, _ in results:
        assert torch.equal(values, results[0][0])
    assert not torch.allclose(results[0][0], plain.values(), rtol=0, atol=1e-3)
    made = results[0][0] - RATE * sum(counted(body, more) for _, more in results)
    torch.testing.assert_close(made, plain.values(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("body", [both, gan, left])
def test_the_last_body_before_members_stop_leaves_nothing(body: Body) -> None:
    plain, results = alone(body), train(body, 2, ends=True)
    for values, more in results:
        # All that it owed in the beginning is paid as well.
        made = values - RATE * sum(counted(body, other) for _, other in results)
        torch.testing.assert_close(made, plain.values(), rtol=0, atol=1e-4)
        assert more.abs().max() > 0.1
    for weight in (slice(0, 480), slice(500, 980)):
        owed = [more[weight].view(20, 24) + debt(rank) for rank, (_, more) in enumerate(results)]
        assert all(part.count_nonzero() == 0 for part in owed)


def test_a_dropped_body_leaves_what_is_owed_as_it_was() -> None:
    for body in (gan, left):
        for ours, theirs in zip(train(body, 2, drop=4), train(body, 2), strict=True):
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_closure_is_refused() -> None:
    def script(rank: Rank) -> None:
        game = Game()
        rank.distribute(game.models, [game.first, game.second])
        for batch in rank.batches(IDS, batch_size=BATCH, seed=0):
            with rank.step():
                first: Any = game.first
                first.step(partial(game.loss, game.generator, batch.data))

    with pytest.raises(UsageError, match=r"PowerSGD takes no optimizer\.step\(closure\)"):
        on_ranks(1, script, compression="PowerSGD")

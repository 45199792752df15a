"""Top-k where a body has several optimizers, steps and backward passes.

A gradient's elements that are left out become a residual only if a step has taken the other ones.
"""

from __future__ import annotations

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
    carried,
    counted,
    gan,
    left,
    looked_at,
    rests,
    scaled,
)
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks

from springtide.ps.backend import PsBackend

torch.set_num_threads(1)


def owed(exchange: PsBackend) -> torch.Tensor:
    """Return the residuals as one flat tensor with an element per parameter's element."""
    assert exchange.compression.residuals is not None
    flats = [torch.zeros(size) for size in exchange.context.layout.sizes]
    for chunk in exchange.chunks:
        if (kept := exchange.compression.residuals.residual(chunk.key)) is not None:
            flats[chunk.bucket][chunk.start : chunk.stop] = kept
    slots = zip(exchange.context.layout.fields, exchange.context.layout.slots, strict=True)
    return torch.cat([flats[slot.bucket][slot.offset : slot.offset + item.numel] for item, slot in slots])


def train(
    body: Body, size: int, how: dict[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Train with TopK compression.

    Returns:
        for each worker, the values, and its residuals at the end and at the beginning.
    """
    store = Store()

    def script(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        game = Game()
        tracked = {"scaler": game.scaler} if body is scaled else {}
        rank.distribute(game.models, [game.first, game.second], **tracked)
        rank.enter_servers(names(running), store)
        exchange = rank.trainer.servers
        assert exchange is not None
        assert exchange.compression.residuals is not None
        for number, chunk in enumerate(exchange.chunks):
            generator = torch.Generator().manual_seed(100 * rank.rank + number)
            debt = torch.zeros(chunk.stop - chunk.start)
            for _, _, start, stop in chunk.pieces:
                debt[start:stop] = torch.randn(stop - start, generator=generator)
            exchange.compression.residuals.leave_out(chunk.key, debt)
            exchange.compression.residuals.landed(chunk.key, (), applied=True)
        before = owed(exchange)
        for batch in rank.batches(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0):
            with rank.step():
                game.bodies = rank.trainer.batch_number
                body(game, batch.data)
        rank.runtime.settle(None)
        return game.values(), owed(exchange), before

    settings = {"compression": "TopK", "top_k_ratio": 0.2, **how}
    with servers(2) as running:
        return on_ranks(size, script, strategy="ParameterServer", token=TOKEN, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "size", "how"),
    [
        *((body, 2, {}) for body in (both, rests, looked_at, gan, carried, left, scaled)),
        *((body, 3, {"group_size": 2}) for body in (rests, gan, carried, scaled)),
        *((body, 1, {"consistency": "Asynchronous"}) for body in (both, rests, looked_at, gan, scaled)),
        *(
            (body, 2, {"consistency": "BoundedStaleness", "group_size": 2})
            for body in (both, rests, looked_at, gan, scaled)
        ),
    ],
)
def test_what_is_not_sent_is_owed(body: Body, size: int, how: dict[str, Any]) -> None:
    plain, results = alone(body), train(body, size, how)
    due = torch.zeros_like(results[0][0])
    for values, after, before in results:
        assert torch.equal(values, results[0][0])
        due += counted(body, after - before)
    assert float(due.abs().max()) > 0.01
    assert not torch.allclose(results[0][0], plain.values(), rtol=0, atol=1e-3)
    torch.testing.assert_close(results[0][0] - RATE * due, plain.values(), rtol=0, atol=2e-5)

"""Top-k together with a GradScaler: what is left out is kept without the scale, which changes meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from torch.nn import functional as F
from worker_ranks import Rank, on_ranks, seeded

from springtide.ps.compression import GradientCompression
from springtide.ps.sharding import PlannedChunk
from springtide_ps.params.sparse_gradient import SparseGradient

BATCH, STEPS = 8, 12
X = torch.randn(BATCH * STEPS, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(BATCH * STEPS, 2, generator=torch.Generator().manual_seed(2))


class Run:
    """The result of one worker: its values, its residuals and its ledger's audit."""

    def __init__(self, values: torch.Tensor, owed: dict[str, torch.Tensor], audit: dict[str, int]) -> None:
        self.values, self.owed, self.audit = values, owed, audit


def train(
    size: int, consistency: str, scale: float, without: int = 0, broken: int = 0, **how: Any
) -> tuple[list[Run], list[float]]:
    """Train with TopK compression and a scaler.

    Args:
        scale: of the scaler at first; 0 for no scaler.
        without: number of a batch (from 1) that is not in the data; 0 for none.
        broken: number of a batch that overflows at one worker; 0 for none.

    Returns:
        the result of each worker, and the first one's scale before each step.
    """
    store, scales = Store(), list[float]()
    data, keep = torch.arange(len(X)), torch.ones(len(X), dtype=torch.bool)
    if without:
        keep[(without - 1) * BATCH : without * BATCH] = False

    def script(rank: Rank) -> Run:
        with seeded(3):
            layers = torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 2)
            model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        # Powers of two: scaled numbers have the bits of plain ones.
        scaler = torch.amp.GradScaler("cpu", scale or 1.0, growth_interval=3, enabled=bool(scale))
        rank.distribute(model, optimizer, scaler=scaler, clip_norm=0.5)
        rank.enter_servers(names(running), store)
        wire = rank.trainer.servers.compression  # type: ignore[union-attr]
        for batch in rank.batches(data[keep], batch_size=BATCH, seed=0, shuffle=False):
            ids = batch.data
            with rank.step():
                if rank.rank == 0:
                    scales.append(scaler.get_scale())
                loss = F.mse_loss(model(X[ids]), Y[ids])
                # The batch's first sample is the first worker's.
                overflows = bool(broken) and bool((ids == (broken - 1) * BATCH).any())
                scaler.scale(loss * float("inf") if overflows else loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        rank.runtime.settle(None)
        assert wire.residuals is not None
        keys = [chunk.key for chunk in rank.trainer.servers.chunks]  # type: ignore[union-attr]
        owed = {key: kept.clone() for key in keys if (kept := wire.residuals.residual(key)) is not None}
        values = torch.cat([item.detach().reshape(-1) for item in model.parameters()])
        return Run(values, owed, rank.runtime.position.ledger.audit())

    settings = {"compression": "TopK", "top_k_ratio": 0.2, "consistency": consistency, **how}
    with servers(2) as running:
        return on_ranks(size, script, strategy="ParameterServer", token=TOKEN, **settings), scales


def same(found: list[Run], expected: list[Run]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.values, found[0].values)
        assert torch.equal(one.values, other.values)
        assert one.owed.keys() == other.owed.keys()
        for key, kept in other.owed.items():
            assert torch.equal(one.owed[key], kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "consistency", "how"),
    [
        (2, "Synchronous", {}),
        (3, "Synchronous", {"group_size": 2}),
        (1, "Asynchronous", {}),
    ],
)
def test_a_scale_that_grows_changes_no_bit(size: int, consistency: str, how: dict[str, Any]) -> None:
    plain, _ = train(size, consistency, 0, **how)
    scaled, scales = train(size, consistency, 256.0, **how)
    assert scales == [256.0 * 2 ** (step // 3) for step in range(STEPS)]
    assert plain[0].owed
    same(scaled, plain)


@pytest.mark.parametrize(("size", "consistency"), [(2, "Synchronous"), (1, "Asynchronous")])
def test_a_step_that_overflows_leaves_what_is_owed_as_it_was(size: int, consistency: str) -> None:
    """The numbers are those of a run without that batch."""
    expected, _ = train(size, consistency, 0, without=5)
    found, scales = train(size, consistency, 256.0, broken=5)
    assert scales[4:6] == [512.0, 256.0]
    assert [run.audit["skipped"] for run in found] == [1] * size
    same(found, expected)


def test_what_16_bits_leave_out_is_kept_in_more() -> None:
    """Residuals of float16 gradients are kept in more bits.

    A small residual, divided by the loss scale, would vanish in float16.
    """
    chunk = PlannedChunk("0.0", 0, 0, 64, 128, ((0, 0, 0, 64),))
    wire = GradientCompression("TopK", 1 / 64)
    scale = [2.0**15]
    wire.loss_scale = lambda: scale[0]
    small = torch.full((64,), 2.0**-24, dtype=torch.float16)
    small[0] = 1.0
    for step in (1, 2):
        wire.begin(((1, 0, 1), step))
        out = wire.outgoing(chunk, small)
        assert isinstance(out, SparseGradient)
        assert out.indices.tolist() == [0]
        assert out.values.dtype is torch.float16
        wire.stand_at(((1, 0, 1), step), [(0, ())], False)
        assert wire.residuals is not None
        kept = wire.residuals.residual("0.0")
        assert kept is not None
        assert kept[1:].tolist() == [step * 2.0**-39] * 63
        assert kept[0] == 0

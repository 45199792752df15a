"""GradScaler and autocast: the numbers of plain torch, one verdict for all workers, an undo without trace."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from torch.nn import functional as F
from worker_alone import library
from worker_ranks import Rank, on_ranks, seeded

import springtide
from springtide_ps.params.chunk import Chunk

SAMPLES, BATCH, OVERFLOW = 24, 8, 3  # the third step meets an infinity
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(2))
IDS = torch.arange(SAMPLES)


class Training:
    """Model, optimizer, scheduler and scaler, and one step of theirs as a script writes it."""

    def __init__(
        self, kind: str = "sgd", unscale: bool = False, clip: float | None = None, scale: float = 1024.0
    ) -> None:
        with seeded(3):
            self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        parameters = self.model.parameters()
        if kind == "adam":
            self.optimizer: Any = torch.optim.Adam(parameters, lr=0.05)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=kind == "fused")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        self.scales: list[float] = []
        self._unscale, self._clip = unscale, clip

    def backward(self, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor, infinite: int | None) -> None:
        loss = (self.model(x) - y).square().mean()
        if infinite is not None and bool((ids == infinite).any()):
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()

    def finish(self) -> None:
        if self._unscale:
            self.scaler.unscale_(self.optimizer)
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scales.append(self.scaler.get_scale())

    def parameters(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()]).clone()


def plain(order: list[torch.Tensor], infinite: int | None, **how: Any) -> Training:
    """The same steps with torch alone, on whole batches."""
    training = Training(**how)
    for ids in order:
        training.backward(X[ids], Y[ids], ids, infinite)
        training.finish()
    return training


def elastic(
    size: int,
    *,
    how: dict[str, Any] | None = None,
    drop_at: tuple[int, str] | None = None,
    infinite: bool = True,
    clip_norm: float | None = None,
    addresses: list[str] | None = None,
    **settings: Any,
) -> tuple[list[tuple[Training, dict[str, int]]], list[torch.Tensor], int | None]:
    """Train on `size` ranks; also return the global batches and the sample whose loss is infinite.

    addresses: of parameter servers.
    """
    with library() as runtime:  # only to see the order in which samples are dealt
        script = Training()
        springtide.distribute(script.model, script.optimizer)
        plan = springtide.batches(IDS, batch_size=BATCH, epochs=3, seed=0)
        order = []
        for batch in plan:
            order.append(batch.ids.clone())
            with springtide.step():
                script.model(X[batch.ids]).sum().backward()
                script.optimizer.step()
                script.optimizer.zero_grad()
        assert runtime.position.cursor.step == 9
    # One sample of the third step; it comes again in later epochs.
    sample = int(order[OVERFLOW - 1][-1]) if infinite else None
    store = Store()
    if addresses is not None:
        settings |= {"strategy": "ParameterServer", "token": TOKEN}

    def script_of(rank: Rank) -> tuple[Training, dict[str, int]]:
        training = Training(**(how or {}))
        rank.distribute(training.model, training.optimizer, scaler=training.scaler, clip_norm=clip_norm)
        if addresses is not None:
            rank.enter_servers(addresses, store)
        dropped = False
        for batch in rank.batches((X, Y, IDS), batch_size=BATCH, epochs=3, seed=0):
            with rank.step():
                here = drop_at is not None and not dropped and rank.step_number == drop_at[0]
                training.backward(*batch, sample)
                if here and drop_at is not None and drop_at[1] == "unscaled":
                    training.scaler.unscale_(training.optimizer)
                if here:
                    dropped = True
                    rank.drop()
                training.finish()
        assert drop_at is None or dropped
        rank.runtime.settle(None)
        return training, rank.runtime.position.ledger.audit()

    return on_ranks(size, script_of, **settings), order, sample


@pytest.mark.parametrize(
    ("size", "how", "clip_norm"),
    [
        (1, {}, None),
        (2, {}, None),
        (3, {"kind": "adam"}, None),
        (2, {"kind": "fused"}, None),
        (2, {"unscale": True}, None),
        (2, {"unscale": True, "clip": 0.05}, None),
        (2, {}, 0.05),
        (2, {"kind": "fused"}, 0.05),
    ],
)
def test_equal_to_plain_torch(size: int, how: dict[str, Any], clip_norm: float | None) -> None:
    """An infinity at one worker makes all skip; scale, growth and parameters are those of one process."""
    results, order, sample = elastic(size, how=how, clip_norm=clip_norm)
    expected = plain(order, sample, **({**how, "unscale": True, "clip": clip_norm} if clip_norm else how))
    for training, audit in results:
        torch.testing.assert_close(training.parameters(), expected.parameters(), rtol=0, atol=2e-6)
        assert training.scales == expected.scales
        assert audit["skipped"] == 3
        assert (audit["repeated"], audit["lost"], audit["totalSeen"]) == (0, 0, 72)
    assert len({tuple(training.parameters().tolist()) for training, _ in results}) == 1
    assert min(expected.scales) < 1024 < max(expected.scales)


@pytest.mark.parametrize(
    ("size", "how", "clip_norm"),
    [
        (1, {}, None),
        (2, {}, 0.05),
        (3, {"kind": "adam", "unscale": True}, None),
        (2, {"kind": "fused"}, 0.05),
    ],
)
def test_parameter_servers_skip_for_all(size: int, how: dict[str, Any], clip_norm: float | None) -> None:
    with servers(2) as running:
        results, order, sample = elastic(size, how=how, clip_norm=clip_norm, addresses=names(running))
    expected = plain(order, sample, **({**how, "unscale": True, "clip": clip_norm} if clip_norm else how))
    for training, audit in results:
        torch.testing.assert_close(training.parameters(), expected.parameters(), rtol=0, atol=2e-6)
        assert training.scales == expected.scales
        assert (audit["skipped"], audit["repeated"], audit["lost"]) == (3, 0, 0)


def test_lone_worker_stepping_freely_equals_plain_torch() -> None:
    with servers(2) as running:
        [(training, audit)], order, sample = elastic(
            1, how={"kind": "adam"}, clip_norm=0.05, addresses=names(running), consistency="Asynchronous"
        )
    expected = plain(order, sample, kind="adam", unscale=True, clip=0.05)
    torch.testing.assert_close(training.parameters(), expected.parameters(), rtol=0, atol=2e-6)
    assert training.scales == expected.scales
    assert (audit["skipped"], audit["repeated"], audit["lost"], audit["totalSeen"]) == (3, 0, 0, 72)


@pytest.mark.parametrize("compression", ["None", "BF16"])
def test_workers_that_do_not_step_together_skip_each_for_itself(compression: str) -> None:
    with servers(2) as running:
        results, _, _ = elastic(
            3, addresses=names(running), consistency="BoundedStaleness", compression=compression
        )
    down = 0
    for training, audit in results:
        assert (audit["skipped"], audit["repeated"], audit["lost"], audit["totalSeen"]) == (3, 0, 0, 72)
        assert bool(training.parameters().isfinite().all())
        down += sum(after < before for before, after in itertools.pairwise([1024.0, *training.scales]))
    # Whoever had the range of the infinite sample, and nobody else.
    assert down == 3
    assert sum(len(training.scales) for training, _ in results) == 9
    assert len({tuple(training.parameters().tolist()) for training, _ in results}) == 1


def test_gradient_infinite_only_in_sixteen_bits_is_skipped() -> None:
    with servers(1) as running:
        [(training, audit)], _, _ = elastic(
            1,
            how={"scale": 2.0**20},
            infinite=False,
            addresses=names(running),
            consistency="Asynchronous",
            compression="FP16",
        )
    assert 0 < audit["skipped"] < 9
    assert bool(training.parameters().isfinite().all())
    assert training.scales[0] == 2.0**19


def test_gradients_on_servers_are_not_clipped_by_the_script() -> None:
    with servers(1) as running, pytest.raises(springtide.UsageError, match=r"distribute.*clip_norm="):
        elastic(1, how={"unscale": True, "clip": 0.01}, addresses=names(running))


def test_a_chunk_s_norm_is_finite_exactly_when_its_sums_are() -> None:
    chunk = Chunk(torch.zeros(6), [(0, 0, 0, 2), (1, 0, 3, 6)], "sgd", [{"lr": 0.1}])
    total = torch.tensor([1e30, -1e30, float("inf"), 2.0, 0.0, 1.0])  # an infinity between the parameters
    assert chunk.square_norm(total) == pytest.approx(2e60)
    for broken in (float("inf"), float("-inf"), float("nan")):
        total[4] = broken
        assert not math.isfinite(chunk.square_norm(total))


@pytest.mark.parametrize("where", [(1, "backward"), (1, "unscaled"), (5, "unscaled"), (5, "backward")])
@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_dropped_body_leaves_no_trace_in_the_scaler(where: tuple[int, str], kind: str) -> None:
    how = {"kind": kind}
    results, order, sample = elastic(2, how=how, drop_at=where)
    expected = plain(order, sample, **how)
    for training, audit in results:
        torch.testing.assert_close(training.parameters(), expected.parameters(), rtol=0, atol=2e-6)
        assert training.scales == expected.scales
        assert audit["skipped"] == 3


def test_dropped_while_a_skipped_step_is_not_yet_skipped() -> None:
    results, order, sample = elastic(2, drop_at=(OVERFLOW, "unscaled"))
    assert [audit["skipped"] for _, audit in results] == [3, 3]
    assert results[0][0].scales == plain(order, sample).scales


def test_exact_mode_skips_alike_at_any_size() -> None:
    by_size = [elastic(size, logical_workers=4)[0] for size in (1, 2, 3)]
    first, audit = by_size[0][0]
    assert audit["skipped"] == 3
    expected = plain(*elastic(1)[1:])
    torch.testing.assert_close(first.parameters(), expected.parameters(), rtol=0, atol=1e-5)
    for results in by_size:
        for training, numbers in results:
            assert torch.equal(training.parameters(), first.parameters())
            assert training.scaler.get_scale() == first.scaler.get_scale()
            assert numbers == audit


def test_scaler_that_was_not_declared() -> None:
    def script(rank: Rank) -> None:
        training = Training()
        rank.distribute(training.model, training.optimizer)
        for batch in rank.batches((X, Y, IDS), batch_size=BATCH, seed=0):
            with rank.step():
                training.backward(*batch, None)
                training.finish()

    with pytest.raises(springtide.UsageError, match="scaler=scaler"):
        on_ranks(1, script)


def test_disabled_scaler_is_as_none() -> None:
    def script(rank: Rank) -> torch.Tensor:
        training = Training()
        training.scaler = torch.amp.GradScaler("cpu", enabled=False)
        rank.distribute(training.model, training.optimizer, scaler=training.scaler)
        for batch in rank.batches((X, Y, IDS), batch_size=BATCH, seed=0):
            with rank.step():
                training.backward(*batch, None)
                training.finish()
        return training.parameters()

    results, order, _ = elastic(1, infinite=False)
    torch.testing.assert_close(on_ranks(2, script)[0], plain(order[:3], None).parameters(), rtol=0, atol=2e-6)
    assert results[0][1]["skipped"] == 0


def test_backward_after_unscale_is_told() -> None:
    def script(rank: Rank) -> None:
        training = Training()
        rank.distribute(training.model, training.optimizer, scaler=training.scaler)
        for batch in rank.batches((X, Y, IDS), batch_size=BATCH, seed=0):
            with rank.step():
                training.backward(*batch, None)
                training.scaler.unscale_(training.optimizer)
                training.backward(*batch, None)

    with pytest.raises(springtide.UsageError, match=r"backward\(\) after the gradients were summed"):
        on_ranks(1, script)


def test_autocast_in_bfloat16_equals_plain_torch() -> None:
    labels = (X[:, :2].sum(1) > 0).long()

    def train(training: Training, batches: Any, step: Any) -> torch.Tensor:
        for batch in batches:
            x, y = batch
            with step():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(training.model(x), y)
                loss.backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
        return training.parameters()

    def script(rank: Rank) -> torch.Tensor:
        training = Training()
        rank.distribute(training.model, training.optimizer)
        return train(training, rank.batches((X, labels), batch_size=BATCH, epochs=2, seed=0), rank.step)

    with library():
        training = Training()
        springtide.distribute(training.model, training.optimizer)
        alone = train(
            training, springtide.batches((X, labels), batch_size=BATCH, epochs=2, seed=0), springtide.step
        )
    first, second = on_ranks(2, script)
    assert torch.equal(first, second)
    # bfloat16 keeps 8 bits; the two halves of a batch round differently than the whole.
    torch.testing.assert_close(first, alone, rtol=0, atol=5e-3)


def test_nan_without_a_scaler_is_applied_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """A NaN loss without a scaler makes the parameters NaN at all workers, the same as in plain torch.

    The log says so once.
    """

    def script(rank: Rank) -> torch.Tensor:
        training = Training()
        rank.distribute(training.model, training.optimizer)
        for batch in rank.batches((X, Y), batch_size=BATCH, seed=0):
            with rank.step():
                loss = (training.model(batch[0]) - batch[1]).square().mean() * float("nan")
                loss.backward()
                rank.report(loss=loss)
                training.optimizer.step()
                training.optimizer.zero_grad()
        assert rank.runtime.position.ledger.audit()["skipped"] == 0
        return training.parameters()

    with caplog.at_level("WARNING", "springtide"):
        for values in on_ranks(2, script):
            assert bool(values.isnan().any())
    told = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert told == ["step 1: loss is not finite (said once)"] * 2

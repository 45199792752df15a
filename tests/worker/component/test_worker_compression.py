"""Gradients in 16 bits and as thin matrices: they converge, and nothing of a residual is lost or doubled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from worker_ranks import Rank, on_ranks, seeded

import springtide
from springtide.comm.compression import LowRankBuckets, plan_matrix
from springtide.comm.layout import Field, plan_layout
from springtide.data.balance import NO_BOUND, Proportions
from springtide.elastic import balancer
from springtide.errors import SpringtideError
from springtide.settings import read_settings

SAMPLES, INPUTS, BATCH = 64, 24, 16
X = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(1))
TRUE = torch.randn(INPUTS, 20, generator=torch.Generator().manual_seed(2)) / 5
Y = torch.tanh(X @ TRUE)


class Net:
    def __init__(self, lr: float = 0.1) -> None:
        with seeded(3):
            layers = torch.nn.Linear(INPUTS, 32), torch.nn.Tanh(), torch.nn.Linear(32, 20)
            self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.model(x) - y).square().sum(1).mean()

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).clone()


def train(rank: Rank, epochs: int = 3, drop: tuple[int, str] | None = None, last: int = 0) -> dict[str, Any]:
    """Train; return parameters, loss over all samples, and the trainer's state. last: boundary after it."""
    net = Net()
    rank.distribute(net.model, net.optimizer)
    dropped = False
    for batch in rank.batches((X, Y), batch_size=BATCH, epochs=epochs, seed=0):
        x, y = batch
        here = drop is not None and drop[0] == rank.step_number and not dropped
        if last:
            rank.trainer.want_change(rank.step_number == last and rank.rank == 0)
        with rank.step():
            if here and drop is not None and drop[1] == "begin":
                dropped = True
                rank.drop()
            net.loss(x, y).backward()
            if here and drop is not None and drop[1] == "backward":
                dropped = True
                rank.drop()
            net.optimizer.step()
            net.optimizer.zero_grad()
    assert dropped == (drop is not None)
    return {
        "values": net.values(),
        "loss": float(net.loss(X, Y).detach()),
        "buckets": rank.trainer.buckets,
        "tree": rank.trainer.state.read(rank.runtime.position, {}),
        "bytes": rank.trainer.reduction,
    }


@pytest.mark.parametrize(("kind", "atol"), [("BF16", 2e-2), ("FP16", 2e-3)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sixteen_bits_are_close_to_the_uncompressed_sum(kind: str, atol: float, size: int) -> None:
    expected = on_ranks(1, train)[0]
    results = on_ranks(size, train, compression=kind)
    for result in results:
        assert torch.equal(result["values"], results[0]["values"])
        torch.testing.assert_close(result["values"], expected["values"], rtol=0, atol=atol)
        assert not torch.equal(result["values"], expected["values"])


@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1, 3), (9, 1, 1)])
def test_sixteen_bits_cost_as_much_in_uneven_parts(
    times: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum's error is that of the format, however small the parts are that it is made from.

    With a gradient that does not depend on the parameters, the sum of all updates shows it.
    """
    cut = Proportions(times, (NO_BOUND,) * len(times))
    monkeypatch.setattr(balancer, "next_proportions", lambda current, figures: cut)

    def moved(rank: Rank) -> tuple[torch.Tensor, list[int]]:
        with seeded(4):
            model = torch.nn.Linear(INPUTS, 20, bias=False)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rank.distribute(model, optimizer)
        sizes = []
        for batch in rank.batches((X, Y), batch_size=BATCH, epochs=1, seed=0):
            x, y = batch
            sizes.append(len(x))
            with rank.step():
                (model(x) * y).sum(1).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return before - model.weight.detach(), sizes

    whole = (Y.T @ X) / BATCH
    compressed = on_ranks(3, moved, compression="BF16")
    expected = {(1, 1, 1): (6, 5, 5), (1, 1, 3): (7, 7, 2), (9, 1, 1): (2, 7, 7)}[times]
    assert tuple(sizes[-1] for _, sizes in compressed) == expected
    error = float((compressed[0][0] - whole).norm() / whole.norm())
    assert 1e-4 < error < 0.0025


@pytest.mark.slow
def test_thin_matrices_converge_with_error_feedback() -> None:
    plain = on_ranks(2, lambda rank: train(rank, 40))[0]["loss"]
    results = on_ranks(2, lambda rank: train(rank, 40), compression="PowerSGD")
    assert torch.equal(results[0]["values"], results[1]["values"])
    start = float(Net().loss(X, Y).detach())
    assert plain < 0.1 * start
    assert results[0]["loss"] < 1.2 * plain

    class Forgetful(LowRankBuckets):
        def committed(self) -> None:
            super().committed()
            self.residuals = {}

    def forget(rank: Rank) -> dict[str, Any]:
        original = Rank.distribute

        def distribute(self: Rank, *arguments: Any, **more: Any) -> None:
            original(self, *arguments, **more)
            self.trainer.buckets.__class__ = Forgetful

        rank.distribute = distribute.__get__(rank)  # type: ignore[method-assign]
        return train(rank, 40)

    without = on_ranks(2, forget, compression="PowerSGD")[0]["loss"]
    assert without > results[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("where", [(1, "begin"), (4, "begin"), (4, "backward")])
@pytest.mark.parametrize("kind", ["BF16", "PowerSGD"])
def test_dropped_body_leaves_residuals_as_they_were(where: tuple[int, str], kind: str) -> None:
    """The bits are those of an undisturbed run."""
    undisturbed = on_ranks(2, train, compression=kind)
    for result, expected in zip(
        on_ranks(2, lambda rank: train(rank, drop=where), compression=kind), undisturbed, strict=True
    ):
        assert torch.equal(result["values"], expected["values"])
        if kind == "PowerSGD":
            residuals = expected["buckets"].residuals
            assert residuals
            assert all(torch.equal(result["buckets"].residuals[i], residuals[i]) for i in residuals)


def test_what_was_left_out_goes_in_at_a_boundary() -> None:
    """Updates and residuals add up to the gradients; the last step of a generation leaves no residual.

    With a gradient that does not depend on the parameters, the sum of all updates is then exact.
    """

    def script(rank: Rank, last: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
        with seeded(4):
            model = torch.nn.Linear(INPUTS, 20, bias=False)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rank.distribute(model, optimizer)
        for batch in rank.batches((X, Y), batch_size=BATCH, epochs=1, seed=0):
            x, y = batch
            rank.trainer.want_change(last and rank.step_number == SAMPLES // BATCH and rank.rank == 0)
            with rank.step():
                (model(x) * y).sum(1).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        buckets = rank.trainer.buckets
        assert isinstance(buckets, LowRankBuckets)
        left = sum(float(residual.norm()) for residual in buckets.residuals.values())
        return before - model.weight.detach(), torch.stack(list(buckets.residuals.values())), left

    whole = (Y.T @ X) / BATCH
    kept = on_ranks(2, lambda rank: script(rank, last=False), compression="PowerSGD")
    for moved, _, left in kept:
        assert left > 0.01
        assert not torch.allclose(moved, whole, atol=1e-2)
        torch.testing.assert_close(moved + sum(item[1][0] for item in kept), whole, rtol=0, atol=1e-4)
    for moved, _, left in on_ranks(2, lambda rank: script(rank, last=True), compression="PowerSGD"):
        assert left == 0.0
        torch.testing.assert_close(moved, whole, rtol=0, atol=1e-4)


def test_a_joiner_gets_the_warm_start_and_no_residual() -> None:
    result = on_ranks(1, train, compression="PowerSGD")[0]

    def join(rank: Rank) -> None:
        net = Net()
        rank.distribute(net.model, net.optimizer)
        buckets = rank.trainer.buckets
        assert isinstance(buckets, LowRankBuckets)
        buckets.residuals[0] = torch.ones(1)
        rank.trainer.state.write(result["tree"])
        assert not buckets.residuals
        for index, basis in result["buckets"].state_dict()["bases"].items():
            assert torch.equal(buckets.state_dict()["bases"][index], basis)
        with pytest.raises(ValueError, match="another model or rank"):
            buckets.load_state_dict({"bases": {}})

    on_ranks(1, join, compression="PowerSGD")


def test_what_travels_is_small() -> None:
    fields = [Field("weight", (300, 200), torch.float32), Field("bias", (300,), torch.float32)]
    buckets = LowRankBuckets(plan_layout(fields, 1 << 20), None)
    sent: list[int] = []

    class Done:
        def wait(self) -> None: ...

        def is_completed(self) -> bool:
            return True

    def start_sum(tensor: torch.Tensor) -> Done:
        sent.append(tensor.nbytes)
        return Done()

    buckets.begin(start_sum)
    for index, field in enumerate(fields):
        buckets.put(index, torch.randn(field.shape), 1.0, 0, True)
    buckets.flush()
    buckets.wait()
    assert sum(sent) == 4 * (4 * (300 + 200) + 300)
    assert plan_matrix((300,)) is None
    assert plan_matrix((8, 8)) is None  # two factors would be as large
    convolution = plan_matrix((64, 32, 3, 3))
    assert convolution is not None
    assert (convolution.rows, convolution.columns, convolution.rank) == (64, 288, 4)


@pytest.mark.parametrize(
    ("compression", "settings", "searches", "scaler", "message"),
    [
        ("PowerSGD", {}, True, False, "does not go with LBFGS"),
        ("PowerSGD", {}, False, True, "residuals cannot follow"),
        ("BF16", {"logical_workers": 2}, False, False, "exclude each other"),
    ],
)
def test_what_does_not_go_together(
    compression: str, settings: dict[str, Any], searches: bool, scaler: bool, message: str
) -> None:
    def script(rank: Rank) -> None:
        net = Net()
        tracked = {"scaler": torch.amp.GradScaler("cpu")} if scaler else {}
        rank.distribute(
            net.model, torch.optim.LBFGS(net.model.parameters()) if searches else net.optimizer, **tracked
        )

    with pytest.raises(springtide.UsageError, match=message):
        on_ranks(1, script, compression=compression, **settings)


def test_the_environment_names_the_kinds() -> None:
    assert read_settings({}).compression == "None"
    assert read_settings({"SPRINGTIDE_COMPRESSION": "PowerSGD"}).compression == "PowerSGD"
    with pytest.raises(SpringtideError, match="COMPRESSION must be one of None, BF16, FP16, PowerSGD"):
        read_settings({"SPRINGTIDE_COMPRESSION": "ZIP"})

"""Float32 masters of 16-bit parameters: the bits of a loop that keeps them by hand, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from worker_alone import library

import springtide
from springtide.elastic.runtime import Runtime
from springtide.errors import SpringtideError, UsageError
from springtide.train_step.master_weights import MASTER, take_master
from springtide.train_step.validation import declare

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=1e-4, foreach=True, amsgrad=True),
}


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with library() as runtime:
        yield runtime


def mixed_model(dtype: torch.dtype) -> torch.nn.Module:
    """Return a model of this type with a float32 layer, a transposed parameter and one that nobody uses."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(dtype)
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(2)))
    model.register_parameter("idle", torch.nn.Parameter(torch.ones(5, dtype=dtype)))
    model[2].weight = torch.nn.Parameter(torch.randn(8, 2).to(dtype).t())
    return model


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = model(x.to(model[0].weight.dtype)).float() * model.scale
    return (out - y).square().mean()


class ByHand:
    """A loop that keeps masters itself."""

    def __init__(self, model: torch.nn.Module, make: MakeOptimizer) -> None:
        self.model = model
        self.masters = [parameter.detach().float() for parameter in model.parameters()]
        self.optimizer = make(self.masters)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        loss_of(self.model, x, y).backward()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master)
                parameter.grad = None


def train(script: Any, optimizer: Any, twin: ByHand | None, epochs: int = 4) -> None:
    x, y = torch.randn(32, 4), torch.randn(32, 2)
    for bx, by in springtide.batches((x, y), batch_size=8, epochs=epochs, seed=1):
        with springtide.step():
            loss_of(script, bx, by).backward()
            optimizer.step()
            optimizer.zero_grad()
        if twin is not None:
            twin.step(bx, by)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_to_masters_kept_by_hand(runtime: Runtime, name: str, dtype: torch.dtype) -> None:
    model = mixed_model(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    twin = ByHand(copy.deepcopy(model), OPTIMIZERS[name])
    groups = [list(group["params"]) for group in optimizer.param_groups]
    springtide.distribute(model, optimizer, master_weights=True)
    train(model, optimizer, twin)
    assert runtime.position.cursor.step == 16
    moved = 0
    for own, other, master in zip(model.parameters(), twin.model.parameters(), twin.masters, strict=True):
        assert torch.equal(own, other)
        state = optimizer.state.get(own, {})
        if own.dtype == dtype and own is not model.idle:
            assert torch.equal(state[MASTER], master)
            moved += int((state[MASTER] != own.float()).sum())
        for key, value in twin.optimizer.state.get(master, {}).items():
            assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key
    assert moved > 10, "no step was smaller than the distance of two numbers"
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        list(map(id, group)) for group in groups
    ]
    assert MASTER not in optimizer.state.get(model.scale, {})


def test_change_by_the_script_is_where_the_master_goes_on(runtime: Runtime) -> None:
    model = mixed_model(torch.bfloat16)
    optimizer = OPTIMIZERS["SGD with momentum"](model.parameters())
    springtide.distribute(model, optimizer, master_weights=True)
    train(model, optimizer, None)
    weight = model[0].weight
    before = optimizer.state[weight][MASTER].clone()
    with torch.no_grad():
        weight[:3].clamp_(-0.01, 0.01)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, None, epochs=1)
    after = optimizer.state[weight][MASTER]
    changed = weight.float() != before.to(torch.bfloat16).float()
    assert changed.any()
    assert torch.equal(after[~changed], before[~changed])
    assert torch.equal(after[changed], weight.float()[changed])


def test_state_without_masters_becomes_float32() -> None:
    """A job that had none may be restored into one that asks for them."""
    values = torch.randn(6).bfloat16()
    state = {"exp_avg": torch.randn(6).bfloat16(), "step": torch.tensor(3.0), "count": 2}
    master, rest = take_master(values, state, True)
    assert torch.equal(master, values.float())
    assert torch.equal(rest["exp_avg"], state["exp_avg"].float())  # type: ignore[attr-defined]
    assert (rest["step"], rest["count"]) == (state["step"], 2)


def test_state_with_masters_needs_a_script_that_asks(runtime: Runtime) -> None:
    model = mixed_model(torch.bfloat16)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    springtide.distribute(model, optimizer, master_weights=True)
    train(model, optimizer, None)
    assert runtime.trainer is not None
    tree = runtime.trainer.state.read(runtime.position, {})
    assert runtime.trainer.state.check(tree) is not None
    for asks in (False, True):
        with other_library() as other:
            twin = mixed_model(torch.bfloat16)
            received = OPTIMIZERS["AdamW"](twin.parameters())
            springtide.distribute(twin, received, master_weights=asks)
            assert other.trainer is not None
            if not asks:
                with pytest.raises(SpringtideError, match="give it master_weights=True"):
                    other.trainer.state.check(tree)
                continue
            other.trainer.state.check(tree)
            other.trainer.state.write(tree)
            for own, parameter in zip(twin.parameters(), model.parameters(), strict=True):
                assert torch.equal(own, parameter)
                assert MASTER not in optimizer.state.get(parameter, {}) or torch.equal(
                    received.state[own][MASTER], optimizer.state[parameter][MASTER]
                )


def other_library() -> Any:
    """Return a library in place of the one that is there."""
    springtide.api.active_runtime = None
    return library()


def refused(message: str, optimizers: Any = None, **arguments: Any) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=message):
        declare(
            model,
            [optimizer] if optimizers else optimizer,
            None,
            {},
            in_job=True,
            exact=False,
            **{"master_weights": True, **arguments},
        )


def test_what_masters_cannot_be_with_is_refused() -> None:
    refused("master_weights must be True or False, got 'yes'", master_weights="yes")
    refused("strategy.type ParameterServer has no float32 masters", strategy="ParameterServer")
    refused("one optimizer, not a list", optimizers=True)

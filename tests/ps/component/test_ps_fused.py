"""A step of an optimizer's kernel alone is its own step: values and state are equal bit for bit."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from springtide_ps.params.fused import leaves_gradients, stepper
from springtide_ps.params.optim import Update

SIZES = (1, 7, 1000, 4099)
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "amsgrad": True, "eps": 1e-6}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5, "maximize": True}),
]
NAMES = [f"{kind.__name__}-{'-'.join(options)}" for kind, options in CASES]


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def make(
    kind: Any, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """Two parameter groups: the first three tensors, and the last one with another learning rate."""
    values = tensors(0, dtype)
    groups = [{"params": values[:3]}, {"params": values[3:], "lr": options["lr"] / 3}]
    return kind(groups, **options, fused=True), values


def give(values: list[torch.Tensor], seed: int, without: tuple[int, ...] = ()) -> None:
    for number, (value, gradient) in enumerate(zip(values, tensors(seed, values[0].dtype), strict=True)):
        value.grad = None if number in without else gradient


def check_equal(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    mine, its = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == its["param_groups"]
    assert mine["state"].keys() == its["state"].keys()
    for number, state in its["state"].items():
        assert mine["state"][number].keys() == state.keys()
        for name, held in state.items():
            assert held is mine["state"][number][name] is None or torch.equal(
                held, mine["state"][number][name]
            )
    for a, b in zip(ours.param_groups, theirs.param_groups, strict=True):
        for x, y in zip(a["params"], b["params"], strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_the_optimizers_own(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    (ours, mine), (theirs, its) = make(kind, options, dtype), make(kind, options, dtype)
    step = stepper(ours)
    for number in range(1, 6):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = options["lr"] / number
        give(mine, number)
        give(its, number)
        step()
        theirs.step()
        check_equal(ours, theirs)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_stay_as_they_are(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    optimizer, values = make(kind, options, dtype)
    assert leaves_gradients(optimizer)
    step = stepper(optimizer)
    for number, without in enumerate([(1,), (), (0, 1, 2), (), (3,)], start=1):
        give(values, number, without)
        gradients = [None if value.grad is None else value.grad.clone() for value in values]
        step()
        for value, before in zip(values, gradients, strict=True):
            assert (value.grad is None) or (before is not None and torch.equal(value.grad, before))


def test_of_other_optimizers_that_is_not_known() -> None:
    assert not leaves_gradients(torch.optim.RMSprop(tensors(0)))
    assert not leaves_gradients(torch.optim.SGD(tensors(0), lr=0.1, fused=False))


@pytest.mark.parametrize(("kind", "options"), CASES, ids=NAMES)
def test_tensors_without_gradients_stay_as_they_are(kind: Any, options: dict[str, Any]) -> None:
    (ours, mine), (theirs, its) = make(kind, options), make(kind, options)
    step = stepper(ours)
    # Only from the second step on: torch's own fused SGD cannot begin with half of its momentum.
    for number, without in enumerate([(), (1,), (), (0, 1, 2), (3,), ()], start=1):
        give(mine, number, without)
        give(its, number, without)
        step()
        theirs.step()
        check_equal(ours, theirs)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=NAMES)
def test_tensors_whose_first_gradients_come_late_begin_then(kind: Any, options: dict[str, Any]) -> None:
    """A tensor's state begins at its first gradient, as it does without the fused kernel.

    With the fused kernel torch's own SGD fails here, so the reference runs without it.
    """
    (ours, mine), (theirs, its) = make(kind, options), make(kind, options)
    for group in theirs.param_groups:
        group["fused"] = False
    step = stepper(ours)
    for number, without in enumerate([(0, 1, 2), (1, 3), (), (2,), ()], start=1):
        give(mine, number, without)
        give(its, number, without)
        step()
        theirs.step()
        for a, b in zip(mine, its, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
            assert ours.state.get(a, {}).keys() == theirs.state.get(b, {}).keys()
            for name, held in theirs.state.get(b, {}).items():
                torch.testing.assert_close(ours.state[a][name], held, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad", "rmsprop"])
def test_steps_in_other_dtypes_match_float32_within_rounding(name: str, dtype: torch.dtype) -> None:
    """Also of elements that a kernel takes many at a time (pytorch/pytorch#191763)."""
    update = Update(name, {"lr": 0.01, **({"momentum": 0.9} if name == "sgd" else {"eps": 1e-3})})
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100, generator=generator).to(dtype)
    wide = values.float()
    step, expected = update.bind(values), update.bind(wide)
    for _ in range(4):
        gradient = torch.randn(100, generator=generator).to(dtype)
        step(gradient.clone())
        expected(gradient.float())
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(values.double(), wide.double(), rtol=8 * rounding, atol=8 * rounding)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=NAMES)
def test_a_state_that_was_put_in_is_used(kind: Any, options: dict[str, Any]) -> None:
    (ours, mine), (theirs, its) = make(kind, options), make(kind, options)
    step = stepper(ours)
    for number in (1, 2):
        give(mine, number)
        give(its, number)
        step()
        theirs.step()
    for values, optimizer in ((mine, ours), (its, theirs)):
        state = optimizer.state[values[1]]
        optimizer.state[values[1]] = {
            name: None if held is None else held.clone() * 2 for name, held in state.items()
        }
        give(values, 3)
    step()
    theirs.step()
    check_equal(ours, theirs)


def test_the_kernel_is_called_without_the_optimizers_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused step does not go through `torch.optim`.

    If it did, the other tests would still pass, and nothing would be gained.
    """
    optimizer, values = make(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    step = stepper(optimizer)
    give(values, 1)
    step()  # makes the momentum
    monkeypatch.setattr(importlib.import_module("torch.optim.sgd"), "sgd", None)
    give(values, 2)
    before = [value.clone() for value in values]
    step()
    assert not any(torch.equal(a, b) for a, b in zip(before, values, strict=True))


def test_an_optimizer_without_a_fused_kernel_makes_its_own_step() -> None:
    values, other = tensors(0), tensors(0)
    ours, theirs = torch.optim.RMSprop(values, lr=0.1), torch.optim.RMSprop(other, lr=0.1)
    step = stepper(ours)
    for number in (1, 2, 3):
        give(values, number)
        give(other, number)
        step()
        theirs.step()
    check_equal(ours, theirs)


COMPILER = """
import sys
import torch
from springtide_ps.params.optim import Update
for name in ("sgd", "adam", "adamw", "adagrad", "rmsprop"):
    values = torch.zeros(10)
    step = Update(name, {"lr": 0.1}).bind(values)
    for _ in range(2):
        step(torch.ones(10))
    assert values.sum() < 0, name
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_no_step_imports_the_compiler() -> None:
    """A step does not import torch's compiler.

    That import takes a starting server as long as the import of torch itself.
    """
    done = subprocess.run([sys.executable, "-c", COMPILER], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stdout + done.stderr

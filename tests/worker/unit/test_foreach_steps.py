"""Steps of many small parameters on the CPU: torch's foreach code instead of one by one, with equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from springtide.train_step.foreach_steps import ForeachSteps, are_small

COUNT, STEPS = 20, 12
CASES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.Adam, {"lr": 0.01}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.Rprop, {}),
]


def parameters(dtype: torch.dtype, numel: int = 37) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(numel, generator=generator).to(dtype)) for _ in range(COUNT)]


def trained(
    kind: type[optim.Optimizer], options: dict[str, Any], dtype: torch.dtype, together: bool
) -> tuple[list[torch.Tensor], list[Any]]:
    """Return all tensors after some steps, and what `foreach` was while each was made."""
    generator = torch.Generator().manual_seed(1)
    own, steps, seen = parameters(dtype), ForeachSteps(), []
    optimizer = kind(own, **options)
    for _ in range(STEPS):
        for parameter in own:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        if together:
            steps.begin(optimizer)
        seen.append(optimizer.param_groups[0]["foreach"])
        optimizer.step()
        steps.end()
        assert optimizer.param_groups[0]["foreach"] is options.get("foreach")
    kept = [value for item in own for _, value in sorted(optimizer.state[item].items())]
    return [*(item.detach() for item in own), *(item for item in kept if torch.is_tensor(item))], seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_foreach_step_has_the_bits_of_single_ones(
    kind: type[optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    one_by_one, _ = trained(kind, options, dtype, together=False)
    together, seen = trained(kind, options, dtype, together=True)
    assert seen == [True] * STEPS
    for expected, found in zip(one_by_one, together, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        (optim.SGD, {"lr": 0.1, "foreach": False}, torch.float32),
        (optim.AdamW, {"fused": True}, torch.float32),
        (optim.SGD, {"lr": torch.tensor(0.1)}, torch.float32),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}, torch.bfloat16),
        (optim.NAdam, {}, torch.float32),
    ],
)
def test_what_would_differ_or_was_said_is_left_alone(
    kind: type[optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    _, seen = trained(kind, options, dtype, together=True)
    assert seen == [options.get("foreach")] * STEPS


def test_a_group_that_gets_large_parameters_is_left_alone() -> None:
    steps, optimizer = ForeachSteps(), optim.SGD(parameters(torch.float32), lr=0.1)
    steps.begin(optimizer)
    assert optimizer.param_groups[0]["foreach"] is True
    steps.end()
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(1 << 20)))
    steps.begin(optimizer)
    assert optimizer.param_groups[0]["foreach"] is None


def test_few_or_large_parameters_are_not_small() -> None:
    small, large = torch.zeros(64), torch.zeros(1 << 14)
    assert are_small([small] * 8)
    assert not are_small([small] * 7)
    assert not are_small([large] * 8)
    assert are_small([large, *[small] * 7])
    assert not are_small([torch.zeros(4096)] * 257)
    assert not are_small([torch.zeros(64, device="meta")] * 8)

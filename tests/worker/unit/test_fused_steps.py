"""Steps of SGD on the CPU by torch's fused code, where its bits are those of single steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import optim

from springtide.train_step import fused_steps
from springtide.train_step.foreach_steps import ForeachSteps
from springtide.train_step.fused_steps import FusedSteps, has_equal_bits

STEPS = 6
NUMELS = (16, 10, 4096, 37, 1 << 17)
"""Sizes of parameters: two are no whole number of vectors, and one is divided among torch's threads."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.1, "maximize": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"weight_decay": 0.01},
]


@pytest.fixture(autouse=True)
def forget_trials() -> Iterator[None]:
    yield
    has_equal_bits.cache_clear()


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(numel, generator=generator).to(dtype)) for numel in NUMELS]


def give_gradients(own: list[torch.nn.Parameter], generator: torch.Generator) -> None:
    for parameter in own:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def fuses(steps: FusedSteps, optimizer: optim.Optimizer) -> list[bool]:
    """Return for each group whether a step would fuse it; all looks as before then."""
    before = [dict(group) for group in optimizer.param_groups]
    steps.begin(optimizer)
    found = [bool(group["fused"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    steps.end(optimizer)
    for group, earlier in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = earlier["lr"]
    assert [dict(group) for group in optimizer.param_groups] == before
    return found


def trained(options: dict[str, Any], dtype: torch.dtype, is_fused: bool) -> list[torch.Tensor]:
    own, fused, together = parameters(dtype), FusedSteps(), ForeachSteps()
    optimizer = optim.SGD([{"params": own[:3]}, {"params": own[3:], "lr": 0.02}], lr=0.1, **options)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        give_gradients(own, generator)
        if number == 3:
            own[2].grad = None
        if is_fused:
            fused.begin(optimizer)
            together.begin(optimizer)
            assert [group["fused"] for group in optimizer.param_groups] == [True, True]
            assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2]
        optimizer.step()
        together.end()
        fused.end(optimizer)
        scheduler.step()
    kept = [value for item in own for value in optimizer.state[item].values()]
    return [*(item.detach() for item in own), *(item for item in kept if torch.is_tensor(item))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_fused_step_has_the_bits_of_single_ones(options: dict[str, Any], dtype: torch.dtype) -> None:
    one_by_one, fused = (trained(options, dtype, is_fused) for is_fused in (False, True))
    assert len(one_by_one) == len(NUMELS) * (2 if "momentum" in options else 1)
    for expected, found in zip(one_by_one, fused, strict=True):
        assert torch.equal(expected, found)


def test_the_trial_leaves_the_scripts_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    assert has_equal_bits(torch.float32, True, True, False, True, False)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_bits_or_no_fused_code_for_a_cpu_keep_single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    own = parameters()
    optimizer = optim.SGD(own, lr=0.1, momentum=0.9)
    give_gradients(own, torch.Generator().manual_seed(0))
    steps, real = FusedSteps(), fused_steps.sgd
    assert fuses(steps, optimizer) == [True]

    def other_bits(params: list[torch.Tensor], *args: Any, fused: bool, **kwargs: Any) -> None:
        real(params, *args, fused=fused, **kwargs)
        if fused:
            params[-1][-1] = torch.nextafter(params[-1][-1], torch.tensor(0.0))

    def none(*args: Any, fused: bool, **kwargs: Any) -> None:
        if fused:
            raise RuntimeError("`fused=True` requires all the params to be on a device that has it")
        real(*args, fused=fused, **kwargs)

    for code in (other_bits, none):
        has_equal_bits.cache_clear()
        monkeypatch.setattr(fused_steps, "sgd", code)
        assert fuses(steps, optimizer) == [False]


@pytest.mark.parametrize(
    "options",
    [{"foreach": False}, {"foreach": True}, {"fused": False}, {"fused": True}, {"differentiable": True}],
)
def test_what_the_script_has_said_stays(options: dict[str, Any]) -> None:
    own = parameters()
    optimizer = optim.SGD(own, lr=0.1, **options)
    give_gradients(own, torch.Generator().manual_seed(0))
    FusedSteps().begin(optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [options.get("fused")]


def test_other_optimizers_and_rates_in_tensors_are_left_alone() -> None:
    class Own(optim.SGD):
        pass

    own = parameters()
    give_gradients(own, torch.Generator().manual_seed(0))
    for optimizer in (optim.Adam(own), Own(own), optim.SGD(own, lr=torch.tensor(0.1))):
        steps = FusedSteps()
        steps.begin(optimizer)
        assert optimizer.param_groups[0]["fused"] is None


def test_numbers_that_lie_in_another_order_are_not_fused() -> None:
    """torch's fused code does not look at strides: it would add the wrong numbers."""
    steps = FusedSteps()
    parameter = torch.nn.Parameter(torch.randn(2, 16, 4, 4).to(memory_format=torch.channels_last))
    optimizer = optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.randn(2, 16, 4, 4)
    assert fuses(steps, optimizer) == [False]
    parameter.data = parameter.data.contiguous()
    optimizer.state.clear()
    assert fuses(steps, optimizer) == [True]
    parameter.grad = parameter.grad.to(memory_format=torch.channels_last)
    assert fuses(steps, optimizer) == [False]
    parameter.grad = parameter.grad.contiguous()
    assert fuses(steps, optimizer) == [True]
    momentum = optimizer.state[parameter]["momentum_buffer"]
    optimizer.state[parameter]["momentum_buffer"] = momentum.to(memory_format=torch.channels_last)
    assert fuses(steps, optimizer) == [False]


def test_steps_are_single_while_some_have_no_momentum() -> None:
    """Parameters get momentum with their first gradients, at different times."""
    own, steps = parameters(), FusedSteps()
    optimizer = optim.SGD(own, lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    give_gradients(own, generator)
    own[0].grad = None
    assert fuses(steps, optimizer) == [True]
    give_gradients(own, generator)
    assert fuses(steps, optimizer) == [False]
    assert fuses(steps, optimizer) == [True]
    optimizer.state[own[0]]["momentum_buffer"] = None  # as checkpoints of old releases of torch have it
    assert fuses(steps, optimizer) == [False]


def test_groups_of_other_kinds_or_mostly_odd_ones_are_not_fused() -> None:
    generator = torch.Generator().manual_seed(0)
    for own in (
        [torch.nn.Parameter(torch.randn(16).bfloat16()), torch.nn.Parameter(torch.randn(16))],
        [torch.nn.Parameter(torch.randn(15))],
        [torch.nn.Parameter(torch.randn((1 << 14) + 1)), torch.nn.Parameter(torch.randn(16))],
    ):
        give_gradients(own, generator)
        assert fuses(FusedSteps(), optim.SGD(own, lr=0.1)) == [False]


def test_parameters_that_come_are_looked_at() -> None:
    own, steps = parameters()[:1], FusedSteps()
    optimizer = optim.SGD(own, lr=0.1)
    give_gradients(own, torch.Generator().manual_seed(0))
    assert fuses(steps, optimizer) == [True]
    other = torch.nn.Parameter(torch.randn(16).bfloat16())
    other.grad = torch.zeros_like(other)
    optimizer.param_groups[0]["params"].append(other)
    assert fuses(steps, optimizer) == [False]
    optimizer.param_groups[0]["params"].pop()
    assert fuses(steps, optimizer) == [True]
    optimizer.param_groups[0]["params"][0] = other
    assert fuses(steps, optimizer) == [False]


def test_groups_are_as_before_after_a_step_that_raised() -> None:
    own, steps = parameters(), FusedSteps()
    optimizer = optim.SGD(own, lr=0.1)
    give_gradients(own, torch.Generator().manual_seed(0))
    before = dict(optimizer.param_groups[0])
    steps.begin(optimizer)  # and no end
    steps.begin(optimizer)
    assert optimizer.param_groups[0]["fused"] is True
    steps.end(optimizer)
    assert dict(optimizer.param_groups[0]) == before

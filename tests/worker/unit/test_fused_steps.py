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


def fused_sizes(steps: FusedSteps, optimizer: optim.Optimizer) -> list[int]:
    """Return the sizes of the parameters that a step would fuse; all looks as before then."""
    before = [dict(group) for group in optimizer.param_groups]
    steps.begin(optimizer)
    found = [
        parameter.numel()
        for group in optimizer.param_groups
        if group["fused"]
        for parameter in group["params"]
    ]
    steps.end(optimizer)
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
            assert [group["fused"] for group in optimizer.param_groups] == [True, True, None, None]
        optimizer.step()
        together.end()
        fused.end(optimizer)
        scheduler.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2]
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
    assert fused_sizes(steps, optimizer) == [16, 4096, 1 << 17]

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
        assert fused_sizes(steps, optimizer) == []


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
        assert fused_sizes(FusedSteps(), optimizer) == []


def test_numbers_that_lie_in_another_order_are_not_fused() -> None:
    """torch's fused code does not look at strides: it would add the wrong numbers."""
    steps = FusedSteps()
    parameter = torch.nn.Parameter(torch.randn(2, 16, 4, 4).to(memory_format=torch.channels_last))
    optimizer = optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.randn(2, 16, 4, 4)
    assert fused_sizes(steps, optimizer) == []
    parameter.data = parameter.data.contiguous()
    assert fused_sizes(steps, optimizer) == [512]
    parameter.grad = parameter.grad.to(memory_format=torch.channels_last)
    assert fused_sizes(steps, optimizer) == []
    parameter.grad = parameter.grad.contiguous()
    optimizer.step()
    momentum = optimizer.state[parameter]["momentum_buffer"]
    assert fused_sizes(steps, optimizer) == [512]
    optimizer.state[parameter]["momentum_buffer"] = momentum.to(memory_format=torch.channels_last)
    assert fused_sizes(steps, optimizer) == []
    optimizer.state[parameter]["momentum_buffer"] = momentum.double()
    assert fused_sizes(steps, optimizer) == []


def test_steps_are_single_while_some_have_no_momentum() -> None:
    """Parameters get momentum with their first gradients, at different times."""
    own, steps = parameters(), FusedSteps()
    optimizer = optim.SGD(own, lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    give_gradients(own, generator)
    own[0].grad = None
    assert fused_sizes(steps, optimizer) == [16, 4096, 1 << 17]
    optimizer.step()
    give_gradients(own, generator)
    assert fused_sizes(steps, optimizer) == []
    optimizer.step()
    assert fused_sizes(steps, optimizer) == [16, 4096, 1 << 17]
    optimizer.state[own[0]]["momentum_buffer"] = None  # as checkpoints of old releases of torch have it
    assert fused_sizes(steps, optimizer) == []


def test_parameters_that_come_and_go_are_stepped() -> None:
    own, steps = parameters(), FusedSteps()
    optimizer = optim.SGD(own[:1], lr=0.1)
    give_gradients(own, torch.Generator().manual_seed(0))
    assert fused_sizes(steps, optimizer) == [16]
    optimizer.param_groups[0]["params"].append(own[2])
    assert fused_sizes(steps, optimizer) == [16, 4096]
    optimizer.param_groups[0]["params"][0] = own[4]
    assert fused_sizes(steps, optimizer) == [1 << 17, 4096]
    optimizer.param_groups[0]["params"] = [own[0]]
    assert fused_sizes(steps, optimizer) == [16]
    optimizer.add_param_group({"params": [own[2]]})
    assert fused_sizes(steps, optimizer) == [16, 4096]


def test_groups_are_whole_again_after_a_step_that_raised() -> None:
    own, steps = parameters(), FusedSteps()
    optimizer = optim.SGD(own, lr=0.1)
    give_gradients(own, torch.Generator().manual_seed(0))
    before = dict(optimizer.param_groups[0])
    steps.begin(optimizer)  # and no end
    steps.begin(optimizer)
    assert len(optimizer.param_groups) == 2
    steps.end(optimizer)
    assert [dict(group) for group in optimizer.param_groups] == [before]

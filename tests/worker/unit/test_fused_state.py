"""State that a worker receives, in the hands of a fused optimizer that refuses what CUDA's refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_device import Accelerator, There

from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.train_step.buffers import Buffers
from springtide.train_step.state import Position, State

POSITION = Position(Cursor(0, 0, 3, 3), Ledger(stage=0, epoch=0, expected=10, count=3), 1.5)


def convolution(accelerator: Accelerator | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return one in channels_last and its optimizer, which is of the fused kind."""
    torch.manual_seed(1)
    model: torch.nn.Module = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    if accelerator is not None:
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, torch.nn.Parameter(accelerator.put(parameter)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["fused"] = True  # torch's constructor knows no such device
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return State(dict(model.named_parameters()), Buffers(model), [optimizer], {})


def fused_step(optimizer: torch.optim.Optimizer) -> None:
    """Make the step as `torch.optim` does on a device."""
    parameters = optimizer.param_groups[0]["params"]
    states = [optimizer.state[parameter] for parameter in parameters]
    kernel: Any = torch.ops.aten._fused_adamw_.default
    with torch.no_grad():
        for state in states:
            state["step"] += 1
        kernel(
            parameters,
            [torch.ones_like(parameter) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            lr=0.1,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


def received() -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return a state after two steps as it travels, contiguous, and the parameters after a third."""
    model, optimizer = convolution(None)
    for parameter in model.parameters():
        zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
    for _ in range(2):
        fused_step(optimizer)
    tree = state_of(model, optimizer).read(POSITION, {})
    tree["parameters"] = {name: item.detach().contiguous() for name, item in tree["parameters"].items()}
    tree["parameters"] = {name: item.clone() for name, item in tree["parameters"].items()}
    tree["optimizer"]["state"] = [
        {name: item.contiguous().clone() for name, item in own.items()} for own in tree["optimizer"]["state"]
    ]
    fused_step(optimizer)
    return tree, [parameter.detach().clone() for parameter in model.parameters()]


def test_received_state_suits_the_fused_kernel() -> None:
    tree, expected = received()
    with Accelerator() as accelerator:
        model, optimizer = convolution(accelerator)
        state_of(model, optimizer).write(tree)
        fused_step(optimizer)
        for parameter, value in zip(model.parameters(), expected, strict=True):
            assert isinstance(parameter, There)
            assert torch.equal(parameter.here, value)


@pytest.mark.parametrize(
    ("name", "message"), [("step", "is not on meta"), ("exp_avg", "same dtype, device, and layout")]
)
def test_fused_kernel_refuses_state_that_lies_elsewhere(name: str, message: str) -> None:
    """The fake fused kernel refuses state that lies elsewhere, the way CUDA's does."""
    tree, _ = received()
    with Accelerator() as accelerator:
        model, optimizer = convolution(accelerator)
        state_of(model, optimizer).write(tree)
        state = optimizer.state[next(model.parameters())]
        if name == "step":
            state[name] = torch.tensor(2.0)
        else:
            state[name] = accelerator.put(tree["optimizer"]["state"][0][name])
        with pytest.raises(RuntimeError, match=message):
            fused_step(optimizer)

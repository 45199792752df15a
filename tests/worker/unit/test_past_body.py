"""A body of a loop that the job has ended: it runs whole, and nothing of it stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from springtide.errors import UsageError
from springtide.train_step.buffers import Buffers
from springtide.train_step.past_body import PastBody


def watch(past: PastBody, optimizer: torch.optim.Optimizer) -> None:
    """Call what a trainer's hooks call."""
    optimizer.register_step_pre_hook(
        lambda one, args, kwargs: past.before_step(one, args, kwargs) if past.is_open else None
    )
    optimizer.register_step_post_hook(lambda one, *_: past.after_step(one) if past.is_open else None)


class Script:
    """A model with statistics, Adam and a schedule; two steps were made."""

    def __init__(self, is_here: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        for _ in range(2):
            self.body()
        self.past = PastBody(
            list(self.model.parameters()),
            Buffers(self.model),
            [self.optimizer],
            {"scheduler": self.scheduler},
            is_here=is_here,
        )
        watch(self.past, self.optimizer)

    def body(self) -> torch.Tensor:
        loss = self.model(torch.randn(5, 3)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.norm = sum(parameter.grad.norm().item() for parameter in self.model.parameters())
        self.optimizer.zero_grad()
        return loss

    def clip_weights(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.clamp_(-0.01, 0.01)

    def state(self) -> Any:
        parts = (self.model, self.optimizer, self.scheduler)
        return copy.deepcopy([part.state_dict() for part in parts])


@pytest.mark.parametrize("is_here", [True, False])
def test_past_body_runs_whole_and_leaves_no_trace(is_here: bool) -> None:
    script = Script(is_here)
    before, weight = script.state(), script.model[0].weight.detach().clone()
    script.past.begin("state 1")
    loss = script.body()
    assert torch.equal(script.model[0].weight, weight), "the optimizer finds no gradients"
    script.past.end()
    assert loss.item() > 0
    assert script.norm > 0, "gradients are there behind the step"
    torch.testing.assert_close(script.state(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in script.model.parameters())
    assert not script.past.is_open


def test_weights_that_a_script_clips_are_put_back() -> None:
    """Weights are copied once for all bodies in one state, and anew in another."""
    script = Script(is_here=True)
    for state in ("state 1", "state 1", "state 2", "state 2"):
        before = script.state()
        script.past.begin(state)
        script.body()
        script.clip_weights()
        script.past.end()
        torch.testing.assert_close(script.state(), before, rtol=0, atol=0)
        if state == "state 2":
            script.past.forget()
            script.body()  # a step of the job


class Counts(torch.optim.SGD):
    """Count the calls of `step`, with and without gradients, and average what is there."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                state.setdefault("average", torch.zeros(1 << 17)).mul_(0.9)
        return super().step(closure)


def test_state_that_moves_without_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Counts([weight], lr=0.1)
    past = PastBody([weight], Buffers(torch.nn.Module()), [optimizer], {}, is_here=True)
    watch(past, optimizer)
    weight.square().sum().backward()
    optimizer.step()
    past.begin("state 1")
    weight.square().sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match="Counts changed 'average' of its state in a step without gradients"):
        past.end()


def test_past_closure_computes_its_loss_and_moves_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([weight])
    past = PastBody([weight], Buffers(torch.nn.Module()), [optimizer], {}, is_here=True)
    watch(past, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    past.begin("state 1")
    assert optimizer.step(closure).item() == 3.0
    past.end()
    assert torch.equal(weight, torch.ones(3))
    assert not optimizer.state

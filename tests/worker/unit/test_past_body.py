"""A body of a loop that the job has ended: it runs whole, and nothing of it stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from springtide.train_step.buffers import Buffers
from springtide.train_step.past_body import PastBody


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
        self.optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: (
                self.past.before_step(optimizer, args, kwargs) if self.past.is_open else None
            )
        )

    def body(self) -> torch.Tensor:
        loss = self.model(torch.randn(5, 3)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> Any:
        parts = (self.model, self.optimizer, self.scheduler)
        return copy.deepcopy([part.state_dict() for part in parts])


@pytest.mark.parametrize("is_here", [True, False])
def test_past_body_runs_whole_and_leaves_no_trace(is_here: bool) -> None:
    script = Script(is_here)
    before, weight = script.state(), script.model[0].weight.detach().clone()
    script.past.begin()
    loss = script.body()
    moved = not torch.equal(script.model[0].weight, weight)
    script.past.end()
    assert loss.item() > 0
    assert moved == is_here, "a step of its own is made where the state is this process's"
    torch.testing.assert_close(script.state(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in script.model.parameters())
    assert not script.past.is_open


def test_past_closure_computes_its_loss_and_moves_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([weight])
    past = PastBody([weight], Buffers(torch.nn.Module()), [optimizer], {}, is_here=False)
    optimizer.register_step_pre_hook(past.before_step)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    past.begin()
    assert optimizer.step(closure).item() == 3.0
    past.end()
    assert torch.equal(weight, torch.ones(3))

"""The library in the test's own process, without a job and without hooks into the interpreter's end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import springtide
from springtide import api
from springtide.elastic.runtime import Runtime
from springtide.loggers import Logger
from springtide.settings import Settings


@contextlib.contextmanager
def library(loggers: Sequence[Logger] = (), **settings: Any) -> Iterator[Runtime]:
    """Yield a runtime like that after `springtide.init(loggers=...)`, and reset the library afterwards."""
    assert api.active_runtime is None
    runtime = api.active_runtime = Runtime(Settings(**settings), loggers, {"lr": 0.1})
    try:
        yield runtime
    finally:
        api.active_runtime = None
        runtime.close()


class Script:
    """A small regression: model, optimizer and data that a test's loop uses."""

    def __init__(self, samples: int = 24, norm: bool = False, device: str = "cpu", **distribute: Any) -> None:
        self.device = device
        torch.manual_seed(3)
        self.x, self.y = torch.randn(samples, 4), torch.randn(samples, 2)
        layers: list[torch.nn.Module] = [torch.nn.Linear(4, 8)]
        if norm:
            layers.append(torch.nn.BatchNorm1d(8))
        self.model = torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        springtide.distribute(self.model, self.optimizer, scheduler=self.scheduler, **distribute)

    def batches(self, batch_size: int = 8, epochs: int = 1, **more: Any) -> Iterator[Any]:
        return springtide.batches((self.x, self.y), batch_size=batch_size, epochs=epochs, **more)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = (item.to(self.device) for item in batch)
        return (self.model(x) - y).square().mean()

    def finish(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def parameters(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()]).cpu()

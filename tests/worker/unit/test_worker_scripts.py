"""Scripts as people write them, alone: what they train is what plain PyTorch trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from worker_alone import library

import springtide

torch.manual_seed(0)
X, Y = torch.randn(24, 3, 6, 6), torch.randn(24, 2)


@pytest.fixture(autouse=True)
def _library() -> Iterator[None]:
    with library():
        yield


def convolutions() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.Tanh(),
        torch.nn.Conv2d(4, 4, 1),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 2),
    ).to(memory_format=torch.channels_last)


class Transposed(torch.nn.Module):
    """A layer whose weight lies in memory column by column."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(108, 2).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.flatten(1), self.weight)


def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer, order: list[torch.Tensor]) -> None:
    for ids in order:
        (model(X[ids]) - Y[ids]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def orders(batch_size: int, epochs: int) -> list[torch.Tensor]:
    from springtide.data.permutation import shuffled

    return [
        shuffled(24, 0, epoch, start, start + batch_size)
        for epoch in range(epochs)
        for start in range(0, 24, batch_size)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("make", [convolutions, Transposed])
@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ],
    ids=["fused Adam", "fused SGD", "AdamW"],
)
@pytest.mark.parametrize("multi_step", [False, True])
def test_parameters_that_are_not_contiguous_train_as_in_torch(
    make: Callable[[], torch.nn.Module], kind: Any, multi_step: bool
) -> None:
    """Fused kernels walk through raw memory, so gradients must lie there as parameters do."""
    expected = make()
    plain(expected, kind(expected.parameters()), orders(8, 4))
    model = make()
    optimizer = kind(model.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(next(model.parameters()).grad))
    springtide.distribute([model], [optimizer]) if multi_step else springtide.distribute(model, optimizer)
    for x, y in springtide.batches((X, Y), batch_size=8, epochs=4):
        with springtide.step():
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        for name, value in optimizer.state[ours].items():
            if value.shape == ours.shape:
                assert value.stride() == ours.stride(), name


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_that_builds_a_graph_trains_as_in_torch() -> None:
    model, expected = convolutions(), convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plain(expected, torch.optim.SGD(expected.parameters(), lr=0.01), orders(8, 2))
    springtide.distribute(model, optimizer)
    for batch in springtide.batches((X, Y), batch_size=8, epochs=2):
        with springtide.step():
            for x, y in batch.split(4):
                (model(x) - y).square().mean().backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Halved(torch.optim.SGD):
    """An optimizer that goes on as its base does; torch runs a step's hooks for both."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        return super().step(closure)


@pytest.mark.parametrize("multi_step", [False, True])
def test_optimizer_that_calls_its_base_trains_as_in_torch(multi_step: bool) -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # from here on torch hooks the base too
    model, expected = convolutions(), convolutions()
    plain(expected, Halved(expected.parameters(), lr=0.01, momentum=0.9), orders(8, 2))
    optimizer = Halved(model.parameters(), lr=0.01, momentum=0.9)
    springtide.distribute([model], [optimizer]) if multi_step else springtide.distribute(model, optimizer)
    for x, y in springtide.batches((X, Y), batch_size=8, epochs=2):
        with springtide.step():
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

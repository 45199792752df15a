"""Gradients that a script does not zero: the numbers of plain PyTorch, or a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from worker_alone import library

import springtide
from springtide.elastic.runtime import Runtime

Loss = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with library() as runtime:
        yield runtime


def data() -> torch.Tensor:
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(3))


def seeded(*sizes: int, bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(4)
    layers = [torch.nn.Linear(one, other, bias=bias) for one, other in pairwise(sizes)]
    return torch.nn.Sequential(*layers)


def sgd(*models: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for model in models for parameter in model.parameters()]
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(body: Callable[[torch.Tensor], None], library: bool = True) -> None:
    if library:
        for batch in springtide.batches(data(), batch_size=8, epochs=2, shuffle=False):
            with springtide.step():
                body(batch.data)
    else:
        for number in range(6):
            body(data().split(8)[number % 3])


SENTENCE = r"was not zeroed since the last step.*Call optimizer.zero_grad\(\) in each body"


@pytest.mark.parametrize("sizes", [(4, 2), (4, 8, 8, 2)])
@pytest.mark.parametrize("listed", [False, True])
def test_gradients_that_nobody_zeroes_are_refused(
    runtime: Runtime, sizes: tuple[int, ...], listed: bool
) -> None:
    """Also where one parameter is all there is."""
    model = seeded(*sizes, bias=len(sizes) > 2)
    optimizer = sgd(model)
    springtide.distribute(model, [optimizer] if listed else optimizer)
    steps = []

    def body(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        steps.append(1)

    with pytest.raises(springtide.UsageError, match=SENTENCE):
        train(body)
    assert len(steps) == 1


@pytest.mark.parametrize(("zeroed", "named"), [(0, r"1\.0\.weight"), (1, r"0\.0\.(weight|bias)")])
def test_one_of_two_that_is_not_zeroed_is_refused(runtime: Runtime, zeroed: int, named: str) -> None:
    """The head's only gradient comes first in each backward()."""
    body_part, head = seeded(4, 4), seeded(4, 1, bias=False)
    optimizers = [sgd(body_part), sgd(head)]
    springtide.distribute([body_part, head], optimizers)

    def body(x: torch.Tensor) -> None:
        optimizers[zeroed].zero_grad()
        head(torch.tanh(body_part(x))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    with pytest.raises(springtide.UsageError, match=f"{named} was not zeroed"):
        train(body)


def test_a_gradient_that_is_left_is_not_used_again(runtime: Runtime) -> None:
    """A part that no backward reaches in a step would be stepped with the last step's gradient."""
    parts = torch.nn.ModuleList([seeded(4, 2), seeded(4, 2)])
    optimizer = sgd(parts)
    springtide.distribute(parts, optimizer)
    numbers = iter(range(6))

    def body(x: torch.Tensor) -> None:
        parts[0].zero_grad()
        used = parts if next(numbers) == 0 else parts[:1]
        sum(part(x).square().mean() for part in used).backward()
        optimizer.step()

    with pytest.raises(springtide.UsageError, match=r"1\.0\.(weight|bias) was not zeroed"):
        train(body)


def adversaries(library: bool, zeroing: dict[str, Any]) -> list[torch.Tensor]:
    """Train a generator first, whose backward() adds to what the judge's last step has left."""
    maker, judge = seeded(4, 4), seeded(4, 6, 1)
    optimizers = [sgd(maker), sgd(judge)]
    if library:
        springtide.distribute([maker, judge], optimizers)

    def body(x: torch.Tensor) -> None:
        optimizers[0].zero_grad(**zeroing)
        made = maker(x)
        judge(made).square().mean().backward()
        optimizers[0].step()
        optimizers[1].zero_grad(**zeroing)
        (judge(x).mean() + judge(made.detach()).square().mean()).backward()
        optimizers[1].step()

    train(body, library)
    return [item.detach() for model in (maker, judge) for item in model.parameters()]


@pytest.mark.parametrize("zeroing", [{}, {"set_to_none": False}])
def test_what_is_zeroed_before_its_own_step_is_fine(runtime: Runtime, zeroing: dict[str, Any]) -> None:
    expected = adversaries(False, zeroing)
    torch.testing.assert_close(adversaries(True, zeroing), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("zeroing", [{}, {"set_to_none": False}])
@pytest.mark.parametrize("first", [False, True])
def test_zeroing_in_each_body_is_fine(runtime: Runtime, zeroing: dict[str, Any], first: bool) -> None:
    def run(library: bool) -> list[torch.Tensor]:
        model = seeded(4, 8, 2)
        optimizer = sgd(model)
        if library:
            springtide.distribute(model, optimizer)

        def body(x: torch.Tensor) -> None:
            if first:
                optimizer.zero_grad(**zeroing)
            model(x).square().mean().backward()
            optimizer.step()
            if not first:
                optimizer.zero_grad(**zeroing)

        train(body, library)
        return [item.detach() for item in model.parameters()]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=1e-6)

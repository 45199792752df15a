"""Parameters whose values are on their way: what waits for them, what does not, what they are afterwards."""

from __future__ import annotations

import threading
from collections.abc import Collection

import pytest
import torch
from torch.nn import functional as F

from springtide.errors import Dropped
from springtide.ps.lazy_values import LazyParameter, Pending


def expected(model: torch.nn.Module) -> tuple[Pending, list[list[int]]]:
    """The model's values are expected, and come when they are waited for: ones."""
    pending, waited = Pending(list(model.parameters())), list[list[int]]()

    def wait(numbers: Collection[int] | None) -> None:
        assert numbers is not None
        waited.append(list(numbers))
        for number in numbers:
            list(model.parameters())[number].detach().fill_(1.0)

    pending.wait = wait
    pending.expect()
    return pending, waited


def kinds(model: torch.nn.Module) -> list[type]:
    return [type(parameter) for parameter in model.parameters()]


def test_the_first_look_waits_and_only_for_what_it_looks_at() -> None:
    model = torch.nn.Linear(2, 3)
    pending, waited = expected(model)
    assert F.linear(torch.ones(1, 2), model.weight).tolist() == [[2.0] * 3]
    assert waited == [[0]]
    assert kinds(model) == [torch.nn.Parameter, LazyParameter]
    model.weight.sum()
    assert waited == [[0]]
    norms = torch._foreach_norm([model.weight, model.bias])
    assert waited == [[0], [1]]
    assert norms[1] == 3**0.5
    pending.close()


def test_what_needs_no_values_does_not_wait() -> None:
    model = torch.nn.Linear(2, 3)
    pending, waited = expected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert sum(parameter.numel() for parameter in model.parameters()) == 9
    assert model.weight.shape == (3, 2)
    assert model.weight.requires_grad
    model.weight.grad = torch.ones(3, 2)
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad.sum() == 0
    optimizer.zero_grad()
    assert model.weight.grad is None
    model.requires_grad_(False)
    assert isinstance(model.weight, torch.nn.Parameter)
    assert not waited
    pending.close()
    assert kinds(model) == [torch.nn.Parameter] * 2


def test_another_thread_sees_what_is_there() -> None:
    """Another thread sees the old values without a wait: only the script's own thread may use the
    connections.
    """
    model = torch.nn.Linear(2, 3)
    before = model.weight.sum().item()
    pending, waited = expected(model)
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.append(model.weight.sum().item()))
    thread.start()
    thread.join(60)
    assert seen == [before]
    assert not waited
    pending.close()


def test_body_dropped_at_the_look_still_awaits_its_values() -> None:
    model = torch.nn.Linear(2, 3)
    pending, waited = expected(model)
    wait = pending.wait

    def drop(numbers: Collection[int] | None) -> None:
        raise Dropped("the test says so")

    pending.wait = drop
    with pytest.raises(Dropped):
        model.weight.norm()
    pending.wait = wait
    assert model.weight.mean() == 1.0
    assert waited == [[0]]
    pending.close()


def test_a_look_within_a_wait_is_the_library_s_own() -> None:
    model = torch.nn.Linear(2, 3)
    pending, _ = expected(model)
    found: list[float] = []
    pending.wait = lambda numbers: found.append(model.bias.detach().sum().item())
    model.weight.norm()
    assert len(found) == 1
    pending.close()


def test_what_others_have_made_of_a_parameter_stays_theirs() -> None:
    class Other(torch.nn.Parameter):
        pass

    model = torch.nn.Linear(2, 3)
    model.bias = Other(torch.zeros(3))
    pending, waited = expected(model)
    assert kinds(model) == [LazyParameter, Other]
    copy = LazyParameter(torch.ones(2))  # somebody has called type(parameter)
    assert copy.sum() == 2.0
    assert type(copy) is torch.nn.Parameter
    assert not waited
    pending.close()


def test_compiled_code_waits_too() -> None:
    model = torch.nn.Linear(2, 3)
    pending, waited = expected(model)
    compiled = torch.compile(lambda x: F.linear(x, model.weight).sum(), backend="eager")
    for _ in range(3):
        waited.clear()
        pending.expect()
        with torch.no_grad():
            assert compiled(torch.ones(1, 2)) == 6.0
        assert waited == [[0]]
    pending.close()

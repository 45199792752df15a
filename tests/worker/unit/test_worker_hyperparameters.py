"""Options of optimizers, as members compare them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from springtide.train_step.hyperparameters import Hyperparameters, hashes

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def made(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.ones(1))], **options)


def of(*optimizers: torch.optim.Optimizer) -> tuple[int, int]:
    return Hyperparameters(optimizers).hashes()


def alike(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return any(a == b for a, b in zip(one, other, strict=True))


@given(FLOATS, st.floats(-4e-7, 4e-7))
def test_what_differs_by_less_than_a_millionth_is_alike(value: float, by: float) -> None:
    assume(value == 0 or 1e-300 < abs(value) < 1e300)
    assert alike(hashes([value]), hashes([value * (1 + by)]))


@given(FLOATS, FLOATS)
def test_what_differs_by_more_is_not(one: float, other: float) -> None:
    assume(not math.isclose(one, other, rel_tol=3e-6))
    assert not alike(hashes([one, "x"]), hashes([other, "x"])) or (
        # Of 2^20 values, two may fall together.
        sum(a == b for a, b in zip(hashes([one, "x"]), hashes([other, "x"]), strict=True)) < 2
    )


def test_each_option_that_a_script_sets_counts() -> None:
    plain = of(made(lr=0.1, momentum=0.9))
    assert plain == of(made(lr=0.1, momentum=0.9)) == of(made(lr=torch.tensor(0.1), momentum=0.9))
    for changed in ({"lr": 0.2}, {"momentum": 0.8}, {"weight_decay": 1e-4}, {"nesterov": True}):
        assert not alike(plain, of(made(**({"lr": 0.1, "momentum": 0.9} | changed))))
    adam = made(torch.optim.Adam, betas=(0.9, 0.999))
    assert not alike(of(adam), of(made(torch.optim.Adam, betas=(0.9, 0.99))))
    assert not alike(of(adam, made(lr=0.1)), of(adam, made(lr=0.2)))


def test_method_and_kept_values_of_an_optimizer_are_left_out() -> None:
    one, other = made(lr=0.1, foreach=True), made(lr=0.1, foreach=False)
    other.param_groups[0]["d_estimate"] = 0.3
    assert of(one) == of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float32(0.1), 0.1),
        (np.float64(0.1), torch.tensor(0.1)),
        (True, 1),
        (False, 0.0),
        (0.0, -0.0),
        ((torch.tensor(0.9), 0.999), [0.9, torch.tensor([0.999])]),
        (lambda step: 0.1 * step, lambda step: 0.1 * step),
        ({"a", "b"}, {"b", "a"}),
    ],
)
def test_one_value_in_two_forms_is_alike(one: Any, other: Any) -> None:
    """One value in two forms is alike: a process that was given another's state may hold it in another
    form.
    """
    optimizers = [made(lr=0.1), made(lr=0.1)]
    for optimizer, value in zip(optimizers, (one, other), strict=True):
        optimizer.param_groups[0]["alpha"] = value
    assert alike(of(optimizers[0]), of(optimizers[1]))


def test_a_change_within_a_tensor_is_seen() -> None:
    betas = torch.tensor(0.9), torch.tensor(0.999)
    adam = made(torch.optim.Adam, betas=betas, foreach=False)
    options = Hyperparameters([adam])
    before = options.hashes()
    betas[0].fill_(0.8)
    assert not alike(before, options.hashes())


def test_tensors_of_a_device_do_not_count_wherever_they_are() -> None:
    """A newcomer's came with its state, to the CPU."""
    there, newcomer, other = (made(lr=0.1) for _ in range(3))
    for optimizer, device, rate in ((there, "meta", 0.1), (newcomer, "cpu", 0.1), (other, "cpu", 0.2)):
        optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.ones(1, device="meta"))]
        optimizer.param_groups[0]["lr"] = torch.full((), rate, device=device)
    assert of(there) == of(newcomer) == of(other)


def test_a_change_is_seen_at_once() -> None:
    optimizer = made(lr=0.1)
    options = Hyperparameters([optimizer])
    before = options.hashes()
    optimizer.param_groups[0]["lr"] = 0.05
    assert not alike(before, options.hashes())
    optimizer.param_groups[0]["lr"] = 0.1
    assert options.hashes() == before


def test_described() -> None:
    optimizer = made(lr=0.1, momentum=0.9)
    said = Hyperparameters([optimizer]).described()
    assert said.startswith("group 0: lr=0.1, momentum=0.9, dampening=0, weight_decay=0, nesterov=False")
    for _ in range(5):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert Hyperparameters([optimizer]).described().endswith("; and 2 more groups")
    assert Hyperparameters([optimizer, made()]).described().startswith("optimizer 0 group 0: lr=0.1")


def test_an_option_that_is_changed_in_place_is_seen() -> None:
    """A tensor, also within a tuple, is the same object with another value."""
    beta, rate = torch.tensor(0.9), torch.tensor(0.1)
    optimizer = made(torch.optim.Adam, lr=rate, betas=(beta, torch.tensor(0.999)), capturable=True)
    kept = Hyperparameters([optimizer])
    first = kept.hashes()
    assert kept.hashes() == first
    beta.fill_(0.5)
    second = kept.hashes()
    assert not alike(first, second)
    rate.fill_(0.2)
    assert not alike(second, kept.hashes())
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    plain = kept.hashes()
    optimizer.param_groups[0]["betas"] = (0.8, 0.999)
    assert not alike(plain, kept.hashes())

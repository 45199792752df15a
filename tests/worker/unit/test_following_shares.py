"""The state as followers get it: shares, descriptions, and steps that are made once more with equal bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.following import shares
from springtide.following.replay import Replay
from springtide.memory.optimizer_state import COPIES


@given(
    sizes=st.lists(st.integers(0, 3 * shares.MOST_BUNCH_BYTES), max_size=40),
    count=st.integers(1, 8),
)
def test_each_parameter_is_in_one_bunch_of_one_share(sizes: list[int], count: int) -> None:
    found = [shares.bunches(sizes, share, count) for share in range(count)]
    numbers = [number for share in found for bunch in share for number in bunch]
    assert sorted(numbers) == [number for number, size in enumerate(sizes) if size]
    for bunch in (bunch for share in found for bunch in share):
        assert bunch
        assert len(bunch) == 1 or sum(sizes[number] for number in bunch) <= shares.MOST_BUNCH_BYTES
    loads = [sum(sizes[number] for bunch in share for number in bunch) for share in found]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_what_cannot_travel_is_not_described() -> None:
    parameter = torch.zeros(4, 3)
    assert shares.describe(0, parameter, {"exp_avg": torch.zeros(3, 4).t()}) is None
    assert shares.describe(0, parameter, {"hook": object()}) is None
    assert shares.describe(0, parameter, {"sum": torch.zeros(4, 3, dtype=torch.complex64)}) is None
    assert not shares.fits(torch.zeros(3, 4).t())
    assert not shares.fits(torch.zeros(0))
    assert shares.plain_options({"params": [], "lr": torch.tensor(0.1)}) is None


def test_description_says_how_to_make_the_tensors() -> None:
    parameter = torch.zeros(4, 3)
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4, 3), "kind": "x", "nothing": None}
    described = shares.describe(7, parameter, state)
    assert described is not None
    assert [item.shape for item in described.tensors] == [(4, 3), (), (4, 3)]
    told = json.loads(json.dumps(described.description))
    assert told["number"] == 7
    step, average, kind, nothing = told["state"]
    assert shares.form_of(step, parameter) == (torch.float32, torch.Size([]), torch.device("cpu"))
    assert shares.form_of(average, parameter)[1] == parameter.shape
    assert (kind["value"], nothing["value"]) == ("x", None)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "float33", "shape": [4]},
        {"dtype": "float32", "shape": "4"},
        {"dtype": "float32", "shape": [-1]},
        {"dtype": "float32", "shape": [1 << 40]},
        {},
    ],
)
def test_wrong_descriptions_are_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="optimizer's state"):
        shares.form_of(entry, torch.zeros(4, 3))


MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{kind.__name__: kind for kind in COPIES},
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "fused": partial(torch.optim.AdamW, fused=True),
    "centered": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
}


def make_script(seed: int, make: Callable[..., torch.optim.Optimizer]) -> tuple[list[Any], Any]:
    torch.manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((33, 17), (5,), (1, 3, 2), (129,))]
    other = {"params": parameters[2:], "weight_decay": 0.01}
    return parameters, make([{"params": parameters[:2]}, other], lr=0.01)


@pytest.mark.parametrize("name", list(MAKE))
def test_replayed_steps_have_equal_bits(name: str) -> None:
    """Each parameter from another step on, with rates that change and gradients that are not there."""
    parameters, optimizer = make_script(1, MAKE[name])
    own, untouched = make_script(2, MAKE[name])
    before = {id(item): dict(state) for item, state in untouched.state.items()}
    replay = Replay(untouched, own)
    for step in range(6):
        if step < 4:
            with torch.no_grad():
                own[step].copy_(parameters[step])
            state = optimizer.state.get(parameters[step], {})
            replay.keep(
                step, {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in state.items()}
            )
        optimizer.param_groups[0]["lr"] *= 0.9
        for number, parameter in enumerate(parameters):
            parameter.grad = None if (number + step) % 5 == 4 else torch.randn(parameter.shape)
        followed = [n for n in range(min(step + 1, 4)) if parameters[n].grad is not None]
        gradients = {number: parameters[number].grad.clone() for number in followed}
        groups = json.loads(json.dumps([shares.plain_options(group) for group in optimizer.param_groups]))
        optimizer.step()
        replay.step(gradients, {number: int(number >= 2) for number in followed}, groups)
    for number, state in replay.states.items():
        assert torch.equal(own[number], parameters[number])
        expected = optimizer.state[parameters[number]]
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            same = torch.equal(value, state[key]) if isinstance(value, torch.Tensor) else value == state[key]
            assert same, f"{key} of parameter {number}"
    assert all(parameter.grad is None for parameter in own)
    assert {id(item): dict(state) for item, state in untouched.state.items()}.keys() == before.keys()


def test_hooks_of_the_script_are_not_called() -> None:
    own, optimizer = make_script(1, torch.optim.Adam)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rate = optimizer.param_groups[0]["lr"]
    replay = Replay(optimizer, own)
    replay.keep(1, {})
    groups = [shares.plain_options(group) or {} for group in optimizer.param_groups]
    replay.step({1: torch.ones(5)}, {1: 0}, groups)
    assert called == []
    assert optimizer.param_groups[0]["lr"] == rate
    assert len(optimizer.state) == 0
    with pytest.raises(KeyError):
        replay.step({0: torch.ones(33, 17)}, {0: 0}, groups)


def test_classes_of_a_script_are_not_followed() -> None:
    class Own(torch.optim.Adam):
        pass

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert not shares.can_follow(Own(parameters))
    assert shares.can_follow(torch.optim.Adam(parameters))

"""The committed state as a tree, written into another process's objects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from springtide.comm import codec
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.errors import SpringtideError
from springtide.train_step.buffers import Buffers
from springtide.train_step.state import Position, State

POSITION = Position(Cursor(1, 2, 3, 4), Ledger(stage=1, epoch=2, expected=10, count=3), 1.5)


def make(seed: int, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> tuple[Any, Any, Any, State]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    state = State(dict(model.named_parameters()), Buffers(model), [optimizer], {"scheduler": scheduler})
    return model, optimizer, scheduler, state


def train(model: Any, optimizer: Any, scheduler: Any, steps: int) -> None:
    torch.manual_seed(9)
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def travelled(state: State) -> Any:
    header, tensors = codec.flatten(state.read(POSITION, {"samples": 10}))
    return codec.unpack(header, codec.pack(tensors))


def test_a_joiner_goes_on_as_the_holder_does() -> None:
    model, optimizer, scheduler, state = make(1)
    train(model, optimizer, scheduler, 3)
    tree = travelled(state)
    other_model, other_optimizer, other_scheduler, other = make(2)
    assert other.check(tree) == POSITION
    other.write(tree)
    for _ in range(2):
        for ours, theirs in zip(model.state_dict().values(), other_model.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)
        assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]
        assert scheduler.state_dict() == other_scheduler.state_dict()
        train(model, optimizer, scheduler, 2)
        train(other_model, other_optimizer, other_scheduler, 2)


def test_optimizer_state_is_not_cast() -> None:
    model, optimizer, _, state = make(1)
    model.to(torch.bfloat16)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "master": torch.randn(parameter.shape)}
    other_model, other_optimizer, _, other = make(2)
    other_model.to(torch.bfloat16)
    other.write(travelled(state))
    for ours, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert other_optimizer.state[theirs]["master"].dtype == torch.float32
        assert torch.equal(optimizer.state[ours]["master"], other_optimizer.state[theirs]["master"])


def test_state_of_fresh_holder_empties_survivors_optimizer() -> None:
    *_, state = make(1)
    model, optimizer, scheduler, other = make(2)
    train(model, optimizer, scheduler, 1)
    other.write(travelled(state))
    assert not optimizer.state


def test_received_tensors_do_not_keep_the_transfer_buffer() -> None:
    model, optimizer, scheduler, state = make(1)
    train(model, optimizer, scheduler, 1)
    tree = travelled(state)
    for give in (False, True):
        _, other_optimizer, _, other = make(2)
        other.write(tree, give=give)
        held = [value for values in other_optimizer.state.values() for value in values.values()]
        assert len(held) == 12
        assert {value.untyped_storage().nbytes() - value.nbytes for value in held} == {0}


def test_what_is_given_away_is_not_copied_and_what_is_kept_is() -> None:
    model, optimizer, scheduler, state = make(1)
    train(model, optimizer, scheduler, 1)
    for give in (False, True):
        header, tensors = codec.flatten(state.read(POSITION, {"samples": 10}))
        tree = codec.unflatten(header, [tensor.clone() for tensor in tensors])
        other_model, other_optimizer, other_scheduler, other = make(2)
        other.write(tree, give=give)
        for parameter, values in zip(other_model.parameters(), tree["optimizer"]["state"], strict=True):
            held = other_optimizer.state[parameter]
            assert (held["exp_avg"].data_ptr() == values["exp_avg"].data_ptr()) == give
            assert held["step"].data_ptr() != values["step"].data_ptr()
        twin, twin_optimizer, twin_scheduler, _ = make(1)
        train(twin, twin_optimizer, twin_scheduler, 1)
        for members in (
            (twin, twin_optimizer, twin_scheduler),
            (other_model, other_optimizer, other_scheduler),
        ):
            train(*members, 2)
        for ours, theirs in zip(twin.state_dict().values(), other_model.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.update(format=9), "format 9"),
        (lambda tree: tree["parameters"].pop("0.bias"), "parameter 0.bias is .* in this worker and missing"),
        (
            lambda tree: tree["parameters"].update(more=torch.zeros(1)),
            "parameter more is missing in this worker",
        ),
        (
            lambda tree: tree["parameters"].update({"0.bias": torch.zeros(5)}),
            r"0.bias is \(4,\) .* and \(5,\)",
        ),
        (lambda tree: tree["buffers"].clear(), "buffer 1.running_mean"),
        (lambda tree: tree["optimizer"]["groups"].append({}), "other parameter groups"),
        (
            lambda tree: tree["optimizer"].update(kinds=["SGD", "Adam"]),
            "optimizer is SGD and Adam and this worker's Adam: is the script",
        ),
        (lambda tree: tree.update(tracked={"ema": {}}), r"tracks \['ema'\] and this worker \['scheduler'\]"),
    ],
)
def test_state_of_another_script_is_refused(change: Any, message: str) -> None:
    *_, state = make(1)
    tree = copy.deepcopy(travelled(state))
    change(tree)
    with pytest.raises(SpringtideError, match=message):
        state.check(tree)


def test_state_that_names_no_optimizer_is_taken() -> None:
    *_, state = make(1)
    tree = copy.deepcopy(travelled(state))
    del tree["optimizer"]["kinds"]
    assert state.check(tree) == POSITION

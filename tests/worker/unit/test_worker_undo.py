"""A dropped body leaves no trace; what could not be put back is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from springtide.errors import UsageError
from springtide.train_step.buffers import Buffers
from springtide.train_step.rollback import Rollback, Snapshot


class Average:
    """A tracked object with a large and a small tensor and a counter."""

    def __init__(self) -> None:
        self.large = torch.zeros(1 << 17)
        self.small = torch.zeros(3)
        self.count = 0
        self.history: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"large": self.large, "small": self.small, "count": self.count, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.large, self.small = state["large"], state["small"]
        self.count, self.history = state["count"], state["history"]


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, Average, Rollback]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    average = Average()
    undo = Rollback(
        list(model.parameters()), Buffers(model), [optimizer], {"scheduler": scheduler, "average": average}
    )
    return model, optimizer, scheduler, average, undo


def test_everything_is_put_back() -> None:
    model, optimizer, scheduler, average, undo = make()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    small = average.small
    undo.begin()
    model(torch.randn(5, 3)).sum().backward()
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()
    optimizer.param_groups[0]["momentum"] = 0.5
    average.small += 1
    average.count += 1
    average.history.append(1)
    undo.put_back()
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["momentum"] == 0
    assert scheduler.last_epoch == 0
    assert (average.count, average.history, average.small.tolist()) == (0, [], [0.0] * 3)
    assert average.small is not small
    # The same body again moves things from the same place.
    undo.begin()
    average.history.append(2)
    undo.put_back()
    assert average.history == []


def test_batch_norm_is_put_back_though_statistics_keep_version() -> None:
    model = torch.nn.BatchNorm1d(2)
    buffers = Buffers(model)
    version = model.running_mean._version
    model(torch.randn(4, 2) + 3)
    assert model.running_mean._version == version
    assert buffers.moved() == [True, True, True]
    buffers.put_back()
    assert model.running_mean.tolist() == [0.0, 0.0]


def test_only_moved_buffers_count_outside_of_norm_layers() -> None:
    model = torch.nn.Module()
    model.register_buffer("kept", torch.zeros(2))
    model.register_buffer("written", torch.zeros(2))
    model.register_buffer("replaced", torch.zeros(2))
    buffers = Buffers(model)
    assert buffers.moved() == [False] * 3
    model.written += 1
    model.replaced = torch.ones(4)
    assert buffers.moved() == [False, True, True]
    buffers.put_back()
    assert model.replaced.tolist() == [0.0, 0.0]
    assert buffers.moved() == [False] * 3
    model.written += 2
    buffers.remember()
    buffers.put_back()
    assert model.written.tolist() == [2.0, 2.0]


def test_removed_buffer_is_named() -> None:
    model = torch.nn.BatchNorm1d(2)
    buffers = Buffers(model)
    model.running_var = None
    with pytest.raises(KeyError, match="running_var is gone"):
        buffers.moved()


def test_large_tracked_tensor_may_not_move_before_the_step() -> None:
    *_, average, undo = make()
    undo.begin()
    average.large += 1
    with pytest.raises(UsageError, match=r"'average' changed large before optimizer.step\(\)"):
        undo.check_untouched()
    with pytest.raises(UsageError, match="after optimizer"):
        undo.put_back()


def test_parameter_changed_before_the_step() -> None:
    model, *_, undo = make()
    undo.begin()
    undo.check_untouched()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(UsageError, match="a parameter was changed inside the step"):
        undo.check_untouched()


def test_snapshot_keeps_types_and_copies_nested_values() -> None:
    state = {"a": [1, {"b": (2, torch.zeros(2))}], "c": None}
    snapshot = Snapshot(state)
    state["a"][1]["b"][1].add_(1)
    state["a"].append(3)
    copy = snapshot.state()
    assert len(copy["a"]) == 2
    assert isinstance(copy["a"][1]["b"], tuple)
    assert copy["a"][1]["b"][1].tolist() == [0.0, 0.0]
    copy["a"].clear()
    assert len(snapshot.state()["a"]) == 2


def test_snapshot_uses_the_memory_of_the_one_before() -> None:
    state = {"shadow": [torch.zeros(3), torch.zeros(2)], "count": 1}
    first = Snapshot(state)
    state["shadow"][0] += 1
    state["shadow"][1] = torch.full((5,), 2.0)  # of another shape
    second = Snapshot(state, earlier=first)
    kept = second.state()
    state["shadow"][0] += 1
    assert kept["shadow"][0].tolist() == [1.0] * 3
    assert kept["shadow"][1].tolist() == [2.0] * 5
    assert second.state()["shadow"][0].tolist() == [1.0] * 3


def test_parameter_changed_in_a_late_body_cannot_be_put_back() -> None:
    """Most bodies are not looked at before they step; a drop looks."""
    model, *_, undo = make()
    for _ in range(40):
        undo.begin()
        undo.check_untouched()
    undo.begin()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(UsageError, match="a parameter was changed inside the step"):
        undo.put_back()


def test_tensors_of_groups_stay_the_objects_they_are() -> None:
    """A compiled or captured optimizer reads that tensor, and no other."""
    model = torch.nn.Linear(3, 2)
    rate, betas = torch.tensor(0.1), (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    group = optimizer.param_groups[0]
    group["betas"] = betas
    undo = Rollback(list(model.parameters()), Buffers(model), [optimizer], {})
    undo.begin()
    rate.mul_(0.5)
    betas[1].add_(1)
    group["lr"] = torch.tensor(7.0)
    undo.put_back()
    assert group["lr"] is rate
    assert group["betas"][0] is betas[0]
    assert group["betas"][1] is betas[1]
    assert [float(rate), float(betas[1])] == pytest.approx([0.1, 0.99])


def test_state_of_several_steps_stays_the_objects_it_is() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
    undo = Rollback(list(model.parameters()), Buffers(model), [optimizer], {}, multi_step=True)

    def step() -> None:
        undo.keep(optimizer)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    undo.begin()
    step()
    undo.begin()
    state = optimizer.state[model.weight]
    before = {name: item.clone() for name, item in state.items()}
    objects = dict(state)
    step()
    state["exp_avg"] = state["exp_avg"] * 2  # as optimizers do that do not work in place
    state["late"] = torch.ones(1)
    undo.put_back()
    state = optimizer.state[model.weight]
    assert {name: id(item) for name, item in state.items()} == {n: id(item) for n, item in objects.items()}
    assert all(torch.equal(item, before[name]) for name, item in state.items())


def test_state_that_did_not_exist_is_gone_again() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    undo = Rollback(list(model.parameters()), Buffers(model), [optimizer], {}, multi_step=True)
    undo.begin()
    undo.keep(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    undo.put_back()
    assert not optimizer.state

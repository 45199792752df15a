"""How members combine buffers that each has changed in its own way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.comm.combine import Combined, Packing, Rule, Share
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.errors import UsageError
from springtide.exact.buffers import pack_parts, unpack_parts
from springtide.exact.parts import Contribution, PartContribution
from springtide.train_step.buffers import Buffers
from springtide.train_step.late_buffers import adopt_arrived
from springtide.train_step.state import Position, State
from springtide.train_step.validation import declare

SHARED = [rule for rule in Rule if rule is not Rule.LOCAL]
WHOLE = [rule for rule in SHARED if rule is not Rule.MEAN]
KINDS = [*((rule, torch.float64) for rule in SHARED), *((rule, torch.int64) for rule in WHOLE)]
numbers = st.integers(-(2**40), 2**40)


def expected(rule: Rule, before: float, held: list[float], weights: list[float]) -> float:
    counted = [value for value, weight in zip(held, weights, strict=True) if weight]
    if rule is Rule.MEAN:
        products = (value * weight for value, weight in zip(held, weights, strict=True))
        return sum(products) / sum(weights)
    if rule is Rule.FIRST:
        return held[0]
    if rule is Rule.SUM:
        return before + sum(value - before for value in counted)
    idle = [before] if len(counted) < len(held) else []
    return min(counted + idle) if rule is Rule.MIN else max(counted + idle)


@given(
    data=st.data(),
    size=st.integers(1, 4),
    kinds=st.lists(st.sampled_from(KINDS)),
)
def test_each_buffer_by_its_rule(data: Any, size: int, kinds: list[tuple[Rule, torch.dtype]]) -> None:
    """Together in one sum, whatever stands beside it; members without samples have no say."""
    before = [data.draw(numbers) for _ in kinds]
    held = [[data.draw(numbers) for _ in kinds] for _ in range(size)]
    weights = [1.0, *(float(data.draw(st.integers(0, 3))) for _ in range(size - 1))]
    rules = [rule for rule, _ in kinds]

    def tensors(values: list[int]) -> list[torch.Tensor]:
        return [torch.tensor([v, v], dtype=dtype) for v, (_, dtype) in zip(values, kinds, strict=True)]

    packing = Packing(tensors(before), rules)
    total = reduce(
        torch.add,
        [
            packing.pack(tensors(held[rank]), tensors(before), Share(weights[rank], rank, size))
            for rank in range(size)
        ],
    )
    result = packing.unpack(total, tensors(before), sum(weights), size)
    for number, (rule, dtype) in enumerate(kinds):
        value = expected(rule, before[number], [row[number] for row in held], weights)
        assert result[number].dtype == dtype
        assert result[number].tolist() == pytest.approx([value, value], rel=1e-12)


@given(
    data=st.data(),
    size=st.integers(1, 4),
    kinds=st.lists(st.sampled_from([kind for kind in KINDS if kind[0] in (Rule.MEAN, Rule.FIRST)])),
)
def test_buffers_on_a_device_follow_the_same_rules(
    data: Any, size: int, kinds: list[tuple[Rule, torch.dtype]]
) -> None:
    held = [[data.draw(numbers) for _ in kinds] for _ in range(size)]
    weights = [1.0, *(float(data.draw(st.integers(0, 3))) for _ in range(size - 1))]
    rules = [rule for rule, _ in kinds]

    def tensors(values: list[int]) -> list[torch.Tensor]:
        return [torch.full((1, 2), v, dtype=dtype) for v, (_, dtype) in zip(values, kinds, strict=True)]

    packing = Packing(tensors(held[0]), rules)
    packed = [
        packing.pack_there(tensors(held[rank]), Share(weights[rank], rank, size)) for rank in range(size)
    ]
    totals = [reduce(torch.add, parts) for parts in zip(*packed, strict=True)]
    assert len(totals) <= 3, "a sum for each kind, not for each buffer"
    result = packing.unpack_there(totals, sum(weights))
    for number, (rule, dtype) in enumerate(kinds):
        value = expected(rule, 0.0, [row[number] for row in held], weights)
        assert (result[number].dtype, result[number].shape) == (dtype, (1, 2))
        assert result[number].tolist() == [pytest.approx([value, value], rel=1e-12)]


def test_idle_member_with_a_nan_on_a_device_adds_nothing() -> None:
    odd, rules = [torch.tensor([float("nan")]), torch.tensor([float("nan")])], [Rule.MEAN, Rule.FIRST]
    parts = Packing(odd, rules).pack_there(odd, Share(0.0, 1, 2))
    assert [part.tolist() for part in parts] == [[0.0], [0.0]]


@pytest.mark.parametrize("rule", SHARED)
def test_parts_of_a_step_are_combined_by_the_same_rules(rule: Rule) -> None:
    before, held, weights = 5.0, [7.0, 2.0, 9.0], [2.0, 1.0, 0.0]
    parts = [
        PartContribution(number, weight, Contribution(0, 0, 0), [True], {0: torch.tensor([value])})
        for number, (value, weight) in enumerate(zip(held, weights, strict=True))
    ]
    committed = [torch.tensor([before])]
    apart = [pack_parts([part], [0], committed, [rule], 3) for part in parts]
    result = unpack_parts(reduce(torch.add, apart), [0], committed, [rule], weights)
    counted = expected(rule, before, held[:2], weights[:2])
    assert result[0].tolist() == pytest.approx([counted])


def test_a_nan_stays_one() -> None:
    odd = torch.tensor([float("nan"), 1.0])
    for rule in SHARED:
        packing = Packing([odd], [rule])
        result = packing.unpack(packing.pack([odd], [odd], Share(1.0, 0, 1)), [odd], 1.0, 1)[0]
        assert bool(result[0].isnan()), rule


class Observed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.zeros(2))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("late", None)


def taken(model: torch.nn.Module, number: float) -> tuple[Buffers, dict[int, torch.Tensor]]:
    """A body in which all buffers moved, and all members' sums have come to `number`."""
    buffers = Buffers(model)
    buffers.remember()
    model.train()
    model(torch.randn(4, 2))
    values = {
        index: torch.full_like(buffer, number)
        for index, (buffer, moved) in enumerate(zip(buffers.current(), buffers.moved(), strict=True))
        if moved
    }
    buffers.take(values)
    return buffers, values


class Normed(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x)


def test_values_of_a_committed_step_become_the_copies() -> None:
    model = Normed(torch.nn.BatchNorm1d(2))
    buffers, values = taken(model, 3.0)
    assert [float(buffer.sum()) for buffer in buffers.current()] == [6.0, 6.0, 3.0]
    buffers.remember()
    assert all(buffers.committed[index] is value for index, value in values.items())
    model(torch.randn(4, 2))
    buffers.put_back()
    assert [float(buffer.sum()) for buffer in buffers.current()] == [6.0, 6.0, 3.0]


def test_values_of_a_dropped_step_are_put_back() -> None:
    model = Normed(torch.nn.BatchNorm1d(2))
    before = copy.deepcopy(model.state_dict())
    buffers, _ = taken(model, 3.0)
    buffers.put_back()
    buffers.remember()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert [float(value.sum()) for value in buffers.committed] == [0.0, 2.0, 0.0]


class Uncounted(torch.nn.BatchNorm1d):
    """Writes its statistics without a count of batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, self.running_mean, self.running_var, training=True)


@pytest.mark.parametrize("kind", [torch.nn.BatchNorm1d, Uncounted])
def test_what_a_forward_writes_after_the_step_is_kept(kind: Callable[[int], torch.nn.Module]) -> None:
    """The statistics' versions do not tell of it."""
    model = Normed(kind(2))
    buffers, _ = taken(model, 3.0)
    model(torch.randn(4, 2))
    after = [buffer.clone() for buffer in buffers.current()]
    assert float(after[0].sum()) != 6.0
    buffers.remember()
    for kept, value in zip(buffers.committed, after, strict=True):
        assert torch.equal(kept, value)
    model(torch.randn(4, 2))
    buffers.put_back()
    for buffer, value in zip(buffers.current(), after, strict=True):
        assert torch.equal(buffer, value)


def test_a_packing_fits_no_other_buffers_nor_other_forms() -> None:
    own = [torch.zeros(2), torch.zeros((), dtype=torch.int64)]
    packing = Packing(own, [Rule.MEAN, Rule.FIRST])
    assert packing.fits(own)
    assert not packing.fits([torch.zeros(2), own[1]])
    assert not packing.fits(own[:1])
    own[0].resize_(3)
    assert not packing.fits(own)


def test_what_no_rule_was_given_for() -> None:
    model = torch.nn.ModuleDict({"a": Observed(), "b": Observed()})
    buffers = Buffers(model, {"queue": Rule.LOCAL, "b.queue": Rule.MAX, "late": Rule.SUM})
    rules = dict(zip(buffers.names, buffers.rules, strict=True))
    assert rules == {
        "a.queue": Rule.LOCAL,
        "a.count": Rule.FIRST,
        "a.norm.running_mean": Rule.MEAN,
        "a.norm.running_var": Rule.MEAN,
        "a.norm.num_batches_tracked": Rule.FIRST,
        "b.queue": Rule.MAX,
        "b.count": Rule.FIRST,
        "b.norm.running_mean": Rule.MEAN,
        "b.norm.running_var": Rule.MEAN,
        "b.norm.num_batches_tracked": Rule.FIRST,
    }
    assert buffers.awaited == ["a.late", "b.late"]


@pytest.mark.parametrize(
    ("given", "exact", "consistency", "message"),
    [
        ({"queue": "median"}, False, "Synchronous", "'queue': 'median' is no rule; there are mean, first"),
        (["queue"], False, "Synchronous", "expected a dict"),
        ({"queue": "local"}, True, "Synchronous", "'queue' cannot be local in exact mode"),
        ({"queue": "sum"}, False, "Asynchronous", "'queue' cannot be added up with consistency Async"),
    ],
)
def test_rules_that_cannot_be(given: Any, exact: bool, consistency: str, message: str) -> None:
    model = Observed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=message):
        declare(model, optimizer, None, {}, buffers=given, in_job=True, exact=exact, consistency=consistency)


def test_names_and_types_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="no buffer 'que'; it has queue, count"):
        Buffers(Observed(), {"que": Rule.MIN})
    with pytest.raises(UsageError, match=r"count holds torch.int64.*no mean"):
        Buffers(Observed(), {"count": Rule.MEAN})


def test_parameter_without_a_shape() -> None:
    model = torch.nn.LazyLinear(2)
    with pytest.raises(UsageError, match=r"weight has no shape yet: run one batch"):
        declare(model, torch.optim.SGD(model.parameters(), lr=0.1), None, {}, in_job=True, exact=False)


@pytest.mark.parametrize("value", [torch.tensor([[1.5, -2.0]]), torch.tensor(2**60 + 1), torch.tensor(True)])
def test_a_buffer_that_comes_late(value: torch.Tensor) -> None:
    models = [Observed(), Observed()]
    first, second = (Buffers(model) for model in models)
    models[0].late = value.clone()
    sent: list[torch.Tensor] = []
    adopt_arrived(first, True, lambda tensor: sent.append(tensor.clone()))
    adopt_arrived(second, False, lambda tensor: tensor.copy_(sent.pop(0)))
    for model, buffers in zip(models, (first, second), strict=True):
        assert torch.equal(model.late, value)
        assert model.late.dtype == value.dtype
        assert buffers.names[-1] == "late"
        assert not buffers.awaited
    models[1].late = torch.zeros(3)
    second.put_back()
    assert torch.equal(models[1].late, value)
    second.forget("late")
    assert models[1].late is None
    assert second.awaited == ["late"]


def test_a_dropped_body_takes_its_buffer_along() -> None:
    model = Observed()
    buffers = Buffers(model)
    model.late = torch.ones(2)
    assert buffers.arrived
    buffers.put_back()
    assert model.late is None


def test_the_job_s_state_has_it_or_not_yet() -> None:
    """A buffer may be in the job's state or not there yet, for a joiner and for a member that goes back."""
    holder, joiner = Observed(), Observed()
    states, buffers = [], [Buffers(holder), Buffers(joiner)]
    for model, own in zip((holder, joiner), buffers, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        states.append(State(dict(model.named_parameters()), own, [optimizer], {}))
    before = copy.deepcopy(states[0].read(Position(Cursor(), Ledger()), {}))
    holder.late = torch.tensor([3.0])
    buffers[0].adopt("late", holder.late)
    after = copy.deepcopy(states[0].read(Position(Cursor(), Ledger()), {}))
    for _ in range(2):
        states[1].check(after)
        states[1].write(after)
        assert joiner.late.tolist() == [3.0]
        states[1].check(before)
        states[1].write(before)
        assert joiner.late is None


class OwnNorm(torch.nn.SyncBatchNorm):
    """A script's own norm layer, derived from one of torch's."""


@pytest.mark.parametrize(
    ("norm", "exact", "consistency", "message"),
    [
        (torch.nn.SyncBatchNorm, True, "Synchronous", "1 is a SyncBatchNorm, and exact mode"),
        (torch.nn.SyncBatchNorm, False, "Asynchronous", "1 is a SyncBatchNorm, and with consistency Async"),
        (OwnNorm, False, "Synchronous", "1 is a OwnNorm, a SyncBatchNorm of the script's own"),
    ],
)
def test_synchronised_layers_that_cannot_be(norm: Any, exact: bool, consistency: str, message: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), norm(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=message):
        declare(model, optimizer, None, {}, in_job=True, exact=exact, consistency=consistency)


def test_taken_statistics_leave_an_open_graph_valid() -> None:
    """A generator's backward comes after the step of the critic, in whose sums its statistics travel."""
    norm = torch.nn.BatchNorm1d(2)
    buffers = Buffers(norm)
    buffers.remember()
    out = norm(torch.randn(4, 2)).square().sum()
    buffers.take({0: torch.full((2,), 3.0)})
    out.backward()
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [3.0, 3.0]
    buffers.remember()
    norm.running_mean.zero_()
    buffers.put_back()
    assert norm.running_mean.tolist() == [3.0, 3.0]


class Steps:
    """One member's steps: all buffers travel, and what comes back is taken and committed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.buffers = model, Buffers(model)
        self._way = Packing([], [])

    def take(self) -> Combined:
        """Make a step whose sums give each number twice its value and one more; return them."""
        self.buffers.remember()
        self.model(torch.randn(4, 2))
        current = self.buffers.current()
        if not self._way.fits(current):
            self._way = Packing(current, self.buffers.rules)
        total = self._way.pack(current, [], Share(1.0, 0, 1))
        flats = [2 * flat + 1 for flat in self._way.unpack_flat(total, [], 1.0, 1)]
        combined = Combined(self._way, flats, list(range(len(current))))
        self.buffers.take(combined)
        return combined


def no_change(model: torch.nn.Module) -> None:
    pass


def stop_training(model: torch.nn.Module) -> None:
    model[1].eval()  # type: ignore[index]


def other_memory(model: torch.nn.Module) -> None:
    model[1].running_mean.data = torch.full((2,), 7.0)  # type: ignore[index]


def other_tensor(model: torch.nn.Module) -> None:
    model[1].running_mean = torch.full((2,), 7.0)  # type: ignore[index]


def other_form(model: torch.nn.Module) -> None:
    model.register_buffer("plain", torch.zeros(2, 3))


@pytest.mark.parametrize("change", [no_change, stop_training, other_memory, other_tensor, other_form])
def test_values_side_by_side_go_into_buffers_and_copies(change: Callable[[torch.nn.Module], None]) -> None:
    """The way into the buffers is found once, and again when the script has changed what it depends on."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
    model.register_buffer("plain", torch.zeros(3))
    steps = Steps(model)
    steps.take()
    earlier = steps.take()
    noted = [value.clone() for value in earlier.values()]
    change(model)
    values = steps.take()
    for index, buffer in enumerate(steps.buffers.current()):
        assert torch.equal(buffer, values[index]), steps.buffers.names[index]
    steps.buffers.put_back()  # the step is dropped
    steps.take()
    after = [value.clone() for value in steps.buffers.current()]
    steps.buffers.remember()
    for kept, value in zip(steps.buffers.committed, after, strict=True):
        assert torch.equal(kept, value)
    model(torch.randn(4, 2))
    steps.buffers.put_back()
    for buffer, value in zip(steps.buffers.current(), after, strict=True):
        assert torch.equal(buffer, value)
    for index, value in enumerate(noted):
        assert torch.equal(earlier[index], value), "what a step has taken is nobody else's room"


def test_step_dropped_after_values_came_is_put_back() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
    steps = Steps(model)
    steps.take()
    steps.buffers.remember()
    before = [buffer.clone() for buffer in steps.buffers.current()]
    steps.take()
    steps.buffers.put_back()
    for buffer, value in zip(steps.buffers.current(), before, strict=True):
        assert torch.equal(buffer, value)


def test_values_side_by_side_leave_an_open_graph_valid() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    steps = Steps(model)
    for _ in range(2):
        out = model(torch.randn(4, 2)).square().sum()
        steps.take()
        out.backward()


def test_statistics_that_a_graph_needs_are_not_changed_silently() -> None:
    """A layer that no longer trains has its statistics read by backward, as the plain write would tell."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
    steps = Steps(model)
    steps.take()
    model[1].eval()
    steps.buffers.remember()
    out = model(torch.randn(4, 2)).square().sum()
    steps.take()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_combined_values_are_a_mapping_that_is_cut_when_asked() -> None:
    own = [torch.ones(2), torch.tensor(3), torch.ones(2, 2, dtype=torch.complex64)]
    way = Packing(own, [Rule.MEAN, Rule.FIRST, Rule.MEAN])
    total = way.pack(own, [], Share(2.0, 0, 1))
    values = Combined(way, way.unpack_flat(total, [], 2.0, 1), [4, 7, 9])
    assert (list(values), len(values), 7 in values, 5 in values) == ([4, 7, 9], 3, True, False)
    for number, buffer in zip(values, own, strict=True):
        assert values[number].dtype == buffer.dtype
        assert torch.equal(values[number], buffer)

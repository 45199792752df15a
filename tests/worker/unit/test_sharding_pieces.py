"""Optimizers that step pieces of parameters: the numbers of a plain step, whatever the pieces are."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from sharding_world import (
    check_state,
    flats_of,
    gradients_for,
    layout_of,
    part_of_whole,
    same,
    small_parameters,
)
from torch import optim

from springtide.errors import SpringtideError, UsageError
from springtide.sharding.pieces import HeldPieces, State, Stretch, check_elementwise
from springtide.sharding.shard_map import Shard, ShardMap, divide

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
LATE_UNUSED = {1: (1, 4), 2: (5,), 4: (0, 1, 2, 3, 4, 5, 6)}
"""Parameters without a gradient, by step."""

PLAIN: dict[str, MakeOptimizer] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD, Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, maximize": lambda p: optim.SGD(p, lr=torch.tensor(0.1), momentum=0.5, maximize=True, foreach=False),
    "Adam": lambda p: optim.Adam(p, lr=0.1),
    "Adam, foreach": lambda p: optim.Adam(p, lr=0.1, foreach=True, weight_decay=0.1),
    "Adam, tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.1), foreach=False, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True, maximize=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1, foreach=True),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1, lambd=0.01, t0=2),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
}
FUSED: dict[str, MakeOptimizer] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.1, fused=True, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
}


def two_groups(make: MakeOptimizer, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with two groups that differ in their learning rate."""
    own = list(parameters.values())
    return make([{"params": own[:3], "lr": 0.05}, {"params": own[3:]}])


def shards_of(layout: Any) -> tuple[Shard, ...]:
    return divide(layout.sizes, [dtype.itemsize for dtype in layout.dtypes])


def random_map(draw: random.Random, count: int, size: int) -> ShardMap:
    pairs = [draw.sample(range(size), 2) if size > 1 else [0, 0] for _ in range(count)]
    return ShardMap(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))


class Holder:
    """A member that holds some shards: parameters, optimizer and pieces."""

    def __init__(self, make: MakeOptimizer, dtype: torch.dtype = torch.float32) -> None:
        self.parameters = {
            name: torch.nn.Parameter(value.data.to(dtype)) for name, value in small_parameters().items()
        }
        self.layout = layout_of(self.parameters)
        self.shards = shards_of(self.layout)
        self.optimizer = two_groups(make, self.parameters)
        self.held = HeldPieces(list(self.parameters.values()), self.layout, [self.optimizer])

    def hold(self, assigned: ShardMap, rank: int, states: Mapping[Stretch, State]) -> None:
        self.held.hold(self.shards, assigned.held_by(rank), states, assigned)

    def hold_own(self, assigned: ShardMap, rank: int) -> None:
        """Begin from the state that the optimizer has of whole parameters."""
        numbers = assigned.held_by(rank)
        self.hold(assigned, rank, self.held.take_from_optimizers(self.shards, numbers))
        self.held.forget_in_optimizers()

    def sums(self, step: int) -> list[torch.Tensor]:
        return flats_of(self.layout, gradients_for(self.layout, step))

    def step(self, step: int, unused: Sequence[int] = ()) -> None:
        self.held.begin_step(self.sums(step), [0.5], unused)
        self.optimizer.step()
        self.held.end_step()


class Plain:
    """One plain optimizer over whole parameters."""

    def __init__(self, make: MakeOptimizer, dtype: torch.dtype = torch.float32) -> None:
        self.parameters = {
            name: torch.nn.Parameter(value.data.to(dtype)) for name, value in small_parameters().items()
        }
        self.layout = layout_of(self.parameters)
        self.optimizer = two_groups(make, self.parameters)

    def step(self, step: int, unused: Sequence[int] = ()) -> None:
        gradients = gradients_for(self.layout, step)
        for index, parameter in enumerate(self.parameters.values()):
            used = index not in unused
            parameter.grad = torch.empty_like(parameter).copy_(gradients[index] * 0.5) if used else None
        self.optimizer.step()

    def check(self, holder: Holder, shards: Sequence[int]) -> None:
        """Fail unless the holder has this optimizer's state and values of these shards."""
        own = list(self.parameters.values())
        for number in shards:
            for part in holder.held.shard_parts(holder.shards, number):
                whole = own[part.stretch.index]
                check_state(part.state, self.optimizer.state.get(whole, {}), part.stretch, whole.shape)
                values = part_of_whole(whole.data, part.stretch, whole.shape)
                assert torch.equal(holder.held.values.of(part.stretch), values.reshape(-1)), part.stretch


def migrated(holders: Sequence[Holder], old: ShardMap, new: ShardMap) -> None:
    """Have all hold what a new map says; state and values come from the old owners."""
    states: list[dict[Stretch, State]] = []
    for rank in range(len(holders)):
        own: dict[Stretch, State] = {}
        for number in new.held_by(rank):
            source = holders[old.owners[number]]
            for part in source.held.shard_parts(source.shards, number):
                own[part.stretch] = copy.deepcopy(part.state)
                holders[rank].held.values.of(part.stretch).copy_(source.held.values.of(part.stretch))
        states.append(own)
    for rank, holder in enumerate(holders):
        holder.hold(new, rank, states[rank])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_and_plain_step_are_equal_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """The state moves between random maps on the way, of one to four members."""
    draw = random.Random(name)
    plain, holders = Plain(PLAIN[name], dtype), [Holder(PLAIN[name], dtype) for _ in range(4)]
    count = len(holders[0].shards)
    assigned = random_map(draw, count, 3)
    for rank, holder in enumerate(holders):
        holder.hold_own(assigned, rank)
    for step in range(6):
        unused = LATE_UNUSED.get(step, ())
        plain.step(step, unused)
        for rank, holder in enumerate(holders):
            holder.step(step, unused)
            plain.check(holder, assigned.held_by(rank))
        following = random_map(draw, count, 1 + step % 4)
        migrated(holders, assigned, following)
        assigned = following


# Not SGD in bfloat16: of a fused one with momentum no two runs are equal on the CPU, in any case.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in FUSED),
        *((name, torch.bfloat16) for name in FUSED if name != "SGD"),
    ],
)
def test_fused_pieces_are_equal_at_both_holders(name: str, dtype: torch.dtype) -> None:
    check_both_holders(FUSED[name], dtype)


@pytest.mark.parametrize("name", PLAIN)
def test_bfloat16_pieces_are_equal_at_both_holders(name: str) -> None:
    check_both_holders(PLAIN[name], torch.bfloat16)


def check_both_holders(make: MakeOptimizer, dtype: torch.dtype) -> None:
    """Fail unless owner and buddy have equal bits, and those of a plain step but for a rounding."""
    plain, holders = Plain(make, dtype), [Holder(make, dtype) for _ in range(3)]
    # One holds all shards, in a row, and shares them with two that hold every other one.
    count = len(holders[0].shards)
    assigned = ShardMap((1,) * count, tuple(number % 2 * 2 for number in range(count)))
    for rank, holder in enumerate(holders):
        holder.hold_own(assigned, rank)
    # torch computes the ends of a tensor by other instructions: so the ends have to be the same ones.
    cut_at = [{piece.stretch for piece in holder.held.pieces} for holder in holders]
    assert cut_at[1] == cut_at[0] | cut_at[2]
    for step in range(6):
        plain.step(step)
        for holder in holders:
            holder.step(step)
    own = list(plain.parameters.values())
    for number in range(len(holders[0].shards)):
        first, second = (holders[rank] for rank in assigned.holders(number))
        for one, other in zip(
            first.held.shard_parts(first.shards, number),
            second.held.shard_parts(second.shards, number),
            strict=True,
        ):
            assert one.state.keys() == other.state.keys()
            assert all(same(one.state[name], other.state[name]) for name in one.state), one.stretch
            values = first.held.values.of(one.stretch)
            assert same(values, second.held.values.of(one.stretch))
            truth = own[one.stretch.index].data.reshape(-1)[one.stretch.start : one.stretch.stop]
            rounding = 0.0625 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(values, truth, rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.slow
@hypothesis.settings(max_examples=25)
@hypothesis.given(seed=st.integers(0, 1 << 20), moves=st.integers(1, 6), name=st.sampled_from(sorted(PLAIN)))
def test_state_moved_any_number_of_times_is_unchanged(seed: int, moves: int, name: str) -> None:
    draw = random.Random(seed)
    plain, holders = Plain(PLAIN[name]), [Holder(PLAIN[name]) for _ in range(4)]
    assigned = random_map(draw, len(holders[0].shards), 4)
    for rank, holder in enumerate(holders):
        holder.hold_own(assigned, rank)
    for step in range(2):
        unused = [draw.randrange(7)]
        for worker in (plain, *holders):
            worker.step(step, unused)
    for _ in range(moves):
        following = random_map(draw, len(holders[0].shards), draw.randrange(1, 5))
        migrated(holders, assigned, following)
        assigned = following
    for rank, holder in enumerate(holders):
        plain.check(holder, assigned.held_by(rank))


@pytest.mark.parametrize("name", PLAIN)
def test_step_now_is_the_step_of_the_script(name: str) -> None:
    """The options are those of its own time, whatever the groups have now, and none of the hooks runs."""
    plain, holder = Plain(PLAIN[name]), Holder(PLAIN[name])
    everything = random_map(random.Random(0), len(holder.shards), 1)
    holder.hold_own(everything, 0)
    for step in range(2):
        plain.step(step)
        holder.step(step)
    options = holder.held.options()
    later: list[Any] = [3.0, 4.0]
    for group, rate in zip(holder.optimizer.param_groups, later, strict=True):
        group["lr"] = rate
    holder.optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the script's step has run"))
    holder.optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook of the script's step has run"))
    holder.held.step_now(holder.sums(2), [0.5], [1], options)
    plain.step(2, [1])
    plain.check(holder, range(len(holder.shards)))
    assert [group["lr"] for group in holder.optimizer.param_groups] == later


def test_step_now_that_fails_leaves_groups_as_they_were() -> None:
    holder = Holder(PLAIN["SGD"])
    holder.hold_own(random_map(random.Random(0), len(holder.shards), 1), 0)
    options = holder.held.options()
    options[0]["lr"] = 7.0
    parameters = [group["params"] for group in holder.optimizer.param_groups]
    options[1]["lr"] = "none"
    with pytest.raises(TypeError):
        holder.held.step_now(holder.sums(0), [1.0], [], options)
    assert [group["lr"] for group in holder.optimizer.param_groups] == [0.05, 0.1]
    assert [group["params"] for group in holder.optimizer.param_groups] == parameters


@pytest.mark.parametrize("name", PLAIN)
def test_state_dict_between_steps_has_options_and_no_state(name: str) -> None:
    holder = Holder(PLAIN[name])
    options = holder.held.options()
    holder.hold_own(random_map(random.Random(0), len(holder.shards), 1), 0)
    for step in range(2):
        holder.step(step)
        saved = holder.optimizer.state_dict()
        assert saved["state"] == {}
        assert [group["params"] for group in saved["param_groups"]] == [[0, 1, 2], [3, 4, 5, 6]]
        assert [{k: v for k, v in g.items() if k != "params"} for g in saved["param_groups"]] == options
        holder.optimizer.load_state_dict(saved)
    assert all(parameter.grad is None for parameter in holder.parameters.values())


def test_values_of_channels_last_come_back_to_the_parameter() -> None:
    plain, holder = Plain(PLAIN["Adam"]), Holder(PLAIN["Adam"])
    holder.hold_own(random_map(random.Random(0), len(holder.shards), 1), 0)
    plain.step(0)
    holder.step(0)
    before = holder.parameters["image"].stride()
    holder.held.values.put_out(range(7))
    for name, truth in plain.parameters.items():
        assert torch.equal(holder.parameters[name], truth), name
    assert holder.parameters["image"].stride() == before
    with torch.no_grad():
        holder.parameters["image"].fill_(3.0)
    holder.held.values.take_in()
    assert holder.held.values.flat[4].tolist() == [3.0] * 270


class Doubled(torch.optim.SGD):
    """Keeps two elements for each of a parameter's."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["pairs"] = torch.zeros(2, *parameter.shape)
        return None


def test_state_that_cannot_be_cut_is_refused_by_name() -> None:
    holder = Holder(lambda p: Doubled(p, lr=0.1))
    assigned = random_map(random.Random(0), len(holder.shards), 1)
    holder.hold_own(assigned, 0)
    holder.step(0)
    for number in range(len(holder.shards)):
        with pytest.raises(SpringtideError, match=r"'pairs' of \w+ has the shape \(2, .* cannot be sharded"):
            holder.held.shard_parts(holder.shards, number)
    whole = Holder(lambda p: Doubled(p, lr=0.1))
    whole.optimizer.step()
    with pytest.raises(SpringtideError, match=r"'pairs' of .* cannot be cut by elements"):
        whole.hold_own(assigned, 0)


def test_state_of_which_a_part_is_missing_is_refused() -> None:
    holder = Holder(PLAIN["Adam"])
    everything = random_map(random.Random(0), len(holder.shards), 1)
    holder.hold_own(everything, 0)
    holder.step(0)
    cuts = [
        part
        for number in range(len(holder.shards))
        for part in holder.held.shard_parts(holder.shards, number)
    ]
    states = {part.stretch: part.state for part in cuts}
    del states[max(states, key=lambda stretch: stretch.start)]
    with pytest.raises(SpringtideError, match="a shard was cut"):
        holder.hold(everything, 0, states)


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.Adafactor, optim.SparseAdam])
def test_optimizer_that_mixes_elements_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(UsageError, match=rf"{kind.__name__} is not known .*elementwise = True"):
        check_elementwise([optim.SGD([torch.zeros(1)], lr=0.1), kind([torch.zeros(3, 3)])])


def test_subclass_says_itself_that_it_is_elementwise() -> None:
    class Own(optim.SGD):
        """Overrides something that nobody here knows."""

    with pytest.raises(UsageError, match="Own is not known"):
        check_elementwise([Own([torch.zeros(1)], lr=0.1)])
    Own.elementwise = True  # type: ignore[attr-defined]
    check_elementwise([Own([torch.zeros(1)], lr=0.1)])

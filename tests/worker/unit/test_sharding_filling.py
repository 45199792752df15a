"""Second copies of shards that wait until training goes on: which ones, when, and their bytes on the way."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from sharding_world import same

from springtide.sharding.filling import (
    Batch,
    Fill,
    alone,
    filled,
    form_bytes,
    next_batch,
    postponed,
    without_values,
)
from springtide.sharding.migration import VALUES, Form, Move, cut_bytes, form_of, moves
from springtide.sharding.pieces import ShardPart, State, Stretch
from springtide.sharding.shard_map import Shard, ShardMap, plan

SHARD = 100
CPU = torch.device("cpu")


def part(number: int, state: State | None = None) -> ShardPart:
    """Return all of a shard, with the state of Adam or another one."""
    stretch = Stretch(0, number * SHARD, (number + 1) * SHARD)
    moments = torch.arange(SHARD, dtype=torch.float32) + number
    adam = {"step": torch.tensor(float(number)), "exp_avg": moments, "exp_avg_sq": moments.double()}
    return ShardPart(stretch, adam if state is None else state)


def with_values(found: ShardPart) -> ShardPart:
    """Return it with a parameter's values, as it moves between generations."""
    return ShardPart(found.stretch, found.state | {VALUES: torch.zeros(SHARD)})


def forms(planned: Sequence[Move], state: State | None = None) -> dict[Move, list[Form]]:
    """Return how the states of moves look."""
    return {move: [form_of(with_values(part(move.shard, state)))] for move in planned}


NBYTES = sum(cut_bytes(form) for form in forms([Move(0, 0, 1)])[Move(0, 0, 1)])


def loads(found: Sequence[Move]) -> int:
    """Return the most moves that any member sends or receives."""
    load = Counter[Any]()
    for move in found:
        load.update([("sends", move.sender), ("receives", move.receiver)])
    return max(load.values(), default=0)


@st.composite
def losses(draw: st.DrawFn) -> tuple[list[set[int]], ShardMap]:
    """Draw the shards of survivors after a loss, and the map that they are to have, with others that came."""
    size, count, seed = draw(st.integers(2, 6)), draw(st.integers(2, 30)), draw(st.integers(0, 1 << 20))
    chooser = random.Random(seed)
    shards = [Shard(0, number * SHARD, (number + 1) * SHARD) for number in range(count)]
    nodes = [chooser.choice("abc") for _ in range(size)]
    before = plan(shards, nodes, [set(range(count))] + [set() for _ in nodes[1:]])
    gone = chooser.randrange(size)
    held: list[set[int]] = [set(before.held_by(rank)) for rank in range(size) if rank != gone]
    held += [set() for _ in range(draw(st.integers(0, 2)))]
    for number in range(count):
        if not any(number in own for own in held):
            held[0].add(number)
    return held, plan(shards, [chooser.choice("abc") for _ in held], held)


@hypothesis.settings(max_examples=60)
@hypothesis.given(case=losses(), room=st.integers(0, 12), most=st.integers(1, 3000))
def test_only_single_copies_wait_and_all_are_made(
    case: tuple[list[set[int]], ShardMap], room: int, most: int
) -> None:
    held, assigned = case
    planned = moves(held, assigned)
    waiting = postponed(forms(planned), held, assigned, room * NBYTES)
    later = [fill.move for fill in waiting]
    at_once = [move for move in planned if move not in later]
    for move in later:
        assert [rank for rank, own in enumerate(held) if move.shard in own] == [move.sender]
    could_wait = {
        move
        for move in planned
        if sum(move.shard in own for own in held) == 1 and move.sender in assigned.holders(move.shard)
    }
    if not set(at_once) <= could_wait:
        forced = [move for move in at_once if move not in could_wait]
        assert loads(at_once) <= max(room, loads(forced))
    else:
        assert loads(at_once) <= room
    now = alone(assigned, waiting)
    for shard in range(len(assigned.owners)):
        single = shard in {move.shard for move in later}
        assert now.holders(shard) == assigned.holders(shard) or single
        for rank in now.holders(shard):
            assert shard in held[rank] or Move(shard, 0, rank).receiver in {
                move.receiver for move in at_once if move.shard == shard
            }
    left, steps = list(waiting), 0
    while left:
        fills = next_batch(left, most)
        batch = Batch(fills, filled(now, fills), 0, len(held))
        assert fills
        assert batch.nbytes <= most or len(fills) == 1
        left = [fill for fill in left if fill not in fills]
        now, steps = batch.assigned, steps + 1
    assert now == assigned
    assert steps <= len(waiting)


@pytest.mark.parametrize("state", [{}, {"step": 3, "exp_avg": torch.zeros(SHARD)}, {"none": None}])
def test_state_whose_form_may_change_does_not_wait(state: State) -> None:
    """No state yet, and what is no tensor."""
    planned = [Move(0, 0, 1)]
    assigned = ShardMap((0,), (1,))
    assert postponed(forms(planned), [{0}, set()], assigned, 0)
    assert not postponed(forms(planned, state), [{0}, set()], assigned, 0)


def test_shard_with_two_copies_does_not_wait_with_one() -> None:
    """A third member is to have it instead of one of the two that do."""
    planned = [Move(0, 0, 2)]
    assert not postponed(forms(planned), [{0}, {0}, set()], ShardMap((0,), (2,)), 0)


def test_shard_that_leaves_its_member_does_not_wait() -> None:
    planned = [Move(0, 0, 1), Move(0, 0, 2)]
    assert not postponed(forms(planned), [{0}, set(), set()], ShardMap((1,), (2,)), 0)


def batches(fills: Sequence[Fill], size: int) -> list[Batch]:
    """Return a batch as each member sees it."""
    return [Batch(fills, ShardMap((), ()), rank, size) for rank in range(size)]


def carried(of_all: Sequence[Batch], parts: dict[int, ShardPart]) -> None:
    """Bring all bytes where they go."""
    for receiver, sender in itertools.product(of_all, of_all):
        for (start, stop), way in zip(
            sender.route.sent[receiver.rank], receiver.route.received[sender.rank], strict=True
        ):
            packed = sender.packed((start, stop), lambda number: [parts[number]], CPU)
            came = torch.cat(packed)
            assert came.numel() == stop - start == way[1] - way[0]
            receiver.take(way, came)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    pairs=st.lists(st.permutations(range(4)).map(lambda found: (found[0], found[1])), min_size=1, max_size=12)
)
def test_state_arrives_bit_for_bit(pairs: list[tuple[int, int]]) -> None:
    parts = {number: part(number) for number in range(len(pairs))}
    fills = [Fill(Move(number, *pair), [form_of(parts[number])], *pair) for number, pair in enumerate(pairs)]
    of_all = batches(fills, 4)
    carried(of_all, parts)
    for rank, batch in enumerate(of_all):
        assert batch.coming == [number for number, pair in enumerate(pairs) if pair[1] == rank]
        assert batch.states.keys() == {parts[number].stretch for number in batch.coming}
        for number in batch.coming:
            own = batch.states[parts[number].stretch]
            assert list(own) == list(parts[number].state)
            assert all(same(own[name], value) for name, value in parts[number].state.items())
            assert own["step"].shape == ()
        assert not batch.changed
    for sender in range(4):
        for receiver in range(4):
            own, other = of_all[sender].runs, of_all[receiver].runs
            shared = {n for n, pair in enumerate(pairs) if pair == (sender, receiver)}
            assert [r for r in own if set(r) <= shared] == [r for r in other if set(r) <= shared]
            assert {n for run in own if set(run) <= shared for n in run} == shared


@pytest.mark.parametrize(
    "changed",
    [
        {"step": torch.tensor(1.0)},
        {"step": torch.tensor(1.0), "exp_avg": torch.zeros(SHARD), "exp_avg_sq": torch.zeros(SHARD)},
        {
            "step": torch.tensor([1.0, 2.0]),
            "exp_avg": torch.zeros(SHARD),
            "exp_avg_sq": part(0).state["exp_avg_sq"],
        },
    ],
)
def test_state_that_looks_otherwise_is_not_taken(changed: State) -> None:
    parts = {0: part(0), 1: part(1)}
    fills = [Fill(Move(number, 0, 1), [form_of(parts[number])], 0, 1) for number in (0, 1)]
    of_all = batches(fills, 2)
    carried(of_all, parts | {1: part(1, changed)})
    assert of_all[1].changed == [1]
    assert list(of_all[1].states) == [parts[0].stretch]


def test_values_do_not_travel_and_a_flag_does() -> None:
    whole, bare = form_of(with_values(part(3))), form_of(part(3))
    assert without_values(whole) == bare
    assert form_bytes(bare) == SHARD * 12 + 4
    assert Fill(Move(3, 0, 1), [bare], 0, 1).nbytes == form_bytes(bare) + 1

"""Shards on their way to new holders: who sends what, in rounds of a bounded size, bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
import torch
from fake_groups import FakeGroup, on_members
from hypothesis import strategies as st
from sharding_world import same

from springtide.sharding import migration
from springtide.sharding.migration import Move, forms_of, migrate, moves
from springtide.sharding.pieces import ShardPart, State, Stretch
from springtide.sharding.shard_map import ShardMap

ONE_NUMBER: list[Any] = [
    None,
    3,
    0.1,
    math.inf,
    True,
    "text",
    [1, 2.5],
    torch.tensor(7.0),
    torch.tensor(0.1, dtype=torch.float64),
    torch.tensor(3, dtype=torch.int64),
    torch.tensor([2.5]),
    torch.tensor(1.5, dtype=torch.bfloat16),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int32, torch.bool]


def state_of(stretch: Stretch, seed: int) -> State:
    """Return a state of all sorts; sometimes none."""
    draw = random.Random(f"{stretch} {seed}")
    if not draw.randrange(4):
        return {}
    size, state = stretch.stop - stretch.start, State()
    numbers = torch.Generator().manual_seed(draw.randrange(1 << 30))
    for number in range(draw.randrange(1, 4)):
        raw = torch.randn(size, generator=numbers)
        state[f"cut {number}"] = (raw * 3).to(draw.choice(DTYPES))
    for number in range(draw.randrange(3)):
        state[f"one {number}"] = draw.choice(ONE_NUMBER)
    return state


def brought(group: FakeGroup, planned: list[Move], *calls: Any) -> dict[Stretch, State]:
    """Return what has come to a member, after all have told each other how it looks."""
    shard_parts, on_round = calls
    forms = forms_of(group, planned, shard_parts)  # type: ignore[arg-type]
    return migrate(group, forms, shard_parts, on_round)  # type: ignore[arg-type]


def cuts_of(sizes: Sequence[Sequence[int]], seed: int) -> list[list[ShardPart]]:
    """Return what each shard consists of: stretches of parameters, of these sizes."""
    found, at = [], 0
    for own in sizes:
        parts = []
        for index, size in enumerate(own):
            stretch = Stretch(index, at, at + size)
            parts.append(ShardPart(stretch, state_of(stretch, seed)))
            at += size
        found.append(parts)
    return found


@pytest.mark.slow
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    sizes=st.lists(st.lists(st.sampled_from([1, 2, 7, 256, 300]), max_size=3), min_size=1, max_size=8),
    size=st.integers(2, 5),
    seed=st.integers(0, 1 << 20),
    most=st.sampled_from([16, 100, 1000, 1 << 24]),
)
def test_state_arrives_bit_for_bit_in_rounds(sizes: list[list[int]], size: int, seed: int, most: int) -> None:
    draw = random.Random(seed)
    shards = cuts_of(sizes, seed)
    held: list[set[int]] = [set() for _ in range(size)]
    for number in range(len(shards)):
        for rank in draw.sample(range(size), draw.randrange(1, size + 1)):
            held[rank].add(number)
    pairs = [draw.sample(range(size), 2) for _ in shards]
    assigned = ShardMap(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
    planned = moves(held, assigned)
    rounds: list[list[int]] = [[] for _ in range(size)]

    def call(group: FakeGroup) -> dict[Stretch, State]:
        def shard_parts(number: int) -> list[ShardPart]:
            assert number in held[group.rank]
            return shards[number]

        forms = forms_of(group, planned, shard_parts)  # type: ignore[arg-type]
        return migrate(group, forms, shard_parts, rounds[group.rank].append)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(migration, "ROUND_BYTES", most)
        results, _ = on_members(size, call, seed)
    for rank, arrived in enumerate(results):
        expected = {
            part.stretch: part.state
            for number in assigned.held_by(rank)
            if number not in held[rank]
            for part in shards[number]
        }
        assert arrived.keys() == expected.keys()
        for stretch, state in expected.items():
            assert list(arrived[stretch]) == list(state)
            assert all(same(arrived[stretch][name], value) for name, value in state.items())
            assert [getattr(v, "shape", ()) for v in arrived[stretch].values()] == [
                getattr(v, "shape", ()) for v in state.values()
            ]
        cut = [
            (stretch, value)
            for stretch, state in expected.items()
            for name, value in state.items()
            if name.startswith("cut")
            or getattr(value, "shape", None) == (1,) == (stretch.stop - stretch.start,)
        ]
        assert sum(rounds[rank]) == sum(value.nbytes for _, value in cut)
        assert all(came <= most * (size - 1) for came in rounds[rank])
    assert len({len(own) for own in rounds}) == 1


def test_moves_bring_each_shard_where_it_is_missing() -> None:
    held = [{0, 1, 2, 3}, {0, 1}, set()]
    assigned = ShardMap((0, 1, 2, 2), (1, 2, 0, 1))
    found = moves(held, assigned)
    assert [(move.shard, move.receiver) for move in found] == [(1, 2), (2, 2), (3, 2), (3, 1)]
    assert all(move.shard in held[move.sender] for move in found)


@hypothesis.given(seed=st.integers(0, 1 << 20), size=st.integers(2, 8), count=st.integers(1, 40))
def test_moves_are_shared_out_among_the_holders(seed: int, size: int, count: int) -> None:
    """All hold all but one: nobody sends two shards more than another."""
    held = [set(range(count)) for _ in range(size - 1)] + [set()]
    draw = random.Random(seed)
    pairs = [draw.sample(range(size), 2) for _ in range(count)]
    assigned = ShardMap(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
    found = moves(held, assigned)
    assert {(m.shard, m.receiver) for m in found} == {(n, size - 1) for n in assigned.held_by(size - 1)}
    sends = [sum(move.sender == rank for move in found) for rank in range(size - 1)]
    assert max(sends) - min(sends) <= 1


def test_nothing_to_move_takes_no_collective() -> None:
    def call(group: FakeGroup) -> Any:
        return brought(group, [], lambda number: pytest.fail("nothing is asked for"), lambda count: None)

    results, network = on_members(3, call)
    assert results == [{}, {}, {}]
    assert not network.operations


def test_move_of_shards_without_state_takes_no_round() -> None:
    """No optimizer has stepped yet."""
    rounds: list[int] = []

    def call(group: FakeGroup) -> Any:
        return brought(
            group,
            [Move(0, 0, 1)],
            lambda number: [ShardPart(Stretch(0, 0, 9), {}), ShardPart(Stretch(1, 0, 9), {})],
            rounds.append,
        )

    results, network = on_members(2, call)
    assert results == [{}, {Stretch(0, 0, 9): {}, Stretch(1, 0, 9): {}}]
    assert not rounds
    assert not network.exchanges


def test_more_than_a_round_of_one_tensor_arrives() -> None:
    """20 MiB, with the limit as it is: two rounds."""
    state = torch.arange(5 << 20, dtype=torch.float32)
    rounds: list[int] = []

    def call(group: FakeGroup) -> Any:
        part = ShardPart(Stretch(0, 0, state.numel()), {"exp_avg": state, "step": torch.tensor(4.0)})
        on_round = rounds.append if group.rank else lambda count: None
        return brought(group, [Move(0, 0, 1)], lambda number: [part], on_round)

    (_, arrived), _ = on_members(2, call)
    (own,) = arrived.values()
    assert torch.equal(own["exp_avg"], state)
    assert own["step"].item() == 4.0
    assert rounds == [16 << 20, 4 << 20]


def test_lost_member_ends_a_migration_as_an_error() -> None:
    """The rest of what is to come never counts as whole."""

    def call(group: FakeGroup) -> Any:
        if group.rank == 2:
            group.shut()
            return None
        with pytest.raises(RuntimeError, match="closed"):
            brought(
                group, [Move(0, 0, 1)], lambda number: [ShardPart(Stretch(0, 0, 1), {})], lambda count: None
            )
        return None

    on_members(3, call)

"""The part of a checkpoint that is in shards: whole and once, whoever writes it; any optimizer reads it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from sharding_parts import POSITIONS, asgd, parts_of, sgd
from sharding_world import Variant, World, adam, same, small_parameters

from springtide.checkpoint import shares
from springtide.comm import codec


def restored(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the tree that the parts are, as a reader puts it together."""
    specs = parts[0].specs
    assert all((part.header, part.specs) == (parts[0].header, specs) for part in parts)
    assert shares.missing(specs, [piece for part in parts for piece in part.pieces]) == ""
    tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    for part in parts:
        at = 0
        for piece in part.pieces:
            width = specs[piece.tensor].dtype.itemsize
            assert not at % width, "a piece is not aligned"
            nbytes = (piece.stop - piece.start) * width
            raw = part.memory[at : at + nbytes].clone().view(specs[piece.tensor].dtype)
            tensors[piece.tensor].view(-1)[piece.start : piece.stop] = raw
            at += nbytes
        assert at == part.memory.numel() == part.size
    tree: dict[str, Any] = codec.unflatten(parts[0].header, tensors)
    return tree


def check_restored(world: World, tree: dict[str, Any]) -> None:
    """Fail unless the tree is the plain optimizer's state, but for parameters without elements."""
    truth = world.reference
    wanted = {
        POSITIONS[index]: truth.state_of(index)
        for index, parameter in enumerate(truth.parameters)
        if parameter.numel() and truth.state_of(index)
    }
    assert tree["optimizer"].keys() == wanted.keys()
    for position, state in wanted.items():
        own = tree["optimizer"][position]
        assert list(own) == list(state)
        for name, value in state.items():
            assert same(own[name], value), (position, name)
            if isinstance(value, torch.Tensor):
                assert own[name].shape == value.shape, (position, name)


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    nodes=st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=5),
    make=st.sampled_from([adam, sgd, asgd]),
    steps=st.integers(0, 2),
    unused=st.lists(st.integers(0, 6), max_size=3),
    seed=st.integers(0, 1000),
    masters=st.booleans(),
)
def test_parts_of_all_writers_are_the_whole_state_once(
    nodes: list[str], make: Any, steps: int, unused: list[int], seed: int, masters: bool
) -> None:
    world = World(nodes, seed, Variant(make, masters))
    world.form()
    assert world.train(steps, unused)
    check_restored(world, restored(parts_of(world, range(len(nodes)))))


def test_subset_of_writers_writes_the_whole_state() -> None:
    """Each one that does not write has a buddy that does."""
    world = World(["a", "b", "c", "d"])
    world.form()
    assert world.train(2)
    for absent in range(4):
        writers = [rank for rank in range(4) if rank != absent]
        check_restored(world, restored(parts_of(world, writers)))


def test_shard_at_no_writer_is_refused() -> None:
    world = World(["a", "b", "c"])
    world.form()
    with pytest.raises(RuntimeError, match="is only at workers that do not write this checkpoint"):
        parts_of(world, [1])


@pytest.mark.parametrize("make", [adam, sgd, asgd])
def test_restored_state_goes_on_as_an_undisturbed_run(make: Any) -> None:
    """The optimizer shards nothing; the way back is how each job's first generation begins."""
    world = World(["a", "b", "c"], 4, Variant(make))
    world.form()
    assert world.train(2)
    tree = restored(parts_of(world, range(3)))
    truth = world.reference
    parameters = list(small_parameters(99).values())
    with torch.no_grad():
        for own, value in zip(parameters, truth.parameters, strict=True):
            own.copy_(value)
    alone = make(parameters)
    places = {place: index for index, place in POSITIONS.items()}
    state = {places[place]: own for place, own in tree["optimizer"].items()}
    groups = copy.deepcopy(truth.optimizer.state_dict()["param_groups"])
    alone.load_state_dict({"state": state, "param_groups": groups})
    for optimizer, own in ((truth.optimizer, truth.parameters), (alone, parameters)):
        for parameter in own:
            parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(truth.parameters, parameters, strict=True))


def test_part_is_a_copy_of_its_step() -> None:
    world = World(["a", "b"])
    world.form()
    assert world.train(1)
    parts = parts_of(world, range(2))
    truth = copy.deepcopy(world.reference)
    assert world.train(2)
    world.reference = truth
    check_restored(world, restored(parts))

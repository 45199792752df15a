"""Restore of the optimizer's state in shards: each file is read by one member, each shard kept by two."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from fake_groups import FakeGroup, on_members
from hypothesis import strategies as st
from sharding_parts import POSITIONS, asgd, parts_of, sgd
from sharding_world import Member, Variant, World, adam, check_state

from springtide.checkpoint import files
from springtide.checkpoint.manifest import File, Part
from springtide.checkpoint.storage import Storage
from springtide.errors import SpringtideError
from springtide.sharding import migration
from springtide.sharding.pieces import State, Stretch
from springtide.sharding.restore import ShardsRestore

NAME = "checkpoint"


def saved(world: World, root: Path) -> Part:
    """Write the state of a job in files as its members would; return their description."""
    parts, folder = parts_of(world, range(len(world.members))), root / NAME
    folder.mkdir(parents=True)
    header = parts[0].header
    (folder / "header").write_bytes(header)
    written = []
    for number, part in enumerate(parts):
        head = files.header(part.pieces, part.specs)
        raw = head + part.memory.numpy().tobytes()
        (folder / f"share-{number}").write_bytes(raw)
        written.append(File(f"share-{number}", len(raw), hashlib.sha256(raw).hexdigest()))
    return Part(File("header", len(header), hashlib.sha256(header).hexdigest()), tuple(written))


Kept = tuple[str, list[int], dict[Stretch, State]]


def restored(
    root: Path, part: Part, variant: Variant, size: int, seed: int = 0, lacking: int = -1
) -> list[tuple[Member, Kept]]:
    """Have fresh members read it together; return them, the problem, the shards and the states of each."""
    members = [Member(f"r{n}", "abc"[n % 3], variant, 50 + n, True, None) for n in range(size)]

    def read(group: FakeGroup) -> Kept:
        found: list[Any] = [[], {}]
        home = members[group.rank].home

        def keep(numbers: Any, states: Any) -> None:
            found[:] = numbers, states

        restore = ShardsRestore(group, home.target(), POSITIONS, keep)  # type: ignore[arg-type]
        storage = None if group.rank == lacking else Storage(str(root))
        return restore.read(storage, NAME, part), found[0], found[1]

    results, _ = on_members(size, read, seed)
    return list(zip(members, results, strict=True))


@hypothesis.settings(max_examples=15, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    writers=st.integers(1, 4),
    readers=st.integers(2, 5),
    make=st.sampled_from([adam, sgd, asgd]),
    steps=st.integers(0, 2),
    unused=st.lists(st.integers(0, 6), max_size=3),
    masters=st.booleans(),
    seed=st.integers(0, 1000),
    most=st.sampled_from([100, 1 << 24]),
)
def test_each_shard_is_kept_by_two_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    writers: int,
    readers: int,
    make: Any,
    steps: int,
    unused: list[int],
    masters: bool,
    seed: int,
    most: int,
) -> None:
    variant = Variant(make, masters)
    nodes = random.Random(seed)
    world = World([nodes.choice("abc") for _ in range(writers)], seed, variant)
    world.form()
    assert world.train(steps, unused)
    root = tmp_path_factory.mktemp("restore")
    part = saved(world, root)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(migration, "ROUND_BYTES", most)
        found = restored(root, part, variant, readers, seed)
    truth, holders = world.reference, Counter[int]()
    for member, (problem, numbers, states) in found:
        home = member.home
        assert problem == ""
        holders.update(numbers)
        expected = set()
        for number in numbers:
            shard = home.shards[number]
            for _, _, stretch in home.held.cells.between(shard.bucket, (shard.start, shard.stop)):
                if stretch is not None:
                    expected.add(stretch)
                    check_state(
                        states[stretch],
                        truth.state_of(stretch.index),
                        stretch,
                        truth.parameters[stretch.index].shape,
                    )
        assert states.keys() == expected
    assert set(holders.values()) == {2}
    assert len(holders) == len(found[0][0].home.shards)


def trained(root: Path, variant: Variant) -> Part:
    """Save a job of three after two steps."""
    world = World(["a", "b", "c"], 1, variant)
    world.form()
    assert world.train(2)
    return saved(world, root)


def test_file_that_one_cannot_read_is_told_to_all(tmp_path: Path) -> None:
    part = trained(tmp_path, Variant())
    share = tmp_path / NAME / "share-1"
    share.write_bytes(share.read_bytes()[:-1])
    found = [problem for _, (problem, _, _) in restored(tmp_path, part, Variant(), 3)]
    assert len(set(found)) == 1
    assert found[0].startswith("rank ")
    assert "share-1 is cut short" in found[0]


def test_member_without_storage_is_told_to_all(tmp_path: Path) -> None:
    part = trained(tmp_path, Variant())
    found = restored(tmp_path, part, Variant(), 3, lacking=2)
    assert {problem for _, (problem, _, _) in found} == {"rank 2: storage cannot be reached"}
    assert not any(numbers or states for _, (_, numbers, states) in found)


def test_share_that_is_missing_is_no_state(tmp_path: Path) -> None:
    part = trained(tmp_path, Variant())
    fewer = Part(part.header, part.files[:2])
    (problem,) = {problem for _, (problem, _, _) in restored(tmp_path, fewer, Variant(), 2)}
    assert "is not whole" in problem or "describes more than the files hold" in problem


def test_masters_that_nobody_asked_for_are_refused(tmp_path: Path) -> None:
    part = trained(tmp_path, Variant(masters=True))
    with pytest.raises(SpringtideError, match="master_weights=True"):
        restored(tmp_path, part, Variant(bfloat16=True), 2)


def test_nobody_has_more_than_its_share_and_its_shards(tmp_path: Path) -> None:
    """Each of six members reads a sixth and keeps a third."""
    world = World(["a", "b", "c"] * 2, 2)
    world.form()
    assert world.train(1)
    part = saved(world, tmp_path)
    total = sum(file.bytes for file in part.files)
    for member, (_, _, states) in restored(tmp_path, part, Variant(), 6):
        kept = sum(
            value.nbytes for state in states.values() for value in state.values() if torch.is_tensor(value)
        )
        assert kept < 0.5 * total
        group: Any = FakeGroupOfSix()
        restore = ShardsRestore(group, member.home.target(), POSITIONS, lambda numbers, states: None)
        assert kept <= restore.bytes_here(part) < total


class FakeGroupOfSix:
    """Have a size, for what counts before it is read."""

    size = 6

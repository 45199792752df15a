"""A checkpoint that all members of a group read together: each file once, and the same state at all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_members import FOLDER, Members, equal, state, tree
from worker_groups import FormedGroups, together

from springtide.checkpoint import names, restore
from springtide.checkpoint.restore import Restored
from springtide.checkpoint.storage import Storage, StorageError
from springtide.comm import gather
from springtide.comm.gather import gather_bytes, pass_around
from springtide.comm.process_group import Group
from springtide.elastic.shared_restore import SharedRestore


@pytest.fixture
def groups() -> Iterator[Callable[[int], list[Group]]]:
    formed = FormedGroups()
    yield formed
    formed.close()  # some are broken, and cannot be freed


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often each share or block of a checkpoint is opened on storage."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    plain = Storage.open

    def count(storage: Storage, path: str) -> Any:
        with lock:
            counts[path] += 1
        return plain(storage, path)

    monkeypatch.setattr(Storage, "open", count)
    return counts


def save(root: Path, writers: int, *steps: int) -> None:
    members = Members(root, writers)
    for step in steps:
        assert not members.save(state(step), tree(step) | {"frozen": ["a"]}).error
    members.close()


def run(
    groups: list[Group], root: Path, has_room: Callable[[int, int], bool] = lambda rank, size: True
) -> tuple[list[Restored | None], bool, list[str]]:
    """Return what each member holds, whether all do, and what was passed over."""
    ended: list[tuple[bool, list[str]]] = []

    def member(rank: int) -> Restored | None:
        shared = SharedRestore(groups[rank], lambda size: has_room(rank, size))
        if rank:
            return shared.follow()
        found, skipped = restore.newest(Storage(str(root), FOLDER), shared.read)
        ended.append((shared.end(found), skipped))
        return found

    found = together([lambda rank=rank: member(rank) for rank in range(len(groups))])
    return found, *ended[0]


@pytest.mark.parametrize(("writers", "readers"), [(3, 2), (1, 3), (4, 4)])
def test_each_file_is_read_once_and_all_hold_the_state(
    writers: int,
    readers: int,
    tmp_path: Path,
    groups: Callable[[int], list[Group]],
    opened: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gather, "CHUNK_BYTES", 100)  # pieces are cut, and packed
    save(tmp_path, writers, 1, 2)
    found, by_all, skipped = run(groups(readers), tmp_path)
    assert by_all
    assert skipped == []
    for one in found:
        assert one is not None
        assert one.manifest.name == names.folder(state(2))
        assert equal(one.tree["parameters"], tree(2)["parameters"])
        assert equal(one.tree["tracked"], tree(2)["tracked"])
    assert set(opened.values()) == {1}
    assert len(opened) == writers + 1  # the shares, and the block that does not train


def test_a_damaged_one_is_passed_over_by_all(tmp_path: Path, groups: Callable[[int], list[Group]]) -> None:
    save(tmp_path, 3, 1, 2)
    share = sorted((tmp_path / FOLDER / names.folder(state(2))).glob("*.safetensors"))[1]
    share.write_bytes(share.read_bytes()[:-1])
    found, by_all, skipped = run(groups(3), tmp_path)
    assert by_all
    assert len(skipped) == 1
    assert "cut short" in skipped[0]
    assert all(one is not None and one.manifest.state == state(1) for one in found)


def test_a_member_without_room_has_the_first_one_read_alone(
    tmp_path: Path, groups: Callable[[int], list[Group]], opened: Counter[str]
) -> None:
    save(tmp_path, 3, 1)
    found, by_all, _ = run(groups(3), tmp_path, lambda rank, size: rank != 1)
    assert not by_all
    assert found[0] is not None
    assert equal(found[0].tree["parameters"], tree(1)["parameters"])
    assert found[1:] == [None, None]
    assert set(opened.values()) == {1}


def test_a_member_whose_storage_fails_has_the_first_read_alone(
    tmp_path: Path, groups: Callable[[int], list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4, 1)
    plain, failed = Storage.open, []
    lock = threading.Lock()

    def fail_once(storage: Storage, path: str) -> Any:
        with lock:
            if not failed:
                failed.append(path)
                raise StorageError("cannot read: it is slow today")
        return plain(storage, path)

    monkeypatch.setattr(Storage, "open", fail_once)
    found, by_all, skipped = run(groups(2), tmp_path)
    assert not by_all
    assert not skipped
    assert found[0] is not None
    assert found[1] is None
    assert equal(found[0].tree["optimizer"], tree(1)["optimizer"])


def test_without_a_checkpoint_all_go_on(tmp_path: Path, groups: Callable[[int], list[Group]]) -> None:
    assert run(groups(3), tmp_path) == ([None, None, None], False, [])


def test_a_member_that_is_lost_ends_the_restore_of_all(
    tmp_path: Path, groups: Callable[[int], list[Group]]
) -> None:
    save(tmp_path, 3, 1)
    made = groups(3)

    def member(rank: int) -> str:
        shared = SharedRestore(made[rank], lambda size: True)
        try:
            if rank == 2:
                gather_bytes(made[rank], b"")  # hears which one, and is gone
                made[rank].shut()
            elif rank:
                shared.follow()
            else:
                restore.newest(Storage(str(tmp_path), FOLDER), shared.read)
        except RuntimeError as error:
            return type(error).__name__
        return "went on"

    said = together([lambda rank=rank: member(rank) for rank in range(3)])
    assert said == ["RuntimeError", "RuntimeError", "went on"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_blocks_of_any_size_go_around(
    size: int, groups: Callable[[int], list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "CHUNK_BYTES", 1000)
    made = groups(size)
    generator = torch.Generator().manual_seed(1)
    sizes = [3000 * rank % 7001 for rank in range(size)]
    whole = [torch.randint(0, 256, (one,), dtype=torch.uint8, generator=generator) for one in sizes]

    def member(rank: int) -> tuple[list[torch.Tensor], int]:
        blocks = [torch.zeros_like(item) for item in whole]
        blocks[rank] = whole[rank].clone()
        parts = [list(torch.split(block, 777)) for block in blocks]
        came = pass_around(made[rank], parts, lambda *_: None)
        return blocks, came

    for rank, (blocks, came) in enumerate(together([lambda rank=rank: member(rank) for rank in range(size)])):
        assert all(torch.equal(block, item) for block, item in zip(blocks, whole, strict=True))
        assert came == sum(item.numel() for other, item in enumerate(whole) if other != rank)


def test_a_chunk_that_came_wrong_is_noticed(groups: Callable[[int], list[Group]]) -> None:
    made = groups(2)

    def member(rank: int) -> str:
        block = [torch.full((64,), rank, dtype=torch.uint8), torch.full((64,), 9, dtype=torch.uint8)]

        def check(source: int, number: int, came: torch.Tensor) -> None:
            raise RuntimeError(f"chunk {number} of rank {source} came wrong: {int(came[0])}")

        try:
            pass_around(made[rank], [[block[0]], [block[1]]], check)
        except RuntimeError as error:
            return str(error)
        return ""

    said = together([lambda rank=rank: member(rank) for rank in range(2)])
    assert said == ["chunk 0 of rank 1 came wrong: 9", "chunk 0 of rank 0 came wrong: 0"]

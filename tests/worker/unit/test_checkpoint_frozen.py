"""Parameters that do not train are saved once, and stay as long as a checkpoint refers to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_members import FOLDER, Members, equal, state
from hypothesis import given
from hypothesis import strategies as st

from springtide import faults
from springtide.checkpoint import frozen, inspect, names, restore
from springtide.checkpoint.frozen import blocks_of, fingerprint
from springtide.checkpoint.keep import unreferenced
from springtide.checkpoint.keeper import Checkpoints
from springtide.checkpoint.location import CheckpointLocation
from springtide.checkpoint.manifest import VERSION, CorruptError, parse
from springtide.checkpoint.shares import Share, missing
from springtide.checkpoint.storage import Storage
from springtide.comm.codec import TensorSpec

BACKBONE = {
    "embedding": torch.randn(40, 6, generator=torch.Generator().manual_seed(1)),
    "norm": torch.ones(5).to(torch.bfloat16),
    "conv": torch.arange(48.0).view(4, 3, 2, 2).to(memory_format=torch.channels_last),
}


def tree(step: int, backbone: dict[str, torch.Tensor] = BACKBONE) -> dict[str, Any]:
    """A state with adapters that train between layers that do not."""
    trained = torch.full((4, 4), float(step))
    parameters = {"embedding": backbone["embedding"], "adapter": trained}
    return {
        "parameters": parameters | {"norm": backbone["norm"], "conv": backbone["conv"]},
        "frozen": ["embedding", "norm", "conv"],
        "optimizer": [{"exp_avg": trained * 2}],
    }


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have several blocks of a few tensors."""
    monkeypatch.setattr(frozen, "BLOCK_BYTES", 300)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    faults.arm("")


def blocks(root: Path) -> dict[str, int]:
    """Names of files of frozen parameters, with what tells whether one was written again."""
    folder = root / FOLDER / names.FROZEN
    return {path.name: path.stat().st_ino for path in folder.glob("*")} if folder.is_dir() else {}


def restored(root: Path, step: int) -> Any:
    return restore.read(Storage(str(root), FOLDER), names.folder(state(step)))[0]


def test_frozen_parameters_are_written_once(root: Path) -> None:
    members = Members(root, 2)
    assert not members.save(state(1), tree(1)).error
    first = blocks(root)
    assert len(first) == 4
    assert not members.save(state(2), tree(2)).error
    assert blocks(root) == first
    for step in (1, 2):
        assert equal(restored(root, step), tree(step))
        assert restore.verify(Storage(str(root), FOLDER), names.folder(state(step)))
        shares = list((root / FOLDER / names.folder(state(step))).glob("*.safetensors"))
        assert sum(path.stat().st_size for path in shares) < 600  # the adapter, its state and headers
    members.close()


@pytest.mark.parametrize("count", [1, 3, 40])
def test_other_members_write_no_block_again(root: Path, count: int) -> None:
    members = Members(root, 2)
    members.save(state(1), tree(1))
    members.close()
    first = blocks(root)
    others = Members(root, count)
    assert not others.save(state(2, number=2), tree(2)).error
    assert blocks(root) == first
    found, skipped = others.all[0].newest(must_read=True)
    assert found is not None
    assert not skipped
    assert equal(found.tree, tree(2))
    others.close()


def test_a_frozen_parameter_that_moves_is_saved_as_it_is(root: Path) -> None:
    """A frozen parameter that is changed through `.data` is saved as it is.

    Averaged teachers change theirs so, and the tensor's version does not count it.
    """
    backbone = {name: item.clone() for name, item in BACKBONE.items()}
    members = Members(root, 2, keep=2)
    members.save(state(1), tree(1, backbone))
    first = set(blocks(root))
    before = {name: item.clone() for name, item in backbone.items()}
    backbone["norm"].data.mul_(2)
    assert not members.save(state(2), tree(2, backbone)).error
    assert equal(restored(root, 1), tree(1, before))
    assert equal(restored(root, 2), tree(2, backbone))
    assert first < set(blocks(root))
    assert len(blocks(root)) == len(first) + 1
    assert not members.save(state(3), tree(3, backbone)).error  # the first checkpoint goes, and its block
    assert len(blocks(root)) == len(first)
    assert equal(restored(root, 2), tree(2, backbone))
    assert equal(restored(root, 3), tree(3, backbone))
    members.close()


def test_blocks_stay_while_a_manifest_cannot_be_read(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    backbone = {name: item.clone() for name, item in BACKBONE.items()}
    members = Members(root, 2, keep=3)
    members.save(state(1), tree(1, backbone))
    first = set(blocks(root))
    manifest = root / FOLDER / names.folder(state(1)) / names.MANIFEST
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-2])
    backbone["norm"].mul_(2)
    assert not members.save(state(2), tree(2, backbone)).error
    assert first < set(blocks(root))
    assert "old files in frozen/ stay" in caplog.text
    manifest.write_bytes(whole)
    assert equal(restored(root, 1)["parameters"]["norm"], BACKBONE["norm"])
    members.close()


@pytest.mark.parametrize("point", ["frozen", "share", "manifest"])
def test_a_failure_while_blocks_are_written_leaves_the_last(root: Path, point: str) -> None:
    # One member: of several, the one that writes the manifest would wait a minute for the one that fails.
    members = Members(root, 1)
    members.save(state(1), tree(1))
    other = {name: item.clone().mul_(3) for name, item in BACKBONE.items()}
    faults.arm(f"{point}:2:raise")
    assert members.save(state(2), tree(2, other)).error
    faults.arm("")
    found, _ = members.all[0].newest(must_read=True)
    assert found is not None
    assert equal(found.tree, tree(1))
    assert not members.save(state(3), tree(3)).error  # back to the first ones
    assert len(blocks(root)) == 4  # and what the failed one has left is gone
    for step in (1, 3):
        assert equal(restored(root, step), tree(step))
    members.close()


def test_a_block_that_is_gone_is_told_and_written_again(root: Path) -> None:
    members = Members(root, 2)
    members.save(state(1), tree(1))
    name = min(blocks(root))
    (root / FOLDER / names.FROZEN / name).unlink()
    found, skipped = members.all[0].newest(must_read=False)
    assert found is None
    assert skipped == [f"{names.folder(state(1))}: {name} is missing"]
    assert f"frozen/{name} is gone" in members.save(state(2), tree(2)).error
    assert not members.save(state(3), tree(3)).error
    assert equal(restored(root, 3), tree(3))
    assert equal(restored(root, 1), tree(1))  # the same block, by its contents
    members.close()


def test_a_damaged_block_is_noticed_when_it_is_read(root: Path) -> None:
    members = Members(root, 1)
    members.save(state(1), tree(1))
    path = root / FOLDER / names.FROZEN / min(blocks(root))
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CorruptError, match="has not the checksum that was written"):
        restored(root, 1)
    members.close()


def test_members_with_other_frozen_parameters_are_told(root: Path) -> None:
    members = Members(root, 2)
    for index, frozen_here in enumerate((["embedding"], ["embedding", "norm"])):
        content = tree(1) | {"frozen": frozen_here}
        members.all[index].take(
            state(1), lambda content=content: content, Share(index, members.share), "interval"
        )
    members.flush()
    assert any("the state of w1 has other tensors than that of w0" in told.error for told in members.told)
    members.close()


def test_without_frozen_parameters_files_are_as_ever(root: Path) -> None:
    """Builds that know no frozen parameters read them, and theirs are read here."""
    members = Members(root, 2)
    plain = tree(1)
    del plain["frozen"]
    members.save(state(1), plain)
    raw = (root / FOLDER / names.folder(state(1)) / names.MANIFEST).read_bytes()
    assert json.loads(raw)["version"] == VERSION
    assert "folder" not in raw.decode()
    assert not blocks(root)
    assert equal(restored(root, 1), plain)
    members.close()


def test_another_job_begins_from_a_checkpoint_with_blocks(root: Path) -> None:
    members = Members(root, 2)
    members.save(state(1), tree(1))
    members.close()
    for folder, named in {"other-1": "", "other-2": f"/{names.folder(state(1))}"}.items():
        place = CheckpointLocation(str(root), folder, 60.0, 3, f"{root}/{FOLDER}{named}")
        other = Checkpoints(place, {}, lambda _: None, lambda _: None)
        found, _ = other.newest(must_read=False)
        assert found is not None
        assert equal(found.tree, tree(1))
        other.take(state(2), lambda: tree(2), Share(0, ("w0",)), "interval")
        assert other.flush(30)
        other.close()
        own = Storage(str(root), folder)
        assert set(own.sizes(names.FROZEN)) == set(blocks(root))  # its own, which go with its own checkpoints
        assert equal(restore.read(own, names.folder(state(2)))[0], tree(2))
        assert inspect.verify(f"{root}/{folder}")[0].problem == ""


def test_storage_without_folders_has_blocks_too() -> None:
    members = Members(Path("unused"), 2, keep=1, uri="memory://frozen-test")
    backbone = {name: item.clone() for name, item in BACKBONE.items()}
    assert not members.save(state(1), tree(1, backbone)).error
    backbone["norm"].mul_(2)
    assert not members.save(state(2), tree(2, backbone)).error
    storage = Storage("memory://frozen-test", FOLDER)
    assert len(storage.sizes(names.FROZEN)) == 4
    assert equal(restore.read(storage, names.folder(state(2)))[0], tree(2, backbone))
    members.close()


@pytest.mark.parametrize("folder", ["..", "/etc", "frozen/..", 7])
def test_a_manifest_refers_to_no_other_folder(root: Path, folder: Any) -> None:
    members = Members(root, 1)
    members.save(state(1), tree(1))
    members.close()
    name = names.folder(state(1))
    value = json.loads((root / FOLDER / name / names.MANIFEST).read_bytes())
    value["parts"]["workers"]["files"][-1]["folder"] = folder
    with pytest.raises(CorruptError, match="impossible folder"):
        parse(json.dumps(value).encode(), name)


def test_pruning_follows_no_link_out_of_the_frozen_folder(root: Path) -> None:
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("keep me")
    (root / FOLDER).mkdir()
    (root / FOLDER / names.FROZEN).symlink_to(elsewhere)
    members = Members(root, 1)
    members.save(state(1), tree(1))
    members.save(state(2), tree(2) | {"frozen": []})
    assert (elsewhere / "precious").read_text() == "keep me"
    members.close()


# ---- decisions


@given(
    files=st.sets(st.integers(0, 9)),
    referenced=st.sets(st.integers(0, 9)),
    steps=st.sets(st.integers(1, 9)),
    own=st.integers(1, 9),
)
def test_only_what_nobody_refers_to_goes(
    files: set[int], referenced: set[int], steps: set[int], own: int
) -> None:
    found = [state(step) for step in steps]
    gone = set(unreferenced([str(f) for f in files], found, state(own), [str(f) for f in referenced]))
    if max(steps, default=0) > own:
        assert gone == set()
    else:
        assert gone == {str(f) for f in files - referenced}


SPECS = st.lists(
    st.tuples(st.sampled_from([torch.uint8, torch.float16, torch.float64]), st.integers(0, 99)),
    min_size=1,
    max_size=6,
)


@given(described=SPECS, count=st.integers(1, 9), chosen=st.data())
def test_members_together_have_each_frozen_element_once(
    described: list[tuple[torch.dtype, int]], count: int, chosen: st.DataObject
) -> None:
    specs = [TensorSpec(dtype, (size,), 0, size * dtype.itemsize) for dtype, size in described]
    numbers = sorted(chosen.draw(st.sets(st.integers(0, len(specs) - 1))))
    parts = [blocks_of(specs, numbers, Share(index, ("w",) * count)) for index in range(count)]
    pieces = [piece for part in parts for block in part for piece in block]
    assert {piece.tensor for piece in pieces} <= set(numbers)
    own = [
        spec if number in numbers else TensorSpec(spec.dtype, (0,), 0, 0) for number, spec in enumerate(specs)
    ]
    assert missing(own, pieces) == ""
    alone = blocks_of(specs, numbers, Share(0, ("w",)))
    assert [block for part in parts for block in part] == alone


@given(
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=4),
    where=st.integers(0, 3600),
    offset=st.integers(0, 9),
    bit=st.integers(0, 7),
)
def test_a_bit_that_flips_changes_the_fingerprint(
    sizes: list[int], where: int, offset: int, bit: int
) -> None:
    memory = torch.arange(offset + sum(sizes), dtype=torch.int64).mul(37).to(torch.uint8)
    parts = list(memory[offset:].split(sizes))
    before = fingerprint(parts)
    assert fingerprint([part.clone() for part in parts]) == before
    if sum(sizes):
        memory[offset + where % sum(sizes)] ^= 1 << bit
        assert fingerprint(parts) != before


def test_bytes_that_change_places_change_the_fingerprint() -> None:
    block = torch.randint(0, 256, (3 << 19,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for distance in (1, 8, 1 << 19):
        assert fingerprint([block.roll(distance)]) != fingerprint([block])
    zeros = torch.zeros(24, dtype=torch.uint8)
    assert len({fingerprint(parts) for parts in ([zeros], [zeros[:16]], [zeros[:16], zeros[:8]], [])}) == 4
    halves = list(block.chunk(2))
    assert fingerprint(halves) != fingerprint(halves[::-1])

"""Checkpoints that somebody with write access to the volume has put there: passed over, with the reason."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_members import FOLDER, Members, equal, state, tree

from springtide.checkpoint import names, restore
from springtide.checkpoint.manifest import MAX_FILES, CorruptError, parse
from springtide.checkpoint.storage import Storage
from springtide.comm.codec import MAX_TENSORS, specs


def saved(root: Path) -> Path:
    """Save two states; return the folder of the newer one, which is to be spoiled."""
    members = Members(root, 1)
    for step in (5, 6):
        members.save(state(step), tree())
    members.close()
    return root / FOLDER / names.folder(state(6))


def found(root: Path) -> tuple[object, list[str]]:
    restored, skipped = restore.newest(Storage(str(root), FOLDER))
    assert restored is not None
    assert restored.manifest.state == state(5)
    assert equal(restored.tree, tree())
    return restored, skipped


def to_endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", [names.MANIFEST, "*.safetensors"])
@pytest.mark.parametrize("spoil", [to_endless, to_pipe, to_link, to_folder])
@pytest.mark.timeout(60)
def test_what_is_no_ordinary_file_is_passed_over(
    spoil: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path)
    spoil(next(folder.glob(file)))
    _, skipped = found(tmp_path)
    assert len(skipped) == 1
    assert "no ordinary file" in skipped[0]


def test_a_claim_beyond_all_memory_is_passed_over(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / names.MANIFEST
    manifest = json.loads(path.read_text())
    part = manifest["parts"]["workers"]
    header = folder / part["header"]["path"]
    described = json.loads(header.read_bytes())
    described["tensors"][0] = ["float32", [1 << 48]]
    raw = json.dumps(described).encode()
    header.write_bytes(raw)
    part["header"] |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    part["files"][0]["bytes"] = 1 << 52
    path.write_text(json.dumps(manifest))
    _, skipped = found(tmp_path)
    assert "cannot hold" in skipped[0]


@pytest.mark.slow
def test_too_many_files_or_tensors_are_refused_at_once() -> None:
    file = {"path": "a", "bytes": 1, "sha256": "0" * 64}
    parts = {"workers": {"header": file, "files": [file] * (MAX_FILES + 1)}}
    value = {"format": "springtide-checkpoint", "version": 1, "state": {}, "parts": parts}
    with pytest.raises(CorruptError, match=f"more than {MAX_FILES} files"):
        parse(json.dumps(value).encode(), "x")
    header = {"version": 1, "tensors": [["float32", []]] * (MAX_TENSORS + 1), "tree": None}
    with pytest.raises(ValueError, match=f"more than {MAX_TENSORS}"):
        specs(json.dumps(header).encode(), 1 << 40)


def test_pruning_follows_no_link(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / names.MANIFEST).write_text("another's")
    job = tmp_path / FOLDER
    job.mkdir()
    (job / names.folder(state(3))).symlink_to(theirs)
    Storage(str(tmp_path), FOLDER).delete(names.folder(state(3)))
    assert (theirs / names.MANIFEST).read_text() == "another's"

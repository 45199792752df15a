"""Looking at checkpoints from outside of a job: what is there, whether it is whole, the model out of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from springtide.checkpoint import names, restore
from springtide.checkpoint.manifest import CorruptError, Manifest, NewerError
from springtide.checkpoint.storage import Storage, StorageError


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint. manifest: None when it cannot be used; problem: why."""

    name: str
    manifest: Manifest | None
    problem: str = ""


def find(uri: str) -> tuple[Storage, list[str]]:
    """(its folder, names of checkpoints, the newest first) at a job's folder, or at one checkpoint in it.

    Those that were never completed come along. Raise StorageError, also when there is none.
    """
    parent, _, last = uri.rstrip("/").rpartition("/")
    if names.parse(last) is not None:
        storage = Storage(parent)
        found = [name for name in storage.checkpoints() if name == last]
    else:
        storage = Storage(uri)
        found = list(storage.checkpoints())
    if not found:
        raise StorageError(
            f"there is no checkpoint at {uri}: name a job's folder (status.checkpoint.uri), or one checkpoint"
        )
    return storage, sorted(found, key=restore.age_key, reverse=True)


def entries(uri: str) -> list[Entry]:
    """All checkpoints, without reading more than manifests. Raise StorageError."""
    storage, found = find(uri)
    return [_entry(storage, name, restore.manifest_of) for name in found]


def verify(uri: str) -> list[Entry]:
    """All checkpoints, every byte of them read. Raise StorageError."""
    storage, found = find(uri)
    return [_entry(storage, name, restore.verify) for name in found]


def export(uri: str, path: Path) -> Manifest:
    """Write parameters and buffers of a checkpoint as one plain safetensors file with the names of the
    model's `state_dict`.

    Args:
        uri: of the folder of checkpoints, whose newest whole one is taken, or of one checkpoint.
        path: of the file to write; it must not be there.

    Returns:
        The manifest of the checkpoint that was written.

    Raises:
        FileExistsError: something is at `path`.
        StorageError: storage does not answer.
        CorruptError: no checkpoint is whole; the text says what is wrong with each.
        NewerError: the newest that is whole is of a later release.
    """
    if path.exists():
        raise FileExistsError(f"{path} is there already: name another file")
    storage, found = find(uri)
    whole = [name for name in found if name in restore.candidates(storage)]
    problems: list[str] = []
    for name in whole:
        try:
            tree, manifest = restore.read(storage, name)
        except NewerError as error:
            raise NewerError(f"{name}: {error}") from None
        except CorruptError as error:
            problems.append(f"{name}: {error}")
            continue
        held = {**tree["parameters"], **tree["buffers"]}
        saved_as = tree.get("saved_as", {})
        tensors = {key: item for name, item in held.items() for key in saved_as.get(name, [name])}
        aside = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            metadata = {"format": "pt", "checkpoint": name, "step": str(manifest.state.step)}
            safetensors.torch.save_file({key: _own(value) for key, value in tensors.items()}, aside, metadata)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        return manifest
    raise CorruptError("; ".join(problems) or f"none of the checkpoints at {uri} is whole")


def _own(tensor: Any) -> Any:
    """Return a copy with memory of its own: safetensors refuses tensors that share some."""
    return tensor.detach().clone().contiguous()


def _entry(storage: Storage, name: str, read: Any) -> Entry:
    try:
        return Entry(name, read(storage, name))
    except CorruptError as error:
        return Entry(name, None, str(error))

"""Looking at checkpoints from outside of a job: what is there, and whether it is whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from springtide.checkpoint import names, restore
from springtide.checkpoint.manifest import CorruptError, Manifest
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


def _entry(storage: Storage, name: str, read: Any) -> Entry:
    try:
        return Entry(name, read(storage, name))
    except CorruptError as error:
        return Entry(name, None, str(error))

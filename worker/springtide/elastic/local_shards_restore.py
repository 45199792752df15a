"""Restore a checkpoint by processes that keep parts of its tensors: each reads it, and keeps its own.

The first member leads, as with `SharedRestore`: it says which checkpoint all read. One that a member cannot
read is used by none, so that all go on from the same.
"""

from __future__ import annotations

import json
from typing import Any

from springtide.checkpoint.local_shards import FindRuns, read_shards_of
from springtide.checkpoint.manifest import CorruptError, Manifest, NewerError
from springtide.checkpoint.restore import Restored
from springtide.checkpoint.storage import Storage, StorageError
from springtide.comm.gather import gather_bytes
from springtide.comm.process_group import Group
from springtide.errors import SpringtideError


class LocalShardsRestore:
    """One restore, by the members of a group."""

    def __init__(self, group: Group, runs: FindRuns) -> None:
        """Make it for one generation.

        Args:
            group: of the generation.
            runs: which of a state's tensors are divided, and what of them is this process's.
        """
        self._group, self._runs_of = group, runs

    # ---- the first member

    def read(self, storage: Storage, name: str) -> tuple[Any, Manifest]:
        """Read this process's parts of a checkpoint, while the others read theirs.

        Args:
            storage: where it lies.
            name: its folder, which has the name of the state.

        Raises:
            CorruptError: a file is not what was written, or another member cannot read it.
            StorageError: storage does not answer, here or there.
            SpringtideError: it cannot be restored by this job.
            RuntimeError: a member is lost meanwhile.
        """
        self._announce({"uri": storage.uri, "name": name})
        found, error = self._try(storage, name)
        heard = self._announce({"problem": "" if error is None else str(error), "kind": _kind(error)})
        if error is not None:
            raise error
        for rank, said in enumerate(heard):
            if said["problem"]:
                text = f"rank {rank}: {said['problem']}"
                raise StorageError(text) if said["kind"] == "storage" else CorruptError(text)
        assert found is not None
        return found

    def end(self, found: Restored | None) -> bool:
        """Tell the others that nothing more is read; return whether they hold what was found."""
        self._announce({"found": found is not None})
        return found is not None

    # ---- the others

    def follow(self) -> Restored | None:
        """Read along until the first member ends; return what all hold now, if they do.

        Raise SpringtideError when a checkpoint that is whole cannot be restored by this job.
        """
        last: Restored | None = None
        while "name" in (said := self._announce({})[0]):
            last, error = None, None
            try:
                read, error = self._try(Storage(said["uri"]), said["name"])
                last = None if read is None else Restored(*read, said["uri"])
            except StorageError as problem:
                error = problem
            self._announce({"problem": "" if error is None else str(error), "kind": _kind(error)})
        return last if said["found"] else None

    # ---- all

    def _announce(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(text) for text in gather_bytes(self._group, json.dumps(message).encode())]

    def _try(self, storage: Storage, name: str) -> tuple[tuple[Any, Manifest] | None, Exception | None]:
        try:
            return read_shards_of(storage, name, self._runs_of), None
        except (CorruptError, StorageError, SpringtideError, MemoryError) as error:
            return None, error


def _kind(error: Exception | None) -> str:
    return "storage" if isinstance(error, StorageError) else "newer" if isinstance(error, NewerError) else ""

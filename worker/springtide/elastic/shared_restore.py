"""Restore a checkpoint by all members of a generation: each reads its share of the files, and they exchange.

The first member leads, as it did when it read alone: it looks for the newest checkpoint, passes over damaged
ones, and tries again when storage does not answer. For each checkpoint that it wants to read it says which;
all members then read their files of it, tell each other what came of it, and pass the bytes around. Where one
of them cannot (its memory is too small, a file is damaged, storage fails) the first member reads alone, and
what it finds counts; the others receive the state as they receive any.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from springtide.checkpoint import restore
from springtide.checkpoint.manifest import CorruptError, Manifest
from springtide.checkpoint.restore import Reading, Restored, assign
from springtide.checkpoint.storage import Storage, StorageError
from springtide.comm.gather import chunks, gather_bytes, pass_around
from springtide.comm.process_group import Group
from springtide.errors import SpringtideError
from springtide.sharding.restore import ShardsRestore

log = logging.getLogger(__name__)

SHARDS_PART = "servers"
"""Kind of the part of a checkpoint that has the optimizer's state, where that was in shards or on servers."""


MakeShardsRestore = Callable[[Mapping[str, Any]], ShardsRestore]
"""Makes the restore of the state of optimizers that the members share out, for the tree of all the rest."""

_UNREAD: Final[Mapping[str, Any]] = {"optimizer": {}}
"""A tree of which nothing is known yet."""


class SharedRestore:
    """One restore, by the members of a group."""

    def __init__(
        self, group: Group, has_room: Callable[[int], bool], shards: MakeShardsRestore | None = None
    ) -> None:
        """Make it for one generation.

        Args:
            group: of the generation.
            has_room: whether this process can hold a state of so many bytes beside its own.
            shards: for the restore of the optimizer's state, where the members share it out and so did those
                that have saved it; the state that is returned does not have it then.
        """
        self._group, self._has_room, self._shards = group, has_room, shards
        self._shared = False

    # ---- the first member

    def read(self, storage: Storage, name: str) -> tuple[Any, Manifest]:
        """Read a checkpoint, together with the others if they can; else by this process alone.

        Args:
            storage: where it lies.
            name: its folder, which has the name of the state.

        Returns:
            The state's tree and the manifest.

        Raises:
            CorruptError: a file is not what was written.
            StorageError: storage does not answer.
            RuntimeError: a member is lost meanwhile.
        """
        self._say({"uri": storage.uri, "name": name})
        found = self._together(storage, name)
        self._shared = found is not None
        return found or restore.read(storage, name)

    def end(self, found: Restored | None) -> bool:
        """Tell the others that nothing more is read; return whether they hold what was found."""
        shared = found is not None and self._shared
        self._say({"shared": shared})
        return shared

    # ---- the others

    def follow(self) -> Restored | None:
        """Read along until the first member ends; return what all hold now, if they do."""
        found: Restored | None = None
        while "name" in (said := self._receive()):
            found = None
            try:
                storage = Storage(said["uri"])
            except StorageError as problem:
                log.info("%s", problem)
                storage = None
            if (read := self._together(storage, said["name"])) is not None:
                found = Restored(*read, said["uri"])
        return found if said["shared"] else None

    # ---- all

    def _say(self, message: dict[str, Any]) -> None:
        gather_bytes(self._group, json.dumps(message).encode())

    def _receive(self) -> dict[str, Any]:
        return dict(json.loads(gather_bytes(self._group, b"")[0]))

    def _announce(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(text) for text in gather_bytes(self._group, json.dumps(message).encode())]

    def _together(self, storage: Storage | None, name: str) -> tuple[Any, Manifest] | None:
        """Return the state, the same at all members, or None at all of them."""
        reading, problem = None, "storage cannot be reached"
        if storage is not None:
            reading, problem = self._opened(storage, name)
        if not _all_well(
            self._announce({"problem": problem, "file": "" if reading is None else _form(reading)})
        ):
            return None
        assert reading is not None
        shares = assign([file.bytes for _, file in reading.files], self._group.size)
        own = shares[self._group.rank]
        try:
            reading.read(own)
            problem = ""
        except (CorruptError, StorageError) as error:
            problem = str(error)
        told: dict[str, Any] = {"problem": problem}
        if not problem:
            told["pieces"] = [reading.pieces(number) for number in own]
            told["sums"] = [_checksum(chunk) for chunk in chunks(_memory(reading, own))]
        heard = self._announce(told)
        if not _all_well(heard):
            return None
        for rank, numbers in enumerate(shares):
            if rank != self._group.rank:
                for number, pieces in zip(numbers, heard[rank]["pieces"], strict=True):
                    reading.expect(number, pieces)

        def check(rank: int, number: int, came: torch.Tensor) -> None:
            if zlib.crc32(came.numpy().data) != heard[rank]["sums"][number]:
                raise RuntimeError(f"checkpoint {name}: chunk {number} of rank {rank} came wrong")

        came = pass_around(self._group, [_memory(reading, numbers) for numbers in shares], check)
        log.info(
            "of checkpoint %s, %d files were read here and %d bytes came from others", name, len(own), came
        )
        tree = reading.tree()
        shards, apart = self._shards, reading.apart
        problem = "" if shards is None or apart is None else shards(tree).read(storage, name, apart)
        if problem:
            log.info("the checkpoint is read by rank 0 alone: %s", problem)
            return None
        return tree, reading.manifest

    def _opened(self, storage: Storage, name: str) -> tuple[Reading | None, str]:
        try:
            reading = Reading(storage, name, "" if self._shards is None else SHARDS_PART)
        except (CorruptError, StorageError, SpringtideError) as error:
            return None, str(error)
        size = reading.size
        if self._shards is not None and reading.apart is not None:
            size += self._shards(_UNREAD).bytes_here(reading.apart)
        if not self._has_room(size):
            return None, f"there is no room for the {size} bytes of its state"
        return reading, ""


def _form(reading: Reading) -> str:
    """Return what members must see alike on storage before they read it together."""
    return f"{len(reading.files)} {zlib.crc32(reading.manifest.to_json())}"


def _memory(reading: Reading, numbers: Sequence[int]) -> list[torch.Tensor]:
    return [part for number in numbers for part in reading.memory(number)]


def _checksum(chunk: Sequence[torch.Tensor]) -> int:
    value = 0
    for part in chunk:
        value = zlib.crc32(part.numpy().data, value)
    return value


def _all_well(heard: Sequence[dict[str, Any]]) -> bool:
    problems = {rank: said["problem"] for rank, said in enumerate(heard) if said["problem"]}
    if not problems and len({said.get("file") for said in heard}) > 1:
        problems = {0: "members see different files"}
    for rank, problem in problems.items():
        log.info("the checkpoint is read by rank 0 alone: rank %d: %s", rank, problem)
    return not problems

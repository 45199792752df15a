"""The way back: the newest checkpoint that is whole, or the one before."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide.checkpoint import files, names, shares
from springtide.checkpoint.manifest import CorruptError, File, Manifest, Part, parse
from springtide.checkpoint.storage import Storage
from springtide.comm import codec
from springtide.errors import SpringtideError

log = logging.getLogger("springtide")

READERS = 4


@dataclass(frozen=True, slots=True)
class Restored:
    """A state from storage. skipped: newer checkpoints that could not be used, and why."""

    tree: Any
    manifest: Manifest
    uri: str
    skipped: list[str] = field(default_factory=list)


def candidates(storage: Storage) -> list[str]:
    """Names of the checkpoints that have a manifest, the newest first. Raise StorageError."""
    whole = [name for name, complete in storage.checkpoints().items() if complete]
    return sorted(whole, key=age_key, reverse=True)


def newest(storage: Storage) -> tuple[Restored | None, list[str]]:
    """The newest checkpoint that can be read, and what is wrong with those that were passed over.

    Raise StorageError when storage does not answer: that is no proof of anything.
    """
    skipped: list[str] = []
    for name in candidates(storage):
        try:
            tree, manifest = read(storage, name)
        except CorruptError as problem:
            skipped.append(f"{name}: {problem}")
            log.error("checkpoint %s cannot be used: %s", name, problem)
            continue
        return Restored(tree, manifest, storage.uri, skipped), skipped
    return None, skipped


def manifest_of(storage: Storage, name: str) -> Manifest:
    """Raise CorruptError, StorageError."""
    try:
        return parse(storage.read(f"{name}/{names.MANIFEST}"), name)
    except FileNotFoundError:
        raise CorruptError(f"there is no {names.MANIFEST}: it was never completed") from None


def read(storage: Storage, name: str) -> tuple[Any, Manifest]:
    """(state tree, manifest) of a checkpoint, all of it checked.

    Raise CorruptError, StorageError; SpringtideError when it is whole and larger than this process's memory.
    """
    manifest = manifest_of(storage, name)
    trees = {kind: _read_part(storage, name, part) for kind, part in parts_of(manifest).items()}
    tree = trees.pop("workers")
    for held in trees.values():
        _join(tree, held)
    return tree, manifest


def _read_part(storage: Storage, name: str, part: Part) -> Any:
    header, specs = read_header(storage, name, part)
    try:
        tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    except (MemoryError, RuntimeError) as error:
        what = f"{part.header.path} describes what this process cannot hold: {error}"
        if _is_as_large_as_it_says(storage, name, part):
            # Older ones are as large: nothing is wrong with them, and training must not begin anew for that.
            raise SpringtideError(f"checkpoint {name}: {what}; give the workers more memory") from None
        raise CorruptError(what) from None
    memory = [codec.as_bytes(tensor) for tensor in tensors]

    def place(piece: shares.Piece) -> torch.Tensor:
        size = specs[piece.tensor].dtype.itemsize
        return memory[piece.tensor][piece.start * size : piece.stop * size]

    read_shares(storage, name, part, specs, place)
    try:
        return codec.unflatten(header, tensors)
    except ValueError as error:
        raise CorruptError(f"{part.header.path}: {error}") from None


def _is_as_large_as_it_says(storage: Storage, name: str, part: Part) -> bool:
    """Return whether the files have the bytes of the manifest. Raise CorruptError, StorageError."""
    try:
        return all(storage.size(f"{file.folder or name}/{file.path}") == file.bytes for file in part.files)
    except FileNotFoundError:
        return False


def _join(tree: Any, held: Any) -> None:
    """Put what servers held to where it stands in a job without servers. Raise CorruptError."""
    try:
        for position, state in held["optimizer"].items():
            tree["optimizer"]["state"][position].update(state)
        if held["tables"]:
            tree["tracked"][names.TABLES] = held["tables"]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CorruptError(f"the servers' state does not fit the workers': {error!r}") from None


def verify(storage: Storage, name: str) -> Manifest:
    """Read all of a checkpoint and keep nothing. Raise CorruptError, StorageError."""
    manifest = manifest_of(storage, name)
    for part in parts_of(manifest).values():
        _, specs = read_header(storage, name, part)
        read_shares(storage, name, part, specs, None)
    return manifest


def parts_of(manifest: Manifest) -> Mapping[str, Part]:
    """Raise CorruptError for a checkpoint of something else."""
    unknown = sorted(set(manifest.parts) - {"workers", "servers"})
    if unknown or "workers" not in manifest.parts:
        raise CorruptError(
            f"it holds the state of {', '.join(unknown) or 'nobody'}, which this version cannot restore"
        )
    return manifest.parts


def read_header(storage: Storage, name: str, part: Part) -> tuple[bytes, list[codec.TensorSpec]]:
    """The tree's description. Raise CorruptError, StorageError."""
    try:
        header = storage.read(f"{name}/{part.header.path}", part.header.bytes)
    except FileNotFoundError:
        raise CorruptError(f"{part.header.path} is missing") from None
    if len(header) != part.header.bytes or hashlib.sha256(header).hexdigest() != part.header.sha256:
        raise CorruptError(f"{part.header.path} is not what was written")
    try:
        limit = sum(file.bytes for file in part.files) * codec.ALIGNMENT + (1 << 20)
        specs = codec.specs(header, limit)
    except ValueError as error:
        raise CorruptError(f"{part.header.path}: {error}") from None
    if sum(spec.nbytes for spec in specs) > sum(file.bytes for file in part.files):
        raise CorruptError(f"{part.header.path} describes more than the files hold")
    return header, specs


def read_shares(
    storage: Storage,
    name: str,
    part: Part,
    specs: list[codec.TensorSpec],
    place: Callable[[shares.Piece], torch.Tensor] | None,
) -> None:
    """Read all shares, several at a time. Raise CorruptError, StorageError."""

    def one(file: File) -> list[shares.Piece]:
        try:
            with storage.open(f"{file.folder or name}/{file.path}") as stream:
                return files.read(stream, file, specs, place)
        except FileNotFoundError:
            raise CorruptError(f"{file.path} is missing") from None

    with ThreadPoolExecutor(min(READERS, max(1, len(part.files)))) as pool:
        pieces = [piece for found in pool.map(one, part.files) for piece in found]
    if problem := shares.missing(specs, pieces):
        raise CorruptError(problem)


def age_key(name: str) -> Any:
    """Sorts names of checkpoints: the newest state is the greatest."""
    return names.parse(name)

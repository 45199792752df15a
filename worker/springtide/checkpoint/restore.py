"""The way back: the newest checkpoint that is whole, or the one before."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide.checkpoint import files, names, shares
from springtide.checkpoint.manifest import CorruptError, File, Manifest, NewerError, Part, parse
from springtide.checkpoint.storage import Storage
from springtide.comm import codec
from springtide.errors import SpringtideError

log = logging.getLogger("springtide")

READERS = 4

Read = Callable[[Storage, str], tuple[Any, Manifest]]
"""Reads the checkpoint of a name, as `read` does."""


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


def newest(storage: Storage, reader: Read | None = None) -> tuple[Restored | None, list[str]]:
    """Read the newest checkpoint that can be read.

    Args:
        storage: the folder of checkpoints.
        reader: reads one, together with others; None: `read`.

    Returns:
        The checkpoint, None if no one can be read; and what is wrong with those that were passed over.

    Raises:
        StorageError: storage does not answer, which is no proof of anything.
        SpringtideError: the newest that is whole is of a later release; the one before would lose steps.
    """
    skipped: list[str] = []
    for name in candidates(storage):
        try:
            tree, manifest = (reader or read)(storage, name)
        except NewerError as problem:
            raise SpringtideError(
                f"checkpoint {name}: {problem}, or move the checkpoint away to go on from an older one"
            ) from None
        except CorruptError as problem:
            skipped.append(f"{name}: {problem}")
            log.error("checkpoint %s cannot be used: %s", name, problem)
            continue
        return Restored(tree, manifest, storage.uri, skipped), skipped
    return None, skipped


def manifest_of(storage: Storage, name: str) -> Manifest:
    """Read the manifest of a checkpoint.

    Args:
        storage: the folder of checkpoints.
        name: of the checkpoint.

    Raises:
        CorruptError: there is none, or it is not one.
        StorageError: storage does not answer.
    """
    try:
        return parse(storage.read(f"{name}/{names.MANIFEST}"), name)
    except FileNotFoundError:
        raise CorruptError(f"there is no {names.MANIFEST}: it was never completed") from None


def read(storage: Storage, name: str) -> tuple[Any, Manifest]:
    """Read a checkpoint, all of it checked.

    Args:
        storage: the folder of checkpoints.
        name: of the checkpoint.

    Returns:
        The state's tree, with tensors on the CPU, and the manifest.

    Raises:
        CorruptError: something is not what was written.
        StorageError: storage does not answer.
        SpringtideError: it is whole and larger than this process's memory.
    """
    reading = Reading(storage, name)
    reading.read(range(len(reading.files)))
    return reading.tree(), reading.manifest


def assign(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return which files each member reads: about equally many bytes each.

    The largest first, each to the member that has least so far: Graham, Bounds on Multiprocessing Timing
    Anomalies, 1969.

    Args:
        sizes: of the files, in bytes.
        count: members, at least 1.

    Returns:
        By member: the numbers of its files, ascending.
    """
    found: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        member = min(range(count), key=lambda member: (loads[member], member))
        found[member].append(number)
        loads[member] += sizes[number]
    return [sorted(numbers) for numbers in found]


class Reading:
    """A checkpoint on its way into this process's memory, file by file, from storage or from other members.

    files: with what it read and what it is to read, in one order for all members.
    apart: a part of the checkpoint that is not read here; None: there is none.
    """

    def __init__(self, storage: Storage, name: str, without: str = "") -> None:
        """Read the descriptions, and take the memory.

        Args:
            storage: the folder of checkpoints.
            name: of the checkpoint.
            without: kind of a part that is left out; "": none is.

        Raises:
            CorruptError: something is not what was written.
            StorageError: storage does not answer.
            SpringtideError: there is not the memory for it.
        """
        self._storage, self._name = storage, name
        self.manifest = manifest_of(storage, name)
        parts = dict(sorted(parts_of(self.manifest).items()))
        self.apart = parts.pop(without, None)
        self._parts = {kind: _Part(storage, name, part) for kind, part in parts.items()}
        self.files = [(kind, file) for kind, part in self._parts.items() for file in part.part.files]
        self._pieces: dict[int, list[shares.Piece]] = {}

    @property
    def size(self) -> int:
        """Bytes of the state's tensors."""
        return sum(spec.nbytes for part in self._parts.values() for spec in part.specs)

    def read(self, numbers: Sequence[int]) -> None:
        """Read and check these files, several at a time. Raise CorruptError, StorageError."""

        def one(number: int) -> tuple[int, list[shares.Piece]]:
            kind, file = self.files[number]
            part = self._parts[kind]
            return number, _read_file(self._storage, self._name, file, part.specs, part.place)

        with ThreadPoolExecutor(min(READERS, max(1, len(numbers)))) as pool:
            self._pieces.update(pool.map(one, numbers))

    def pieces(self, number: int) -> list[list[int]]:
        """Return what is in a file that was read: [tensor, start, stop] of each piece. JSON-able."""
        return [[piece.tensor, piece.start, piece.stop] for piece in self._pieces[number]]

    def expect(self, number: int, pieces: Sequence[Sequence[int]]) -> None:
        """Have the memory of a file that another member has read.

        Args:
            number: of the file, in `files`.
            pieces: (tensor, start, stop) of each piece, as that member found them in the file.

        Raises:
            CorruptError: the pieces do not lie in the state's tensors.
        """
        kind, file = self.files[number]
        specs = self._parts[kind].specs
        found = [shares.Piece(*piece) for piece in pieces]
        for piece in found:
            count = specs[piece.tensor].nbytes // specs[piece.tensor].dtype.itemsize
            if not 0 <= piece.start <= piece.stop <= count:
                raise CorruptError(f"{file.path} was described as what it cannot be")
        self._pieces[number] = found

    def memory(self, number: int) -> list[torch.Tensor]:
        """Return the memory of a file's pieces: uint8, in order."""
        part = self._parts[self.files[number][0]]
        return [part.place(piece) for piece in self._pieces[number]]

    def tree(self) -> Any:
        """Return the state, of which all files are here. Raise CorruptError."""
        trees = {}
        for kind, part in self._parts.items():
            numbers = [number for number, (own, _) in enumerate(self.files) if own == kind]
            pieces = [piece for number in numbers for piece in self._pieces[number]]
            if problem := shares.missing(part.specs, pieces):
                raise CorruptError(problem)
            trees[kind] = part.tree()
        tree = trees.pop("workers")
        for held in trees.values():
            join(tree, held)
        return tree


class _Part:
    """The state of one kind of processes: its description, and memory for its tensors."""

    def __init__(self, storage: Storage, name: str, part: Part) -> None:
        self.part = part
        self._header, self.specs = read_header(storage, name, part)
        try:
            self._tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in self.specs]
        except (MemoryError, RuntimeError) as error:
            what = f"{part.header.path} describes what this process cannot hold: {error}"
            if _is_as_large_as_it_says(storage, name, part):
                # Older ones are as large: nothing is wrong with them, and training must not begin anew.
                raise SpringtideError(f"checkpoint {name}: {what}; give the workers more memory") from None
            raise CorruptError(what) from None
        self._memory = [codec.as_bytes(tensor) for tensor in self._tensors]

    def place(self, piece: shares.Piece) -> torch.Tensor:
        size = self.specs[piece.tensor].dtype.itemsize
        return self._memory[piece.tensor][piece.start * size : piece.stop * size]

    def tree(self) -> Any:
        try:
            return codec.unflatten(self._header, self._tensors)
        except ValueError as error:
            raise CorruptError(f"{self.part.header.path}: {error}") from None


def _is_as_large_as_it_says(storage: Storage, name: str, part: Part) -> bool:
    """Return whether the files have the bytes of the manifest. Raise CorruptError, StorageError."""
    try:
        return all(storage.size(f"{file.folder or name}/{file.path}") == file.bytes for file in part.files)
    except FileNotFoundError:
        return False


def join(tree: Any, held: Any) -> None:
    """Put what servers held to where it stands in a job without servers.

    Args:
        tree: of the workers; it is changed in place.
        held: of the servers.

    Raises:
        CorruptError: they do not fit.
    """
    try:
        for position, state in held["optimizer"].items():
            tree["optimizer"]["state"][position].update(state)
        if held["tables"]:
            tree["tracked"][names.TABLES] = held["tables"]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CorruptError(f"the servers' state does not fit the workers': {error!r}") from None


def verify(storage: Storage, name: str) -> Manifest:
    """Read all of a checkpoint and keep nothing.

    Args:
        storage: the folder of checkpoints.
        name: of the checkpoint.

    Returns:
        Its manifest.

    Raises:
        CorruptError: something is not what was written.
        StorageError: storage does not answer.
    """
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
    """Read the description of a state's tree.

    Args:
        storage: the folder of checkpoints.
        name: of the checkpoint.
        part: of the manifest, for one kind of processes.

    Returns:
        Its bytes, and shape and dtype of the tensors by their numbers.

    Raises:
        CorruptError: it is missing, is not what was written, or describes more than the files hold.
        StorageError: storage does not answer.
    """
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
    place: Callable[[shares.Piece], torch.Tensor | None] | None,
) -> None:
    """Read all shares of a part, several at a time.

    Args:
        storage: the folder of checkpoints.
        name: of the checkpoint.
        part: of the manifest, for one kind of processes.
        specs: shape and dtype of the tensors, by their numbers.
        place: gives the memory of a piece (uint8, one-dimensional), from several threads, or None for one
            that is only checked; None: check all only.

    Raises:
        CorruptError: a file is not what was written, or the shares are not the whole state.
        StorageError: storage does not answer.
    """

    def one(file: File) -> list[shares.Piece]:
        return _read_file(storage, name, file, specs, place)

    with ThreadPoolExecutor(min(READERS, max(1, len(part.files)))) as pool:
        pieces = [piece for found in pool.map(one, part.files) for piece in found]
    if problem := shares.missing(specs, pieces):
        raise CorruptError(problem)


def _read_file(
    storage: Storage,
    name: str,
    file: File,
    specs: list[codec.TensorSpec],
    place: Callable[[shares.Piece], torch.Tensor | None] | None,
) -> list[shares.Piece]:
    """Read one file of a checkpoint. Raise CorruptError, StorageError."""
    try:
        with storage.open(f"{file.folder or name}/{file.path}") as stream:
            return files.read(stream, file, specs, place)
    except FileNotFoundError:
        raise CorruptError(f"{file.path} is missing") from None


def age_key(name: str) -> Any:
    """Sorts names of checkpoints: the newest state is the greatest."""
    return names.parse(name)

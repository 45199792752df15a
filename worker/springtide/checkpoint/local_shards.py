"""Checkpoints of parameters that lie in parts in a pod's processes: each saves and reads its own.

A checkpoint describes whole tensors, and holds each of their elements once, whoever wrote it. So one of a job
with `springtide.mesh()` looks like any other: plain jobs, other meshes and other numbers of processes restore
it, and `springtide.checkpoint.consolidate` makes plain files of it. No process ever has a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from springtide.checkpoint import files, shares
from springtide.checkpoint.manifest import CorruptError, File, Manifest
from springtide.checkpoint.restore import READERS, manifest_of, parts_of, read_header
from springtide.checkpoint.shares import Piece
from springtide.checkpoint.storage import Storage
from springtide.comm import codec
from springtide.errors import SpringtideError
from springtide.pods.tensors import ShardRuns

FindRuns = Callable[[Any], Mapping[int, ShardRuns]]
"""Returns, for an outline of a state, which tensors (by id) are divided, and how."""


@dataclass(frozen=True, slots=True)
class OwnShards:
    """Say which elements of divided tensors this process saves.

    Attributes:
        runs: by the id of the tree's tensor, which is this process's part.
        index, count: which of so many processes with the same parts this one is; each saves a stretch.
    """

    runs: Mapping[int, ShardRuns]
    index: int = 0
    count: int = 1


def with_whole(tree: Any, own: OwnShards) -> tuple[Any, dict[int, tuple[torch.Tensor, ShardRuns]]]:
    """Return a tree in which parts stand for whole tensors, on the meta device, for its description.

    Args:
        tree: of a state, with parts.
        own: which of its tensors are parts.

    Returns:
        The tree; and part and runs by the id of what stands in its place.
    """
    wholes: dict[int, torch.Tensor] = {}
    parts: dict[int, tuple[torch.Tensor, ShardRuns]] = {}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        runs = own.runs.get(id(tensor))
        if runs is None:
            return tensor
        if id(tensor) not in wholes:
            whole = torch.empty(runs.shape, dtype=tensor.dtype, device="meta")
            wholes[id(tensor)], parts[id(whole)] = whole, (tensor, runs)
        return wholes[id(tensor)]

    # What does not train is divided, too, and saved with the rest.
    return {**_mapped(tree, stand_in), "frozen": []}, parts


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return containers of their own around what `change` returns for each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value


def pieces_of(number: int, runs: ShardRuns, own: OwnShards) -> list[tuple[Piece, int]]:
    """Return what this process saves of a tensor, with the place of each piece in its part.

    Args:
        number: of the tensor.
        runs: which elements are here.
        own: which stretch of them this process saves.
    """
    if not runs.is_owner:
        return []
    count = int((runs.stops - runs.starts).sum())
    begin, end = count * own.index // own.count, count * (own.index + 1) // own.count
    return [(Piece(number, start, stop), at) for start, stop, at in runs.stretch(begin, end)]


def read_shards_of(storage: Storage, name: str, runs: FindRuns) -> tuple[Any, Manifest]:
    """Read a checkpoint, all of it checked, and keep this process's parts.

    Args:
        storage: the folder of checkpoints.
        name: of the checkpoint.
        runs: which of its tensors are divided; the others are kept whole.

    Returns:
        The state's tree, with tensors on the CPU, and the manifest.

    Raises:
        CorruptError: something is not what was written.
        StorageError: storage does not answer.
        SpringtideError: it is of a job whose state was not all in its workers.
    """
    manifest = manifest_of(storage, name)
    kinds = parts_of(manifest)
    if set(kinds) != {"workers"}:
        raise SpringtideError(
            f"checkpoint {name} is of a job with parameter servers, or with strategy.allReduce.shard, which "
            "a script that calls mesh() cannot go on from: restore it in a job without either first"
        )
    part = kinds["workers"]
    header, specs = read_header(storage, name, part)
    metas = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs]
    outline, placed = codec.outline(header, specs)
    by_id = runs(outline)
    by_number = {at.index: by_id[id(at.outline)] for at in placed if id(at.outline) in by_id}
    tensors = [
        torch.empty(by_number[number].local_shape if number in by_number else spec.shape, dtype=spec.dtype)
        for number, spec in enumerate(specs)
    ]

    def take(file: File) -> list[Piece]:
        # Checked as a whole before any of it counts.
        memory = torch.empty(file.bytes, dtype=torch.uint8)
        found: list[tuple[Piece, torch.Tensor]] = []
        end = 0

        def place(piece: Piece) -> torch.Tensor:
            nonlocal end
            size = (piece.stop - piece.start) * specs[piece.tensor].dtype.itemsize
            target = memory[end : end + size]
            end += size
            found.append((piece, target))
            return target

        with storage.open(f"{file.folder or name}/{file.path}") as stream:
            pieces = files.read(stream, file, specs, place)
        for piece, raw in found:
            _keep(piece, raw, tensors[piece.tensor], by_number.get(piece.tensor))
        return pieces

    try:
        with ThreadPoolExecutor(min(READERS, max(1, len(part.files)))) as pool:
            pieces = [piece for found in pool.map(take, part.files) for piece in found]
    except FileNotFoundError as error:
        raise CorruptError(f"a file is missing: {error}") from None
    if problem := shares.missing(specs, pieces):
        raise CorruptError(problem)
    stand_ins = [metas[number] if number in by_number else tensor for number, tensor in enumerate(tensors)]
    parts = {id(metas[number]): tensors[number] for number in by_number}
    try:
        tree = codec.unflatten(header, stand_ins)
    except ValueError as error:
        raise CorruptError(f"{part.header.path}: {error}") from None
    return _mapped(tree, lambda tensor: parts.get(id(tensor), tensor)), manifest


def _keep(piece: Piece, raw: torch.Tensor, target: torch.Tensor, runs: ShardRuns | None) -> None:
    """Copy what a piece has in common with what this process keeps of its tensor.

    Args:
        piece: of the whole tensor.
        raw: its bytes.
        target: what this process keeps.
        runs: which elements these are; None: all.
    """
    size, memory = target.dtype.itemsize, codec.as_bytes(target)
    if runs is None:
        memory[piece.start * size : piece.stop * size] = raw
        return
    for start, stop, at in runs.common_runs(piece.start, piece.stop):
        part = raw[(start - piece.start) * size : (stop - piece.start) * size]
        memory[at * size : (at + stop - start) * size] = part

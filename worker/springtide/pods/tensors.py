"""Parameters that lie in parts in a pod's processes (DTensors), and which elements of the whole a part has.

torch numbers dimensions and processes; nothing is communicated here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Runs = np.ndarray[Any, np.dtype[np.int64]]


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor lies in parts in the processes of the pod."""
    # Importing the module takes a second; where nobody has, there are no such tensors.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part that is in this process, in the same memory; any other tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = _known(tensor).to_local()
        return part


def _known(tensor: torch.Tensor) -> Any:
    """Return a DTensor for what it is."""
    return tensor


def as_dtensor(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor, in the same memory, as what `like` is.

    Args:
        part: of the shape of `local_shard(like)`.
        like: a tensor that is divided; for any other the part is the tensor.
    """
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor  # imported already

    mesh, placements = _known(like).device_mesh, _known(like).placements
    with torch.no_grad():
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def is_sharded_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two divided tensors have one shape, and their parts lie in the same processes.

    Args:
        one: a divided tensor.
        other: another one.
    """
    return one.shape == other.shape and bool(_known(one).placements == _known(other).placements)


def lies_along(tensor: torch.Tensor) -> list[str]:
    """Return the names of the mesh's dimensions over which a tensor is divided or repeated by torch."""
    return list(_known(tensor).device_mesh.mesh_dim_names or ()) if is_dtensor(tensor) else []


def shard_count(tensor: torch.Tensor) -> int:
    """Return into how many parts a tensor is divided; 1 for one that is not."""
    if not is_dtensor(tensor):
        return 1
    mesh, placements = _known(tensor).device_mesh, _known(tensor).placements
    return math.prod(mesh.size(dim) for dim, item in enumerate(placements) if not item.is_replicate())


@dataclass(frozen=True, slots=True)
class ShardRuns:
    """Which elements of a whole tensor are in this process.

    Attributes:
        shape: of the whole.
        local_shape: of the part.
        starts, stops: int64 [n], the runs of elements of the whole in memory order, ascending; together they
            are the part's elements in its own memory order.
        offsets: int64 [n], where each run begins in the part.
        is_owner: of the processes that have the same part, this one saves it.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    starts: Runs
    stops: Runs
    offsets: Runs
    is_owner: bool

    def stretch(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Return the runs of some of the part's elements.

        Args:
            begin: first element of the part.
            end: the one behind the last.

        Returns:
            (start in the whole, stop in the whole, start in the part) of each, ascending.
        """
        found = []
        for start, stop, offset in zip(self.starts, self.stops, self.offsets, strict=True):
            low, high = max(begin, int(offset)), min(end, int(offset + stop - start))
            if low < high:
                found.append((int(start) + low - int(offset), int(start) + high - int(offset), low))
        return found

    def common_runs(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return what a run of the whole has in common with the part.

        Args:
            start: first element of the whole.
            stop: the one behind the last.

        Returns:
            (start in the whole, stop in the whole, start in the part) of each common run, ascending.
        """
        first, found = int(np.searchsorted(self.stops, start, side="right")), []
        for number in range(first, len(self.starts)):
            low, high = max(start, int(self.starts[number])), min(stop, int(self.stops[number]))
            if low >= high:
                break
            found.append((low, high, int(self.offsets[number]) + low - int(self.starts[number])))
        return found


def runs_of(tensor: torch.Tensor, is_first: bool) -> ShardRuns:
    """Return which elements of a divided tensor are here.

    Args:
        tensor: one that is divided.
        is_first: this process is the first along all dimensions of the pod's mesh that the tensor does not
            lie along.

    Raises:
        RuntimeError: it is divided in a way that this version does not know.
    """
    mesh, placements = _known(tensor).device_mesh, _known(tensor).placements
    coordinate = mesh.get_coordinate()
    shape, local_shape = tuple(tensor.shape), tuple(local_shard(tensor).shape)
    indices = [np.arange(size, dtype=np.int64) for size in shape]
    for dim in _order(placements):
        if not placements[dim].is_replicate():
            at = placements[dim].dim
            indices[at] = _chunk(indices[at], mesh.size(dim), coordinate[dim])
    if tuple(len(index) for index in indices) != local_shape:
        raise RuntimeError(
            f"a tensor of shape {shape} is divided as {placements} into parts of {local_shape}, which "
            "this version of springtide cannot save"
        )
    repeated = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    is_owner = is_first and not any(coordinate[dim] for dim in repeated)
    starts, stops = _runs(shape, indices)
    return make_runs(shape, local_shape, starts, stops, is_owner)


def make_runs(
    shape: tuple[int, ...], local_shape: tuple[int, ...], starts: Runs, stops: Runs, is_owner: bool = True
) -> ShardRuns:
    """Return these runs with the places of each in the part. PURE.

    Args:
        shape: of the whole.
        local_shape: of the part.
        starts: of the runs, in elements of the whole.
        stops: of the runs.
        is_owner: this process saves the part.
    """
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(stops - starts)))[:-1]
    return ShardRuns(shape, local_shape, starts, stops, offsets, is_owner)


def _order(placements: Sequence[Any]) -> list[int]:
    """Return the mesh's dimensions in the order in which they have cut a tensor.

    `fully_shard` cuts what tensor parallelism has cut already, though its dimension stands before: torch
    calls such a placement strided, and it comes after those that stand behind it.
    """
    strided = [dim for dim, item in enumerate(placements) if "Strided" in type(item).__name__]
    return [dim for dim in range(len(placements)) if dim not in strided] + strided[::-1]


def _chunk(index: Runs, parts: int, number: int) -> Runs:
    """Return one of the parts that `torch.chunk` makes; empty where there are fewer."""
    size = -(-len(index) // parts)
    return index[min(len(index), number * size) : (number + 1) * size]


def _runs(shape: Sequence[int], indices: Sequence[Runs]) -> tuple[Runs, Runs]:
    """Return starts and stops, in elements of the whole, of the product of indices of its dimensions."""
    empty = np.zeros(0, np.int64)
    if any(not len(index) for index in indices):
        return empty, empty
    inner, last = 1, len(shape)
    while last and len(indices[last - 1]) == shape[last - 1]:
        last -= 1
        inner *= shape[last]
    if not last:
        return np.zeros(1, np.int64), np.full(1, inner, np.int64)
    index = indices[last - 1]
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    firsts = index[np.concatenate((np.zeros(1, np.int64), breaks))]
    lasts = index[np.concatenate((breaks - 1, np.array([len(index) - 1])))]
    starts, stops, stride = firsts * inner, (lasts + 1) * inner, inner * shape[last - 1]
    for dim in reversed(range(last - 1)):
        base = indices[dim] * stride
        starts = (base[:, None] + starts[None, :]).reshape(-1)
        stops = (base[:, None] + stops[None, :]).reshape(-1)
        stride *= shape[dim]
    return starts, stops

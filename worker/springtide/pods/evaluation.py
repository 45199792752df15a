"""Samples that the processes of a pod evaluate together: all go through equally many forward passes. PURE.

A forward pass of `fully_shard` has collectives, so that a process without samples of its own computes on
others' in the meantime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from springtide.pods.dims import MeshShape


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One forward pass of a process.

    Attributes:
        ids: samples to compute on.
        is_standin: they are another process's, and this one has none.
        weight: how many of them count here.
    """

    ids: range
    is_standin: bool
    weight: int


def forward_passes(
    start: int, stop: int, unit: int, shape: MeshShape, local_rank: int
) -> Iterator[ForwardPass]:
    """Share a range of samples out among the processes of a pod, each sample to one data index.

    Args:
        start: of the range.
        stop: the sample behind the last one.
        unit: samples that a process computes at once.
        shape: of the mesh.
        local_rank: of the process.

    Yields:
        Each of its forward passes; every other process of the pod makes as many.
    """
    index = shape.data_index(local_rank)
    for first in range(start, stop, unit * shape.data_degree):
        begin = first + index * unit
        ids = range(begin, min(begin + unit, stop))
        if ids:
            yield ForwardPass(ids, False, len(ids) if shape.counts(local_rank) else 0)
        else:
            yield ForwardPass(range(first, min(first + unit, stop)), True, 0)


def added(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each name's values.

    Args:
        sums: values by name; not all have all names.
    """
    total: dict[str, float] = {}
    for one in sums:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total

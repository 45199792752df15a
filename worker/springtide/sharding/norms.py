"""The norm of all gradients, from the squares of the norms of shards.

Shards depend on the layout alone, and squares are added up in the shards' order. So the bits of the norm do
not depend on who holds which shard, nor on whether anybody shares them out: exact mode takes it both ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from springtide.comm.layout import Layout
from springtide.sharding.collectives import Sums
from springtide.sharding.pieces import Cells
from springtide.sharding.shard_map import Shard, divide


def squares_of(
    shards: Sequence[Shard],
    chosen: Iterable[int],
    cells: Cells,
    sums: Sequence[Sums],
    optimizer_of: Sequence[int],
) -> torch.Tensor:
    """Return the squares of the norms of some shards, zeros for the others: float64 [shards, optimizers].

    Args:
        shards: All of the layout.
        chosen: Numbers of those whose sums are here.
        cells: Of the layout.
        sums: Of gradients, by bucket.
        optimizer_of: By parameter, the number of the optimizer that steps it.
    """
    squares = torch.zeros(len(shards), 1 + max(optimizer_of, default=0), dtype=torch.float64)
    places: list[tuple[int, int]] = []
    norms: list[torch.Tensor] = []
    for number in chosen:
        shard = shards[number]
        for start, stop, stretch in cells.between(shard.bucket, (shard.start, shard.stop)):
            if stretch is not None:
                part = sums[shard.bucket][start:stop]
                places.append((number, optimizer_of[stretch.index]))
                norms.append(torch.linalg.vector_norm(part, dtype=torch.float64))
    if norms:
        there = torch.stack(norms).cpu().tolist()  # a device is asked once
        for place, norm in zip(places, there, strict=True):
            squares[place] += norm**2
    return squares


def totals_of(squares: torch.Tensor) -> list[float]:
    """Return the sum over all shards, by optimizer, added up in the shards' order. PURE.

    Args:
        squares: Of `squares_of`, complete.
    """
    return [sum(column) for column in squares.T.tolist()]


def norm_of_all(layout: Layout) -> Callable[[Sequence[torch.Tensor]], float]:
    """Return what computes the norm of gradients that are all here, as members with shards do it together.

    Args:
        layout: Of the gradients.
    """
    shards = divide(layout.sizes, [dtype.itemsize for dtype in layout.dtypes])
    cells, optimizer_of = Cells(layout), [0] * len(layout.fields)

    def norm(flats: Sequence[torch.Tensor]) -> float:
        squares = squares_of(shards, range(len(shards)), cells, flats, optimizer_of)
        return math.sqrt(sum(totals_of(squares)))

    return norm

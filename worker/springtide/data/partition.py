"""How a global batch is cut into the workers' parts, and a part into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from springtide.data.balance import Proportions


class Part(NamedTuple):
    """A contiguous range of a batch, in samples. size 0: nothing to do here."""

    start: int
    size: int


def _even(n: int, parts: int) -> list[Part]:
    base, longer = divmod(n, parts)
    return [Part(i * base + min(i, longer), base + (i < longer)) for i in range(parts)]


def partition(
    n: int, world_size: int, min_part: int = 2, proportions: Proportions | None = None
) -> list[Part]:
    """Cut a global batch into contiguous parts in rank order, as even as possible or by speed.

    No part is below min_part unless the whole batch is: a short batch goes to the first ranks, the others get
    size 0 (their start is n).

    Args:
        n: samples of the global batch, at least 1.
        world_size: parts to make, at least 1.
        min_part: fewest samples of a part that has any, at least 1.
        proportions: by which parts follow speed; None: even parts, which a short batch always has.

    Returns:
        One part for each rank.

    Raises:
        ValueError: n, world_size or min_part is below 1, or the cut is one for other members.
    """
    if n < 1 or world_size < 1 or min_part < 1:
        raise ValueError(f"partition needs values >= 1: n={n}, world_size={world_size}, min_part={min_part}")
    if proportions is not None and len(proportions.sample_times) != world_size:
        raise ValueError(
            f"the cut is one for {len(proportions.sample_times)} members, and there are {world_size}"
        )
    used = min(world_size, max(1, n // min_part))
    if proportions is not None and world_size * min_part <= n:
        sizes = proportions.sizes(n, min_part)
        return [Part(end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return _even(n, used) + [Part(n, 0)] * (world_size - used)


def pieces_together(
    n: int, parts: Sequence[int], wanted: int = 1, micro_batch: int | None = None, min_part: int = 1
) -> list[Part]:
    """Cut one process's part into as many micro-batches as the largest part of its pod has.

    The processes of a pod run forward and backward together, and so equally often. Where a part has fewer
    samples than there are micro-batches, the last ones are empty.

    Args:
        n: samples of the part; 0: none.
        parts: samples of the parts of all processes of the pod.
        wanted: as for `pieces`.
        micro_batch: as for `pieces`.
        min_part: as for `pieces`.

    Returns:
        Equally many for each of the parts.
    """
    counts = [len(pieces(size, wanted, micro_batch, min_part)) for size in parts if size]
    return _even(n, max(counts, default=1))


def pieces(n: int, wanted: int = 1, micro_batch: int | None = None, min_part: int = 1) -> list[Part]:
    """Cut one worker's part into micro-batches, sizes as even as possible.

    There are `wanted` of them, fewer if they would fall below min_part, more if they would exceed
    micro_batch: the memory bound comes first. With micro_batch >= 2 * min_part - 1 both always hold for n >=
    min_part.

    Args:
        n: samples of the part, at least 1.
        wanted: micro-batches to make where the limits allow it.
        micro_batch: most samples of one; None: no limit.
        min_part: fewest samples of one.

    Raises:
        ValueError: a value is below 1.
    """
    if n < 1 or wanted < 1 or min_part < 1 or (micro_batch is not None and micro_batch < 1):
        raise ValueError(f"pieces needs values >= 1: {n=}, {wanted=}, {micro_batch=}, {min_part=}")
    count = min(wanted, max(1, n // min_part))
    if micro_batch is not None:
        count = max(count, -(-n // micro_batch))
    return _even(n, count)

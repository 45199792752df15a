"""The order in which an epoch takes the samples: the same on every worker, whatever their number.

Up to `TABLE_SIZE` samples the order is torch's `randperm`, which is kept as a table. Above, it is a keyed
permutation: each place is computed from (size, seed, epoch, place) alone, so that an epoch of 10^9 samples
begins at once and takes no memory, also for a worker that joins in the middle of it.

The keyed permutation is a Feistel network over Z_a x Z_b with a * b just above the size, and cycle walking
for the few numbers beyond it: Black, Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from springtide.data.mixing import mix, mix_tensor, signed

TABLE_SIZE = 1 << 15
"""The largest number of samples whose order is a table."""
BLOCK_SIZE = 1 << 13
"""Places of a larger order that are made, and kept, at once: most small batches are then a slice."""

_ROUNDS = 8
_POSITIVE = (1 << 63) - 1


def shuffled(n: int, seed: int, epoch: int, start: int, stop: int) -> torch.Tensor:
    """Return the samples at places start..stop-1 of the epoch: int64, shape (stop - start,), on the CPU.

    The result may share memory with later results: do not write into it. The global random state is neither
    read nor moved. A batch of consecutive places costs time in proportion to its length.

    Args:
        n: samples of the epoch; each of 0..n-1 has one place.
        seed: an integer of 64 bits that chooses the order.
        epoch: another one.
        start: first place, from 0.
        stop: behind the last one, not below `start`; what lies beyond n is left out.

    Raises:
        ValueError: n is below 1, or the places are not in order.
    """
    if n < 1:
        raise ValueError(f"a permutation needs at least one sample, got {n}")
    if not 0 <= start <= stop:
        raise ValueError(f"places must be 0 <= start <= stop, got {start} and {stop}")
    start, stop = min(start, n), min(stop, n)
    if n <= TABLE_SIZE:
        return _table(n, seed, epoch)[start:stop]
    first, last = start // BLOCK_SIZE, max(start, stop - 1) // BLOCK_SIZE
    blocks = [_block(n, seed, epoch, number) for number in range(first, last + 1)]
    whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return whole[start - first * BLOCK_SIZE : stop - first * BLOCK_SIZE]


@lru_cache(maxsize=2)
def _table(n: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator(device="cpu")
    generator.manual_seed(signed(mix(seed, epoch)))
    return torch.randperm(n, generator=generator, dtype=torch.int64, device="cpu")


@lru_cache(maxsize=2)
def _block(n: int, seed: int, epoch: int, number: int) -> torch.Tensor:
    """Return the samples at the places of one block; kept, since a step takes a small part of it."""
    return keyed(n, seed, epoch, torch.arange(number * BLOCK_SIZE, min((number + 1) * BLOCK_SIZE, n)))


def keyed(n: int, seed: int, epoch: int, places: torch.Tensor) -> torch.Tensor:
    """Return the samples at any places of an epoch by the keyed permutation.

    Args:
        n: samples of the epoch, at least 1.
        seed: an integer of 64 bits that chooses the order.
        epoch: another one.
        places: int64, shape (m,), each in 0..n-1.

    Returns:
        int64 of shape (m,), each in 0..n-1; different places have different samples.
    """
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    keys = [signed(mix(seed, epoch, number)) for number in range(_ROUNDS)]
    found = _network(places, rows, columns, keys)
    # rows * columns exceeds n by less than rows: few places walk on, and a cycle always comes back below n.
    while bool((outside := found >= n).any()):
        found[outside] = _network(found[outside], rows, columns, keys)
    return found


def _network(values: torch.Tensor, rows: int, columns: int, keys: list[int]) -> torch.Tensor:
    """Permute 0..rows * columns - 1: what is mixed of one half is added to the other, which can be undone."""
    left, right = values % rows, values // rows
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + (mix_tensor(right ^ key) & _POSITIVE) % rows) % rows
        else:
            right = (right + (mix_tensor(left ^ key) & _POSITIVE) % columns) % columns
    return right * rows + left

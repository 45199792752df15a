"""64-bit mixing.

The finaliser of SplitMix64: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np
import torch

MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_FEW = 1 << 13
_OF_NUMPY = tuple(map(np.uint64, (_GOLDEN, _FIRST, _SECOND, 30, 27, 31)))


def mix(*values: int) -> int:
    """Mix integers (taken mod 2^64), in order, into one unsigned 64-bit number."""
    state = 0
    for value in values:
        state = (state + (value & MASK_64) + _GOLDEN) & MASK_64
        state = ((state ^ (state >> 30)) * _FIRST) & MASK_64
        state = ((state ^ (state >> 27)) * _SECOND) & MASK_64
        state ^= state >> 31
    return state


def signed(value: int) -> int:
    """The same 64 bits as a two's complement number, as int64 tensors hold them."""
    value &= MASK_64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    # Tensors of int64 shift arithmetically; the mask makes it logical.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed_sum(ids: torch.Tensor) -> int:
    """Return the sum of `mix(id)` over the ids (int64, any shape, on the CPU) mod 2^64."""
    if ids.numel() > _FEW:
        return int(mix_tensor(ids).sum().item()) & MASK_64
    # Of one batch: numpy's calls cost a third of torch's.
    golden, first, second, *shifts = _OF_NUMPY
    x = ids.numpy().view(np.uint64) + golden
    x = (x ^ (x >> shifts[0])) * first
    x = (x ^ (x >> shifts[1])) * second
    return int((x ^ (x >> shifts[2])).sum(dtype=np.uint64))


def mix_tensor(ids: torch.Tensor) -> torch.Tensor:
    """Mix each element as `mix(id)` does.

    Ids: int64, any shape; returns int64 of the same shape (wraps mod 2^64).
    """
    x = ids + signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * signed(_FIRST)
    x = (x ^ _shift_right(x, 27)) * signed(_SECOND)
    return x ^ _shift_right(x, 31)

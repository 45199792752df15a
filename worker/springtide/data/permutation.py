"""The order in which an epoch takes the samples: the same on every worker, whatever their number."""

from __future__ import annotations

from functools import lru_cache

import torch

from springtide.data.mixing import mix, signed


@lru_cache(maxsize=2)
def permutation(n: int, seed: int, epoch: int) -> torch.Tensor:
    """A permutation of 0..n-1 for this (seed, epoch), int64 of shape (n,), on the CPU.

    The last two are kept (8 bytes per sample each) and shared between callers: do not write into the result.
    The global random state is neither read nor moved.
    """
    if n < 1:
        raise ValueError(f"a permutation needs at least one sample, got {n}")
    generator = torch.Generator(device="cpu")
    generator.manual_seed(signed(mix(seed, epoch)))
    return torch.randperm(n, generator=generator, dtype=torch.int64, device="cpu")

"""First values of embedding rows. PURE.

A function of (seed, id, column) alone, so that any number of servers makes the same table.
"""

from __future__ import annotations

import numpy as np
import torch

from springtide_ps.params.idmap import Ids, mix

KINDS = ("normal", "uniform", "zeros")


def first_rows(kind: str, scale: float, seed: int, ids: Ids, dim: int) -> torch.Tensor:
    """Return the rows that ids have before they are trained.

    Args:
        kind: "normal", mean 0 and standard deviation `scale` (Box-Muller over a counter-based generator);
            "uniform", -scale to scale; or "zeros".
        scale: of the numbers.
        seed: of the generator.
        ids: int64.
        dim: of a row.

    Returns:
        float32 [len(ids), dim].

    Raises:
        ValueError: there is no such kind.
    """
    if kind == "zeros":
        return torch.zeros(len(ids), dim)
    if kind not in KINDS:
        raise ValueError(f"there is no initialisation {kind!r}: choose one of {', '.join(KINDS)}")
    columns = dim + dim % 2
    with np.errstate(over="ignore"):
        start = mix(ids, seed)[:, None]
        counter = np.arange(columns, dtype=np.uint64)[None, :] * np.uint64(0xD1342543DE82EF95)
        bits = mix((start + counter).reshape(-1).view(np.int64))
    # 53 bits, and never 0: the logarithm below needs that.
    unit = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    unit = unit.reshape(len(ids), columns)
    if kind == "uniform":
        return torch.from_numpy(((2 * unit[:, :dim] - 1) * scale).astype(np.float32))
    half = columns // 2
    radius = np.sqrt(-2 * np.log(unit[:, :half])) * scale
    angle = 2 * np.pi * unit[:, half:]
    both = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)), axis=1)[:, :dim]
    return torch.from_numpy(both.astype(np.float32))

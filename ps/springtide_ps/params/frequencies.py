"""Gradients of rows that are divided by how often a row was looked up, as torch's `scale_grad_by_freq`. PURE.

torch counts within one call of the module. A step's call is shared by workers and micro-batches, and is
divided by what all of them count. So such gradients travel undivided, and with them the number of the call
within the forward pass and how often it looked the row up. A gradient is named by its *head*: the id (int64
[n]), or (int64 [n, 2]) the id and `call << 32 | count`.
"""

from __future__ import annotations

import torch

_BITS = 32
_LATER = 1 << 20  # more than the calls of a forward pass


def heads_of(ids: torch.Tensor, counts: torch.Tensor, call: int) -> torch.Tensor:
    """Return heads that say how often each row was looked up.

    Args:
        ids: int64 [n].
        counts: int64 [n], below 2**32.
        call: number of the call within the forward pass.

    Returns:
        int64 [n, 2].
    """
    return torch.stack((ids, counts + (call << _BITS)), 1)


def ids_of(heads: torch.Tensor) -> torch.Tensor:
    """int64 [n]."""
    return heads if heads.dim() == 1 else heads[:, 0]


def renumbered(heads: torch.Tensor, by: int) -> torch.Tensor:
    """Return heads with a larger number of the call; ids and counts stay.

    Args:
        heads: int64 [n], which have no call, or [n, 2].
        by: what is added to the number of the call.
    """
    if heads.dim() == 1 or not by:
        return heads
    return torch.stack((heads[:, 0], heads[:, 1] + (by << _BITS)), 1)


def carried(heads: torch.Tensor) -> torch.Tensor:
    """Return heads as of another forward pass, which is not to be counted together with the next one."""
    return renumbered(heads, _LATER)


def summed(heads: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum gradients of the same id and call, with all their counts.

    Args:
        heads: int64 [n], or [n, 2] of counted ones.
        rows: float32 [n, dim].

    Returns:
        (heads in order, sums float32 [m, dim]).
    """
    if heads.dim() == 1:
        names, inverse = torch.unique(heads, return_inverse=True)
    else:
        calls, counts = heads[:, 1] >> _BITS, heads[:, 1] & (1 << _BITS) - 1
        pairs, inverse = torch.unique(torch.stack((heads[:, 0], calls), 1), dim=0, return_inverse=True)
        totals = torch.zeros(len(pairs), dtype=torch.int64).index_add_(0, inverse, counts)
        names = torch.stack((pairs[:, 0], (pairs[:, 1] << _BITS) + totals), 1)
    return names, torch.zeros(len(names), rows.shape[1]).index_add_(0, inverse, rows)


def divided(heads: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by which rows are changed: divided by their counts, and summed by id.

    Args:
        heads: int64 [n], which are not counted, or [n, 2].
        rows: float32 [n, dim], each once.

    Returns:
        (ids int64 [m], each once, gradients float32 [m, dim]).
    """
    if heads.dim() == 1:
        return heads, rows
    counts = (heads[:, 1] & (1 << _BITS) - 1).clamp_(min=1)
    return summed(heads[:, 0], rows / counts[:, None])

"""A bound on the norm of embedding rows, as torch's `max_norm`. PURE.

torch changes a row where it is when it is looked up. Here whoever looks a row up bounds its own copy, and the
row itself is bounded when a step that has its gradient is made. Both are the same to everybody who looks rows
up, for a row between two of its steps gives the same copy each time; and a step that is dropped has changed
nothing.
"""

from __future__ import annotations

import torch

_SMALL = 1e-7  # torch's, against a norm of 0


def bounded(rows: torch.Tensor, max_norm: float | None, norm_type: float) -> torch.Tensor:
    """Scale rows whose norm is above a bound to it.

    Args:
        rows: float32 [n, dim], which do not change.
        max_norm: the bound; None: there is none.
        norm_type: order of the norm.

    Returns:
        float32 [n, dim]; the very same tensor where no row is above.
    """
    if max_norm is None or not len(rows):
        return rows
    # In float64, so that all servers and workers round to the same rows, however they add.
    norms = torch.linalg.vector_norm(rows, norm_type, 1, dtype=torch.float64)
    above = norms > max_norm
    if not bool(above.any()):
        return rows
    factors = torch.where(above, max_norm / (norms + _SMALL), 1.0).to(rows.dtype)
    return rows * factors[:, None]

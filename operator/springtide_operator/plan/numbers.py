"""Numbers that others say: taken only where the API server can store them."""

from __future__ import annotations

import math
from typing import Any

from springtide_operator.api.limits import MAX_NUMBER


def whole(value: Any) -> int | None:
    """Return an integer from 0 to 2**63 - 1; None for everything else."""
    return value if type(value) is int and 0 <= value <= MAX_NUMBER else None


def real(value: Any) -> float | None:
    """Return a number as a float; None for what is none, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def finite(value: float, otherwise: float = 0.0) -> float:
    """Return the value, or `otherwise` for infinity and what is no number."""
    return value if math.isfinite(value) else otherwise

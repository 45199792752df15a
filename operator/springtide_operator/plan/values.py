"""Values as the API server can store them: times and back, and numbers that others say."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from springtide_operator.api.limits import MAX_NUMBER

LAST_SECOND = 253_402_300_799.0  # of the year 9999


def timestamp(unix: float) -> str:
    """RFC 3339 with whole seconds, as the Kubernetes API writes it; the nearest there is for any number."""
    known = 0.0 if math.isnan(unix) else min(max(unix, 0.0), LAST_SECOND)
    return datetime.fromtimestamp(known, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> float | None:
    """Unix seconds; None for nothing or nonsense."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


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
    """Return the value, or `otherwise` for infinity and what is no number.

    Args:
        value: any.
        otherwise: what is returned in its place.
    """
    return value if math.isfinite(value) else otherwise

"""Times as the Kubernetes API writes them, and back."""

from __future__ import annotations

import math
from datetime import UTC, datetime

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

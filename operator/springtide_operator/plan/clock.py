"""Times as the Kubernetes API writes them, and back."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(unix: float) -> str:
    """RFC 3339 with whole seconds, as the Kubernetes API writes it."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> float | None:
    """Unix seconds; None for nothing or nonsense."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None

"""Times as Kubernetes writes them. Inside the cluster a time is a float: seconds since 1970, UTC."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(seconds: float) -> str:
    """Whole seconds, as in `metadata.creationTimestamp`: `2026-01-31T12:00:00Z`."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(seconds: float) -> str:
    """Microseconds, as in `lease.spec.renewTime`: `2026-01-31T12:00:00.000000Z`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_timestamp(text: str | None) -> float | None:
    """Seconds since 1970 of an RFC 3339 time; None for None or an empty text. Raise ValueError for anything
    else.
    """
    if not text:
        return None
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()

"""The first member waits for the others' shares: how long, and for whom."""

from __future__ import annotations

from collections.abc import Collection, Sequence

GRACE_SECONDS = 5.0
"""Time that is waited for the share of a member that is gone: its storage may show it late."""
PATIENCE_SECONDS = 60.0


def give_up(
    missing: Sequence[str], waited: float, own_seconds: float, present: Collection[str] | None
) -> str:
    """Return why a checkpoint is given up.

    Args:
        missing: the members whose shares have not arrived.
        waited: seconds since the own share was whole.
        own_seconds: seconds that the own share took.
        present: the members of the job's current generation; None: the same as when it was taken.

    Returns:
        The reason in words; "" to wait on.
    """
    gone = [] if present is None else [name for name in missing if name not in present]
    if gone and waited >= GRACE_SECONDS:
        return f"{_some(gone)} did not live to write its share"
    if missing and waited >= PATIENCE_SECONDS + 3.0 * own_seconds:
        return (
            f"the share of {_some(missing)} did not arrive: all workers must reach the same storage at the "
            "checkpoint's URI"
        )
    return ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

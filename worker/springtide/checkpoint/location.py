"""Where the checkpoints of a job are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """Where a job's checkpoints are and how many: uri "" means nowhere. interval: seconds, 0: none by time.

    restore_from: URI of another job's checkpoints, or of one of them, for a job that has none of its own.
    """

    uri: str = ""
    folder: str = ""
    interval: float = 60.0
    keep: int = 3
    restore_from: str = ""

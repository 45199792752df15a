"""The place where a job's checkpoints are stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """The place of a job's checkpoints, and how many are kept.

    Attributes:
        uri: of the storage; "" means nowhere.
        interval: seconds between two; 0: none by time.
        restore_from: URI of another job's checkpoints, or of one of them, for a job that has none of its own.
    """

    uri: str = ""
    folder: str = ""
    interval: float = 60.0
    keep: int = 3
    restore_from: str = ""

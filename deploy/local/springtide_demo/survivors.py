"""Which worker processes ended although nothing had been done to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerProcess:
    """One worker process as its pod's status showed it. `ended_at` (unix s) is None while it lives."""

    pod: str
    uid: str
    pid: int
    node: str
    ended_at: float | None = None
    outcome: str = ""


@dataclass(frozen=True)
class Target:
    """Target of an event: pods by uid, from the moment `at` on (unix s)."""

    kind: str
    at: float
    uids: frozenset[str]


def unexpected_ends(
    processes: Iterable[WorkerProcess], targets: Iterable[Target], over_at: float = float("inf")
) -> list[WorkerProcess]:
    """Return the processes that ended although no event aimed at them.

    Each is a broken promise: a survivor that restarted.

    Args:
        processes: all worker processes that were seen.
        targets: pods that events aimed at, and when.
        over_at: when the job was over, in unix seconds; ends after that are as they should be.
    """
    aims = list(targets)
    return [
        process
        for process in processes
        if process.ended_at is not None
        and process.ended_at < over_at
        and process.outcome != "Finished"
        and not any(process.uid in target.uids and process.ended_at >= target.at for target in aims)
    ]

"""How often to look at what does not change: the more there is, the more seldom, so that idling stays cheap.

Events wake a job at once whatever its pace; the pace bounds what only time or the coordinator would tell.
"""

from __future__ import annotations

CALM_JOBS_PER_SECOND = 20.0
BUSY_JOBS_PER_SECOND = 100.0
CALM_LIMIT_SECONDS = 50.0
RESYNC_SHARE = 0.01  # of the time may go into listing everything
RESYNC_LIMIT_SECONDS = 3600.0
BACKOFF_LIMIT_SECONDS = 30.0


def calm_seconds(jobs: int, tick: float) -> float:
    """Return the seconds between two looks at a job that trains and does not change.

    Args:
        jobs: that the operator has.
        tick: seconds between two looks while there are few jobs.
    """
    return min(max(CALM_LIMIT_SECONDS, tick), max(tick, jobs / CALM_JOBS_PER_SECOND))


def busy_seconds(jobs: int, tick: float) -> float:
    """Return the seconds between two looks at a job that is not calm: events wake each anyhow.

    Args:
        jobs: that are not calm.
        tick: seconds between two looks while there are few jobs.
    """
    return max(tick, min(CALM_LIMIT_SECONDS, jobs / BUSY_JOBS_PER_SECOND))


def backoff_seconds(failures: int, first: float, limit: float = BACKOFF_LIMIT_SECONDS) -> float:
    """Return the seconds until the next try, which double with each failure.

    Args:
        failures: in a row, the last one included.
        first: seconds after the first failure.
        limit: seconds that it never exceeds, unless the first do.
    """
    return min(max(limit, first), first * 2.0 ** min(max(0, failures - 1), 10))


def resync_seconds(took: float, resync: float) -> float:
    """Return the seconds until everything is listed again.

    Args:
        took: seconds that the last list took.
        resync: seconds while lists are quick.
    """
    return min(max(RESYNC_LIMIT_SECONDS, resync), max(resync, took / RESYNC_SHARE))

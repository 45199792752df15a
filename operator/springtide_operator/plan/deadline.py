"""activeDeadlineSeconds: counted from status.startTime, which suspending takes away and resuming sets anew,
as for a Kubernetes Job.
"""

from __future__ import annotations

from springtide_operator.api.job import Job
from springtide_operator.plan.clock import parse_time, timestamp
from springtide_operator.plan.suspension import halted


def due(job: Job) -> float | None:
    """Unix seconds at which the job's time is over; None without a limit, or while it is not active."""
    limit, since = job.spec.active_deadline_seconds, parse_time(job.status.get("startTime"))
    return since + limit if limit is not None and since is not None and not halted(job) else None


def exceeded(job: Job, now: float) -> str | None:
    """With what the job fails; None while there is time."""
    at = due(job)
    if at is None or now < at:
        return None
    limit = job.spec.active_deadline_seconds
    return (
        f"the job was active for {limit} s, its activeDeadlineSeconds, since {timestamp(at - (limit or 0))}"
    )


def wakes(job: Job) -> list[float]:
    """When to look again; empty without a limit."""
    at = due(job)
    return [] if at is None else [at]

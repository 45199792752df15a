"""Whether a job is to have no pods for now, and on whose word."""

from __future__ import annotations

from springtide_operator.api import reasons
from springtide_operator.api.job import Job


def halted(job: Job) -> str:
    """Why the job is to have no pods; "" while it is to have them."""
    if job.spec.suspend:
        return "spec.suspend is true"
    queue = job.status.get("queue")
    if queue and not queue.get("admitted"):
        return f"it waits in the queue {queue.get('name')}: {queue.get('message')}"
    return ""


def reason(job: Job) -> str:
    """The same as the reason of the condition Suspended."""
    if job.spec.suspend:
        return reasons.JOB_SUSPENDED
    evicted = (job.status.get("queue") or {}).get("reason") == reasons.EVICTED
    return reasons.EVICTED if evicted else reasons.QUEUED

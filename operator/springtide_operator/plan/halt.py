"""Whether a job is to have no pods for now, and on whose word."""

from __future__ import annotations

from springtide_operator.api.job import Job


def halted(job: Job) -> str:
    """Why the job is to have no pods; "" while it is to have them."""
    if job.spec.suspend:
        return "spec.suspend is true"
    return ""

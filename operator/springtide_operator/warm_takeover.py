"""An operator that takes over many jobs trusts for a while that what they have had is still there.

Each process applies the Secret, the NetworkPolicy and the Service of each job once, which also mends them.
At a take-over of a thousand jobs these are thousands of requests, and a worker that has just been lost would
wait behind them. For jobs that train they are spread over the first minute instead.
"""

from __future__ import annotations

import zlib
from typing import Any

from springtide_operator.api import reasons
from springtide_operator.plan import conditions
from springtide_operator.plan.coordinator import SERVICE_CHECK_SECONDS, current
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import Observation, ServiceSeen

FEW_JOBS = 50  # are all seen to at once
JOBS_PER_SECOND = 20.0


def patience(uid: str, jobs: int) -> float:
    """Return the seconds for which a job may be trusted; another share of the whole for each job.

    Args:
        uid: of the job.
        jobs: that the operator has taken over; up to FEW_JOBS nothing is trusted.
    """
    if jobs <= FEW_JOBS:
        return 0.0
    return jobs / JOBS_PER_SECOND * (zlib.crc32(uid.encode()) % 1000) / 1000


def trusted_service(status: dict[str, Any], observation: Observation, now: float) -> ServiceSeen | None:
    """Return the Service that a job must have which trains with a coordinator that has run for a while.

    It counts as applied so long ago that anybody who cannot reach the coordinator has it applied again.

    Args:
        status: of the job.
        observation: of the job.
        now: in unix seconds.

    Returns:
        None where it is not certain.
    """
    ledger = Ledger.from_status(status)
    pod = current(observation, ledger)
    settled = pod is not None and pod.running_since is not None
    if not settled or not ledger.address or not conditions.is_true(status, reasons.RUNNING):
        return None
    assert pod is not None
    assert pod.running_since is not None
    if now - pod.running_since < SERVICE_CHECK_SECONDS:
        return None
    return ServiceSeen(ledger.address, ledger.incarnation, now - SERVICE_CHECK_SECONDS - 1.0)

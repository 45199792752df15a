"""Numbers of processes whose addresses do not fit into the coordinator's store.

Each process that reduces gradients with all others puts the addresses of its connections to them into the
store, 8 bytes for each, so their sum grows with the square of the processes. A generation beyond the limit
cannot form: a manifest that lets a job grow so far is said to be doubtful, and the job runs while it is
smaller.
"""

from __future__ import annotations

from springtide_operator.api.job import Job
from springtide_operator.api.model import StrategyType
from springtide_protocol.limits import MAX_STORE_BYTES

ENTRY_BYTES = 200
"""Bytes of each process's entry: gloo's own 154, and its name."""
PEER_BYTES = 8


def store_bytes(processes: int) -> int:
    """Return how much the addresses of so many processes take."""
    return processes * (ENTRY_BYTES + PEER_BYTES * processes)


def most_processes() -> int:
    """Return how many processes fit into the store."""
    most = int((MAX_STORE_BYTES / PEER_BYTES) ** 0.5)
    while store_bytes(most) > MAX_STORE_BYTES:
        most -= 1
    return most


def doubt(job: Job) -> str:
    """Say that a job may grow beyond what the store holds; "" where it may not.

    Args:
        job: with its sizes.
    """
    foreseen, most = job.spec.workers.processes_foreseen, most_processes()
    if foreseen <= most or job.spec.strategy.type is StrategyType.PARAMETER_SERVER:
        return ""
    return (
        f"the manifest has up to {foreseen} processes (maxReplicas x processesPerPod), and a generation whose"
        f" processes reduce with each other by gloo has {most} at most: a larger one does not form"
    )

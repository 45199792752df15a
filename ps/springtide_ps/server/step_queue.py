"""The order in which threads bring shards to their steps: each shard's steps one after another. PURE.

Called in the lock of whoever has the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """Bring a shard to a step.

    Attributes:
        key: of the shard.
        step: to which it is brought.
        trying: whether the step is only tried.
    """

    key: str
    step: int
    trying: bool


class StepQueue:
    """Jobs, taken in their order but for those of a shard that another thread is busy with."""

    def __init__(self) -> None:
        self._ready = deque[Job]()
        self._later: dict[str, deque[Job]] = {}  # of the shards that have a job that is ready or taken
        self._taken: dict[str, Job] = {}

    def __bool__(self) -> bool:
        """Return whether a job is not done yet."""
        return bool(self._ready or self._taken)

    def put(self, job: Job) -> None:
        """Add a job behind all others."""
        later = self._later.get(job.key)
        if later is not None:
            later.append(job)
            return
        self._later[job.key] = deque()
        self._ready.append(job)

    def take(self) -> Job | None:
        """Take the first job whose shard nobody is busy with; None: there is none."""
        if not self._ready:
            return None
        job = self._ready.popleft()
        self._taken[job.key] = job
        return job

    def done(self, job: Job) -> bool:
        """Note that a job which was taken is done; return whether that makes another one ready."""
        del self._taken[job.key]
        later = self._later[job.key]
        if later:
            self._ready.append(later.popleft())
            return True
        del self._later[job.key]
        return False

    def steps(self) -> Iterable[int]:
        """Yield, of each shard with jobs, the step of the first one that is not done."""
        for job in (*self._taken.values(), *self._ready):
            yield job.step

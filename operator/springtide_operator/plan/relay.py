"""What the operator tells the coordinator: the sizes, and the whole list of pods that may still have a
process.
"""

from __future__ import annotations

from dataclasses import dataclass

from springtide_operator.api.job import Job
from springtide_operator.plan import sizing
from springtide_operator.plan.observation import Observation

# A pod is held for gone when its deletionTimestamp is past by this much, although its node never said so.
# What may
# still run there can finish nothing: collectives need the others, and a newer incarnation fences it.
LOST_SECONDS = 60.0


@dataclass(frozen=True)
class LivingPod:
    uid: str
    name: str
    slot: int
    started: bool
    leave_by: float  # unix seconds; 0: stays


@dataclass(frozen=True)
class Word:
    """One Sync call."""

    target: int
    minimum: int
    maximum: int
    incarnation: int  # in status: a coordinator with a lower one steps down
    living: tuple[LivingPod, ...]


def word(job: Job, observation: Observation, incarnation: int, now: float) -> Word:
    """Everything each time, never changes: a lost call loses nothing."""
    living = [
        LivingPod(pod.uid, pod.name, pod.slot, pod.started_at is not None or pod.running, pod.gone_by or 0.0)
        for pod in sorted(observation.workers, key=lambda pod: (pod.slot, pod.attempt))
        if pod.end is None and (pod.gone_by is None or now < pod.gone_by + LOST_SECONDS)
    ]
    workers = job.spec.workers
    return Word(sizing.target(job), workers.min_replicas, workers.maximum, incarnation, tuple(living))

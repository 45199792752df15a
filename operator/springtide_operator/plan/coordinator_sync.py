"""The operator's message to the coordinator: the sizes, and the whole list of pods that may still have a
process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.api.servers import Consistency
from springtide_operator.plan import conditions, hangs, memory, sight, sizing, suspend
from springtide_operator.plan.observation import CoordinatorPod, Observation, ServerPod, WorkerPod

# A pod is held for gone when its deletionTimestamp is past by this much, although its node never said so.
# What may still run there can finish nothing: collectives need the others, and a newer incarnation fences it.
LOST_SECONDS = 60.0
# From the deletion itself where the node was lost: its kubelet does not hear of a grace period.
UNREACHABLE_LOST_SECONDS = 15.0


def held_for_gone_at(pod: WorkerPod | CoordinatorPod | ServerPod) -> float:
    """Return from when on, by the steady clock, the pod counts as gone; infinite while nobody has asked it to
    go.
    """
    if pod.gone_by is None:
        return math.inf
    if pod.unreachable:
        return going_since(pod) + UNREACHABLE_LOST_SECONDS
    return _leaves_at(pod) + LOST_SECONDS


def _leaves_at(pod: WorkerPod | CoordinatorPod | ServerPod) -> float:
    """Return when the grace period ends of a pod that was asked to go, by the steady clock; 0 for others.

    The deletionTimestamp is the API server's time, which may be minutes away from any other machine's.
    """
    if pod.gone_by is None:
        return 0.0
    grace = pod.gone_by - (pod.deletion_asked_at if pod.deletion_asked_at is not None else pod.gone_by)
    return going_since(pod) + grace


def going_since(pod: WorkerPod | CoordinatorPod | ServerPod) -> float:
    """Return when the pod was asked to go, as the operator saw it, by its steady clock.

    Clocks of other machines may be minutes away, and decisions that depend on it may kill. Infinite while
    nobody has asked.
    """
    if pod.going_since is not None:
        return pod.going_since
    return pod.deletion_asked_at if pod.deletion_asked_at is not None else math.inf


@dataclass(frozen=True)
class LivingPod:
    uid: str
    name: str
    slot: int
    started: bool
    leave_by: float  # unix seconds, by the API server's clock; 0: stays
    unheard: bool = False  # the operator looked, and heard nothing of it nor of its node
    leave_at: float = 0.0  # the same by the operator's steady clock


@dataclass(frozen=True)
class CoordinatorUpdate:
    """One Sync call. Sizes are processes."""

    target: int
    minimum: int
    maximum: int
    incarnation: int  # in status: a coordinator with a lower one steps down
    living: tuple[LivingPod, ...]
    generation: int = 0  # newest in status; 0: none yet
    pause: float = 0.0  # seconds within which the next call comes; 0: not told
    processes_per_pod: int = 1
    hang_seconds: float = 0.0  # a stall is told of from so many seconds on
    hung: tuple[str, ...] = ()  # uids of pods that are replaced since they hang
    servers: int = 0  # parameter servers wanted
    living_servers: tuple[LivingPod, ...] = ()
    consistency: str = ""  # wanted; "": no parameters on servers
    staleness: int = 0  # with BoundedStaleness
    suspend_by: float = 0.0  # unix time at which all members leave, whatever is saved; 0: they stay
    suspend_at: float = 0.0  # the same by the operator's steady clock
    standby: int = 0  # that are to wait beyond `target`; with any, no more than `target` train
    saved: str = ""  # name of the checkpoint that the job was put away with
    now: float = field(default=0.0, compare=False)  # unix seconds, when it was made
    steady: float = field(default=0.0, compare=False)  # the same by the operator's steady clock


def make_sync(
    job: Job, observation: Observation, incarnation: int, now: float, pause: float = 0.0
) -> CoordinatorUpdate:
    """Return the operator's message to the coordinator: everything each time, never changes, so that a lost
    call loses nothing.

    Args:
        job: with its status.
        observation: of the job.
        incarnation: of the coordinator that is called.
        now: in unix seconds.
        pause: seconds within which the next call comes; 0: not told.
    """
    living = [
        _living(pod, observation)
        for pod in sorted(observation.workers, key=lambda pod: (pod.slot, pod.attempt))
        if pod.end is None and observation.seen_for(held_for_gone_at(pod), now) < 0 and not hangs.goes(pod)
    ]
    hung = sorted(pod.uid for pod in observation.workers if hangs.goes(pod))
    hang_seconds = float(job.spec.failure_policy.hang_timeout_seconds)
    workers = job.spec.workers
    trained = int(job.status.get("generation") or 0)
    each = workers.processes_per_pod
    # Of a failed job nobody waits for successors: those that can save what they hold do, and all leave.
    wanted = 0 if conditions.is_true(job.status, reasons.FAILED) else sizing.target(job)
    sizes = wanted * each, memory.smallest(job) * each, workers.maximum * each
    serving = [
        _living(pod, observation)
        for pod in sorted(observation.servers, key=lambda pod: (pod.slot, pod.attempt))
        if not pod.lost
        and pod.phase not in ("Succeeded", "Failed")
        and observation.seen_for(held_for_gone_at(pod), now) < 0
    ]
    return CoordinatorUpdate(
        *sizes,
        incarnation,
        tuple(living),
        trained,
        pause,
        each,
        hang_seconds,
        tuple(hung),
        job.spec.servers,
        tuple(serving),
        suspend_by=suspend.leave_by(job),
        suspend_at=suspend.leave_at(job, observation),
        standby=workers.standby * each if wanted else 0,
        saved=suspend.saved_name(job.status),
        now=now,
        steady=now if observation.steady is None else observation.steady,
        **_consistency(job),
    )


def _living(pod: WorkerPod | ServerPod, observation: Observation) -> LivingPod:
    started = pod.started_at is not None or pod.running
    unheard = sight.is_unheard(pod, observation)
    return LivingPod(pod.uid, pod.name, pod.slot, started, pod.gone_by or 0.0, unheard, _leaves_at(pod))


def _consistency(job: Job) -> dict[str, Any]:
    consistency = job.spec.strategy.consistency
    if consistency is None:
        return {}
    staleness = job.spec.strategy.parameter_server.staleness
    bounded = consistency is Consistency.BOUNDED_STALENESS
    return {"consistency": consistency.value, "staleness": staleness if bounded else 0}

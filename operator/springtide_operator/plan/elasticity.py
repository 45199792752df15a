"""How many workers a job is to have: what `elasticity.policy` makes of replicas, minReplicas and maxReplicas.

The decision stands in status, so that it is the same for all who ask, also for the next operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from springtide_operator.api import reasons
from springtide_operator.api.elasticity import ElasticityPolicy
from springtide_operator.api.job import Job
from springtide_operator.plan import capacity, memory, throughput
from springtide_operator.plan.actions import Event
from springtide_operator.plan.capacity import Extras, Room
from springtide_operator.plan.observation import CoordinatorPod, Observation, ServerPod, WorkerPod
from springtide_operator.plan.throughput import Scene, Search

STATUS = "elasticity"
# What no node takes for longer, extra workers that are given back do not help.
HELPED_SECONDS = 600.0


@dataclass(frozen=True)
class Sized:
    """`job` carries the decision in its status. `wakes`: unix seconds at which to look again."""

    job: Job
    events: tuple[Event, ...] = ()
    wakes: tuple[float, ...] = ()


def size(job: Job) -> int:
    """Workers asked for, by the decision in status; not those settled on while others are tried."""
    workers = job.spec.workers
    if job.spec.elasticity.policy is ElasticityPolicy.THROUGHPUT:
        target = int(_entry(job).get("target") or 0)
        return min(max(target, memory.smallest(job)), workers.replicas)
    if job.spec.elasticity.policy is ElasticityPolicy.CAPACITY:
        extra = int(_entry(job).get("extra", 0))
        return min(max(workers.maximum, workers.replicas), workers.replicas + extra)
    return workers.replicas


def gives_back(job: Job) -> bool:
    """Whether the job may have pods that it gives back for others: extra workers, or standbys."""
    return job.spec.elasticity.policy is ElasticityPolicy.CAPACITY or job.spec.workers.standby > 0


def needed(job: Job) -> int:
    """Workers that the job does not do without: pods beyond are given back for others."""
    least = job.spec.workers.replicas
    if job.spec.elasticity.policy is ElasticityPolicy.THROUGHPUT:
        least = max(int(_entry(job).get("workers") or 0), memory.smallest(job))
    return min(size(job), least)


def expected(job: Job, live: Sequence[WorkerPod]) -> int:
    """Return how many workers are to train: not those that are only tried and that no node has taken yet.

    Args:
        job: with its status.
        live: one pod per slot.
    """
    placed = sum(pod.placed for pod in live)
    return max(needed(job), min(size(job), placed))


def why(job: Job) -> str:
    """The reason of the size in words; "" where it is just workers.replicas."""
    return str(_entry(job).get("message", "")) if size(job) != job.spec.workers.replicas else ""


def decide(
    job: Job, live: Sequence[WorkerPod], observation: Observation, held_back: bool, now: float
) -> Sized:
    """Decide the size anew.

    Args:
        job: with its status.
        live: one pod per slot.
        observation: of the job.
        held_back: failed workers wait to be made again.
        now: in unix seconds.
    """
    if job.halted or job.spec.elasticity.policy is ElasticityPolicy.MANUAL:
        return Sized(_with(job, None))
    if job.spec.elasticity.policy is ElasticityPolicy.THROUGHPUT:
        return _by_throughput(job, live, observation, now)
    room = _room(job, live, observation, held_back, now)
    before = Extras.from_status(_entry(job))
    after = capacity.step(before, room, now)
    events = _scaled(before.workers, after.workers, after.message)
    return Sized(_with(job, after.to_status()), events, tuple(after.wakes(room, now)))


def _by_throughput(job: Job, live: Sequence[WorkerPod], observation: Observation, now: float) -> Sized:
    workers, policy = job.spec.workers, job.spec.elasticity
    incarnation = (job.status.get("coordinator") or {}).get("incarnation", 0)
    report = observation.report_of(incarnation)
    trains = report is not None and report.phase == "RUNNING" and observation.unreachable_since is None
    active: set[str] = set()
    if report is not None and trains:
        active = {member.pod_uid for member in report.members if member.active}
    scene = Scene(
        minimum=min(memory.smallest(job), max(workers.replicas, workers.min_replicas)),
        replicas=max(workers.replicas, workers.min_replicas),
        gain=policy.min_gain_percent / 100,
        measure=float(policy.measure_seconds),
        patience=float(policy.patience_seconds),
        placed=sum(pod.placed for pod in live),
        active=len(active),
        rates=report.rates if report is not None else (),
    )
    before = Search.from_status(_entry(job))
    after = throughput.step(before, scene, now)
    events = _scaled(before.workers or workers.min_replicas, after.workers, after.message)
    return Sized(_with(job, after.to_status()), events, tuple(after.wakes(scene, now)))


def _scaled(before: int, after: int, why: str) -> tuple[Event, ...]:
    if not before or not after or before == after:
        return ()
    return (Event(reasons.EVENT_SCALED, f"from {before} to {after} workers: {why}"),)


def _room(job: Job, live: Sequence[WorkerPod], observation: Observation, held_back: bool, now: float) -> Room:
    workers = job.spec.workers
    standbys = bool((job.status.get("standby") or {}).get("asked"))  # they go first
    refusal = observation.refusals.get("worker")
    refused = refusal is not None and not refusal.transient and now < refusal.retry_at
    report = observation.report
    return Room(
        replicas=workers.replicas,
        maximum=max(workers.maximum, workers.replicas),
        patience=float(job.spec.elasticity.patience_seconds),
        placed=sum(pod.placed for pod in live),
        stuck=any(is_stuck(pod) for pod in live),
        leaving=sum(pod.deleting and pod.end is None for pod in observation.workers),
        crowd=() if standbys else crowd(observation, now),
        refused=refusal.message if refusal is not None and refused and len(live) >= workers.replicas else "",
        open_nodes=open_nodes(observation),
        may_grow=report is None or report.phase not in ("ENDING", "AFTER_LOOP"),
        held_back=held_back,
    )


def crowd(observation: Observation, now: float) -> tuple[str, ...]:
    """Return the pods that are needed and that no node takes, for which the job gives back what it can do
    without.

    Args:
        observation: of the job.
        now: in unix seconds.
    """
    return (*_own_crowd(observation, now), *observation.crowd)


def _own_crowd(observation: Observation, now: float) -> list[str]:
    """The job's coordinator and parameter servers that no node takes: extra workers go for them, too."""
    pods: list[CoordinatorPod | ServerPod] = [*observation.coordinators, *observation.servers]
    stuck = (pod for pod in pods if pod.live and pod.problem is not None and pod.node is None)
    return sorted(
        pod.name
        for pod in stuck
        if pod.problem is not None
        and pod.problem.cause == "Unschedulable"
        and 0 <= now - pod.created_at < HELPED_SECONDS
    )


def is_stuck(pod: WorkerPod) -> bool:
    """Return whether the scheduler has said that no node takes the pod."""
    return pod.problem is not None and pod.problem.reason == reasons.UNSCHEDULABLE


def open_nodes(observation: Observation) -> int | None:
    """Return how many nodes take pods; None where they cannot be read."""
    if observation.nodes is None:
        return None
    return sum(
        bool(node.ready) and not node.cordoned and not node.gone for node in observation.nodes.values()
    )


def _entry(job: Job) -> dict[str, Any]:
    return job.status.get(STATUS) or {}


def _with(job: Job, entry: dict[str, Any] | None) -> Job:
    status = {key: value for key, value in job.status.items() if key != STATUS}
    return replace(job, status=status if entry is None else {**status, STATUS: entry})

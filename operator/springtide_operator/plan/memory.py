"""Memory that workers need for their model: what status says of it, and what follows for a job's smallest
size.

Workers tell it when they have built their model, which is after the job was created: so a job that does not
fit fails in its first moments (its workers end with MemoryLimitError). An edit of a job that trains costs it
nothing: the operator says what it would lead to, and has no generation made that is too small to live.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

from springtide_operator.api import reasons
from springtide_operator.api.all_reduce import Compression, Shard
from springtide_operator.api.job import Job
from springtide_operator.api.model import StrategyType
from springtide_operator.api.names import MAX_WORKERS
from springtide_operator.manifests.worker import memory_limit
from springtide_operator.plan.observation import Problem, Report
from springtide_protocol.memory import CONTAINER, ModelMemory, fewest, need

STATUS = "memory"
ERROR = "springtide.errors.MemoryLimitError"
"""Class of the exception with which the workers of a job end that does not fit."""
_MEBIBYTE = 1 << 20


def status(job: Job, report: Report | None, old: dict[str, Any]) -> dict[str, Any] | None:
    """Return status.memory: of the report, as it was without one, or None before it is known.

    Args:
        job: with its sizes and its template.
        report: of the coordinator; None: it does not answer.
        old: status as it was.
    """
    if report is None or report.memory is None:
        before: dict[str, Any] | None = old.get(STATUS)
        return before
    workers, model = job.spec.workers, _limited(job, report.memory)
    per_pod = workers.processes_per_pod
    size = sum(member.active for member in report.members) or (
        _former_size(job, old) or workers.replicas * per_pod
    )
    found: dict[str, Any] = {
        "perWorker": _quantity_up(per_pod * need(model, size).total),
        "perWorkerAtMinReplicas": _quantity_up(per_pod * need(model, workers.min_replicas * per_pod).total),
    }
    if model.limit:
        found["limit"] = f"{per_pod * model.limit // _MEBIBYTE}Mi"
        found["limitedBy"] = "Container" if model.limited_by == CONTAINER else "Device"
        enough = fewest(model)
        if enough is not None:
            found["fewestWorkers"] = -(-enough // per_pod)
    return found


def _former_size(job: Job, old: dict[str, Any]) -> int:
    """Return the processes that trained when somebody last knew; 0 where none ever did."""
    return int((old.get("workers") or {}).get("active") or 0) * job.spec.workers.processes_per_pod


def _limited(job: Job, model: ModelMemory) -> ModelMemory:
    """Return the model with the limit of pods that are made from now on, where that is smaller."""
    limit = memory_limit(job) if model.limited_by == CONTAINER else None
    if limit is None:
        return model
    each = int(limit / Decimal(job.spec.workers.processes_per_pod))
    return replace(model, limit=min(model.limit, each) if model.limit else each)


def _quantity_up(nbytes: int) -> str:
    return f"{-(-nbytes // _MEBIBYTE)}Mi"


def smallest(job: Job) -> int:
    """Return how few workers may train: as the manifest says, and of a job that has trained no fewer than
    have room for its model.
    """
    wanted = job.spec.workers.min_replicas
    known = (job.status.get(STATUS) or {}).get("fewestWorkers")
    if not job.status.get("generation") or not isinstance(known, int):
        return wanted
    return max(wanted, min(known, MAX_WORKERS))


def problems(job: Job, report: Report | None, old: dict[str, Any]) -> list[Problem]:
    """Return what is wrong with the smallest size that the job may have; empty while it has room.

    Args:
        job: with its sizes and its template.
        report: of the coordinator; None: it does not answer.
        old: status as it was.
    """
    found, least = status(job, report, old), job.spec.workers.min_replicas
    if found is None or "limit" not in found:
        return []
    enough = found.get("fewestWorkers")
    if enough is not None and enough <= least:
        return []
    raised = "raise the memory limit in workers.template" if found["limitedBy"] == "Container" else ""
    raised = raised or "use devices with more memory"
    text = (
        f"with {_count(least)} (workers.minReplicas) each would need {found['perWorkerAtMinReplicas']} of "
        f"memory, activations not counted, and has {found['limit']}"
    )
    if enough is None:
        shared = "set strategy.allReduce.shard in a new job, or " if _can_share(job) else ""
        return [Problem(reasons.MEMORY_TOO_SMALL, f"{text}; more workers do not help: {shared}{raised}")]
    then = f"fewer than {enough} do not train, and wait for others"
    if enough > job.spec.workers.maximum:
        then = f"{enough} are needed, and the job has {job.spec.workers.maximum} at most"
    return [
        Problem(reasons.MEMORY_TOO_SMALL, f"{text}; {then}: set workers.minReplicas to {enough}, or {raised}")
    ]


def _can_share(job: Job) -> bool:
    strategy = job.spec.strategy
    return (
        strategy.type is StrategyType.ALL_REDUCE
        and strategy.all_reduce.shard is Shard.NONE
        and strategy.all_reduce.compression is Compression.NONE
        and not strategy.all_reduce.exact
    )


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"

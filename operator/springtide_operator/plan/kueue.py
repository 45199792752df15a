"""Kueue: a job with a queue's name has a Workload, and pods only while that is admitted.

Kueue's decision stands in `status.queue`, and everything else reads it there: a job that is not admitted is
halted, so its workers leave as for a suspension, and an admitted one has at most the workers that were
admitted. Where Kueue's API is not served the label means nothing, and the condition says so; a job that was
handed to Kueue before stays as Kueue left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from springtide_operator.api import names, reasons
from springtide_operator.api.job import Job
from springtide_operator.api.model import PodCleanup
from springtide_operator.manifests import kueue as manifest
from springtide_operator.manifests.kueue import SERVERS, WORKERS, queue_name, workload_version
from springtide_operator.plan import conditions
from springtide_operator.plan.actions import (
    Action,
    CreateWorkload,
    DeleteWorkload,
    ReportWorkload,
    UpdateWorkload,
)
from springtide_operator.plan.observation import Observation, Problem
from springtide_operator.plan.retry import held_back
from springtide_operator.plan.workload import WorkloadSeen

ROLE = "workload"
STATUS = "queue"


def api(job: Job) -> list[str]:
    """The APIs that this policy must know to be served or not."""
    return [names.KUEUE_API] if queue_name(job) or STATUS in job.status else []


def concerns(raw: Mapping[str, Any]) -> bool:
    """Whether a job, as the API server gives it, has to do with a queue."""
    labels = raw["metadata"].get("labels") or {}
    return bool(labels.get(names.LABEL_QUEUE)) or STATUS in (raw.get("status") or {})


def with_queue_state(job: Job, observation: Observation) -> Job:
    """Return the job with `status.queue` as it is from now on, and no more workers than were admitted.

    Args:
        job: with its status.
        observation: of the job.
    """
    status = {key: value for key, value in job.status.items() if key != STATUS}
    entry = _entry(job, observation)
    if entry is not None:
        status[STATUS] = entry
    return limited(replace(job, status=status))


def limited(job: Job) -> Job:
    """The job with its sizes cut to the pods that its queue admitted."""
    entry = job.status.get(STATUS) or {}
    workers, servers = job.spec.workers, job.spec.parameter_servers
    changes: dict[str, Any] = {}
    count = entry.get("workers")
    if count and count < workers.maximum:
        sizes = {"replicas": min(workers.replicas, count), "max_replicas": count}
        changes["workers"] = workers.model_copy(update=sizes)
    count = entry.get("servers")
    if count and servers is not None and count < servers.replicas:
        changes["parameter_servers"] = servers.model_copy(update={"replicas": count})
    return replace(job, spec=job.spec.model_copy(update=changes)) if changes else job


def waits(job: Job, observation: Observation) -> str:
    """Return why no pod may be made yet, although nobody has halted the job; "" when one may.

    Args:
        job: with its status.
        observation: of the job.
    """
    if queue_name(job) and STATUS not in job.status and names.KUEUE_API not in observation.apis:
        return f"it is not known yet whether the cluster serves {names.KUEUE_API}"
    return ""


def decide(job: Job, asked: Job, observation: Observation, now: float) -> list[Action]:
    """Decide what to ask of Kueue for a job that goes on.

    Args:
        job: with the sizes that were admitted.
        asked: the job with its sizes as the user wants them.
        observation: with its Workload.
        now: unix seconds.
    """
    if not _readable(observation) or held_back(observation, ROLE, now):
        return []
    found = observation.workload
    if not queue_name(job) or job.spec.suspend:
        if found is None or found.deleting or (job.spec.suspend and _pods_left(observation)):
            return []
        why = "the job is suspended" if job.spec.suspend else "the job names no queue any more"
        return [DeleteWorkload(found.name, found.uid, why)]
    if found is None:
        text = f"the job waits for the queue {queue_name(job)}"
        return [CreateWorkload(workload_version(asked), text)]
    if found.deleting or found.finished:
        return []
    if found.reserved and not _pods_left(observation):
        if found.queue != queue_name(job):
            return [DeleteWorkload(found.name, found.uid, f"the job goes to the queue {queue_name(job)}")]
        if found.evicted is not None:
            text = "no pod of the evicted job is left"
            return [ReportWorkload("Released", text, evicted=found.evicted, message=found.message)]
    if not found.reserved and found.version != workload_version(asked):
        return [UpdateWorkload(workload_version(asked), "the job was changed while it waits")]
    going = bool((job.status.get(STATUS) or {}).get("admitted"))
    if going and not found.pods_ready and conditions.is_true(job.status, reasons.RUNNING):
        return [ReportWorkload("PodsReady", "the job trains")]
    return []


def finish(job: Job, observation: Observation, succeeded: bool, now: float) -> list[Action]:
    """Give the quota of a job back that has ended, with its last process.

    Args:
        job: that has ended.
        observation: with its Workload.
        succeeded: whether it ended well.
        now: unix seconds.
    """
    found = observation.workload
    if not _readable(observation) or held_back(observation, ROLE, now):
        return []
    if found is None or found.deleting or found.finished:
        return []
    running = any(pod.end is None for pod in observation.workers)
    if running and job.spec.pod_cleanup is not PodCleanup.NONE:
        return []
    message = str(job.status.get("message") or "")[:1024]
    return [ReportWorkload("Finished", "the job has ended", succeeded=succeeded, message=message)]


def problem(job: Job, observation: Observation) -> Problem | None:
    """Return what is wrong when Kueue is not there, or has admitted fewer workers than are asked for.

    Args:
        job: with its status.
        observation: of the job.

    Returns:
        None when all is well.
    """
    name, entry = queue_name(job), job.status.get(STATUS) or {}
    if name and observation.apis.get(names.KUEUE_API) is False:
        does = "stays as Kueue left it" if entry else "runs without a queue"
        text = f"the job names the queue {name}, but the cluster does not serve {names.KUEUE_API}: it {does}"
        return Problem(reasons.QUEUE_UNAVAILABLE, text)
    if name and observation.apis.get(names.KUEUE_API) and observation.workloads_trouble:
        text = f"Kueue's Workloads cannot be listed: {observation.workloads_trouble}"
        return Problem(reasons.WORKLOAD_REFUSED, text)
    count, asked = entry.get("workers"), entry.get("asked", 0)
    if entry.get("admitted") and count and count < asked:
        text = f"the queue {entry['name']} admitted {count} of {asked} workers"
        if count < job.spec.workers.min_replicas:
            text += f", fewer than minReplicas ({job.spec.workers.min_replicas}): training cannot start"
        return Problem(reasons.QUEUE_LIMITS_SIZE, text + "; suspend and resume the job to ask again")
    count, asked = entry.get("servers", 0), entry.get("serversAsked", 0)
    if entry.get("admitted") and count < asked:
        text = f"the queue {entry['name']} admitted {count} of {asked} parameter servers"
        return Problem(reasons.QUEUE_LIMITS_SIZE, text + "; suspend and resume the job to ask again")
    return None


def _readable(observation: Observation) -> bool:
    return bool(observation.apis.get(names.KUEUE_API)) and observation.workloads_listed


def _pods_left(observation: Observation) -> bool:
    left = bool(observation.coordinators or observation.servers)
    return left or any(pod.end is None for pod in observation.workers)


def _entry(job: Job, observation: Observation) -> dict[str, Any] | None:
    name, old = queue_name(job), job.status.get(STATUS)
    if not name:
        return old if observation.workload is not None else None
    served = observation.apis.get(names.KUEUE_API)
    if not served or not observation.workloads_listed:
        if old is None and not served:
            return None
        return old or _waiting(job, reasons.QUEUED, f"the queue {name} is asked")
    return _workload_status(job, name, observation.workload, old or {})


def _workload_status(
    job: Job, name: str, found: WorkloadSeen | None, old: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `status.queue` from Kueue's Workload of the job."""
    if job.spec.suspend:
        return _waiting(job, reasons.JOB_SUSPENDED, "the job is suspended")
    if found is None or found.deleting:
        if old.get("admitted"):
            return _waiting(job, reasons.EVICTED, "its Workload was deleted")
        return _waiting(job, old.get("reason") or reasons.QUEUED, "its Workload is being made")
    if found.evicted is not None:
        text = f"evicted ({found.evicted}): {found.message}"
        if not found.active:
            text += f"; set spec.active of the Workload {found.name} to true to have it queued again"
        return _waiting(job, reasons.EVICTED, text)
    if found.finished:
        return _waiting(job, reasons.QUEUED, f"the Workload {found.name} is said to be finished: delete it")
    if found.queue != name and found.reserved:
        return _waiting(job, reasons.EVICTED, f"the job leaves the queue {found.queue}")
    if not found.admitted:
        return _waiting(job, reasons.QUEUED, found.message or "the queue has not admitted it yet")
    if found.trouble and not old.get("admitted"):
        return _waiting(job, reasons.QUEUED, f"it is admitted, but {found.trouble}")
    count, servers = found.counts.get(WORKERS, job.spec.workers.replicas), job.spec.servers
    return {
        "name": name,
        "workload": found.name,
        "admitted": True,
        "reason": reasons.ADMITTED,
        "message": f"{found.cluster_queue or name} admitted {count} workers",
        "clusterQueue": found.cluster_queue,
        "workers": count,
        "asked": job.spec.workers.replicas,
        **({"servers": found.counts.get(SERVERS, servers), "serversAsked": servers} if servers else {}),
        "podSets": old.get("podSets") or {} if found.trouble else dict(found.placements),
    }


def _waiting(job: Job, reason: str, message: str) -> dict[str, Any]:
    return {
        "name": manifest.queue_name(job),
        "workload": names.workload_name(job.name, job.uid),
        "admitted": False,
        "reason": reason,
        "message": message[:1024],
    }

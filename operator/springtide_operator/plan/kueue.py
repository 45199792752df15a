"""Kueue: a job with a queue's name has a Workload, and pods only while that is admitted.

Kueue's decision stands in `status.queue`, and everything else reads it there: a job that is not admitted is
halted, so its workers leave as for a suspension, and an admitted one has at most the workers that were
admitted. Where Kueue's API is not served nobody can admit: a job that names a queue does not start, and one
that was admitted before goes on with what it was given, and never with more.

A job that shrinks gives quota back for pods that are gone. One that grows waits for its next admission, or,
where its annotation calls it elastic, has a second Workload that asks for all pods and takes the place of the
first when Kueue admits it (Kueue's workload slices).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from springtide_operator.api import names, reasons
from springtide_operator.api.elasticity import ElasticityPolicy
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
from springtide_operator.plan.observation import Observation, Problem, newest_served
from springtide_operator.plan.retry import held_back
from springtide_operator.plan.workload import WorkloadSeen

ROLE = "workload"
STATUS = "queue"


def api(job: Job) -> list[str]:
    """The APIs that this policy must know to be served or not."""
    return [*names.KUEUE_APIS] if queue_name(job) or STATUS in job.status else []


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
    if queue_name(job) and STATUS not in job.status and _served(observation) is None:
        return f"it is not known yet whether the cluster serves {names.KUEUE_GROUP}"
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
    if manifest.prebuilt_name(job):
        return _with_prebuilt(job, asked, observation)
    found = observation.workload
    if not queue_name(job) or job.spec.suspend:
        if found is None or (job.spec.suspend and _pods_left(observation)):
            return []
        return _delete_all(
            found, "the job is suspended" if job.spec.suspend else "the job names no queue any more"
        )
    if found is None:
        text = f"the job waits for the queue {queue_name(job)}"
        return [CreateWorkload(workload_version(asked), text)]
    if found.deleting or found.finished:
        return []
    if found.reserved and not _pods_left(observation):
        if found.queue != queue_name(job):
            return _delete_all(found, f"the job goes to the queue {queue_name(job)}")
        if found.evicted is not None:
            text = "no pod of the evicted job is left"
            return [
                ReportWorkload("Released", text, found.name, evicted=found.evicted, message=found.message)
            ]
    if not found.reserved and found.version != workload_version(asked):
        text = "the job was changed while it waits"
        return [UpdateWorkload(workload_version(asked), text, found.name, found.replaces)]
    if not found.holds:
        return _delete_successor(found, "the job is evicted")
    actions: list[Action] = []
    if not found.pods_ready and conditions.is_true(job.status, reasons.RUNNING):
        actions.append(ReportWorkload("PodsReady", "the job trains", found.name))
    for name, uid in found.others:
        actions.append(DeleteWorkload(name, uid, f"the Workload {found.name} has taken its place"))
    return [*actions, *_give_back(asked, found, observation), *_grow(asked, found)]


def _with_prebuilt(job: Job, asked: Job, observation: Observation) -> list[Action]:
    """Decide about a Workload that somebody else has made for the job: its spec and its life are theirs."""
    found = observation.workload
    if found is None:
        name = manifest.prebuilt_name(job)
        return [CreateWorkload("", f"the job takes the Workload {name}", name)] if queue_name(job) else []
    if found.deleting or found.finished:
        return []
    if found.evicted is not None and found.reserved and not _pods_left(observation):
        text = "no pod of the evicted job is left"
        return [ReportWorkload("Released", text, found.name, evicted=found.evicted, message=found.message)]
    if not found.holds or job.spec.suspend:
        return []
    actions: list[Action] = []
    if not found.pods_ready and conditions.is_true(job.status, reasons.RUNNING):
        actions.append(ReportWorkload("PodsReady", "the job trains", found.name))
    return [*actions, *_give_back(asked, found, observation)]


def decide_elsewhere(job: Job, observation: Observation, now: float) -> list[Action]:
    """Decide what to ask of Kueue for a job that MultiKueue runs in another cluster: the job has no pods
    here, and its status is MultiKueue's.

    Args:
        job: without its status.
        observation: with its Workload and refusals.
        now: unix seconds.
    """
    actions = decide(job, job, observation, now)
    return [one for one in actions if not (isinstance(one, ReportWorkload) and one.what == "Reclaimed")]


def _give_back(asked: Job, found: WorkloadSeen, observation: Observation) -> list[Action]:
    """Give back the quota of pods that the job needs no more, and that are gone."""
    live = {
        WORKERS: sum(pod.end is None for pod in observation.workers),
        SERVERS: len(observation.servers),
    }
    needed = {name: max(count, live[name]) for name, count in _needed(asked, found).items()}
    spare = {name: found.asked[name] - count for name, count in needed.items() if count < found.counts[name]}
    if not spare:
        return []
    text = "the job needs fewer pods: " + ", ".join(f"{needed[name]} {name}" for name in spare)
    return [ReportWorkload("Reclaimed", text, found.name, counts=tuple(spare.items()))]


def _needed(asked: Job, found: WorkloadSeen) -> dict[str, int]:
    """Pods that the job has a use for, by pod set of its Workload: what is asked for, and what
    `elasticity.policy: Capacity` may take within the quota.
    """
    needed = {name: count for name, count in manifest.sizes(asked).items() if name in found.counts}
    if WORKERS in needed:
        needed[WORKERS] = max(needed[WORKERS], asked.spec.workers.replicas + asked.spec.workers.standby)
    if asked.spec.elasticity.policy is ElasticityPolicy.CAPACITY and WORKERS in needed:
        most = min(asked.spec.workers.maximum, found.counts[WORKERS])
        needed[WORKERS] = max(needed[WORKERS], most)
    return needed


def _grow(asked: Job, found: WorkloadSeen) -> list[Action]:
    """Ask for more pods while the job goes on with those that it has, by a second Workload for them all."""
    wanted = {name: count for name, count in _needed(asked, found).items() if count > found.counts[name]}
    if not wanted or not manifest.is_elastic(asked):
        return _delete_successor(found, "the job is to grow no more")
    counts = tuple((name, wanted.get(name, found.counts[name])) for name in _needed(asked, found))
    version, next_one = workload_version(asked), found.successor
    text = "the job is to grow: " + ", ".join(f"{count} {name}" for name, count in counts)
    if next_one is None:
        name = names.workload_name(asked.name, asked.uid, found.number + 1)
        return [CreateWorkload(version, text, name, found.name, counts)]
    if next_one.replaces != found.name or next_one.evicted is not None or next_one.finished:
        return _delete_successor(found, "it is to be asked anew")
    same = all(next_one.asked.get(name) == count for name, count in counts)
    if next_one.reserved or (same and next_one.version == version):
        return []
    return [UpdateWorkload(version, text, next_one.name, found.name, counts)]


def _delete_successor(found: WorkloadSeen, why: str) -> list[Action]:
    return [DeleteWorkload(found.successor.name, found.successor.uid, why)] if found.successor else []


def _delete_all(found: WorkloadSeen, why: str) -> list[Action]:
    actions: list[Action] = [DeleteWorkload(name, uid, why) for name, uid in found.others]
    actions += _delete_successor(found, why)
    return [*actions, *([] if found.deleting else [DeleteWorkload(found.name, found.uid, why)])]


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
    if found is None:
        return []
    if found.deleting or found.finished:
        return _delete_successor(found, "the job has ended")
    running = any(pod.end is None for pod in observation.workers)
    if running and job.spec.pod_cleanup is not PodCleanup.NONE:
        return []
    message = str(job.status.get("message") or "")[:1024]
    end = ReportWorkload("Finished", "the job has ended", found.name, succeeded=succeeded, message=message)
    return [end, *_delete_successor(found, "the job has ended")]


def problem(job: Job, observation: Observation) -> Problem | None:
    """Return what is wrong when Kueue is not there, or has admitted fewer workers than are asked for.

    Args:
        job: with its status.
        observation: of the job.

    Returns:
        None when all is well.
    """
    name, entry = queue_name(job), job.status.get(STATUS) or {}
    served = _served(observation)
    if name and served == "":
        return Problem(reasons.QUEUE_UNAVAILABLE, f"the job names the queue {name}, but {_away(entry)}")
    if name and served and observation.workloads_trouble:
        text = f"Kueue's Workloads cannot be listed: {observation.workloads_trouble}"
        return Problem(reasons.WORKLOAD_REFUSED, text)
    count, asked = entry.get("workers"), entry.get("asked", 0)
    if entry.get("admitted") and count and count < asked:
        text = f"the queue {entry['name']} admitted {count} of {asked} workers"
        if count < job.spec.workers.min_replicas:
            text += f", fewer than minReplicas ({job.spec.workers.min_replicas}): training cannot start"
        return Problem(reasons.QUEUE_LIMITS_SIZE, text + _how_to_grow(job, observation))
    count, asked = entry.get("servers", 0), entry.get("serversAsked", 0)
    if entry.get("admitted") and count < asked:
        text = f"the queue {entry['name']} admitted {count} of {asked} parameter servers"
        return Problem(reasons.QUEUE_LIMITS_SIZE, text + _how_to_grow(job, observation))
    return None


def _away(entry: Mapping[str, Any]) -> str:
    text = f"the cluster does not serve {' or '.join(names.KUEUE_APIS)}"
    if entry.get("admitted"):
        return f"{text}: it keeps what it was admitted with, and gets no more"
    return f"{text}, so nobody can admit it: install Kueue, or take the label {names.LABEL_QUEUE} off"


def _how_to_grow(job: Job, observation: Observation) -> str:
    found = observation.workload
    if found is not None and found.successor is not None:
        return f"; the Workload {found.successor.name} asks for more: {found.successor.message or 'it waits'}"
    if manifest.is_elastic(job):
        return ""
    return (
        f"; suspend and resume the job to ask again, or make jobs with the annotation"
        f' {names.ANNOTATION_ELASTIC}: "true", which grow while they train'
    )


def _served(observation: Observation) -> str | None:
    """The version of Kueue's API that is used; "" for none, None where that is not known yet."""
    return newest_served(observation.apis, names.KUEUE_APIS)


def _readable(observation: Observation) -> bool:
    return bool(_served(observation)) and observation.workloads_listed


def _pods_left(observation: Observation) -> bool:
    left = bool(observation.coordinators or observation.servers)
    return left or any(pod.end is None for pod in observation.workers)


def _entry(job: Job, observation: Observation) -> dict[str, Any] | None:
    name: str = queue_name(job)
    old: dict[str, Any] | None = job.status.get(STATUS)
    if not name:
        return old if observation.workload is not None else None
    served = _served(observation)
    if served is None:
        return old
    if served == "":
        if old is not None and old.get("admitted") and not job.spec.suspend:
            return old
        reason = reasons.JOB_SUSPENDED if job.spec.suspend else (old or {}).get("reason") or reasons.QUEUED
        return _waiting(job, reason, _away({}))
    if not observation.workloads_listed:
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
        if found.takes_over and found.reserved and old.get("admitted"):
            return dict(old)  # its quota is another Workload's now, which waits for admission checks
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
        "workload": manifest.prebuilt_name(job) or names.workload_name(job.name, job.uid),
        "admitted": False,
        "reason": reason,
        "message": message[:1024],
    }

"""Gang start: a PodGroup says how many pods must start together, and is there before the pods that it counts.

Only where a gang scheduler is named and its API is served. Where the API is missing the pods are made all the
same, one by one, and the condition says so. An ended or suspended job keeps no PodGroup: it would hold a
share of its queue.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from springtide_operator.api import names, reasons
from springtide_operator.api.job import Job
from springtide_operator.manifests.gang import (
    KUBERNETES,
    GangScheduler,
    gang_scheduler,
    gang_schedulers,
    known_api,
)
from springtide_operator.manifests.worker import template_hash
from springtide_operator.plan.actions import Action, ApplyPodGroup, DeletePodGroup, Event
from springtide_operator.plan.observation import Observation, Problem, newest_served
from springtide_operator.plan.retry import held_back

ROLE = "podgroup"


def api(job: Job) -> list[str]:
    """The APIs that this policy must know to be served or not."""
    return [scheduler.api for scheduler in gang_schedulers(job)]


def members(job: Job) -> int:
    """Pods without which training cannot start: minReplicas workers, all servers and the coordinator."""
    return job.spec.workers.min_replicas + job.spec.servers + 1


def version(job: Job, scheduler: GangScheduler) -> str:
    """Return the version of the PodGroup: another one is to be applied when this changes.

    Args:
        job: with the sizes.
        scheduler: that gets the PodGroup.
    """
    return f"{scheduler.api} {_members(job, scheduler)} {template_hash(job)}"


def trusted(job: Job) -> str:
    """The version of the PodGroup that a job must have by its status; "" for none."""
    scheduler = gang_scheduler(job)
    return version(job, scheduler) if scheduler is not None else ""


def _members(job: Job, scheduler: GangScheduler) -> int:
    """The size of the job's PodGroup: as it was made, where it cannot change."""
    made = job.status.get("gang") or {}
    if scheduler.fixed and made.get("apiVersion") == scheduler.api:
        return int(made.get("minMember") or members(job))
    return members(job)


def with_gang(job: Job, observation: Observation, over: bool = False) -> Job:
    """Return the job with `status.gang` as it is from now on; pods made from it carry the mark of their
    group.

    Args:
        job: with its status.
        observation: of the job.
        over: the job has ended.
    """
    status = {key: value for key, value in job.status.items() if key != "gang"}
    scheduler = None if over else _present(job, observation)
    old = job.status.get("gang")
    if scheduler is not None:
        status["gang"] = {
            "scheduler": scheduler.name,
            "apiVersion": scheduler.api,
            "podGroup": names.pod_group_name(job.name, job.uid),
            "minMember": _members(job, scheduler),
        }
    elif known_api(_api(old)) and not (
        observation.pod_group_gone or observation.apis.get(str(_api(old))) is False
    ):
        status["gang"] = old
    return replace(job, status=status)


def waits(job: Job, observation: Observation) -> str:
    """Return why no pod may be made yet; "" when one may.

    Args:
        job: with its status.
        observation: of the job.
    """
    known = gang_schedulers(job)
    if not known or job.halted:
        return ""
    api = newest_served(observation.apis, [one.api for one in known])
    if api is None:
        return f"it is not known yet whether the cluster serves {' or '.join(one.api for one in known)}"
    return f"the PodGroup for {known[0].name} comes first" if api and not observation.pod_group else ""


def decide(job: Job, observation: Observation, now: float, over: bool = False) -> list[Action]:
    """Apply the PodGroup (once by each operator process, which also mends it, and when its size changes), or
    delete it when it is wanted no more and no process of the job is left that was scheduled with it.

    Args:
        job: with its status.
        observation: of the job.
        now: in unix seconds.
        over: the job has ended.

    Returns:
        The one action; empty when there is nothing to do, or it has to wait.
    """
    if held_back(observation, ROLE, now):
        return []
    scheduler = None if over else _present(job, observation)
    if scheduler is not None:
        wanted = version(job, scheduler)
        if observation.pod_group == wanted:
            return []
        text = f"{scheduler.name} is to start at least {_members(job, scheduler)} pods together"
        return [ApplyPodGroup(_members(job, scheduler), wanted, text)]
    asked = known_api(_api(job.status.get("gang")))  # what is deleted is ours by name, whatever status says
    ending = over or bool(job.halted)
    pods_left = any(pod.end is None for pod in observation.workers) or bool(observation.coordinators)
    pods_left = pods_left or bool(observation.servers)
    if not asked or observation.pod_group_gone or (ending and pods_left):
        return []
    name = names.pod_group_name(job.name, job.uid)
    return [DeletePodGroup(asked, name, "no pods are to be started with it")]


def problem(job: Job, observation: Observation) -> Problem | None:
    """Return what is wrong when the named scheduler's API is missing: pods are started one by one.

    Args:
        job: with its status.
        observation: of the job.

    Returns:
        None when it is there, or none is named.
    """
    known = gang_schedulers(job)
    apis = [one.api for one in known]
    if not known or job.halted or newest_served(observation.apis, apis) != "":
        return None
    how = "switch it on" if known == KUBERNETES else f"install {known[0].name}"
    text = (
        f"the cluster does not serve {' or '.join(apis)}, so pods are not started together: {how},"
        " or set gangScheduling to None"
    )
    return Problem(reasons.GANG_UNAVAILABLE, text)


def events(old: dict[str, Any], new: dict[str, Any]) -> list[Event]:
    """Return an event where a PodGroup is asked for, or for another number of pods.

    Args:
        old: status before the plan.
        new: status after it.
    """
    before, now = old.get("gang") or {}, new.get("gang") or {}
    if not now or before.get("minMember") == now["minMember"]:
        return []
    text = f"PodGroup {now['podGroup']} asks {now['scheduler']} to start at least {now['minMember']} pods"
    return [Event(reasons.EVENT_GANG_REQUESTED, text + " together")]


def _api(entry: Any) -> object:
    return entry.get("apiVersion") if isinstance(entry, dict) else None


def _present(job: Job, observation: Observation) -> GangScheduler | None:
    """Return the scheduler that gets a PodGroup now; None where there is none."""
    if job.halted:
        return None
    known = gang_schedulers(job)
    api = newest_served(observation.apis, [one.api for one in known])
    return next((one for one in known if one.api == api), None)

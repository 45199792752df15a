"""PodGroups: gang schedulers start a group's pods together or not at all.

Volcano (`scheduling.volcano.sh/v1beta1`) finds a pod's group in an annotation, the coscheduling plugin of
kubernetes-sigs/scheduler-plugins (`scheduling.x-k8s.io/v1alpha1`) in a label, Kubernetes' own scheduler
(`scheduling.k8s.io`, from 1.36 on) in the field `schedulingGroup` of the pod's spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.api.model import GangScheduling
from springtide_operator.manifests.resources import sum_of_requests

Object = dict[str, Any]

VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"


@dataclass(frozen=True)
class GangScheduler:
    """One that knows PodGroups. `part`: of a pod's metadata, in which `key` names the pod's group; "": the
    field `key` of its spec does. `fixed`: the size of a group cannot change.
    """

    name: str
    api: str
    part: str
    key: str
    scheduler_names: tuple[str, ...]
    fixed: bool = False


VOLCANO = GangScheduler(
    "Volcano", names.VOLCANO_API, "annotations", "scheduling.k8s.io/group-name", ("volcano",)
)
COSCHEDULING = GangScheduler(
    "Coscheduling",
    names.COSCHEDULING_API,
    "labels",
    "scheduling.x-k8s.io/pod-group",
    ("scheduler-plugins-scheduler", "scheduler-plugins", "coscheduling"),
)
KUBERNETES = tuple(
    GangScheduler("Kubernetes", api, "", "schedulingGroup", (), fixed=api == names.POD_GROUP_V1ALPHA2)
    for api in names.POD_GROUP_APIS
)
_ALL = (VOLCANO, COSCHEDULING, *KUBERNETES)


def gang_schedulers(job: Job) -> tuple[GangScheduler, ...]:
    """Return the scheduler that is to start the job's pods together, in each version of its API, the
    preferred one first; none where nobody is asked, or where the template names a PodGroup of its own.
    """
    chosen = job.spec.gang_scheduling
    if chosen is GangScheduling.NONE:
        return ()
    template = job.spec.workers.template
    if chosen is GangScheduling.KUBERNETES:
        return () if _inside(template, "spec").get("schedulingGroup") else KUBERNETES
    found = _by_name(job)
    return (found,) if found is not None else ()


def gang_scheduler(job: Job) -> GangScheduler | None:
    """Return the scheduler whose PodGroup the job has by its status; None where it has none."""
    api = (job.status.get("gang") or {}).get("apiVersion")
    return next((one for one in gang_schedulers(job) if one.api == api), None)


def _by_name(job: Job) -> GangScheduler | None:
    chosen = job.spec.gang_scheduling
    template = job.spec.workers.template
    wanted = _inside(template, "spec").get("schedulerName")
    for one in _ALL:
        if one.name == chosen.value or (chosen is GangScheduling.AUTO and wanted in one.scheduler_names):
            own = _inside(_inside(template, "metadata"), one.part).get(one.key)
            return None if own else one
    return None


def known_api(api: object) -> str | None:
    """The API of a gang scheduler that the operator knows; None for all else. Status may say anything."""
    return next((one.api for one in _ALL if one.api == api), None)


def _inside(source: Object, key: str) -> Object:
    """Return an object of a template that may not have been checked yet; empty where it is none."""
    found = source.get(key)
    return found if isinstance(found, dict) else {}


def mark(job: Job, pod: Object) -> None:
    """Put a pod into the job's PodGroup, if status says that it has one.

    Args:
        job: with its status.
        pod: is changed in place.
    """
    group = job.status.get("gang") or {}
    for one in _ALL:
        if group.get("apiVersion") == one.api:
            name = names.pod_group_name(job.name, job.uid)
            if one.part:
                pod["metadata"].setdefault(one.part, {}).setdefault(one.key, name)
            else:
                pod["spec"].setdefault(one.key, {"podGroupName": name})


def pod_group(job: Job, scheduler: GangScheduler, min_member: int, pods: list[tuple[Object, int]]) -> Object:
    """Return the job's PodGroup.

    Args:
        job: the TrainingJob.
        scheduler: whose API it is of.
        min_member: pods that are to be started together.
        pods: one of each kind, and how many of it `min_member` counts; their requests are minResources.
    """
    template = job.spec.workers.template
    spec: Object = {"minMember": min_member}
    asked = sum_of_requests(pods)
    if asked:
        spec["minResources"] = asked
    if scheduler in KUBERNETES:
        spec = {"schedulingPolicy": {"gang": {"minCount": min_member}}}
    if scheduler is VOLCANO:
        priority = (template.get("spec") or {}).get("priorityClassName")
        queue = ((template.get("metadata") or {}).get("annotations") or {}).get(VOLCANO_QUEUE)
        queue = queue or job.spec.pod_metadata.annotations.get(VOLCANO_QUEUE)
        spec |= {"priorityClassName": priority} if priority else {}
        spec |= {"queue": queue} if queue else {}
    return {
        "apiVersion": scheduler.api,
        "kind": "PodGroup",
        "metadata": {
            "name": names.pod_group_name(job.name, job.uid),
            "namespace": job.namespace,
            "labels": names.labels(job.name),
            "ownerReferences": [job.owner_reference],
        },
        "spec": spec,
    }


def no_longer_asked_for(wanted: Object, found: Object) -> Object:
    """Return {resource: None} for what a PodGroup asks for and should not, as a merge patch takes it away.

    Args:
        wanted: the PodGroup as it should be.
        found: as it is.
    """
    asked = (wanted.get("spec") or {}).get("minResources") or {}
    return {name: None for name in (found.get("spec") or {}).get("minResources") or {} if name not in asked}

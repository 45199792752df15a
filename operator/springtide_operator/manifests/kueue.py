"""Kueue's Workload for a job, and what its admission means for the job's pods.

Kueue (kueue.x-k8s.io) knows the controllers of a few kinds; for any other kind the controller keeps the
Workload itself, as Kueue's own job framework does: pod sets while no quota is reserved, and the conditions
Finished, PodsReady and, once the pods of an evicted job are gone, the end of its reservation. v1beta1 and
v1beta2 differ, in what is written here, only in how a Workload names its priority class.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.manifests.errors import TemplateError

Object = dict[str, Any]

FORMAT = 2  # of what is written to Workloads: those that wait are written anew when it changes
COORDINATOR = "coordinator"  # names of pod sets
WORKERS = "workers"
SERVERS = "parameter-servers"

QUEUE_PRIORITY_SOURCE = "kueue.x-k8s.io/workloadpriorityclass"
POD_PRIORITY_SOURCE = "scheduling.k8s.io/priorityclass"
ELASTIC_ANNOTATIONS = (names.ANNOTATION_ELASTIC, names.ANNOTATION_SLICE_OF, names.ANNOTATION_REPLACES)
_CLASS_KINDS = {  # in v1beta2
    QUEUE_PRIORITY_SOURCE: (names.KUEUE_GROUP, "WorkloadPriorityClass"),
    POD_PRIORITY_SOURCE: ("scheduling.k8s.io", "PriorityClass"),
}

# What Kueue looks at in a pod: requests, and what decides which flavors fit.
_POD_FIELDS = (
    "nodeSelector",
    "affinity",
    "tolerations",
    "priorityClassName",
    "runtimeClassName",
    "overhead",
    "resources",
    "resourceClaims",  # quota of devices: by the classes of the templates that they name
    "schedulerName",
    "topologySpreadConstraints",
)
_CONTAINER_FIELDS = ("name", "image", "resources", "restartPolicy")

# After these evictions Kueue may admit the job again at once; after others it says itself when.
_REQUEUED = ("Preempted", "AdmissionCheck", "NodeFailures")


def queue_name(job: Job) -> str:
    """The LocalQueue that the job's label names; "" for none."""
    return job.labels.get(names.LABEL_QUEUE, "")


def priority_class(job: Job) -> tuple[str, str]:
    """(source, name) of the class that gives the Workload its priority; ("", "") for none."""
    own = job.labels.get(names.LABEL_QUEUE_PRIORITY, "")
    if own:
        return QUEUE_PRIORITY_SOURCE, own
    pods = str((job.spec.workers.template.get("spec") or {}).get("priorityClassName") or "")
    return (POD_PRIORITY_SOURCE, pods) if pods else ("", "")


def prebuilt_name(job: Job) -> str:
    """The Workload that somebody else, as MultiKueue, has made for the job; "" for none."""
    said = job.annotations.get(names.PREBUILT_WORKLOAD) or job.labels.get(names.PREBUILT_WORKLOAD)
    return said or ""


def adoption(job: Job) -> Object:
    """Return the metadata by which a Workload that was made for the job becomes the job's."""
    return {
        "labels": {**names.labels(job.name), names.LABEL_QUEUE_JOB_UID: job.uid},
        "ownerReferences": [job.owner_reference],
    }


def is_elastic(job: Job) -> bool:
    """Whether the job's annotation asks Kueue to let it grow while it is admitted."""
    return job.annotations.get(names.ANNOTATION_ELASTIC) == "true"


def sizes(job: Job) -> dict[str, int]:
    """Pods that the job asks for at first, by those pod sets that can change their size.

    A job that grows while it is admitted asks for its standbys later; another one does so with its workers,
    and can do with fewer.
    """
    workers = job.spec.workers
    found = {WORKERS: workers.replicas + (0 if is_elastic(job) else workers.standby)}
    return found | ({SERVERS: job.spec.servers} if job.spec.servers else {})


def workload_version(job: Job) -> str:
    """12 hex digits of what the Workload is made from; it is written on it as an annotation."""
    workers = job.spec.workers
    made_from = [
        FORMAT,
        is_elastic(job),
        queue_name(job),
        priority_class(job),
        workers.replicas,
        workers.min_replicas,
        workers.template,
    ]
    if workers.standby:
        made_from += [{"standby": workers.standby}]
    if job.spec.servers and job.spec.parameter_servers is not None:
        made_from += [job.spec.servers, job.spec.parameter_servers.template]
    text = json.dumps(made_from, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class JobPods:
    """A pod of each role, as it would be made without an admission; `server`: None where the job has none."""

    worker: Object
    coordinator: Object
    server: Object | None = None


@dataclass(frozen=True)
class Ask:
    """Say what a Workload holds besides the job's pods.

    Attributes:
        api: the version of Kueue's API in which it is written.
        priority: value of the job's priority class; None: it has none.
        name: of the Workload; "": the job's first.
        replaces: the name of the Workload whose place it takes.
        counts: pods by pod set, where they are not those of the spec.
    """

    api: str
    priority: int | None = None
    name: str = ""
    replaces: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)


def workload(job: Job, pods: JobPods, ask: Ask) -> Object:
    """Return a Workload of the job.

    Args:
        job: the TrainingJob.
        pods: one of each role.
        ask: which Workload, and for how many pods.
    """
    first = names.workload_name(job.name, job.uid)
    annotations = {names.ANNOTATION_WORKLOAD_VERSION: workload_version(job)}
    if is_elastic(job):
        annotations |= {names.ANNOTATION_ELASTIC: "true", names.ANNOTATION_SLICE_OF: first}
    if ask.replaces:
        annotations[names.ANNOTATION_REPLACES] = f"{job.namespace}/{ask.replaces}"
    return {
        "apiVersion": ask.api,
        "kind": "Workload",
        "metadata": {
            "name": ask.name or first,
            "namespace": job.namespace,
            "labels": {**names.labels(job.name), names.LABEL_QUEUE_JOB_UID: job.uid},
            "annotations": annotations,
            "ownerReferences": [job.owner_reference],
        },
        "spec": _spec(job, pods, ask),
    }


def _spec(job: Job, pods: JobPods, ask: Ask) -> Object:
    """The coordinator comes first; workers may be fewer than `replicas`, down to `minReplicas`, except where
    the job is to grow while it is admitted: Kueue allows only one of both.
    """
    workers, counts = job.spec.workers, {**sizes(job), **ask.counts}
    pod_sets: list[Object] = [
        {"name": COORDINATOR, "count": 1, "template": _template(pods.coordinator)},
        {"name": WORKERS, "count": counts[WORKERS], "template": _template(pods.worker)},
    ]
    if workers.min_replicas < counts[WORKERS] and not is_elastic(job):
        pod_sets[1]["minCount"] = workers.min_replicas
    if pods.server is not None:
        pod_sets.append({"name": SERVERS, "count": counts[SERVERS], "template": _template(pods.server)})
    spec: Object = {"queueName": queue_name(job), "podSets": pod_sets}
    source, name = priority_class(job)
    if name and ask.priority is not None:
        spec |= {**_priority_class(ask.api, source, name), "priority": ask.priority}
    return spec


def _priority_class(api: str, source: str, name: str) -> Object:
    if api == names.KUEUE_V1BETA1:
        return {"priorityClassName": name, "priorityClassSource": source}
    group, kind = _CLASS_KINDS[source]
    return {"priorityClassRef": {"group": group, "kind": kind, "name": name}}


def fields_to_clear(api: str) -> tuple[str, ...]:
    """Fields of a Workload's spec that a merge patch has to take away where the job has no such class."""
    if api == names.KUEUE_V1BETA1:
        return ("priorityClassName", "priorityClassSource", "priority")
    return ("priorityClassRef", "priority")


def _template(pod: Object) -> Object:
    spec = pod["spec"]
    short = {key: spec[key] for key in _POD_FIELDS if spec.get(key)}
    for kind in ("initContainers", "containers"):
        if spec.get(kind):
            short[kind] = [{key: one[key] for key in _CONTAINER_FIELDS if one.get(key)} for one in spec[kind]]
    return {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": short}


def unplaced(job: Job) -> Job:
    """The job as if nobody had admitted it: pods made from it are what the Workload asks for."""
    return replace(job, status={})


def place(job: Job, pod: Object, pod_set: str) -> None:
    """Send a pod where the admission in status says. The pod's own entries may be added to, not changed.

    Args:
        job: with the admission in its status.
        pod: is changed in place.
        pod_set: of the Workload.

    Raises TemplateError where both name a node label, and differ.
    """
    placement = ((job.status.get("queue") or {}).get("podSets") or {}).get(pod_set) or {}
    spec, meta = pod["spec"], pod["metadata"]
    where = "parameterServers" if pod_set == SERVERS else "workers"
    for key, value in (placement.get("nodeSelector") or {}).items():
        own = spec.setdefault("nodeSelector", {}).setdefault(key, value)
        if own != value:
            raise TemplateError(
                f"spec.{where}.template.spec.nodeSelector: {key} is {own!r}, but the queue's admission sends"
                f" the job's {pod_set} to nodes with {value!r}: correct one of them"
            )
    tolerations = placement.get("tolerations") or []
    if tolerations:
        own_list = spec.setdefault("tolerations", [])
        own_list += [one for one in tolerations if one not in own_list]
    for part in ("labels", "annotations"):
        for key, value in (placement.get(part) or {}).items():
            meta[part].setdefault(key, value)


def finished(raw: Object, succeeded: bool, message: str, now: str) -> Object:
    """Return the status that reports the job's end; its quota is free from then on.

    Args:
        raw: the Workload as it is.
        succeeded: how it ended.
        message: in words.
        now: as Kubernetes writes times.
    """
    return {"conditions": _set(raw, now, ("Finished", True, "Succeeded" if succeeded else "Failed", message))}


def pods_ready(raw: Object, now: str) -> Object:
    """Return the status that reports that training has started, for a Kueue that waits for that.

    Args:
        raw: the Workload as it is.
        now: as Kubernetes writes times.
    """
    return {"conditions": _set(raw, now, ("PodsReady", True, "Started", "the job trains"))}


def reclaimed(raw: Object, counts: Mapping[str, int]) -> Object:
    """Return the status that gives quota back for pods that the job needs no more. Kueue allows these numbers
    to grow only, while quota is reserved.

    Args:
        raw: the Workload as it is.
        counts: pods that are needed no more, by pod set.
    """
    before = {one["name"]: one for one in (raw.get("status") or {}).get("reclaimablePods") or []}
    now = {name: {"name": name, "count": count} for name, count in counts.items()}
    return {"reclaimablePods": list((before | now).values())}


def released(raw: Object, reason: str, message: str, now: str) -> Object:
    """Return the status after an eviction, when no pod is left: the reservation ends, and the job waits
    again.

    Args:
        raw: the Workload as it is.
        reason: of the eviction.
        message: in words.
        now: as Kubernetes writes times.
    """
    changes = [
        ("QuotaReserved", False, "Pending", message),
        ("Admitted", False, "NoReservation", "The workload has no reservation"),
        ("Requeued", reason in _REQUEUED, reason, message),
    ]
    if _condition(raw, "PodsReady") is not None:
        changes.append(("PodsReady", False, "Evicted", "the job has no pods"))
    # What was given back of this admission is asked for again with the next one.
    return {"admission": None, "reclaimablePods": None, "conditions": _set(raw, now, *changes)}


def _condition(raw: Object, kind: str) -> Object | None:
    conditions = (raw.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind), None)


def _set(raw: Object, now: str, *changes: tuple[str, bool, str, str]) -> list[Mapping[str, Any]]:
    """The whole list of conditions (a merge patch replaces lists), with these set."""
    result: dict[str, Object] = {c["type"]: c for c in (raw.get("status") or {}).get("conditions") or []}
    for kind, true, reason, message in changes:
        before = result.get(kind) or {}
        status = "True" if true else "False"
        same = before.get("status") == status
        result[kind] = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message[:32768],
            "lastTransitionTime": before["lastTransitionTime"] if same else now,
            "observedGeneration": raw["metadata"].get("generation", 1),
        }
    return list(result.values())

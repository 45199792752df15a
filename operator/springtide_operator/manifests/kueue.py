"""Kueue's Workload for a job, and what its admission means for the job's pods.

Kueue (kueue.x-k8s.io/v1beta1) knows the controllers of a few kinds; for any other kind the controller keeps
the Workload itself, as Kueue's own job framework does: pod sets while no quota is reserved, and the
conditions Finished, PodsReady and, once the pods of an evicted job are gone, the end of its reservation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.manifests.errors import TemplateError

Object = dict[str, Any]

COORDINATOR = "coordinator"  # names of pod sets
WORKERS = "workers"
SERVERS = "parameter-servers"

QUEUE_PRIORITY_SOURCE = "kueue.x-k8s.io/workloadpriorityclass"
POD_PRIORITY_SOURCE = "scheduling.k8s.io/priorityclass"

# What Kueue looks at in a pod: requests, and what decides which flavors fit.
_POD_FIELDS = (
    "nodeSelector",
    "affinity",
    "tolerations",
    "priorityClassName",
    "runtimeClassName",
    "overhead",
    "resources",
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


def workload_version(job: Job) -> str:
    """12 hex digits of what the Workload is made from; it is written on it as an annotation."""
    workers = job.spec.workers
    made_from = [
        queue_name(job),
        priority_class(job),
        workers.replicas,
        workers.min_replicas,
        workers.template,
    ]
    if job.spec.servers and job.spec.parameter_servers is not None:
        made_from += [job.spec.servers, job.spec.parameter_servers.template]
    text = json.dumps(made_from, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def workload(
    job: Job, worker: Object, coordinator: Object, priority: int | None, server: Object | None = None
) -> Object:
    """Return the job's Workload.

    Args:
        job: the TrainingJob.
        worker: a worker's pod, as it would be made without an admission.
        coordinator: the coordinator's pod, likewise.
        priority: value of the job's priority class; None: it has none.
        server: a parameter server's pod, likewise; None: the job has none.
    """
    return {
        "apiVersion": names.KUEUE_API,
        "kind": "Workload",
        "metadata": {
            "name": names.workload_name(job.name, job.uid),
            "namespace": job.namespace,
            "labels": {**names.labels(job.name), names.LABEL_QUEUE_JOB_UID: job.uid},
            "annotations": {names.ANNOTATION_WORKLOAD_VERSION: workload_version(job)},
            "ownerReferences": [job.owner_reference],
        },
        "spec": workload_spec(job, worker, coordinator, priority, server),
    }


def workload_spec(
    job: Job, worker: Object, coordinator: Object, priority: int | None, server: Object | None = None
) -> Object:
    """Return the spec of the job's Workload.

    The coordinator comes first; workers may be fewer than `replicas`, down to `minReplicas`.

    Args:
        job: the TrainingJob.
        worker: a worker's pod, as it would be made without an admission.
        coordinator: the coordinator's pod, likewise.
        priority: value of the job's priority class; None: it has none.
        server: a parameter server's pod, likewise; None: the job has none.
    """
    workers = job.spec.workers
    pod_sets: list[Object] = [
        {"name": COORDINATOR, "count": 1, "template": _template(coordinator)},
        {"name": WORKERS, "count": workers.replicas, "template": _template(worker)},
    ]
    if workers.min_replicas < workers.replicas:
        pod_sets[1]["minCount"] = workers.min_replicas
    if server is not None:
        pod_sets.append({"name": SERVERS, "count": job.spec.servers, "template": _template(server)})
    spec: Object = {"queueName": queue_name(job), "podSets": pod_sets}
    source, name = priority_class(job)
    if name and priority is not None:
        spec |= {"priorityClassName": name, "priorityClassSource": source, "priority": priority}
    return spec


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
    return {"admission": None, "conditions": _set(raw, now, *changes)}


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

"""Carry out what a plan asks for about the job's Workload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from springtide_kube.errors import ApiError
from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.cluster import Cluster, is_gone
from springtide_operator.manifests import kueue
from springtide_operator.plan.actions import (
    CreateWorkload,
    DeleteWorkload,
    ReportWorkload,
    UpdateWorkload,
)
from springtide_operator.plan.values import timestamp
from springtide_operator.queues import Queues

Object = dict[str, Any]
WorkloadAction = CreateWorkload | UpdateWorkload | ReportWorkload | DeleteWorkload
MakePods = Callable[[Job], kueue.JobPods]


async def delete(cluster: Cluster, queues: Queues, job: Job, name: str, uid: str) -> None:
    """Delete a Workload; that it is gone is as good.

    Args:
        cluster: where the Workload is.
        queues: the Workloads as last heard of.
        job: whose Workload it is.
        name: of the Workload.
        uid: of this very one.

    Raises:
        ApiError: the API server refuses.
    """
    try:
        await cluster.delete_workload(_api(queues), job.namespace, name, uid)
    except ApiError as error:
        if not is_gone(error):
            raise
    queues.drop(job.uid, name)


async def write(
    cluster: Cluster, queues: Queues, job: Job, wanted: CreateWorkload | UpdateWorkload, pods: MakePods
) -> None:
    """Make a Workload of the job, or write its spec anew.

    Args:
        cluster: where the Workload is.
        queues: the Workloads as last heard of.
        job: whose Workload it is.
        wanted: which one, and for how many pods.
        pods: makes one pod of each role.

    Raises:
        ApiError: 409 where somebody else has changed it.
        TemplateError: no pod can be made of the template.
    """
    if kueue.prebuilt_name(job):
        await _adopt(cluster, queues, job)
        return
    bare, api = kueue.unplaced(job), _api(queues)
    source, name = kueue.priority_class(job)
    if name and not names.is_name(name):
        raise ApiError(422, "Invalid", f"no priority class can be called {name[:80]!r}")
    try:
        priority = await cluster.get_priority(api, source, name) if name else None
    except ApiError as error:
        if not is_gone(error):
            raise
        raise ApiError(404, error.reason, f"its priority class does not exist: {error.message}") from error
    ask = kueue.Ask(api, priority, wanted.name, wanted.replaces, dict(wanted.counts))
    made = kueue.workload(bare, pods(bare), ask)
    name = made["metadata"]["name"]
    raw = queues.raw(job.uid, name)
    if isinstance(wanted, CreateWorkload) or raw is None:
        try:
            queues.put(await cluster.create_workload(made))
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            await queues.look()  # which brings it, if it is this job's
            if queues.raw(job.uid, name) is None:
                text = f"a Workload {name!r} exists that this job does not control: delete it"
                raise ApiError(409, "Conflict", text) from error
        return
    for key in kueue.fields_to_clear(api):
        made["spec"].setdefault(key, None)
    annotations = dict.fromkeys(kueue.ELASTIC_ANNOTATIONS) | made["metadata"]["annotations"]
    patch = {"metadata": {**_precondition(raw), "annotations": annotations}, "spec": made["spec"]}
    queues.put(await cluster.patch_workload(api, job.namespace, name, patch))


async def _adopt(cluster: Cluster, queues: Queues, job: Job) -> None:
    """Make the Workload that a job names the job's own."""
    name = kueue.prebuilt_name(job)
    raw = queues.unowned(job.namespace, name)
    if raw is None:
        text = f"the job names a Workload {name[:80]!r} by {names.PREBUILT_WORKLOAD}, and there is none"
        raise ApiError(404, "NotFound", f"{text} with the label {names.LABEL_JOB} that nobody controls")
    patch = {"metadata": {**_precondition(raw), **kueue.adoption(job)}}
    queues.put(await cluster.patch_workload(_api(queues), job.namespace, name, patch))


async def report(cluster: Cluster, queues: Queues, job: Job, what: ReportWorkload, unix: float) -> None:
    """Write the status of the job's Workload, unless it is gone.

    Args:
        cluster: where the Workload is.
        queues: the Workloads as last heard of.
        job: whose Workload it is.
        what: the status is to say.
        unix: now, in unix seconds.

    Raises:
        ApiError: the API server refuses.
    """
    now = timestamp(unix)
    raw = queues.raw(job.uid, what.name)
    if raw is None:
        return
    name = raw["metadata"]["name"]
    if what.what == "Finished":
        status = kueue.finished(raw, what.succeeded, what.message, now)
    elif what.what == "PodsReady":
        status = kueue.pods_ready(raw, now)
    elif what.what == "Reclaimed":
        status = kueue.reclaimed(raw, dict(what.counts))
    else:
        status = kueue.released(raw, what.evicted, what.message, now)
    patch = {"metadata": _precondition(raw), "status": status}
    try:
        queues.put(await cluster.patch_workload(_api(queues), job.namespace, name, patch, status=True))
    except ApiError as error:
        if not is_gone(error):
            raise
        queues.drop(job.uid, name)


def _api(queues: Queues) -> str:
    api = queues.api()
    if not api:
        text = f"the cluster does not serve {names.KUEUE_GROUP} any more, or this process does not act"
        raise ApiError(503, "ServiceUnavailable", text)
    return api


def _precondition(raw: Object) -> Object:
    return {"uid": raw["metadata"]["uid"], "resourceVersion": raw["metadata"]["resourceVersion"]}

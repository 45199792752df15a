"""Read pods, as the API server gives them, into observations."""

from __future__ import annotations

import re
from typing import Any

from springtide_operator.api import names, reasons
from springtide_operator.plan.observation import CoordinatorPod, Node, Problem, ServerPod, WorkerPod
from springtide_operator.plan.outcome import disruption, read_end
from springtide_operator.plan.values import parse_time

Object = dict[str, Any]

_IMAGE = {
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RegistryUnavailable",
    "SignatureValidationFailed",
}
_CONFIG = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "PreStartHookError",
    "PostStartHookError",
}


# With these taints an autoscaler or a cloud says that it is about to take the node away.
_LEAVING_TAINTS = (
    "ToBeDeletedByClusterAutoscaler",
    "cloud.google.com/impending-node-termination",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",  # of Karpenter before 1.0
)
_INCARNATION = re.compile("[0-9]{1,9}")
_LEAVING_TAINT_PREFIX = "aws-node-termination-handler/"  # spot-itn, asg-lifecycle-termination, ...


def owned_by(obj: Object, uid: str) -> bool:
    """Return whether an object's controller is the job with this uid.

    Args:
        obj: as the API server gives it.
        uid: of the job.
    """
    references = obj.get("metadata", {}).get("ownerReferences") or []
    return any(reference.get("controller") and reference.get("uid") == uid for reference in references)


def role_of(pod: Object) -> str | None:
    return (pod["metadata"].get("labels") or {}).get(names.LABEL_ROLE)


def worker_pod(pod: Object) -> WorkerPod | None:
    """Read a worker's pod; None for a pod whose name carries no slot and attempt."""
    meta = pod["metadata"]
    place = names.parse_worker_name(meta["name"])
    if place is None:
        return None
    status = pod.get("status") or {}
    container = _container(pod, names.ROLE_WORKER)
    state = (container or {}).get("state") or {}
    running = state.get("running")
    started = (
        running or state.get("terminated") or ((container or {}).get("lastState") or {}).get("terminated")
    )
    annotations = meta.get("annotations") or {}
    disrupted = disruption(status)
    gone_by = parse_time(meta.get("deletionTimestamp"))
    grace = float(meta.get("deletionGracePeriodSeconds") or 0)
    return WorkerPod(
        name=meta["name"],
        uid=meta["uid"],
        slot=place[0],
        attempt=place[1],
        phase=status.get("phase", "Pending"),
        created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
        started_at=parse_time((started or {}).get("startedAt")),
        running=running is not None,
        deletion_asked_at=None if gone_by is None else gone_by - grace,
        gone_by=gone_by,
        deleted_because=annotations.get(names.ANNOTATION_DELETED_BECAUSE),
        template=annotations.get(names.ANNOTATION_TEMPLATE),
        end=read_end(pod, container),
        stopped=_stopped(status),
        problem=pod_problem(pod, f"worker {meta['name']}"),
        starting_since=_starting_since(pod),
        disruption=disrupted[1] if disrupted is not None else None,
        disruption_reason=disrupted[0] if disrupted is not None else None,
        node=(pod.get("spec") or {}).get("nodeName") or None,
        key=annotations.get(names.ANNOTATION_KEY, ""),
        unreachable=_node_lost(status, disrupted),
        address=_metrics_address(pod, names.WORKER_METRICS_PORT),
    )


def _stopped(status: Object) -> bool:
    """Return whether all containers have ended. Since 1.27 a kubelet says so first, and the phase up to
    seconds later, when the rest of the pod is put away, too."""
    containers = status.get("containerStatuses") or []
    return bool(containers) and all((one.get("state") or {}).get("terminated") for one in containers)


def _metrics_address(pod: Object, usual: int) -> tuple[str, int] | None:
    """IP and port of the pod's metrics; None before it has an IP."""
    ip = (pod.get("status") or {}).get("podIP")
    containers = (pod.get("spec") or {}).get("containers") or []
    ports = [port for container in containers for port in container.get("ports") or []]
    named = (port.get("containerPort") for port in ports if port.get("name") == "metrics")
    return (str(ip), int(next(named, None) or usual)) if ip else None


def _node_lost(status: Object, disrupted: tuple[str, str] | None) -> bool:
    """Driven out by a taint, and not Ready: a kubelet that still answers keeps a leaving pod Ready."""
    if disrupted is None or disrupted[0] != "DeletionByTaintManager":
        return False
    ready = (c.get("status") for c in status.get("conditions") or [] if c.get("type") == "Ready")
    return next(ready, "True") != "True"


def coordinator_pod(pod: Object) -> CoordinatorPod | None:
    """Read a coordinator's pod; None for a pod without an incarnation label."""
    meta = pod["metadata"]
    number = (meta.get("labels") or {}).get(names.LABEL_INCARNATION, "")
    if not _INCARNATION.fullmatch(number):
        return None
    status = pod.get("status") or {}
    running = ((_container(pod, names.ROLE_COORDINATOR) or {}).get("state") or {}).get("running")
    annotations = meta.get("annotations") or {}
    gone_by = parse_time(meta.get("deletionTimestamp"))
    grace = float(meta.get("deletionGracePeriodSeconds") or 0)
    return CoordinatorPod(
        name=meta["name"],
        uid=meta["uid"],
        incarnation=int(number),
        phase=status.get("phase", "Pending"),
        created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
        running_since=parse_time(running.get("startedAt")) if running else None,
        ready_since=_ready_since(status),
        deletion_asked_at=None if gone_by is None else gone_by - grace,
        gone_by=gone_by,
        node=(pod.get("spec") or {}).get("nodeName") or None,
        unreachable=_node_lost(status, disruption(status)),
        ip=status.get("podIP") or None,
        template=annotations.get(names.ANNOTATION_TEMPLATE),
        keys=tuple(annotations.get(names.ANNOTATION_KEY, "").split(",")),
        problem=pod_problem(pod, f"the coordinator {meta['name']}"),
        starting_since=_starting_since(pod),
    )


def _ready_since(status: Object) -> float | None:
    for condition in status.get("conditions") or []:
        if condition.get("type") == "Ready" and condition.get("status") == "True":
            return parse_time(condition.get("lastTransitionTime")) or 0.0
    return None


def server_pod(pod: Object) -> ServerPod | None:
    """Read a parameter server's pod; None for a pod whose name carries no slot and attempt of one."""
    meta = pod["metadata"]
    place = names.parse_server_name(meta["name"])
    if place is None:
        return None
    status = pod.get("status") or {}
    found = _container(pod, "server") or {}
    state, last = found.get("state") or {}, (found.get("lastState") or {}).get("terminated")
    running = state.get("running")
    started = running or state.get("terminated") or last or {}
    disrupted = disruption(status)
    ended = status.get("reason") and f"{status['reason']}: {status.get('message') or 'no message'}"
    annotations = meta.get("annotations") or {}
    gone_by = parse_time(meta.get("deletionTimestamp"))
    grace = float(meta.get("deletionGracePeriodSeconds") or 0)
    ready = (c.get("status") for c in status.get("conditions") or [] if c.get("type") == "Ready")
    return ServerPod(
        name=meta["name"],
        uid=meta["uid"],
        slot=place[0],
        attempt=place[1],
        phase=status.get("phase", "Pending"),
        created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
        started_at=parse_time(started.get("startedAt")),
        running=running is not None,
        ready=running is not None and next(ready, "True") == "True",
        restarts=int(found.get("restartCount") or 0),
        deletion_asked_at=None if gone_by is None else gone_by - grace,
        gone_by=gone_by,
        deleted_because=annotations.get(names.ANNOTATION_DELETED_BECAUSE),
        template=annotations.get(names.ANNOTATION_TEMPLATE),
        problem=pod_problem(pod, f"parameter server {meta['name']}"),
        starting_since=_starting_since(pod),
        disruption=disrupted[1] if disrupted is not None else ended or None,
        node=(pod.get("spec") or {}).get("nodeName") or None,
        key=annotations.get(names.ANNOTATION_KEY, ""),
        unreachable=_node_lost(status, disrupted),
        address=_metrics_address(pod, names.PARAMETER_SERVER_METRICS_PORT),
    )


def node(obj: Object) -> Node:
    """Read a Node object: the facts that policies need."""
    spec = obj.get("spec") or {}
    conditions = (obj.get("status") or {}).get("conditions") or []
    ready: Object = next((c for c in conditions if c.get("type") == "Ready"), {})
    taints = {str(taint.get("key") or "") for taint in spec.get("taints") or []}
    leaves = any(key in _LEAVING_TAINTS or key.startswith(_LEAVING_TAINT_PREFIX) for key in taints)
    return Node(
        name=obj["metadata"]["name"],
        ready={"True": True, "False": False}.get(ready.get("status", "")),
        since=parse_time(ready.get("lastTransitionTime")) or 0.0,
        cordoned=bool(spec.get("unschedulable")) or leaves,
        leaving=leaves,
        zone=str((obj["metadata"].get("labels") or {}).get("topology.kubernetes.io/zone") or ""),
    )


def unplaced(pod: Object) -> Object | None:
    """The scheduler's word that no node takes the pod, if it has said so."""
    for condition in (pod.get("status") or {}).get("conditions") or []:
        no = condition.get("type") == "PodScheduled" and condition.get("status") == "False"
        if no and condition.get("reason") in ("Unschedulable", "SchedulingGated"):
            return dict(condition)
    return None


def pod_problem(pod: Object, who: str) -> Problem | None:
    """Return the problem that keeps a pod from running and that a person has to act on; None without one.

    Args:
        pod: as the API server has it.
        who: its role, for the message.
    """
    status = pod.get("status") or {}
    if "deletionTimestamp" in pod["metadata"] or status.get("phase") in ("Succeeded", "Failed"):
        return None
    every = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    for container in every:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason") or ""
        detail = _short(waiting.get("message") or reason)
        if reason in _IMAGE:
            return Problem(
                reasons.IMAGE_PULL_FAILED,
                f"the image {container.get('image', '?')!r} of {who} cannot be pulled:"
                " check its name and the pull secrets" + _pull_error(reason, detail),
                reason,
            )
        if reason in _CONFIG:
            text = f"{who} cannot be started ({reason}): {detail}"
            return Problem(reasons.CONTAINER_CONFIG_ERROR, text, reason)
        if reason == "CrashLoopBackOff":
            last = (container.get("lastState") or {}).get("terminated") or {}
            text = _short((last.get("message") or "").strip().splitlines()[-1:] or "")
            return Problem(
                reasons.CRASH_LOOP,
                f"{who} fails again and again: exit code {last.get('exitCode', '?')}"
                + (f": {text}" if text else ""),
                reason,
            )
    said = unplaced(pod)
    if said is not None:
        text = f"{who} cannot be scheduled: {_short(said.get('message') or 'no node fits')}"
        return Problem(reasons.UNSCHEDULABLE, text + _gates(pod), said["reason"])
    return None


def _gates(pod: Object) -> str:
    gates = [str(one.get("name")) for one in (pod.get("spec") or {}).get("schedulingGates") or []]
    if names.KUEUE_GATE in gates:
        return (
            f"; Kueue takes it for a pod of its own ({names.KUEUE_GATE}): name the queue by the label"
            f" {names.LABEL_QUEUE} of the job, and let Kueue know of jobs (integrations.externalFrameworks)"
        )
    return f" ({', '.join(gates[:3])[:300]})" if gates else ""


def _starting_since(pod: Object) -> float | None:
    """Return when a node took the pod, while none of its containers has begun; None for all others."""
    status = pod.get("status") or {}
    if not (pod.get("spec") or {}).get("nodeName") or status.get("phase", "Pending") != "Pending":
        return None
    every = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    if any(set(c.get("state") or {}) & {"running", "terminated"} or c.get("lastState") for c in every):
        return None
    said = (c for c in status.get("conditions") or [] if c.get("type") == "PodScheduled")
    placed = next((c.get("lastTransitionTime") for c in said if c.get("status") == "True"), None)
    return parse_time(placed) or parse_time(pod["metadata"].get("creationTimestamp"))


def _container(pod: Object, usual: str) -> Object | None:
    """Status of the container that runs our process: the one of the usual name, else the one that was given
    the job's token, else the spec's first. (Webhooks add containers of theirs, also before it.)
    """
    containers = (pod.get("spec") or {}).get("containers") or []
    ours = [c for c in containers if c.get("name") == usual]
    ours += [c for c in containers if any(e.get("name") == names.TOKEN for e in c.get("env") or [])]
    ours += containers[:1]
    wanted = ours[0].get("name") if ours else None
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        if status.get("name") == wanted:
            return dict(status)
    return None


def _pull_error(reason: str, detail: str) -> str:
    """Return the message of the registry or the runtime, where the kubelet passes it on: newer ones do it
    while they wait for the next try, too.
    """
    if reason == "ImagePullBackOff":
        detail = detail.partition("ErrImagePull: ")[2]
    return f" ({detail})" if detail not in ("", reason) else ""


def _short(text: str | list[str]) -> str:
    if isinstance(text, list):
        text = text[0] if text else ""
    return text if len(text) <= 400 else text[:397] + "..."

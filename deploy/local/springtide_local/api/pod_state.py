"""A pod's state in words, as `kubectl get pods` shows it."""

from __future__ import annotations

from typing import Any

from springtide_local.api.durations import age
from springtide_local.ports import Object


def pod_cells(pod: Object, now: float) -> tuple[Any, ...]:
    """Return the cells of a pod's row.

    Args:
        pod: the Pod.
        now: in unix seconds, for ages.

    Returns:
        Ready, Status, Restarts, Age, IP, Node, Nominated Node, Readiness Gates.
    """
    status, spec = pod.get("status") or {}, pod["spec"]
    statuses = status.get("containerStatuses") or []
    ready = sum(bool(container.get("ready")) for container in statuses)
    return (
        f"{ready}/{len(spec.get('containers') or ())}",
        pod_reason(pod),
        _restarts(status, now),
        age(pod["metadata"].get("creationTimestamp"), now),
        status.get("podIP") or "<none>",
        spec.get("nodeName") or "<none>",
        status.get("nominatedNodeName") or "<none>",
        "<none>",
    )


def pod_reason(pod: Object) -> str:
    status = pod.get("status") or {}
    reason = str(status.get("reason") or status.get("phase") or "Unknown")
    initializing = _init_reason(pod, status)
    if initializing:
        reason = initializing
    else:
        running = False
        for container in reversed(status.get("containerStatuses") or []):
            state = container.get("state") or {}
            waiting, ended = state.get("waiting"), state.get("terminated")
            if waiting and waiting.get("reason"):
                reason = waiting["reason"]
            elif ended:
                reason = ended.get("reason") or _exit_text(ended)
            elif container.get("ready") and "running" in state:
                running = True
        if reason == "Completed" and running:
            reason = "Running" if _is_ready(status) else "NotReady"
    if pod["metadata"].get("deletionTimestamp"):
        return "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return reason


def _is_ready(status: Object) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())


def _exit_text(ended: Object) -> str:
    if ended.get("signal"):
        return f"Signal:{ended['signal']}"
    return f"ExitCode:{ended.get('exitCode', 0)}"


def _init_reason(pod: Object, status: Object) -> str:
    total = len(pod["spec"].get("initContainers") or ())
    for index, container in enumerate(status.get("initContainerStatuses") or ()):
        state = container.get("state") or {}
        ended, waiting = state.get("terminated"), state.get("waiting")
        if ended and ended.get("exitCode") == 0:
            continue
        if ended:
            return f"Init:{ended.get('reason') or _exit_text(ended)}"
        if waiting and waiting.get("reason") not in (None, "PodInitializing"):
            return f"Init:{waiting['reason']}"
        return f"Init:{index}/{total}"
    return ""


def _restarts(status: Object, now: float) -> str:
    statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    count = sum(container.get("restartCount", 0) for container in statuses)
    last = max(
        (
            finished
            for container in statuses
            if (finished := ((container.get("lastState") or {}).get("terminated") or {}).get("finishedAt"))
        ),
        default=None,
    )
    return f"{count} ({age(last, now)} ago)" if count and last else str(count)

"""A pod's status from the states of its containers. Pure; the rules are those of the kubelet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from springtide_local.clock import timestamp
from springtide_local.kubelet.restarts import should_restart
from springtide_local.kubelet.state import ContainerRecord, Running, State, Terminated, Waiting

Object = dict[str, Any]
_OURS = ("Initialized", "Ready", "ContainersReady")


def phase(records: Mapping[str, ContainerRecord], restart_policy: str) -> str:
    """Return Pending, Running, Succeeded or Failed.

    Args:
        records: of the containers, by name.
        restart_policy: of the pod.
    """
    for record in records.values():
        if record.kind == "init":
            ended = record.ended
            if ended is None:
                return "Pending"
            if ended.exit_code != 0:
                return "Failed" if restart_policy == "Never" else "Pending"
        elif record.kind == "sidecar" and not record.passed_startup and record.ended is None:
            return "Pending"
    mains = [record for record in records.values() if record.kind == "main"]
    if any(isinstance(r.state, Waiting) and r.last is None for r in mains):
        return "Pending"
    running = [r for r in mains if not isinstance(r.state, Terminated)]
    codes = [r.state.exit_code for r in mains if isinstance(r.state, Terminated)]
    if running or any(should_restart(restart_policy, code) for code in codes):
        return "Running"
    return "Failed" if any(codes) else "Succeeded"


def container_status(record: ContainerRecord) -> Object:
    running = isinstance(record.state, Running)
    completed_init = (
        record.kind == "init" and isinstance(record.state, Terminated) and record.state.exit_code == 0
    )
    current = record.state
    container_id = (
        current.container_id
        if isinstance(current, Running | Terminated)
        else record.last.container_id
        if record.last
        else ""
    )
    return {
        "name": record.name,
        "image": record.image,
        "imageID": record.image_id,
        "containerID": container_id,
        "ready": (running and record.ready) or completed_init,
        "started": running and record.passed_startup,
        "restartCount": record.restarts,
        "state": _state(record.state),
        "lastState": _state(record.last) if record.last is not None else {},
    }


def _state(state: State) -> Object:
    if isinstance(state, Running):
        return {"running": {"startedAt": timestamp(state.started_at)}}
    if isinstance(state, Waiting):
        return {"waiting": {"reason": state.reason, **({"message": state.message} if state.message else {})}}
    return {
        "terminated": {
            "exitCode": state.exit_code,
            **({"signal": state.signal} if state.signal else {}),
            "reason": state.reason,
            **({"message": state.message} if state.message else {}),
            "startedAt": timestamp(state.started_at),
            "finishedAt": timestamp(state.finished_at),
            **({"containerID": state.container_id} if state.container_id else {}),
        }
    }


def pod_status(
    old: Object,
    records: Mapping[str, ContainerRecord],
    restart_policy: str,
    readiness_gates: Iterable[str],
    now: float,
    failure: tuple[str, str] | None = None,
    settled: bool = True,
) -> Object:
    """Return a pod's status with the parts that the kubelet owns made new: phase, conditions, container
    statuses.

    Args:
        old: the status there is; it stays as it is.
        records: of the containers, by name.
        restart_policy: of the pod.
        readiness_gates: types of conditions that others set, and that have to be True.
        now: in unix seconds.
        failure: (reason, message) that makes the pod Failed whatever its containers did: a deadline, a lost
            container.
        settled: the rest of the pod is put away, too; before that, a kubelet (since 1.27) says that
            containers have ended, and keeps the phase.
    """
    status = dict(old)
    status["phase"] = "Failed" if failure else phase(records, restart_policy)
    if not settled and status["phase"] in ("Succeeded", "Failed"):
        status["phase"] = old.get("phase", "Pending")
    if failure:
        status["reason"], status["message"] = failure
    done = status["phase"] in ("Succeeded", "Failed")
    mains = [record for record in records.values() if record.kind in ("main", "sidecar")]
    unready = [r.name for r in mains if not (isinstance(r.state, Running) and r.ready)]
    uninitialized = [
        r.name
        for r in records.values()
        if (r.kind == "init" and not (r.ended and r.ended.exit_code == 0))
        or (r.kind == "sidecar" and not r.passed_startup and not done)
    ]
    conditions: dict[str, Object] = {c["type"]: c for c in old.get("conditions") or []}
    open_gates = [gate for gate in readiness_gates if (conditions.get(gate) or {}).get("status") != "True"]
    if uninitialized:
        initialized = (
            "False",
            "ContainersNotInitialized",
            f"containers with incomplete status: [{' '.join(uninitialized)}]",
        )
    else:
        initialized = ("True", "PodCompleted", "") if status["phase"] == "Succeeded" else ("True", "", "")
    if status["phase"] == "Succeeded":
        containers_ready = ("False", "PodCompleted", "")
    elif status["phase"] == "Failed":
        containers_ready = ("False", "PodFailed", "")
    elif unready:
        containers_ready = (
            "False",
            "ContainersNotReady",
            f"containers with unready status: [{' '.join(unready)}]",
        )
    else:
        containers_ready = ("True", "", "")
    ready = containers_ready
    if containers_ready[0] == "True" and open_gates:
        message = "; ".join(
            f'corresponding condition of pod readiness gate "{gate}" does not exist or is not "True".'
            for gate in open_gates
        )
        ready = ("False", "ReadinessGatesNotReady", message)
    for name, (value, reason, message) in zip(_OURS, (initialized, ready, containers_ready), strict=True):
        conditions[name] = _condition(conditions.get(name), name, value, reason, message, now)
    status["conditions"] = list(conditions.values())
    status["containerStatuses"] = [container_status(r) for r in records.values() if r.kind == "main"]
    inits = [container_status(r) for r in records.values() if r.kind != "main"]
    if inits:
        status["initContainerStatuses"] = inits
    return status


def _condition(old: Object | None, name: str, value: str, reason: str, message: str, now: float) -> Object:
    since = old["lastTransitionTime"] if old is not None and old["status"] == value else timestamp(now)
    fresh: Object = {"type": name, "status": value, "lastProbeTime": None, "lastTransitionTime": since}
    if reason:
        fresh["reason"] = reason
    if message:
        fresh["message"] = message
    return fresh

"""Evictions and disruption budgets: how many healthy pods a budget wants, and whether one more may go."""

from __future__ import annotations

import math
from typing import NamedTuple

from springtide_local.api import bodies, errors, writes
from springtide_local.api.objects import clone, parse_timestamp, timestamp
from springtide_local.api.requests import deletion
from springtide_local.api.selectors import selector_of
from springtide_local.api.store import Store
from springtide_local.api.writes import Options
from springtide_local.ports import Object

PDBS = "poddisruptionbudgets.policy"
_DONE = ("Succeeded", "Failed")


class Budget(NamedTuple):
    """Pods: `healthy` now, `desired` at least, `expected` in all, `allowed` disruptions."""

    healthy: int
    desired: int
    expected: int
    allowed: int


def is_healthy(pod: Object) -> bool:
    if pod["metadata"].get("deletionTimestamp"):
        return False
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def budget(spec: Object, pods: list[Object], controlled: int | None) -> Budget:
    """Return the state of a disruption budget.

    Percentages round up, as in Kubernetes' disruption controller.

    Args:
        spec: of the PodDisruptionBudget.
        pods: that it selects.
        controlled: pods that the owners' scales promise; None: the pods are counted.
    """
    running = [pod for pod in pods if pod.get("status", {}).get("phase") not in _DONE]
    healthy = sum(is_healthy(pod) for pod in running)
    least, most = spec.get("minAvailable"), spec.get("maxUnavailable")
    if most is not None:
        expected = controlled if controlled is not None else len(running)
        desired = max(expected - _amount(most, expected), 0)
    elif isinstance(least, str):
        expected = controlled if controlled is not None else len(running)
        desired = _amount(least, expected)
    else:
        expected = len(running)
        desired = 1 if least is None else least
    return Budget(healthy, desired, expected, max(healthy - desired, 0))


def _amount(value: int | str, whole: int) -> int:
    return math.ceil(whole * int(value[:-1]) / 100) if isinstance(value, str) else value


def current(store: Store, pdb: Object) -> Budget:
    """Return the state of a disruption budget from the pods as they are.

    Args:
        store: of all objects.
        pdb: the PodDisruptionBudget.
    """
    namespace = pdb["metadata"]["namespace"]
    selector = selector_of((pdb.get("spec") or {}).get("selector"))
    pods = [pod for pod in store.scan("pods", namespace) if selector.matches(pod["metadata"].get("labels"))]
    return budget(pdb.get("spec") or {}, pods, _controlled(store, pods))


def _controlled(store: Store, pods: list[Object]) -> int | None:
    """The sum of the replicas of the pods' controllers, or None when one of them has no scale."""
    total, seen = 0, set()
    for pod in pods:
        owner = next(
            (ref for ref in pod["metadata"].get("ownerReferences") or () if ref.get("controller")), None
        )
        if owner is None or owner["uid"] not in store.by_uid:
            return None
        if owner["uid"] in seen:
            continue
        seen.add(owner["uid"])
        storage, key = store.by_uid[owner["uid"]]
        resource = store.registry.stored(storage)
        obj = store.peek(storage, key[1], key[0])
        if resource.scale is None or obj is None:
            return None
        value: object = obj
        for step in resource.scale.spec_replicas:
            value = value.get(step) if isinstance(value, dict) else None
        if not isinstance(value, int):
            return None
        total += value
    return total


def evict(store: Store, name: str, namespace: str, body: Object, options: Options) -> None:
    """Delete a pod gracefully unless a budget forbids it.

    Args:
        store: of all objects.
        name: of the pod.
        namespace: of the pod.
        body: the Eviction.
        options: of the write; `dry_run` is set where the Eviction asks for it.

    Raises:
        ApiError: 404: there is no such pod; 409: it is another one; 429: a budget is against it; 500: two
            budgets select it.
    """
    resource = store.registry.stored("pods")
    pod = store.get_stored(resource, name, namespace).object
    asked = bodies.of_type(body, "Eviction", "deleteOptions", "object") or {}
    if bodies.of_type(asked, "DeleteOptions", "dryRun", "[]string"):
        options.dry_run = True
    request = deletion(asked, {})
    if request.uid and request.uid != pod["metadata"]["uid"]:
        found = pod["metadata"]["uid"]
        why = f"Precondition failed: UID in precondition: {request.uid}, UID in object meta: {found}"
        raise errors.conflict("", "pods", name, why)
    phase = pod.get("status", {}).get("phase")
    if phase not in (*_DONE, "Pending") and not pod["metadata"].get("deletionTimestamp"):
        _ask_budgets(store, pod)
    if not options.dry_run:
        _mark(store, name, namespace)
    writes.delete(store, resource, name, namespace, request, options)


def _ask_budgets(store: Store, pod: Object) -> None:
    labels = pod["metadata"].get("labels")
    namespace = pod["metadata"]["namespace"]
    pdbs = [
        pdb
        for pdb in store.scan(PDBS, namespace)
        if selector_of((pdb.get("spec") or {}).get("selector")).matches(labels)
    ]
    if not pdbs:
        return
    if len(pdbs) > 1:
        raise errors.internal(
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        )
    state = current(store, pdbs[0])
    always = pdbs[0]["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
    if not is_healthy(pod) and (always or state.healthy >= max(state.desired, 1)):
        return
    if state.allowed <= 0:
        cause = (
            f"The disruption budget {pdbs[0]['metadata']['name']} needs {state.desired} healthy pods and has "
            f"{state.healthy} currently"
        )
        raise errors.too_many_requests(
            "Cannot evict pod as it would violate the pod's disruption budget.", cause
        )


def _mark(store: Store, name: str, namespace: str) -> None:
    def change(pod: Object) -> None:
        conditions = pod["status"].setdefault("conditions", [])
        conditions[:] = [condition for condition in conditions if condition["type"] != "DisruptionTarget"]
        conditions.append(
            {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "EvictionByEvictionAPI",
                "message": "Eviction API: evicting",
                "lastProbeTime": None,
                "lastTransitionTime": timestamp(store.now()),
            }
        )

    store.mutate("pods", name, namespace, change, subresource="status")


def refresh_status(store: Store, namespace: str) -> None:
    """Bring the status of a namespace's budgets up to date; written only where it changed.

    Args:
        store: of all objects.
        namespace: whose objects are meant.
    """
    for pdb in list(store.scan(PDBS, namespace)):
        state = current(store, pdb)
        status = {
            "currentHealthy": state.healthy,
            "desiredHealthy": state.desired,
            "disruptionsAllowed": state.allowed,
            "expectedPods": state.expected,
            "observedGeneration": pdb["metadata"].get("generation", 1),
        }
        before = pdb.get("status") or {}
        if all(before.get(name) == value for name, value in status.items()):
            continue
        ok = state.allowed > 0
        condition = {
            "type": "DisruptionAllowed",
            "status": "True" if ok else "False",
            "reason": "SufficientPods" if ok else "InsufficientPods",
            "message": "",
            "lastTransitionTime": _transition(before, ok, store.now()),
            "observedGeneration": status["observedGeneration"],
        }
        made = {**clone(pdb), "status": {**status, "conditions": [condition]}}
        resource = store.registry.stored(PDBS)
        options = Options("kube-controller-manager", subresource="status")
        writes.update(store, resource, pdb["metadata"]["name"], namespace, made, options)


def _transition(before: Object, ok: bool, now: float) -> str:
    for condition in before.get("conditions") or ():
        if condition["status"] == ("True" if ok else "False"):
            return timestamp(parse_timestamp(condition["lastTransitionTime"]))
    return timestamp(now)

"""ReplicaSets: as many pods of a template as asked for."""

from __future__ import annotations

import time
from typing import Any

from springtide_local.clock import parse_timestamp
from springtide_local.controllers.conditions import (
    condition,
    controller_of,
    is_active,
    is_true,
    set_condition,
)
from springtide_local.controllers.loop import Controller
from springtide_local.events import EventRecorder
from springtide_local.informer import Change, Informers
from springtide_local.ports import ApiError, StorePort

Object = dict[str, Any]
RESOURCE = "replicasets.apps"


def victims(pods: list[Object], count: int) -> list[Object]:
    """Return the pods to delete first: not bound, then not running, then not ready, then the youngest.

    Args:
        pods: of the ReplicaSet.
        count: how many of them.
    """

    def worth(pod: Object) -> tuple[bool, bool, bool, float]:
        status = pod.get("status") or {}
        age = -(parse_timestamp(pod["metadata"].get("creationTimestamp")) or 0.0)
        return bool(pod["spec"].get("nodeName")), status.get("phase") == "Running", is_true(pod, "Ready"), age

    return sorted(pods, key=worth)[:count]


def available(pod: Object, min_ready_seconds: float, now: float) -> bool:
    """Return whether a pod is available: ready for long enough.

    Args:
        pod: the Pod.
        min_ready_seconds: for which it has to be ready.
        now: in unix seconds.
    """
    ready = condition(pod, "Ready")
    if ready is None or ready["status"] != "True":
        return False
    since = parse_timestamp(ready.get("lastTransitionTime")) or now
    return now - since >= min_ready_seconds


class ReplicaSets:
    """Creates and deletes pods; adopts none that it did not make."""

    def __init__(self, store: StorePort, informers: Informers) -> None:
        self._store = store
        self._sets = informers.of(RESOURCE)
        self._pods = informers.of("pods")
        self._events = EventRecorder(store, "replicaset-controller")
        self.controller = Controller("replicasets", self._reconcile)
        self._sets.on_change(self.controller.on_change)
        self._pods.on_change(self._on_pod)

    def _on_pod(self, change: Change) -> None:
        owner = controller_of(change.object)
        if owner is not None and owner["kind"] == "ReplicaSet":
            self.controller.enqueue(change.object["metadata"]["namespace"], owner["name"])

    def _reconcile(self, namespace: str, name: str) -> float | None:
        try:
            replica_set = self._store.get(RESOURCE, name, namespace)
        except ApiError as error:
            if error.code == 404:
                return None
            raise
        if replica_set["metadata"].get("deletionTimestamp"):
            return None
        uid = replica_set["metadata"]["uid"]
        # From the store itself: a watch that lags would make it create a pod twice.
        pods = [p for p in self._store.list("pods", namespace) if (controller_of(p) or {}).get("uid") == uid]
        active = [pod for pod in pods if is_active(pod)]
        wanted = int(replica_set["spec"].get("replicas", 1))
        problem = ""
        for _ in range(wanted - len(active)):
            try:
                pod = self._store.create("pods", self._pod(replica_set), namespace)
            except ApiError as error:
                problem = error.message
                self._events.warning(replica_set, "FailedCreate", f"Error creating: {error.message}")
                break
            active.append(pod)
            self._events.normal(replica_set, "SuccessfulCreate", f"Created pod: {pod['metadata']['name']}")
        for pod in victims(active, len(active) - wanted):
            active.remove(pod)
            self._store.delete("pods", pod["metadata"]["name"], namespace, uid=pod["metadata"]["uid"])
            self._events.normal(replica_set, "SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}")
        return self._write_status(replica_set, active, problem)

    def _pod(self, replica_set: Object) -> Object:
        template, metadata = replica_set["spec"]["template"], replica_set["metadata"]
        owner = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        kept = {
            key: value
            for key, value in (template.get("metadata") or {}).items()
            if key in ("labels", "annotations")
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**kept, "generateName": f"{metadata['name']}-", "ownerReferences": [owner]},
            "spec": template["spec"],
        }

    def _write_status(self, replica_set: Object, active: list[Object], problem: str) -> float | None:
        now = time.time()
        delay = float(replica_set["spec"].get("minReadySeconds") or 0)
        ready = [pod for pod in active if is_true(pod, "Ready")]
        usable = [pod for pod in ready if available(pod, delay, now)]
        labels = (replica_set["spec"]["template"].get("metadata") or {}).get("labels") or {}
        labelled = [pod for pod in active if labels.items() <= (pod["metadata"].get("labels") or {}).items()]

        def change(obj: Object) -> None:
            status = obj.setdefault("status", {})
            status.update(
                replicas=len(active),
                fullyLabeledReplicas=len(labelled),
                readyReplicas=len(ready),
                availableReplicas=len(usable),
                observedGeneration=obj["metadata"].get("generation", 0),
            )
            if problem:
                set_condition(status, "ReplicaFailure", "True", "FailedCreate", problem, now)
            else:
                status["conditions"] = [
                    c for c in status.get("conditions") or [] if c["type"] != "ReplicaFailure"
                ]
                if not status["conditions"]:
                    del status["conditions"]

        metadata = replica_set["metadata"]
        self._store.mutate(RESOURCE, metadata["name"], metadata["namespace"], change, subresource="status")
        if problem:
            raise ApiError(403, "Forbidden", problem)
        return delay if len(usable) < len(ready) else None

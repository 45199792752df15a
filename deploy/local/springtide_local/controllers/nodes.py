"""Node life cycle: a node whose lease is not renewed becomes NotReady and tainted; its pods are deleted
when their toleration is over.

As in Kubernetes, a pod on a dead node stays Terminating until its kubelet comes back, the Node object is
deleted, or somebody deletes it by force. The times are shorter: see `NodeTimes`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from springtide_local.clock import parse_timestamp, timestamp
from springtide_local.controllers.conditions import condition, set_condition
from springtide_local.events import EventRecorder
from springtide_local.informer import Informers
from springtide_local.ports import ApiError, StorePort
from springtide_local.selection import toleration_of
from springtide_local.settings import LEASES, NodeTimes

Object = dict[str, Any]
_log = logging.getLogger(__name__)
_TICK = 0.25
_OURS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/unschedulable")
_EVICTING = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


class Silence:
    """How long a lease has not been renewed, as far as this process could have seen it: while it was itself
    held up, nobody was silent.
    """

    def __init__(self) -> None:
        self._renewals: dict[str, str] = {}
        self._silent: dict[str, float] = {}
        self._looked: float | None = None

    def look(self, renewals: dict[str, str], now: float) -> dict[str, float]:
        """Return for how many seconds each node has been silent.

        Args:
            renewals: renewTime of the lease, by node.
            now: monotonic time in seconds.
        """
        passed = 0.0 if self._looked is None else min(now - self._looked, 2 * _TICK)
        self._looked = now
        for name, renewal in renewals.items():
            if self._renewals.get(name) == renewal:
                self._silent[name] = self._silent.get(name, 0.0) + passed
            else:
                self._silent[name] = 0.0
        self._renewals = dict(renewals)
        self._silent = {name: self._silent[name] for name in renewals}
        return dict(self._silent)


def wanted_taints(node: Object, now: float) -> list[Object]:
    """Return the taints that follow from a node's Ready condition and its spec, and those of others.

    Args:
        node: the Node.
        now: in unix seconds: NoExecute ones say since when.
    """
    spec = node.get("spec") or {}
    taints = spec.get("taints") or []
    known = {(taint["key"], taint["effect"]): taint for taint in taints}
    ready = condition(node, "Ready")
    wanted: list[tuple[str, str]] = []
    if spec.get("unschedulable"):
        wanted.append(("node.kubernetes.io/unschedulable", "NoSchedule"))
    if ready is None or ready["status"] != "True":
        key = (
            "node.kubernetes.io/unreachable"
            if ready is not None and ready["status"] == "Unknown"
            else _OURS[0]
        )
        wanted += [(key, "NoSchedule"), (key, "NoExecute")]
    made = [taint for taint in taints if taint["key"] not in _OURS]
    made += [known.get(pair) or {"key": pair[0], "effect": pair[1]} for pair in wanted]
    return [
        {"timeAdded": timestamp(now), **taint} if taint["effect"] == "NoExecute" else taint for taint in made
    ]


def eviction_due(pod: Object, taints: list[Object], toleration: float) -> tuple[float, str] | None:
    """Return when (seconds since 1970) the pod has to leave a node with these taints, and which one drives it
    out; None: it may stay.

    Args:
        pod: on the node.
        taints: of the node.
        toleration: seconds for taints that the pod does not name.
    """
    due: tuple[float, str] | None = None
    for taint in taints:
        if taint.get("effect") != "NoExecute":
            continue
        since = parse_timestamp(taint.get("timeAdded")) or 0.0
        found = toleration_of(pod["spec"].get("tolerations") or [], taint)
        if found is None:
            delay = toleration if taint["key"] in _EVICTING else 0.0
        elif found.get("tolerationSeconds") is None:
            continue
        else:
            delay = min(float(found["tolerationSeconds"]), toleration)
        if due is None or since + delay < due[0]:
            due = (since + delay, taint["key"])
    return due


class NodeLifecycle:
    def __init__(self, store: StorePort, informers: Informers, times: NodeTimes) -> None:
        self._store = store
        self._times = times
        self._nodes = informers.of("nodes")
        self._leases = informers.of("leases.coordination.k8s.io")
        self._pods = informers.of("pods")
        self._events = EventRecorder(store, "node-controller")
        self._silence = Silence()
        self._gone_since: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            try:
                self._tick(time.time())
            except ApiError as error:
                _log.info("node life cycle: %s", error.message)
            await asyncio.sleep(_TICK)

    def _tick(self, now: float) -> None:
        renewals = {
            lease["metadata"]["name"]: str(lease["spec"].get("renewTime"))
            for lease in self._leases.all(LEASES)
        }
        silence = self._silence.look(renewals, time.monotonic())
        names = set()
        for node in self._nodes.all():
            name = node["metadata"]["name"]
            names.add(name)
            ready = condition(node, "Ready")
            if (
                silence.get(name, 0.0) > self._times.grace
                and ready is not None
                and ready["status"] != "Unknown"
            ):
                self._lost(node, now)
            elif wanted_taints(node, now) != ((node.get("spec") or {}).get("taints") or []):
                self._taint(name, now)
        self._evict(now)
        self._collect(names)

    def _lost(self, node: Object, now: float) -> None:
        name = node["metadata"]["name"]
        text = "Kubelet stopped posting node status."

        def change(fresh: Object) -> None:
            for kind in ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready"):
                set_condition(fresh["status"], kind, "Unknown", "NodeStatusUnknown", text, now)

        self._store.mutate("nodes", name, None, change, subresource="status")
        self._taint(name, now)
        self._events.normal(node, "NodeNotReady", f"Node {name} status is now: NodeNotReady")
        for pod in self._pods.all():
            if pod["spec"].get("nodeName") == name and (pod.get("status") or {}).get("phase") == "Running":
                self._unready(pod, now)

    def _unready(self, pod: Object, now: float) -> None:
        metadata = pod["metadata"]

        def change(fresh: Object) -> None:
            if condition(fresh, "Ready") is not None:
                set_condition(fresh["status"], "Ready", "False", "NodeNotReady", "", now)

        try:
            self._store.mutate("pods", metadata["name"], metadata["namespace"], change, subresource="status")
        except ApiError as error:
            if error.code != 404:
                raise
            return
        self._events.warning(pod, "NodeNotReady", "Node is not ready")

    def _taint(self, name: str, now: float) -> None:
        def change(node: Object) -> None:
            taints = wanted_taints(node, now)
            if taints:
                node.setdefault("spec", {})["taints"] = taints
            else:
                node.setdefault("spec", {}).pop("taints", None)

        self._store.mutate("nodes", name, None, change)

    def _evict(self, now: float) -> None:
        taints = {
            node["metadata"]["name"]: (node.get("spec") or {}).get("taints") or []
            for node in self._nodes.all()
        }
        if not any(taint.get("effect") == "NoExecute" for each in taints.values() for taint in each):
            return
        for pod in self._pods.all():
            metadata = pod["metadata"]
            if metadata.get("deletionTimestamp") or (pod.get("status") or {}).get("phase") in (
                "Succeeded",
                "Failed",
            ):
                continue
            due = eviction_due(pod, taints.get(pod["spec"].get("nodeName", ""), []), self._times.toleration)
            if due is not None and due[0] <= now:
                self._delete_tainted(pod, due[1], now)

    def _delete_tainted(self, pod: Object, taint: str, now: float) -> None:
        metadata = pod["metadata"]
        text = f"Taint manager: deleting due to NoExecute taint {taint}"

        def change(fresh: Object) -> None:
            status = fresh.setdefault("status", {})
            set_condition(status, "DisruptionTarget", "True", "DeletionByTaintManager", text, now)

        try:
            self._store.mutate("pods", metadata["name"], metadata["namespace"], change, subresource="status")
            self._store.delete("pods", metadata["name"], metadata["namespace"], uid=metadata["uid"])
        except ApiError as error:
            if error.code not in (404, 409):
                raise
            return
        self._events.normal(
            pod,
            "TaintManagerEviction",
            f"Marking for deletion Pod {metadata['namespace']}/{metadata['name']}",
        )

    def _collect(self, nodes: set[str]) -> None:
        """Remove the pods of nodes that have been gone for as long as a silent one is waited for (Kubernetes:
        40 s), and pods being deleted on nodes that are declared out of service.
        """
        out = {
            node["metadata"]["name"]
            for node in self._nodes.all()
            if any(
                t["key"] == "node.kubernetes.io/out-of-service"
                for t in (node.get("spec") or {}).get("taints") or []
            )
        }
        for name in nodes & self._gone_since.keys():
            del self._gone_since[name]
        for pod in self._pods.all():
            metadata, node = pod["metadata"], pod["spec"].get("nodeName")
            orphan = self._gone_for(node, nodes) >= self._times.grace if node else False
            if orphan or (node in out and metadata.get("deletionTimestamp")):
                try:
                    self._store.delete("pods", metadata["name"], metadata["namespace"], 0, metadata["uid"])
                except ApiError as error:
                    if error.code not in (404, 409):
                        raise

    def _gone_for(self, name: str, nodes: set[str]) -> float:
        """Seconds since this was first seen; 0 while there is such a node."""
        if name in nodes:
            return 0.0
        now = time.monotonic()
        return now - self._gone_since.setdefault(name, now)

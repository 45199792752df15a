"""One node's kubelet: registers the node, keeps its heartbeat, and has a worker for each pod bound to it.

The node can be made to fail: the annotation `springtide.dev/local-node` on its Node object says `killed`
(all processes die, nothing is reported any more), `crashed` (the same, and its addresses are silent, as when
the machine loses power) or `stopped` (all processes are stopped); without it the node works, and comes back.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from springtide_local.clock import micro_timestamp, timestamp
from springtide_local.controllers.conditions import is_true
from springtide_local.informer import Change, Informers
from springtide_local.kubelet.blackout import SilentSockets
from springtide_local.kubelet.live import LiveContainer
from springtide_local.kubelet.pod import PodWorker
from springtide_local.kubelet.services import NodeServices
from springtide_local.ports import ApiError
from springtide_local.settings import CRASHED, KILLED, LEASES, STATE_ANNOTATION, STOPPED

Object = dict[str, Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeShape:
    """Size of a node, as Kubernetes quantities by resource name."""

    name: str
    address: str
    capacity: Mapping[str, str]
    version: str
    labels: Mapping[str, str]


class Kubelet:
    """The workers of one node. `heartbeat` is the time between two renewals of the node's lease, in
    seconds. `make_worker` makes that of a pod.
    """

    def __init__(
        self,
        shape: NodeShape,
        node: NodeServices,
        informers: Informers,
        heartbeat: float,
        make_worker: Callable[[Object, NodeServices], PodWorker] = PodWorker,
    ) -> None:
        self.shape = shape
        self.workers: dict[str, PodWorker] = {}
        self._node = node
        self._heartbeat = heartbeat
        self._make_worker = make_worker
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._state = ""
        self._silent = SilentSockets()
        self._crash: asyncio.Task[None] | None = None
        self._informers = informers

    @property
    def down(self) -> str:
        """`killed`, `crashed` or `stopped`; empty while the node works."""
        return self._state

    async def run(self) -> None:
        """Run the node's pods until cancelled; then all its processes are killed before this returns."""
        self._register()
        self._node.running.set()
        self._informers.of("nodes").on_change(self._on_node)
        self._informers.of("pods").on_change(self._on_pod)
        for resource in ("secrets", "configmaps", "persistentvolumeclaims"):
            self._informers.of(resource).on_change(self._on_reference)
        try:
            while True:
                await asyncio.sleep(self._heartbeat)
                if not self._state:
                    self._renew()
        finally:
            tasks = [*self._tasks.values(), *([self._crash] if self._crash is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._silent.release()

    def _on_pod(self, change: Change) -> None:
        pod = change.object
        uid = pod["metadata"]["uid"]
        worker = self.workers.get(uid)
        if worker is not None:
            if change.type == "DELETED":
                worker.removed()
            else:
                worker.update(pod)
            return
        if change.type == "DELETED" or pod["spec"].get("nodeName") != self.shape.name:
            return
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed") and not pod["metadata"].get(
            "deletionTimestamp"
        ):
            return
        worker = self._make_worker(pod, self._node)
        self.workers[uid] = worker
        task = asyncio.get_running_loop().create_task(worker.run(), name=f"pod:{worker.name}")
        self._tasks[uid] = task
        task.add_done_callback(lambda done: self._forget(uid, done))

    def _forget(self, uid: str, task: asyncio.Task[None]) -> None:
        worker = self.workers.pop(uid)
        del self._tasks[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the worker of pod %s ended with an error", worker.name, exc_info=error)

    def _on_reference(self, change: Change) -> None:
        namespace, name = change.object["metadata"]["namespace"], change.object["metadata"]["name"]
        for worker in self.workers.values():
            if worker.pod["metadata"]["namespace"] == namespace:
                worker.reference_changed(change.object.get("kind", ""), name)

    def _on_node(self, change: Change) -> None:
        if change.object["metadata"]["name"] != self.shape.name:
            return
        if change.type == "DELETED":
            if not self._state:
                self._register()
            return
        wanted = (change.object["metadata"].get("annotations") or {}).get(STATE_ANNOTATION, "")
        if wanted != self._state:
            self._enter(wanted)

    def _enter(self, wanted: str) -> None:
        _log.info("node %s: %s", self.shape.name, wanted or "works")
        old, self._state = self._state, wanted
        lives = [live for worker in self.workers.values() for live in worker.live.values()]
        if wanted:
            self._node.running.clear()
            for live in lives:
                live.kill() if wanted == KILLED else live.running.freeze()
            if wanted == CRASHED:
                self._crash = asyncio.get_running_loop().create_task(self._die_in_silence(lives))
            return
        if self._crash is not None:
            self._crash.add_done_callback(lambda _: self._silent.release())
        if old == STOPPED:
            for live in lives:
                live.running.thaw()
        self._node.running.set()
        for worker in self.workers.values():
            worker.wake()
        self._register()

    async def _die_in_silence(self, lives: list[LiveContainer]) -> None:
        """Take the sockets of all containers off the network while they stand still, then kill them."""

        def take() -> list[str]:
            return self._silent.take([pid for live in lives for pid in live.running.pids()])

        try:
            for failure in await asyncio.get_running_loop().run_in_executor(None, take):
                _log.warning("node %s does not crash in silence: %s", self.shape.name, failure)
        finally:
            for live in lives:
                live.kill()

    def _register(self) -> None:
        shape, now = self.shape, time.time()
        labels = {
            "kubernetes.io/hostname": shape.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(
                platform.machine(), platform.machine()
            ),
            "node.kubernetes.io/instance-type": "springtide-local",
            **shape.labels,
        }
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": shape.name, "labels": labels},
            "spec": {"providerID": f"springtide-local://{self._node.cluster}/{shape.name}"},
            "status": self._status({}, now),
        }
        store = self._node.store
        try:
            store.create("nodes", node)
        except ApiError as error:
            if error.code != 409:
                raise
            store.mutate(
                "nodes", shape.name, None, lambda n: n["metadata"].setdefault("labels", {}).update(labels)
            )
        self._write_status(now)
        self._node.events.normal(node, "Starting", "Starting kubelet.")
        self._renew()

    def _write_status(self, now: float) -> None:
        def change(node: Object) -> None:
            node["status"] = self._status(node.get("status") or {}, now)

        self._node.store.mutate("nodes", self.shape.name, None, change, subresource="status")

    def _renew(self) -> None:
        now = time.time()

        def renew(lease: Object) -> None:
            lease.setdefault("spec", {})["renewTime"] = micro_timestamp(now)

        try:
            self._node.store.mutate("leases.coordination.k8s.io", self.shape.name, LEASES, renew)
        except ApiError as error:
            if error.code != 404:
                raise
            spec = {
                "holderIdentity": self.shape.name,
                "leaseDurationSeconds": 40,
                "renewTime": micro_timestamp(now),
            }
            metadata = {"name": self.shape.name, "namespace": LEASES}
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": metadata,
                "spec": spec,
            }
            self._node.store.create("leases.coordination.k8s.io", lease, LEASES)
        node = self._informers.of("nodes").get(None, self.shape.name)
        if node is not None and not is_true(node, "Ready"):
            self._write_status(now)

    def _status(self, old: Object, now: float) -> Object:
        shape = self.shape
        known = {c["type"]: c for c in old.get("conditions") or []}
        calm = {
            "MemoryPressure": (
                "False",
                "KubeletHasSufficientMemory",
                "kubelet has sufficient memory available",
            ),
            "DiskPressure": ("False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
            "PIDPressure": ("False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
            "Ready": ("True", "KubeletReady", "kubelet is posting ready status"),
        }
        for name, (status, reason, message) in calm.items():
            before = known.get(name)
            since = (
                before["lastTransitionTime"]
                if before is not None and before["status"] == status
                else timestamp(now)
            )
            known[name] = {
                "type": name,
                "status": status,
                "reason": reason,
                "message": message,
                "lastHeartbeatTime": timestamp(now),
                "lastTransitionTime": since,
            }
        return {
            **old,
            "capacity": dict(shape.capacity),
            "allocatable": dict(shape.capacity),
            "conditions": list(known.values()),
            "addresses": [
                {"type": "InternalIP", "address": shape.address},
                {"type": "Hostname", "address": shape.name},
            ],
            "nodeInfo": {
                "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(
                    platform.machine(), platform.machine()
                ),
                "bootID": self._node.cluster,
                "containerRuntimeVersion": "process://1",
                "kernelVersion": platform.release(),
                "kubeProxyVersion": shape.version,
                "kubeletVersion": shape.version,
                "machineID": self._node.cluster,
                "operatingSystem": "linux",
                "osImage": "Springtide local (processes)",
                "systemUUID": self._node.cluster,
            },
        }

"""Faults on a cluster, done to one job and its operator at random, from a seed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import standstill
from e2e_cluster import OPERATOR_LABELS, OPERATOR_NAMESPACE, E2ECluster
from operator_fake_worker import FakeJob

from springtide_kube.errors import ApiRefusal
from springtide_local.cluster import Cluster
from springtide_local.strays import program_of
from springtide_operator.plan.values import parse_time

Object = dict[str, Any]

LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/springtide-operator"
STOP_SECONDS = 12.0  # longer than the operator's lease
TAKEOVER_SECONDS = 30.0


def process_of(pod: Object) -> int | None:
    """Process id of the command of a pod's first container, while it runs."""
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        if (status.get("state") or {}).get("running"):
            return program_of(int(status["containerID"].removeprefix("process://")))
    return None


def kill_process(pod: Object, number: int = signal.SIGKILL) -> int | None:
    """Send a signal to a pod's process; None when there is none any more."""
    pid = process_of(pod)
    if pid is None:
        return None
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGSTOP:
            standstill.stop(pid)
        else:
            os.kill(pid, number)
        return pid
    return None


def acting_operator(cluster: E2ECluster) -> Object | None:
    """The pod whose process holds the lease."""
    holder = cluster.api.request("GET", LEASE)["spec"].get("holderIdentity") or ""
    for pod in cluster.pods(OPERATOR_NAMESPACE, OPERATOR_LABELS):
        if holder.endswith(pod["metadata"]["uid"]):
            return pod
    return None


@dataclass
class Faults:
    """One fault after the other. `operator_times`: when an operator was disturbed (monotonic seconds)."""

    cluster: E2ECluster
    embedded: Cluster
    job: FakeJob
    seed: int
    replicas: int
    most: int
    down: str | None = None
    cordoned: str | None = None
    quota: bool = False
    suspended: bool = False
    stopped: dict[int, float] = field(default_factory=dict)  # operator processes, and when they go on
    log: list[str] = field(default_factory=list)
    operator_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._began = time.monotonic()
        self._disturb()

    def strike(self) -> None:
        """Do one thing, chosen by the seed; what cannot be done now is passed over."""
        choices: list[tuple[int, Callable[[], str]]] = [
            (6, self.kill_worker),
            (3, self.delete_worker),
            (3, self.force_delete_worker),
            (3, self.evict_worker),
            (5, self.scale),
            (2, self.kill_operator),
            (1, self.stop_operator),
            (2, self.kill_coordinator),
            (2, self.delete_coordinator),
            (3, self.node_down_or_up),
            (3, self.cordon_or_uncordon),
            (2, self.quota_on_or_off),
            (2, self.suspend_or_resume),
        ]
        fault = self.random.choices([f for _, f in choices], [weight for weight, _ in choices])[0]
        self._awake()
        try:
            said = fault()
        except ApiRefusal as error:
            said = f"{fault.__name__}: {error}"
        self.log.append(f"{time.monotonic() - self._began:6.1f} s  {said}")

    def hindered(self) -> str | None:
        """Why there may rightly be fewer workers than wanted; None: nothing stands against them."""
        if self.quota or self.suspended:
            return "a quota, or suspension"
        if self.stopped or time.monotonic() - self.operator_times[-1] < TAKEOVER_SECONDS:
            return "an operator that takes over"
        until = [entry["until"] for entry in (self.job.status().get("backoff") or {}).values()]
        if any((parse_time(at) or 0.0) > time.time() for at in until):
            return "a backoff"
        return None

    def heal(self) -> None:
        """End all that lasts."""
        if self.down is not None:
            self.node_down_or_up()
        if self.cordoned is not None:
            self.cordon_or_uncordon()
        if self.quota:
            self.quota_on_or_off()
        if self.suspended:
            self.suspend_or_resume()
        for pid in list(self.stopped):
            self._continue(pid)

    def _disturb(self) -> None:
        self.operator_times.append(time.monotonic())

    def _awake(self) -> None:
        for pid, at in list(self.stopped.items()):
            if time.monotonic() >= at:
                self._continue(pid)

    def _continue(self, pid: int) -> None:
        del self.stopped[pid]
        self._disturb()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _worker(self) -> Object:
        live = [p for p in self.job.pods().values() if "deletionTimestamp" not in p["metadata"]]
        if not live:
            raise ApiRefusal(404, "NotFound", "there is no worker")
        return self.random.choice(sorted(live, key=lambda pod: str(pod["metadata"]["name"])))

    def _coordinator(self) -> Object:
        pods = list(self.job.pods("coordinator").values())
        if not pods:
            raise ApiRefusal(404, "NotFound", "there is no coordinator")
        return pods[-1]

    def _path(self, pod: Object, sub: str = "") -> str:
        return f"/api/v1/namespaces/{self.job.namespace}/pods/{pod['metadata']['name']}{sub}"

    def kill_worker(self) -> str:
        pod = self._worker()
        return f"kill -9 of {pod['metadata']['name']}: {kill_process(pod)}"

    def delete_worker(self) -> str:
        pod = self._worker()
        self.cluster.api.request("DELETE", self._path(pod))
        return f"delete {pod['metadata']['name']}"

    def force_delete_worker(self) -> str:
        pod = self._worker()
        self.cluster.api.request("DELETE", self._path(pod), {"gracePeriodSeconds": 0})
        return f"delete by force {pod['metadata']['name']}"

    def evict_worker(self) -> str:
        pod = self._worker()
        self.cluster.api.evict(self.job.namespace, pod["metadata"]["name"])
        return f"evict {pod['metadata']['name']}"

    def scale(self) -> str:
        self.replicas = self.random.randint(1, self.most)
        self.cluster.api.scale(self.job.namespace, self.job.name, self.replicas)
        return f"scale to {self.replicas}"

    def kill_operator(self) -> str:
        pod = acting_operator(self.cluster)
        self._disturb()
        if pod is None:
            return "kill -9 of the operator: nobody acts"
        return f"kill -9 of {pod['metadata']['name']}: {kill_process(pod)}"

    def stop_operator(self) -> str:
        pod = acting_operator(self.cluster)
        pid = kill_process(pod, signal.SIGSTOP) if pod is not None else None
        if pod is None or pid is None:
            return "SIGSTOP of the operator: nobody acts"
        self._disturb()
        self.stopped[pid] = time.monotonic() + STOP_SECONDS
        return f"SIGSTOP of {pod['metadata']['name']} for {STOP_SECONDS:.0f} s"

    def kill_coordinator(self) -> str:
        pod = self._coordinator()
        return f"kill -9 of {pod['metadata']['name']}: {kill_process(pod)}"

    def delete_coordinator(self) -> str:
        pod = self._coordinator()
        self.cluster.api.request("DELETE", self._path(pod))
        return f"delete {pod['metadata']['name']}"

    def node_down_or_up(self) -> str:
        self._disturb()  # it may be on that node
        if self.down is None:
            self.down = f"springtide-{self.random.randrange(3)}"
            self.embedded.kill_node(self.down)
            return f"node {self.down} is dead"
        name, self.down = self.down, None
        self.embedded.restore_node(name, timeout=60)
        return f"node {name} is back"

    def cordon_or_uncordon(self) -> str:
        name = self.cordoned or f"springtide-{self.random.randrange(3)}"
        cordon = self.cordoned is None
        body = {"spec": {"unschedulable": cordon or None}}
        self.cluster.api.request("PATCH", f"/api/v1/nodes/{name}", body, "application/merge-patch+json")
        self.cordoned = name if cordon else None
        return f"{'cordon' if cordon else 'uncordon'} {name}"

    def quota_on_or_off(self) -> str:
        path = f"/api/v1/namespaces/{self.job.namespace}/resourcequotas"
        self.quota = not self.quota
        if not self.quota:
            self.cluster.api.request("DELETE", f"{path}/small")
            return "no quota"
        hard = {"pods": str(self.random.randint(1, 4))}
        body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
        self.cluster.api.request("POST", path, {**body, "spec": {"hard": hard}})
        return f"quota of {hard['pods']} pods"

    def suspend_or_resume(self) -> str:
        path = f"/apis/springtide.dev/v1alpha1/namespaces/{self.job.namespace}/trainingjobs/{self.job.name}"
        self.suspended = not self.suspended
        self._disturb()  # whoever leaves may take its grace period
        body = {"spec": {"suspend": self.suspended}}
        self.cluster.api.request("PATCH", path, body, "application/merge-patch+json")
        return "suspend" if self.suspended else "resume"

"""The operator's process over a cluster in memory: lost nodes, refusals, a namespace that goes."""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Any

import pytest
from operator_cluster import FakeCluster
from operator_running import operator, until

from springtide_kube.errors import ApiError
from springtide_operator.api import names
from springtide_operator.plan import nodes, sight
from springtide_operator.plan.values import timestamp

Object = dict[str, Any]


def node(name: str, ready: str = "True", **spec: Any) -> Object:
    """A Node; its last change was a minute ago."""
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": timestamp(time.time() - 60)}
    meta = {"name": name, "namespace": ""}
    return {"kind": "Node", "metadata": meta, "spec": spec, "status": {"conditions": [condition]}}


def degraded(cluster: FakeCluster) -> str:
    found = cluster.job()["status"]["conditions"]
    return next(str(one["reason"]) for one in found if one["type"] == "Degraded")


async def test_workers_leave_lost_nodes_and_are_deleted_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "GONE_SECONDS", 1.0)
    monkeypatch.setattr(sight, "HEARD_SECONDS", 1.0)
    cluster = FakeCluster()
    cluster.put("nodes", node("a"))
    cluster.put("nodes", node("b"))
    cluster.add_job(replicas=2)
    async with operator(cluster) as running:
        await until(lambda: len(cluster.pods()) == 2, "two workers")
        for pod, name in zip(cluster.pods(), ("a", "b"), strict=True):
            pod["spec"]["nodeName"] = name
        cluster.run_pods()
        assert running.cache.nodes() is not None
        running.take_event("nodes", "MODIFIED", cluster.put("nodes", node("b", "Unknown")))
        await until(
            lambda: "digits-worker-1-1" in {p["metadata"]["name"] for p in cluster.pods()}, "a replacement"
        )
        lost = cluster.objects["pods", "default", "digits-worker-1-0"]
        assert lost["metadata"]["annotations"][names.ANNOTATION_DELETED_BECAUSE] == "NodeLost"
        cluster.remove("nodes", "", "b")
        running.take_event(
            "nodes", "DELETED", {**node("b"), "metadata": {"name": "b", "resourceVersion": "9999"}}
        )
        await until(lambda: ("pods", "default", "digits-worker-1-0") not in cluster.objects, "force")
        read = running.metrics.registry.get_sample_value
        assert read("springtide_operator_nodes", {"state": "total"}) == 1
        assert read("springtide_operator_brake", {"why": "nodes"}) == 0
        running.take_event("nodes", "MODIFIED", cluster.put("nodes", node("a", "Unknown")))
        await until(lambda: read("springtide_operator_brake", {"why": "nodes"}) == 1, "the brake")
        assert read("springtide_operator_nodes", {"state": "lost"}) == 1
        await until(lambda: degraded(cluster) == "TooManyNodesUnknown", "a word in status")
    assert cluster.job()["status"]["restarts"]["preemptions"] == 1


async def test_nodes_that_may_not_be_read_are_told_of_and_done_without() -> None:
    cluster = FakeCluster()

    def refuse(method: str, name: str) -> None:
        if method == "list_nodes":
            raise ApiError(403, "Forbidden", "nodes is forbidden")

    cluster.before = refuse
    cluster.add_job(replicas=1)
    async with operator(cluster) as running:
        await until(lambda: len(cluster.pods()) == 1, "a worker")
        assert running.cache.nodes() is None
        value = running.metrics.registry.get_sample_value("springtide_operator_nodes_readable")
        assert value == 0.0


async def test_an_operator_of_named_namespaces_does_not_ask_for_nodes() -> None:
    cluster = FakeCluster()
    cluster.add_job(replicas=1)
    async with operator(cluster, watched=("default",)):
        await until(lambda: len(cluster.pods()) == 1, "a worker")
    assert cluster.calls["list_nodes"] == 0


async def test_a_namespace_that_is_being_deleted_is_asked_once() -> None:
    cluster = FakeCluster()

    def refuse(method: str, name: str) -> None:
        if method.startswith("create_") and method not in ("create_lease", "create_event"):
            raise ApiError(403, "Forbidden", "is forbidden", ("NamespaceTerminating",))

    cluster.before = refuse
    cluster.add_job(replicas=2)
    async with operator(cluster, tick=0.02):
        await until(lambda: cluster.job().get("status", {}).get("conditions"), "status")
        await until(
            lambda: (
                [c["reason"] for c in cluster.job()["status"]["conditions"] if c["type"] == "Degraded"]
                == ["NamespaceTerminating"]
            ),
            "the condition",
        )
        before = +cluster.calls
        await asyncio.sleep(0.2)
    made = ("create_pod", "create_secret", "apply_service")
    assert [cluster.calls[name] - before[name] for name in made] == [0, 0, 0]
    assert cluster.pods() == []


async def test_quota_changed_by_others_meanwhile_is_asked_again() -> None:
    cluster = FakeCluster()
    refused: list[str] = []

    def refuse(method: str, name: str) -> None:
        if method == "create_pod" and len(refused) < 3:
            refused.append(name)
            raise ApiError(409, "Conflict", "Operation cannot be fulfilled on resourcequotas")

    cluster.before = refuse
    cluster.add_job(replicas=2)
    async with operator(cluster):
        await until(lambda: len(cluster.pods()) == 2, "two workers")
    assert cluster.job()["status"]["restarts"]["total"] == 0


async def test_refused_deletion_is_reported_until_unwanted() -> None:
    cluster = FakeCluster()
    protected = True

    def refuse(method: str, name: str) -> None:
        if method == "delete_pod" and protected:
            raise ApiError(403, "Forbidden", 'admission webhook "keep" denied the request: no deletions')

    def degraded() -> str:
        said = (cluster.job().get("status") or {}).get("conditions") or []
        return next((f"{c['reason']}: {c['message']}" for c in said if c["type"] == "Degraded"), "")

    def going() -> int:
        return sum("deletionTimestamp" in pod["metadata"] for pod in cluster.pods())

    cluster.before = refuse
    cluster.add_job(replicas=2)
    async with operator(cluster, tick=0.05):
        await until(lambda: len(cluster.pods()) == 2, "two workers")
        job = copy.deepcopy(cluster.job())
        job["spec"]["workers"]["replicas"] = 1
        job["metadata"]["generation"] += 1
        cluster.put("trainingjobs", job)
        await until(lambda: "PodDeletionRefused" in degraded(), "the condition")
        assert 'the deletion of pods: admission webhook "keep" denied' in degraded()
        assert going() == 0
        protected = False
        await until(lambda: going() == 1, "the deletion")
        await until(lambda: "PodDeletionRefused" not in degraded(), "its end in the condition")

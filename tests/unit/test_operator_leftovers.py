"""Pods of deleted jobs: whose grace the operator shortens, and whose it does not."""

from __future__ import annotations

import time
from typing import Any

import pytest
from operator_cluster import FakeCluster
from operator_running import operator, until

from springtide_operator.api import names
from springtide_operator.cache import Cache
from springtide_operator.kube import ApiError
from springtide_operator.plan.clock import timestamp

Object = dict[str, Any]
KEY = ("default", "digits")


def collect(cluster: FakeCluster, pods: list[Object], grace: int = 120) -> None:
    """Delete these as Kubernetes' garbage collector does."""
    for pod in pods:
        pod["metadata"] |= {
            "deletionTimestamp": timestamp(time.time() + grace),
            "deletionGracePeriodSeconds": grace,
        }
        cluster.put("pods", pod)


def graces(cluster: FakeCluster) -> set[int | None]:
    return {pod["metadata"].get("deletionGracePeriodSeconds") for pod in cluster.pods()}


@pytest.fixture
def cluster() -> FakeCluster:
    made = FakeCluster()
    made.add_job(replicas=2)
    return made


async def test_pods_of_a_deleted_job_get_less_grace(cluster: FakeCluster) -> None:
    async with operator(cluster):
        await until(lambda: len(cluster.pods()) == 2, "the workers")
        cluster.remove("trainingjobs", *KEY)
        first, second = cluster.pods()
        collect(cluster, [first])
        await until(lambda: 5 in graces(cluster), "the shorter grace")
        assert graces(cluster) == {5, None}  # what nobody has deleted is not the operator's to delete
        collect(cluster, [second])
        await until(lambda: graces(cluster) == {5}, "the other one's")
        assert cluster.calls["get_job"] == 1
        assert cluster.calls["delete_pod"] == 0


async def test_operator_that_starts_finds_pods_of_no_job(cluster: FakeCluster) -> None:
    async with operator(cluster):
        await until(lambda: len(cluster.pods()) == 2, "the workers")
    cluster.remove("trainingjobs", *KEY)
    collect(cluster, cluster.pods())
    async with operator(cluster, identity="two", watch=False):
        await until(lambda: graces(cluster) == {5}, "the shorter grace")


async def test_job_that_the_api_server_knows_is_not_gone(cluster: FakeCluster) -> None:
    """A watch that says so too early costs no worker its time to leave."""
    async with operator(cluster) as made:
        await until(lambda: len(cluster.pods()) == 2, "the workers")
        cluster.calls.clear()
        made.job_event("DELETED", cluster.job())
        collect(cluster, cluster.pods())
        await until(lambda: cluster.calls["get_job"], "the question")
        assert cluster.calls["shorten_grace"] == 0
        assert graces(cluster) == {120}


async def test_job_of_the_same_name_keeps_its_pods(cluster: FakeCluster) -> None:
    async with operator(cluster):
        await until(lambda: len(cluster.pods()) == 2, "the workers")
        old = {pod["metadata"]["uid"] for pod in cluster.pods()}
        cluster.remove("trainingjobs", *KEY)
        cluster.remove("services", "default", names.service_name("digits"))
        cluster.add_job(replicas=2)
        collect(cluster, cluster.pods())
        await until(lambda: 5 in graces(cluster), "the shorter grace")
        await until(lambda: any(p["metadata"]["uid"] not in old for p in cluster.pods()), "the new one's")
        for pod in cluster.pods():
            given = pod["metadata"].get("deletionGracePeriodSeconds")
            assert (given in (5, 120)) == (pod["metadata"]["uid"] in old)


async def test_shortening_that_fails_is_tried_again(cluster: FakeCluster) -> None:
    failures = iter([ApiError(500, "InternalError", "not now"), ApiError(0, "Timeout", "no answer")])

    def before(method: str, name: str) -> None:
        if method == "shorten_grace" and (error := next(failures, None)) is not None:
            raise error

    async with operator(cluster):
        await until(lambda: len(cluster.pods()) == 2, "the workers")
        cluster.before = before
        cluster.remove("trainingjobs", *KEY)
        collect(cluster, cluster.pods())
        await until(lambda: graces(cluster) == {5}, "the shorter grace")


async def test_standby_shortens_nothing(cluster: FakeCluster) -> None:
    async with operator(cluster):
        await until(lambda: len(cluster.pods()) == 2, "the workers")
        async with operator(cluster, identity="two"):
            cluster.remove("trainingjobs", *KEY)
            collect(cluster, cluster.pods())
            await until(lambda: graces(cluster) == {5}, "the shorter grace")
    assert cluster.calls["shorten_grace"] == 2


def test_pods_of_other_controllers_are_left_alone() -> None:
    cache = Cache()
    owners = [
        {"apiVersion": "kubeflow.org/v1", "kind": names.KIND, "uid": "theirs", "controller": True},
        {"apiVersion": names.API_VERSION, "kind": "Other", "uid": "other", "controller": True},
        {"apiVersion": names.API_VERSION, "kind": names.KIND, "uid": "no controller"},
        {"apiVersion": names.API_VERSION, "kind": names.KIND, "uid": "gone", "controller": True},
    ]
    for number, owner in enumerate(owners):
        labels = {names.LABEL_JOB: "digits", names.LABEL_ROLE: names.ROLE_WORKER}
        metadata = {
            "name": names.worker_name("digits", number, 0),
            "namespace": "default",
            "uid": f"pod-{number}",
            "resourceVersion": str(number + 1),
            "labels": labels,
            "ownerReferences": [owner],
            "deletionTimestamp": "2027-01-15T08:00:00Z",
            "deletionGracePeriodSeconds": 120,
        }
        cache.put_pod({"metadata": metadata, "spec": {}, "status": {}})
    assert {uid: len(pods) for uid, pods in cache.left_behind(KEY).items()} == {"gone": 1}

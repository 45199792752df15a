"""Which pods of others a job with extra workers makes room for, and who hears of them."""

from __future__ import annotations

import time
from typing import Any

from operator_cluster import FakeCluster
from operator_running import operator, until

from springtide_kube.errors import ApiError
from springtide_operator import unschedulable_pods as crowding
from springtide_operator.cache import Cache
from springtide_operator.plan.ledger import timestamp
from springtide_operator.unschedulable_pods import HELPED_SECONDS, UnschedulablePods

Object = dict[str, Any]
OWNER = {"apiVersion": "springtide.dev/v1alpha1", "kind": "TrainingJob", "controller": True}
NO = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}


def stuck(pod: Object, reason: str = "Unschedulable") -> Object:
    pod["spec"].pop("nodeName", None)
    pod["status"] = {"phase": "Pending", "conditions": [{**NO, "reason": reason}]}
    return pod


def foreign(name: str, age: float = 5.0) -> Object:
    meta = {"name": name, "namespace": "web", "uid": name, "creationTimestamp": timestamp(time.time() - age)}
    return stuck({"metadata": meta, "spec": {}})


async def test_worker_needed_by_another_job_is_awaited_extras_return(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr("springtide_operator.runtime.FRESH_SECONDS", 0.01)
    cluster = FakeCluster()
    elastic = cluster.add_job("elastic", replicas=1)
    elastic["spec"]["workers"]["maxReplicas"] = 3
    elastic["spec"]["elasticity"] = {"policy": "Capacity"}
    cluster.put("trainingjobs", elastic)

    def place() -> bool:
        cluster.run_pods()
        return len([p for p in cluster.pods() if p["status"]["phase"] == "Running"]) == 3

    async with operator(cluster, resync=0.2):
        await until(place, "one worker and two extra ones")
        await until(lambda: cluster.job("elastic")["status"]["elasticity"].get("workers") == 3, "three")
        cluster.add_job("needy", replicas=1)
        await until(lambda: len(cluster.pods()) == 4, "the other job's worker")
        needy = next(pod for pod in cluster.pods() if pod["metadata"]["name"].startswith("needy"))
        cluster.put("pods", stuck(needy))
        await until(lambda: cluster.job("elastic")["status"]["elasticity"]["extra"] == 1, "one given back")
        said = cluster.job("elastic")["status"]["elasticity"]
        assert said["reason"] == "OthersWait"
        assert "default/needy-worker-0-0" in said["message"]

        def leaving() -> list[str]:
            return [p["metadata"]["name"] for p in cluster.pods() if "deletionTimestamp" in p["metadata"]]

        await until(leaving, "a pod to be deleted: status says so first")
        assert leaving() == ["elastic-worker-2-0"]


def cached(cluster: FakeCluster, extra: int) -> tuple[Cache, UnschedulablePods]:
    cache = Cache()
    job = cluster.add_job("elastic", replicas=1)
    job["status"] = {"elasticity": {"extra": extra}}
    cache.put_job(cluster.put("trainingjobs", job))
    return cache, UnschedulablePods(cache, cluster)


async def test_pods_of_others_are_listed_only_for_a_job_with_extras() -> None:
    cluster = FakeCluster()
    cluster.put("pods", foreign("api"))
    _, idle = cached(cluster, 0)
    assert not await idle.look()
    assert cluster.calls["list_waiting_pods"] == 0
    _, busy = cached(cluster, 2)
    assert await busy.look()
    assert not await busy.look(), "no news"
    assert busy.waiting(("default", "elastic")) == ("web/api",)


async def test_pods_of_others_are_listed_for_a_job_with_standbys() -> None:
    cluster = FakeCluster()
    cluster.put("pods", foreign("api"))
    cache, crowd = cached(cluster, 0)
    job = cluster.job("elastic")
    job["status"] = {"standby": {"asked": 1}}
    cache.put_job(cluster.put("trainingjobs", job))
    assert await crowd.look()
    assert crowd.waiting(("default", "elastic")) == ("web/api",)


async def test_what_giving_back_does_not_help_is_not_waited_for() -> None:
    cluster = FakeCluster()
    cluster.put("pods", foreign("old", HELPED_SECONDS + 5))
    cluster.put("pods", stuck(foreign("gated"), "SchedulingGated"))
    _, busy = cached(cluster, 2)
    await busy.look()
    assert busy.waiting(("default", "elastic")) == ()


async def test_without_an_answer_what_was_known_stays() -> None:
    cluster = FakeCluster()
    cluster.put("pods", foreign("api"))
    _, busy = cached(cluster, 1)
    await busy.look()

    def refuse(method: str, name: str) -> None:
        raise ApiError(403, "Forbidden", "pods is forbidden")

    cluster.before = refuse
    assert not await busy.look()
    assert busy.waiting(("default", "elastic")) == ("web/api",)


def test_extras_of_other_jobs_are_not_waited_for() -> None:
    cluster = FakeCluster()
    cache, crowd = cached(cluster, 2)
    other = cluster.add_job("other", replicas=1)
    cache.put_job(other)

    def pod(number: int, placed: bool) -> Object:
        made = {
            "metadata": {
                "name": f"other-worker-{number}-0",
                "namespace": "default",
                "uid": f"pod-{number}",
                "resourceVersion": str(100 + number + 10 * placed),
                "labels": {"springtide.dev/job": "other", "springtide.dev/role": "worker"},
                "creationTimestamp": timestamp(time.time()),
                "ownerReferences": [{**OWNER, "uid": other["metadata"]["uid"]}],
            },
            "spec": {"nodeName": "node-0"} if placed else {},
            "status": {"phase": "Running"},
        }
        return made if placed else stuck(made)

    version = cache.stuck_version
    cache.put_pod(pod(0, True))
    assert cache.stuck_version == version
    cache.put_pod(pod(1, False))
    assert cache.stuck_version == version + 1
    assert crowd.waiting(("default", "elastic")) == ()
    cache.drop_pod(pod(0, True))
    later = UnschedulablePods(cache, cluster)
    assert later.waiting(("default", "elastic")) == ("default/other-worker-1-0",)
    assert later.waiting(("default", "other")) == ()
    cache.put_pod(pod(1, True))
    assert later.waiting(("default", "elastic")) == ()
    assert crowding.may_have_extras(other) is False


def test_servers_and_coordinators_of_other_jobs_are_waited_for() -> None:
    cluster = FakeCluster()
    cache, crowd = cached(cluster, 2)
    other = cluster.add_job("other", replicas=1)
    cache.put_job(other)
    for name, role, more in (
        ("other-ps-0-0", "parameter-server", {}),
        ("other-coordinator-1", "coordinator", {"springtide.dev/incarnation": "1"}),
    ):
        meta = {
            "name": name,
            "namespace": "default",
            "uid": name,
            "resourceVersion": "100",
            "labels": {"springtide.dev/job": "other", "springtide.dev/role": role, **more},
            "creationTimestamp": timestamp(time.time()),
            "ownerReferences": [{**OWNER, "uid": other["metadata"]["uid"]}],
        }
        cache.put_pod(stuck({"metadata": meta, "spec": {}}))
    assert crowd.waiting(("default", "elastic")) == ("default/other-coordinator-1", "default/other-ps-0-0")
    assert crowd.waiting(("default", "other")) == ()

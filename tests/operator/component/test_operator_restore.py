"""The cluster's store is restored from a backup: numbers of versions go back, and deleted objects return."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from operator_cluster import FakeCluster
from operator_running import operator, until
from operator_world import job_object

from springtide_operator.api import names
from springtide_operator.cache import Cache
from springtide_operator.cluster import Listing
from springtide_operator.queues import Queues

KEY = ("default", "digits")
FIRST = {"digits-worker-0-0", "digits-worker-1-0"}


def names_of(cluster: FakeCluster) -> set[str]:
    return {pod["metadata"]["name"] for pod in cluster.pods()}


def recorded(cluster: FakeCluster) -> int:
    slots = (cluster.job().get("status") or {}).get("slots") or {}
    return sum("uid" in slot for slot in slots.values())


def scale(cluster: FakeCluster, replicas: int) -> None:
    job = cluster.job()
    job["spec"]["workers"]["replicas"] = replicas
    job["metadata"]["generation"] += 1
    cluster.put(names.PLURAL, job)


@pytest.mark.parametrize("resync", [0.1, 3600.0])
async def test_restored_backup_is_the_truth_without_a_restart(resync: float) -> None:
    """A refused write shows it where nothing is to be listed for an hour."""
    cluster = FakeCluster()
    cluster.add_job(replicas=2)
    uid = cluster.job()["metadata"]["uid"]
    async with operator(cluster, resync=resync) as made:

        def known() -> set[str]:
            return {pod.name for pod in made.cache.pods(KEY, uid)[0]}

        await until(lambda: names_of(cluster) == FIRST, "two workers")
        await until(lambda: recorded(cluster) == 2, "status to know them")
        backup = copy.deepcopy(cluster.objects), cluster.version
        cluster.remove("pods", "default", "digits-worker-1-0")
        scale(cluster, 3)
        added = {"digits-worker-1-1", "digits-worker-2-0"}
        await until(lambda: added <= names_of(cluster) and added <= known(), "what the backup does not have")
        cluster.objects, cluster.version = copy.deepcopy(backup[0]), backup[1]
        there = FIRST
        if resync > 100:
            cluster.remove("pods", "default", "digits-worker-0-0")
            there = {"digits-worker-0-1", "digits-worker-1-0"}
        await until(lambda: known() == there, "the pods of the backup, the deleted one among them")
        await until(lambda: made.unready() is None, "no trouble")
        scale(cluster, 4)
        await until(lambda: len(names_of(cluster)) == 4 and there <= names_of(cluster), "four workers")


async def test_nothing_is_decided_while_kinds_are_of_two_times() -> None:
    """Jobs as they are now with pods as they were would look like lost workers."""
    cluster = FakeCluster()
    cluster.add_job(replicas=2)
    async with operator(cluster, resync=3600.0) as made:
        await until(lambda: names_of(cluster) == FIRST, "two workers")
        assert made.acting
        made.begins(names.PLURAL, "")
        made.listed(names.PLURAL, "", set(), "0")
        assert not made.acting
        await until(lambda: made.acting, "lists of all kinds")
        assert names_of(cluster) == FIRST


def workload(name: str, version: int, uid: str = "") -> dict[str, Any]:
    meta = {
        "name": name,
        "namespace": "default",
        "uid": uid or f"uid-of-{name}",
        "resourceVersion": str(version),
        "labels": {names.LABEL_JOB: "digits"},
        "ownerReferences": [{"uid": "job-uid-1234", "controller": True}],
    }
    return {"metadata": meta, "spec": {"podSets": []}, "status": {}}


async def test_restored_workloads_replace_newer_ones() -> None:
    listed = [workload("old", 3), workload("back", 4)]

    class Restored(FakeCluster):
        async def list_workloads(self, api: str) -> Listing:
            return Listing(copy.deepcopy(listed), "5")

    cache = Cache()
    queues = Queues(Restored(), cache, lambda key: None, lambda: names.KUEUE_V1BETA2)
    job = job_object()
    job["metadata"]["labels"] = {names.LABEL_QUEUE: "team"}
    cache.put_job(job)
    queues.put(workload("old", 8))
    queues.put(workload("made-since", 9))
    assert await queues.look() == "5"
    assert queues.raw("job-uid-1234", "made-since") is None
    for name, version in (("old", "3"), ("back", "4")):
        found = queues.raw("job-uid-1234", name)
        assert found is not None
        assert found["metadata"]["resourceVersion"] == version

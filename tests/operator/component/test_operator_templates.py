"""An operator that runs, and jobs that name templates: they wait, take what they find, and stay with it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from operator_cluster import FakeCluster
from operator_running import operator, until

from springtide_kube.errors import ApiError
from springtide_operator import job_loop
from springtide_operator.api import names, reasons

Object = dict[str, Any]

CLUSTER, NAMESPACED = names.CLUSTER_TEMPLATE_PLURAL, names.TEMPLATE_PLURAL


def put_template(cluster: FakeCluster, image: str, plural: str = CLUSTER, **limits: Any) -> None:
    """Write the template `gpu`, a generation later where it is there."""
    where = "" if plural == CLUSTER else "default"
    before = cluster.objects.get((plural, where, "gpu"))
    number = before["metadata"]["generation"] + 1 if before is not None else 1
    pod = {"spec": {"containers": [{"image": image, "command": ["python", "t.py"]}]}}
    spec = {"defaults": {"workers": {"template": pod}}, "limits": limits}
    meta = {"name": "gpu", "namespace": where, "uid": f"uid-of-{plural}", "generation": number}
    cluster.put(plural, {"metadata": meta, "spec": spec})


def add_job(cluster: FakeCluster, name: str = "digits", kind: str = names.CLUSTER_TEMPLATE_KIND) -> None:
    made = cluster.add_job(name, replicas=1)
    del made["spec"]["workers"]["template"]
    cluster.put(
        "trainingjobs", {**made, "spec": {**made["spec"], "templateRef": {"kind": kind, "name": "gpu"}}}
    )


def images(cluster: FakeCluster, name: str = "digits") -> list[str]:
    pods = [pod for pod in cluster.pods() if pod["metadata"]["labels"][names.LABEL_JOB] == name]
    return [pod["spec"]["containers"][0]["image"] for pod in pods]


def degraded(cluster: FakeCluster, name: str = "digits") -> str:
    found = (cluster.job(name).get("status") or {}).get("conditions") or []
    return next((one["reason"] for one in found if one["type"] == "Degraded" and one["status"] == "True"), "")


def event_reasons(cluster: FakeCluster) -> list[str]:
    return [event["reason"] for event in cluster.events.values()]


async def test_a_job_waits_for_its_template_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_loop, "TEMPLATE_SECONDS", 0.5)
    cluster = FakeCluster()
    add_job(cluster)
    async with operator(cluster):
        await until(lambda: degraded(cluster) == reasons.TEMPLATE_NOT_FOUND, "the condition")
        assert not cluster.pods()
        put_template(cluster, "one")
        await until(lambda: images(cluster) == ["one"], "a worker of the template's image")
        await until(lambda: not degraded(cluster), "the condition to go")
    assert event_reasons(cluster).count(reasons.TEMPLATE_NOT_FOUND) == 1
    assert reasons.EVENT_TEMPLATE in event_reasons(cluster)


async def test_an_edited_or_deleted_template_changes_no_job() -> None:
    cluster = FakeCluster()
    put_template(cluster, "one")
    add_job(cluster)
    async with operator(cluster):
        await until(lambda: images(cluster) == ["one"], "the first job's worker")
        noted = cluster.job()["status"]["template"]
        assert (noted["generation"], noted["uid"]) == (1, f"uid-of-{CLUSTER}")
        put_template(cluster, "two", maxReplicas=1)
        add_job(cluster, "later")
        await until(lambda: images(cluster, "later") == ["two"], "the second job's worker")
        cluster.remove(CLUSTER, "", "gpu")
        # A pod that is made now is still the first template's.
        [pod] = [one for one in cluster.pods() if one["metadata"]["labels"][names.LABEL_JOB] == "digits"]
        cluster.remove("pods", "default", pod["metadata"]["name"])
        await until(lambda: images(cluster) == ["one"], "the first job's second worker")
        assert cluster.job()["status"]["template"] == noted
        assert cluster.job()["status"]["workers"]["outdated"] == 0
    async with operator(cluster, identity="two"):  # which has never seen the template
        [pod] = [one for one in cluster.pods() if one["metadata"]["labels"][names.LABEL_JOB] == "digits"]
        cluster.remove("pods", "default", pod["metadata"]["name"])
        await until(lambda: images(cluster) == ["one"], "the first job's third worker")
    assert event_reasons(cluster).count(reasons.EVENT_TEMPLATE) == 2


async def test_a_template_of_the_namespace_is_not_that_of_the_cluster() -> None:
    cluster = FakeCluster()
    put_template(cluster, "of-all")
    put_template(cluster, "of-one", NAMESPACED)
    add_job(cluster, "a")
    add_job(cluster, "b", names.TEMPLATE_KIND)
    async with operator(cluster):
        await until(lambda: images(cluster, "a") + images(cluster, "b") == ["of-all", "of-one"], "both")


async def test_a_job_within_limits_again_goes_on() -> None:
    cluster = FakeCluster()
    put_template(cluster, "one", maxReplicas=1)
    add_job(cluster)
    job = cluster.job()
    job["spec"]["workers"]["replicas"] = 2
    cluster.put("trainingjobs", job)
    async with operator(cluster):
        await until(lambda: degraded(cluster) == reasons.TEMPLATE_LIMITS, "the condition")
        assert "spec.workers.replicas is 2, and at most 1" in cluster.job()["status"]["message"]
        assert not cluster.pods()
        job = cluster.job()
        job["spec"] = {**job["spec"], "workers": {"replicas": 1}}
        job["metadata"]["generation"] += 1
        cluster.put("trainingjobs", job)
        await until(lambda: images(cluster) == ["one"], "a worker")


async def test_jobs_that_wait_for_one_template_share_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_loop, "TEMPLATE_SECONDS", 0.5)
    cluster = FakeCluster()
    for number in range(40):
        add_job(cluster, f"j{number}")
    async with operator(cluster):
        await until(lambda: all(degraded(cluster, f"j{n}") for n in range(40)), "all conditions")
        began, asked = time.monotonic(), cluster.calls["get_template"]
        await until(lambda: time.monotonic() - began > 2.0, "two seconds")
        seconds = time.monotonic() - began
        assert cluster.calls["get_template"] - asked <= seconds + 1
        put_template(cluster, "one")
        await until(lambda: len(cluster.pods()) == 40, "a worker of each")


async def test_a_server_that_does_not_answer_is_asked_again() -> None:
    cluster = FakeCluster()
    put_template(cluster, "one")
    add_job(cluster)
    failures = [
        ApiError(500, "InternalError", "etcd is busy"),
        ApiError(403, "Forbidden", 'User "x" cannot get'),
    ]

    def fail(method: str, name: str) -> None:
        if method == "get_template" and failures:
            raise failures.pop(0)

    cluster.before = fail
    async with operator(cluster):
        await until(lambda: degraded(cluster) == reasons.TEMPLATE_UNREADABLE, "the condition")
        await until(lambda: images(cluster) == ["one"], "a worker")


async def test_a_snapshot_of_another_template_is_not_used() -> None:
    cluster = FakeCluster()
    add_job(cluster)
    job = cluster.job()
    job["status"] = {"template": {"kind": names.CLUSTER_TEMPLATE_KIND, "name": "other", "spec": {}}}
    cluster.put("trainingjobs", job)
    async with operator(cluster):
        await until(lambda: degraded(cluster) == reasons.TEMPLATE_NOT_FOUND, "the condition")
        asked = cluster.calls["get_template"]
        assert asked <= 2
        put_template(cluster, "one")
        await until(lambda: images(cluster) == ["one"], "a worker")
    assert cluster.job()["status"]["template"]["name"] == "gpu"

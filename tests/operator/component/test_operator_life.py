"""Suspend and resume, deadline, clean-up on a cluster, with workers that only pretend to train."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import operator_session_worker
import pytest
from e2e_cluster import E2ECluster, RefusedError, cluster
from operator_fake_worker import FakeJob

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2ECluster]:
    with cluster(tmp_path_factory.mktemp("life")) as running:
        yield running


@pytest.fixture
def namespace(system: E2ECluster) -> Iterator[str]:
    with system.namespace(f"life-{secrets.token_hex(4)}") as name:
        yield name


@pytest.fixture
def job(system: E2ECluster, namespace: str) -> FakeJob:
    return FakeJob(system, namespace, "fake")


def patch(job: FakeJob, **spec: object) -> None:
    job.cluster.kubectl(*job.patch_of(**spec))


@pytest.mark.slow
def test_a_job_is_suspended_and_resumed(system: E2ECluster, job: FakeJob) -> None:
    job.start(replicas=2, suspend=True)
    job.until_condition("Suspended", "JobSuspended", seconds=60)
    assert job.pods() == job.pods("coordinator") == {}
    patch(job, suspend=False)
    job.until_running("0-0", "1-0", seconds=60)
    patch(job, suspend=True)
    system.until(60, "all pods to go", lambda: not {**job.pods(), **job.pods("coordinator")})
    status = job.until_status("the state Suspended", lambda status: status["state"] == "Suspended")
    assert status["restarts"]["total"] == 0
    assert "startTime" not in status
    patch(job, suspend=False)
    job.until_running("0-1", "1-1", seconds=60)
    assert job.condition("Suspended")["status"] == "False"
    job.until_events("JobSuspended", "JobResumed")


@pytest.mark.slow
def test_a_deadline_fails_the_job_and_its_ttl_deletes_it(system: E2ECluster, job: FakeJob) -> None:
    job.start(replicas=1, ttlSecondsAfterFinished=100000)
    job.until_running("0-0", seconds=60)
    patch(job, activeDeadlineSeconds=1)
    job.until_condition("Failed", "DeadlineExceeded", seconds=60)
    system.until(60, "all pods to go", lambda: not {**job.pods(), **job.pods("coordinator")})
    patch(job, ttlSecondsAfterFinished=0)

    def gone() -> bool:
        try:
            job.read()
        except RefusedError as error:
            return "not found" in str(error)
        return False

    system.until(60, "the job to be deleted", gone)


@pytest.mark.slow
@pytest.mark.parametrize("cleanup", ["All", "Running"])
def test_logs_of_ended_workers_stay_unless_all_pods_go(
    system: E2ECluster, job: FakeJob, cleanup: str
) -> None:
    job.start("finish", podCleanup=cleanup)
    job.until_condition("Succeeded", seconds=60)

    def cleaned() -> bool:
        services = system.labelled("services", job.namespace, "springtide.dev/job=fake")
        return not services and not job.pods("coordinator") and bool(job.pods()) == (cleanup == "Running")

    system.until(60, "the coordinator, its Service and what podCleanup names to go", cleaned)
    job.until_status("no address of a coordinator", lambda status: status["coordinator"]["address"] == "")
    if cleanup == "Running":
        assert "done" in system.kubectl("logs", "fake-worker-0-0", "-n", job.namespace)


@pytest.mark.slow
def test_autoscaler_finds_what_it_needs_at_scale_subresource(system: E2ECluster, job: FakeJob) -> None:
    """A HorizontalPodAutoscaler reads the size and the selector, counts those pods, and writes the size."""
    job.start(replicas=2)
    job.until_running("0-0", "1-0", seconds=60)
    path = f"/apis/springtide.dev/v1alpha1/namespaces/{job.namespace}/trainingjobs/fake/scale"
    scale = system.until(
        60,
        "two workers at the subresource",
        lambda: (
            (found := json.loads(system.kubectl("get", "--raw", path)))["status"]["replicas"] == 2 and found
        ),
    )
    assert (scale["kind"], scale["spec"]["replicas"]) == ("Scale", 2)
    selected = system.pods(job.namespace, scale["status"]["selector"])
    assert [pod["metadata"]["name"] for pod in selected] == ["fake-worker-0-0", "fake-worker-1-0"]
    for size in ("3", "1"):
        system.kubectl("scale", "stj/fake", "-n", job.namespace, f"--replicas={size}")
        system.until(60, f"{size} workers", lambda size=size: len(job.running()) == int(size))
    with pytest.raises(RefusedError, match="must lie between"):
        system.kubectl("scale", "stj/fake", "-n", job.namespace, "--replicas=7")


def test_policies_that_do_not_exist_are_refused_by_name(job: FakeJob) -> None:
    with pytest.raises(RefusedError, match="elasticity"):
        job.start(elasticity={"policy": "Magic"})


@pytest.mark.slow
def test_extra_workers_take_free_nodes_and_make_room_for_others(
    system: E2ECluster, namespace: str, job: FakeJob
) -> None:
    """Run on three nodes, with workers that take a node each."""
    big = {"resources": {"requests": {"cpu": "7"}}}

    def settled(workers: int, reason: str) -> None:
        def true() -> bool:
            said = job.status().get("elasticity") or {}
            return (said.get("workers"), said.get("reason")) == (workers, reason)

        try:
            system.until(60, f"{workers} workers, {reason}", true)
        except AssertionError as error:
            raise AssertionError(f"{error}; status: {job.status()}") from None

    job.start(replicas=1, elasticity={"policy": "Capacity", "patienceSeconds": 3}, container=big)
    settled(3, "ExtraWorkers")
    # On a slow machine one of them may have been given up once.
    system.until(60, "three workers", lambda: len(job.running()) == 3)
    first = job.running()
    system.until(60, "no complaint", lambda: job.condition("Degraded")["status"] == "False")
    other = FakeJob(system, namespace, "other").start(replicas=1, container=big)
    other.until_running("0-0", seconds=60)
    settled(2, "ExtraWorkers")
    stayed = job.running()
    assert len(stayed) == 2
    assert stayed.items() <= first.items(), "nobody else was disturbed"
    assert job.status()["restarts"]["total"] == 0
    job.until_events("Scaled", text=f"no node takes {namespace}/other-worker-0-0")
    system.kubectl("delete", "stj/other", "-n", namespace)
    settled(3, "ExtraWorkers")


def test_extra_workers_need_a_limit(job: FakeJob) -> None:
    workers = {"replicas": 1, "template": {"spec": {"containers": [{"image": "x"}]}}}
    with pytest.raises(RefusedError, match=r"elasticity.policy Capacity needs workers.maxReplicas"):
        job.start(workers=workers, elasticity={"policy": "Capacity"})


@pytest.mark.slow
def test_a_minimum_without_room_is_told_and_taken_back(job: FakeJob) -> None:
    """Workers need 800 MiB and a part of 800; they have 1500."""
    told = operator_session_worker.with_memory(400, 400, 800, 1500)
    job.start(replicas=3, container=told)
    patch(job, workers={"minReplicas": 3})
    known = {
        "perWorker": "1334Mi",
        "perWorkerAtMinReplicas": "1334Mi",
        "limit": "1500Mi",
        "limitedBy": "Container",
        "fewestWorkers": 3,
    }
    job.until_status("its memory", lambda status: status.get("memory") == known)
    job.until_status("three to train", lambda status: status["workers"]["active"] == 3)
    patch(job, workers={"minReplicas": 1})
    job.until_condition("Degraded", "MemoryTooSmall", seconds=60)
    assert "fewer than 3 do not train" in job.condition("Degraded")["message"]
    patch(job, workers={"minReplicas": 3})
    job.until_status("no complaint", lambda status: status["memory"] == known)


@pytest.mark.slow
def test_a_worker_that_hangs_is_named_and_replaced(system: E2ECluster, namespace: str, job: FakeJob) -> None:
    policy = {"hangTimeoutSeconds": 5, "onHang": "Replace"}
    system.apply(operator_session_worker.whether(hang="no"), namespace=namespace)
    job.start(replicas=2, failurePolicy=policy, **operator_session_worker.hanging())
    first = job.until_running("0-0", "1-0", seconds=60)
    # Of one that trains alone nobody is late: none would be replaced.
    job.until_status("both to train", lambda status: status["workers"]["active"] == 2)
    system.apply(operator_session_worker.whether(hang="yes"), namespace=namespace)
    after = job.until_running("0-0", "1-1", seconds=120)
    assert after["fake-worker-0-0"] == first["fake-worker-0-0"]

    def log() -> str:
        return system.kubectl("logs", "fake-worker-0-0", "-n", namespace)

    system.until(60, "training to go on", lambda: "with fake-worker-0-0 fake-worker-1-1" in log())
    status = job.status()
    assert status["restarts"]["failures"] == 1
    said = status["lastFailure"]
    assert (said["pod"], said["reason"]) == ("fake-worker-1-0", "Hung")
    assert "fetching samples since" in said["message"]
    assert "(train.py:31 in load)" in said["message"]
    assert "on node" in said["message"]
    system.until(60, "no complaint", lambda: job.condition("Degraded")["status"] == "False")
    job.until_events("WorkerFailed")

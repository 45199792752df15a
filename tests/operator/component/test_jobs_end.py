"""Pods that are to go are gone soon, whatever their command is and does: on an idle cluster within ten
seconds. Here, where other tests run beside, within a third of the grace period that Kubernetes gives them.
Those of a deleted namespace and of a job with servers are among the end-to-end tests (`test_e2e_gone`).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_cluster import (
    OPERATOR_LABELS,
    OPERATOR_NAMESPACE,
    E2ECluster,
    RefusedError,
    cluster,
    until_operator_is_ready,
)
from e2e_jobs import TRAIN, RunningJob, job, script
from required import require_tool

pytestmark = pytest.mark.timeout(400)

Object = dict[str, Any]
Start = Callable[..., RunningJob]

GRACE = 120  # seconds, which the operator gives workers
LIMIT = 45.0
# Before `import springtide`, which is before the library could handle any signal.
NEVER_INIT = "import threading\nprint('reads a large file', flush=True)\nthreading.Event().wait()\n"
PYTHON = ["python", "/scripts/train.py"]
SHELL = ["sh", "-c", "cd /scripts && python /scripts/train.py; echo over"]
SHELL_ONLY = ["sh", "-c", "cd /scripts && python /scripts/train.py"]
LAUNCH = ["springtide", "launch", "--", "python", "/scripts/train.py"]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2ECluster]:
    with cluster(tmp_path_factory.mktemp("ends")) as running:
        yield running


@pytest.fixture
def namespace(system: E2ECluster) -> Iterator[str]:
    name = f"ends-{secrets.token_hex(4)}"
    system.kubectl("create", "namespace", name)
    yield name
    with contextlib.suppress(RefusedError):  # a test may have deleted it
        system.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def start(system: E2ECluster, namespace: str) -> Start:
    """`start("name", code, command, workers=2, ...)` applies a script and a job that runs it."""

    def apply(
        name: str, code: str = NEVER_INIT, command: list[str] = PYTHON, pace: str = "", **arguments: Any
    ) -> RunningJob:
        manifest = job(name, system.image, epochs=100000, command=command, **arguments)
        assert "terminationGracePeriodSeconds" not in manifest["spec"]["workers"]["template"]["spec"]
        system.apply(script(name, code, pace), manifest, namespace=namespace)
        return RunningJob(system, namespace, name)

    return apply


def pods(job: RunningJob) -> list[Object]:
    """All of them, whatever their role."""
    return job.cluster.pods(job.namespace, f"springtide.dev/job={job.name}")


def until_started(job: RunningJob, workers: int = 1) -> None:
    """Wait until the containers of so many workers run."""

    def run() -> bool:
        found = job.pods()
        return len(found) == workers and all(pod["status"].get("phase") == "Running" for pod in found)

    job.cluster.until(60, f"{workers} workers of {job.name} to run", run)


def until_silent(job: RunningJob, workers: int = 1) -> None:
    """Wait until the operator has seen workers run: the coordinator then knows whom it has not heard."""
    until_started(job, workers)
    job.cluster.until(
        60, "the operator to see them", lambda: (job.status().get("workers") or {}).get("ready") == workers
    )


def until_gone(what: str, begun: float, *jobs: RunningJob, workers: int = 0) -> float:
    """Wait until so many worker pods and, with none, no others of these jobs are left; tell how long it took
    from `begun` on.
    """

    def gone() -> bool:
        return all(len(job.pods() if workers else pods(job)) == workers for job in jobs)

    def left() -> str:
        return json.dumps([[pod["metadata"]["name"], pod["status"]] for job in jobs for pod in pods(job)])

    cluster = jobs[0].cluster
    try:
        cluster.until(LIMIT / cluster.slow, what, gone)
    except AssertionError as error:
        raise AssertionError(f"{error}; there are: {left()}") from None
    seconds = time.monotonic() - begun
    print(f"{what}: {seconds:.1f} s")
    assert seconds < LIMIT
    return seconds


@contextlib.contextmanager
def logs_of(job: RunningJob, folder: Path) -> Iterator[Callable[[], str]]:
    """Follow the log of a job's only worker, which goes with its pod."""
    (pod,) = job.pods()
    path = folder / f"{pod['metadata']['name']}.log"
    command = [require_tool("kubectl"), "--kubeconfig", str(job.cluster.kubeconfig), "logs", "-f"]
    with path.open("wb") as file:
        following = subprocess.Popen(
            [*command, pod["metadata"]["name"], "-n", job.namespace], stdout=file, stderr=subprocess.STDOUT
        )
        try:
            job.cluster.until(60, "the log", lambda: "step " in path.read_text())
            yield path.read_text
        finally:
            following.kill()
            following.wait()


@pytest.mark.slow
def test_pods_of_a_deleted_job_that_trains_are_gone(system: E2ECluster, start: Start, tmp_path: Path) -> None:
    """End pods of every kind of command: the program, a shell that forwards nothing, the launcher."""
    commands = {"program": PYTHON, "shell": SHELL, "launcher": LAUNCH}
    jobs = [start(name, TRAIN, command, pace="0.1") for name, command in commands.items()]
    for one in jobs:
        one.until_trains(1)
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(logs_of(one, tmp_path)) for one in jobs]
        begun = time.monotonic()
        names = [f"stj/{one.name}" for one in jobs]
        system.kubectl("delete", *names, "-n", jobs[0].namespace, "--wait=false")
        until_gone("pods of three deleted jobs to go", begun, *jobs)
        for log in logs:
            assert log().count("no coordinator") <= 1, log()
            assert log().count("SIGTERM: leaving") <= 1, log()


@pytest.mark.slow
def test_pods_are_gone_when_the_coordinator_went_first(
    system: E2ECluster, start: Start, tmp_path: Path
) -> None:
    jobs = [start(name, TRAIN, command, pace="0.1") for name, command in (("p", PYTHON), ("s", SHELL))]
    for one in jobs:
        one.until_trains(1)
    with logs_of(jobs[0], tmp_path) as log:
        begun = time.monotonic()
        for one in jobs:
            (coordinator,) = one.pods("coordinator")
            one.delete_pod(coordinator["metadata"]["name"], "--force", "--grace-period=0")
        system.kubectl("delete", "stj", "--all", "-n", jobs[0].namespace, "--wait=false")
        until_gone("pods of deleted jobs without coordinators to go", begun, *jobs)
        assert log().count("no coordinator") <= 1, log()


def test_pods_of_a_deleted_job_that_never_began_are_gone(system: E2ECluster, start: Start) -> None:
    jobs = [start(name, command=command, workers=2) for name, command in (("p", PYTHON), ("s", SHELL))]
    for one in jobs:
        until_started(one, 2)
    begun = time.monotonic()
    system.kubectl("delete", "stj", "--all", "-n", jobs[0].namespace, "--wait=false")
    until_gone("pods of deleted jobs that never began to go", begun, *jobs)


def test_starting_workers_that_are_given_back_are_gone(start: Start) -> None:
    jobs = [start(name, command=command, workers=2) for name, command in (("p", PYTHON), ("s", SHELL))]
    for one in jobs:
        until_silent(one, 2)
    begun = time.monotonic()
    for one in jobs:
        one.scale(1)
    until_gone("starting workers that are given back to go", begun, *jobs, workers=1)
    for one in jobs:
        (left,) = one.pods()
        assert left["metadata"]["name"].endswith("-worker-0-0")
        assert one.status()["restarts"]["total"] == 0
        one.cluster.kubectl("delete", f"stj/{one.name}", "-n", one.namespace, "--wait=false")


def test_starting_worker_that_somebody_deletes_is_gone(start: Start) -> None:
    """Delete a worker that has not begun (a drain does so): it has nothing to finish."""
    one = start("drained", command=SHELL)
    until_silent(one)
    (pod,) = one.pods()
    name = pod["metadata"]["name"]
    begun = time.monotonic()
    one.delete_pod(name, "--wait=false")

    def gone() -> bool:
        return name not in [pod["metadata"]["name"] for pod in one.pods()]

    one.cluster.until(LIMIT / one.cluster.slow, "the starting worker to go", gone)
    print(f"a starting worker that was deleted: {time.monotonic() - begun:.1f} s")


@pytest.mark.slow
def test_pods_of_a_suspended_job_are_gone(system: E2ECluster, start: Start) -> None:
    """Suspend workers that have not begun, and others that train and leave after their step."""
    jobs = [start("p"), start("s", command=SHELL), start("t", TRAIN, SHELL, pace="0.1")]
    jobs[-1].until_trains(1)
    for one in jobs[:-1]:
        until_silent(one)
    begun = time.monotonic()
    for one in jobs:
        patch = '{"spec": {"suspend": true}}'
        system.kubectl("patch", f"stj/{one.name}", "-n", one.namespace, "--type=merge", "-p", patch)
    until_gone("pods of suspended jobs to go", begun, *jobs)
    for one in jobs:
        assert one.status()["restarts"]["total"] == 0


@pytest.mark.slow
def test_failed_job_saves_what_it_holds_and_is_gone(system: E2ECluster, start: Start, tmp_path: Path) -> None:
    """Fail a job whose workers must not train on for successors that will not come."""
    place = tmp_path / "checkpoints"
    place.mkdir()
    one = start("late", TRAIN, SHELL, pace="0.1", checkpoint={"uri": str(place), "intervalSeconds": 3600})
    one.until_trains(1)
    patch = '{"spec": {"activeDeadlineSeconds": 1}}'
    system.kubectl("patch", "stj/late", "-n", one.namespace, "--type=merge", "-p", patch)
    one.until_condition("Failed", reason="DeadlineExceeded")
    until_gone("pods of a failed job to go", time.monotonic(), one)
    assert list(place.glob("*/*/manifest*")), sorted(place.rglob("*"))


@pytest.mark.slow
def test_pods_of_a_finished_job_are_gone(system: E2ECluster, namespace: str) -> None:
    """End a pod whose other container goes on and hears no signal."""
    manifest = job("done", system.image, epochs=5, command=SHELL, podCleanup="All")
    side = {"name": "side", "image": system.image, "command": ["sleep", "100000"]}
    manifest["spec"]["workers"]["template"]["spec"]["containers"].append(side)
    system.apply(script("done", TRAIN), manifest, namespace=namespace)
    one = RunningJob(system, namespace, "done")
    one.until_condition("Succeeded")
    until_gone("pods of a finished job to go", time.monotonic(), one)


@pytest.mark.slow
def test_pods_are_gone_while_no_operator_runs(system: E2ECluster, start: Start) -> None:
    """Stop the operator first: the pods themselves have all that ends them."""
    jobs = [start("p"), start("s", command=SHELL), start("t", TRAIN, SHELL, pace="0.1")]
    jobs[-1].until_trains(1)
    for one in jobs[:-1]:
        until_started(one)
    deployment = ("deployment", "-n", OPERATOR_NAMESPACE, "-l", "app.kubernetes.io/component=operator")
    name = system.kubectl("get", *deployment, "-o", "name").split()[0]
    system.kubectl("scale", name, "-n", OPERATOR_NAMESPACE, "--replicas=0")
    system.until(60, "no operator", lambda: not system.pods(OPERATOR_NAMESPACE, OPERATOR_LABELS))
    try:
        begun = time.monotonic()
        system.kubectl("delete", "stj", "--all", "-n", jobs[0].namespace, "--wait=false")
        until_gone("pods of deleted jobs without an operator to go", begun, *jobs)
    finally:
        system.kubectl("scale", name, "-n", OPERATOR_NAMESPACE, "--replicas=1")
    until_operator_is_ready(system)


@pytest.mark.slow
def test_exit_codes_behind_the_init_process_are_the_workers(system: E2ECluster, start: Start) -> None:
    """143 for one that SIGTERM ended, and its own for one that failed."""
    one = start("ended")
    until_started(one)
    (pod,) = one.pods()
    name = pod["metadata"]["name"]
    one.until_said(name, "(reads)")
    held = ("pod", name, "-n", one.namespace, "--type=merge", "-p")
    system.kubectl("patch", *held, '{"metadata": {"finalizers": ["springtide.test/held"]}}')

    def code() -> int | None:
        (status,) = one.pods()[0]["status"]["containerStatuses"]
        return (status["state"].get("terminated") or {}).get("exitCode")

    try:
        system.kubectl("delete", "stj/ended", "-n", one.namespace, "--wait=false")
        assert system.until(LIMIT / system.slow, "the worker to end", code) == 143
    finally:
        system.kubectl("patch", *held, '{"metadata": {"finalizers": null}}')
    spec = {"failurePolicy": {"backoffLimit": 0}}
    failing = start("fails", "import sys\nsys.exit(7)\n", SHELL_ONLY, **spec)
    assert "exited with code 7" in failing.until_condition("Failed")["message"]

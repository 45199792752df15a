"""Pods of a job that is deleted, suspended, scaled down, or whose namespace goes are gone within 10 s."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e_cluster import E2ECluster, fresh_name
from e2e_jobs import NEVER_INIT, TRAIN, RunningJob, job, left_of, script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Start = Callable[..., RunningJob]

IMPORTS = "import time\nprint('imports', flush=True)\nwhile True:\n    time.sleep(0.1)\n    import torch\n"

SHELL = ["sh", "-c", "cd /scripts && python /scripts/train.py; echo over"]

SERVERS = {
    "strategy": {"type": "ParameterServer", "parameterServer": {"replication": 2}},
    "parameterServers": {"replicas": 2},
}


def namespaces(e2e: E2ECluster) -> set[str]:
    return {item["metadata"]["name"] for item in e2e.read("/api/v1/namespaces")["items"]}


def delete(running: RunningJob) -> None:
    running.cluster.kubectl("delete", "stj", running.name, "-n", running.namespace, "--wait=false")


@pytest.mark.slow
@pytest.mark.parametrize("spec", [{}, SERVERS], ids=["all-reduce", "servers"])
def test_pods_of_a_deleted_job_are_gone_within_10_s(
    e2e: E2ECluster, start: Start, spec: dict[str, object]
) -> None:
    """A server that is told to end serves on for the workers' sake, but not for a deleted job's."""
    running = start("training", workers=2, epochs=100_000, **spec)
    running.until_trains(2)
    assert {line.partition("/")[0] for line in left_of(e2e, running)} == {"pods", "services", "secrets"}
    delete(running)
    running.seconds_until_gone(e2e.gone_within)
    e2e.until(120, "all that the job made to go", lambda: not left_of(e2e, running))


@pytest.mark.parametrize(("code", "says"), [(NEVER_INIT, "(reads) a large file"), (IMPORTS, "(imports)")])
def test_pods_that_never_called_init_are_gone_within_10_s(
    e2e: E2ECluster, start: Start, code: str, says: str
) -> None:
    running = start("early", code=code, workers=1)
    running.until_said("early-worker-0-0", says)
    delete(running)
    running.seconds_until_gone(e2e.gone_within)


@pytest.mark.slow
def test_pods_of_a_deleted_namespace_are_gone_within_10_s(e2e: E2ECluster) -> None:
    with e2e.namespace(fresh_name()) as namespace:
        # One trains, and the other has not begun; both are behind a shell that forwards nothing.
        wanted = job("swept", e2e.image, command=SHELL, epochs=100_000)
        silent = job("silent", e2e.image, command=SHELL)
        e2e.apply(script("swept", TRAIN), wanted, namespace=namespace)
        e2e.apply(script("silent", NEVER_INIT), silent, namespace=namespace)
        running, early = (RunningJob(e2e, namespace, name) for name in ("swept", "silent"))
        running.until_trains(1)
        early.until_said("silent-worker-0-0", "(reads) a large file")
        e2e.kubectl("delete", "namespace", namespace, "--wait=false")
        running.seconds_until_gone(e2e.gone_within)
        early.seconds_until_gone(e2e.gone_within)
        e2e.until(60, "the namespace to go", lambda: namespace not in namespaces(e2e))


@pytest.mark.slow
def test_pods_ended_by_scaling_or_suspension_are_gone_in_10_s(e2e: E2ECluster, start: Start) -> None:
    running = start("shrinks", workers=2, epochs=100_000)
    running.until_trains(2)
    running.scale(1)
    within = e2e.gone_within / e2e.slow  # `until` stretches it again
    e2e.until(within, "the worker that leaves to be gone", lambda: len(running.pods()) == 1)
    running.patch(suspend=True)
    running.seconds_until_gone(e2e.gone_within)

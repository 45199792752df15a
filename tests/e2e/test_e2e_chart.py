"""The chart as packaged, from which the operator of these tests runs: its test, an upgrade, a rollback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_cluster import OPERATOR_LABELS, OPERATOR_NAMESPACE, RELEASE, E2ECluster, package_chart
from e2e_jobs import RunningJob
from required import require_tool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def helm() -> str:
    return require_tool("helm")


def operators(e2e: E2ECluster) -> set[str]:
    pods = e2e.pods(OPERATOR_NAMESPACE, OPERATOR_LABELS)
    return {pod["metadata"]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


@pytest.mark.slow
def test_helm_test_passes_and_prints_its_log_once(e2e: E2ECluster) -> None:
    limit = f"{300 * e2e.slow:.0f}s"
    said = e2e.helm("test", RELEASE, "-n", OPERATOR_NAMESPACE, "--logs", "--timeout", limit, timeout=320)
    assert said.count("Succeeded: WorkerFinished") == 1, said
    assert said.count("the job is gone, and so are its pods") == 1, said
    assert said.count("\npassed\n") == 1, said


@pytest.mark.slow
def test_upgrade_and_rollback_leave_a_job_training(
    e2e: E2ECluster, start: Callable[..., RunningJob], tmp_path: Path
) -> None:
    running = start("stays", workers=2, epochs=100_000)
    running.until_trains(2)
    pods = {pod["metadata"]["uid"] for pod in running.all_pods()}
    steps, before = [running.status().get("step", 0)], operators(e2e)
    complaints = unhealthy(e2e)
    place = ["-n", OPERATOR_NAMESPACE, "--wait", f"--timeout={120 * e2e.slow:.0f}s"]
    (release,) = json.loads(e2e.helm("list", "-n", OPERATOR_NAMESPACE, "-o", "json"))
    values = ["--reuse-values", "--set", "logLevel=debug", "--set-string", "podAnnotations.upgraded=yes"]
    archive = package_chart(tmp_path, version="0.1.999")
    try:
        e2e.helm("upgrade", RELEASE, str(archive), *place, *values)
        assert "springtide-0.1.999" in e2e.helm("list", "-n", OPERATOR_NAMESPACE)
        e2e.until(60, "the old operators to go", lambda: operators(e2e).isdisjoint(before))
        steps.append(goes_on(running))
    finally:
        e2e.helm("rollback", RELEASE, release["revision"], *place)
    assert f"{release['chart']}\t" in e2e.helm("list", "-n", OPERATOR_NAMESPACE)
    steps.append(goes_on(running))
    running.scale(3)  # the operator that came back acts
    running.until_trains(3)
    assert steps == sorted(steps)
    assert unhealthy(e2e) == complaints  # operators came and went
    living = {pod["metadata"]["uid"]: pod for pod in running.all_pods()}
    assert pods <= set(living)
    counts = [living[uid]["status"]["containerStatuses"][0]["restartCount"] for uid in pods]
    assert set(counts) == {0}
    status = running.status()
    assert (status["restarts"]["total"], status["statesLost"]) == (0, 0)


def unhealthy(e2e: E2ECluster) -> list[str]:
    """Return what kubelets complained about the operator's pods."""
    return sorted(line for line in e2e.warnings(OPERATOR_NAMESPACE) if ": Unhealthy: " in line)


def goes_on(running: RunningJob) -> int:
    """Return the job's step in status once it has moved, which it never does backwards."""
    before = int(running.status().get("step", 0))

    def further() -> int:
        step = int(running.status()["step"])
        assert step >= before, f"step {step} after step {before}"
        return step if step > before else 0

    return running.cluster.until(60, f"a step after {before}", further)

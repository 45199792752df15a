"""Pods of two processes each, whose script knows nothing of the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e_cluster import E2ECluster
from e2e_jobs import RunningJob

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# Ends in any round but the first that has all four ranks.
CODE = """
import os, time
print("round", os.environ["TORCHELASTIC_RESTART_COUNT"], "of", os.environ["WORLD_SIZE"], flush=True)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
while first or os.environ["WORLD_SIZE"] != "4":
    time.sleep(0.1)
"""


def test_scripts_begin_again_and_the_other_pod_stays(
    e2e: E2ECluster, start: Callable[..., RunningJob]
) -> None:
    command = ["springtide", "launch", "--torchrun-env", "--", "python", "/scripts/train.py"]
    running = start("ranks", code=CODE, command=command, workers=2, minimum=2, processes=2)
    running.until_trains(2)
    lost, kept = running.pods()
    log = f"/api/v1/namespaces/{running.namespace}/pods/{kept['metadata']['name']}/log"
    e2e.until(120, "the first round of four", lambda: "[3] round 0 of 4" in e2e.api.text(log))
    running.delete_pod(lost["metadata"]["name"], "--force", "--grace-period=0")
    running.until_condition("Succeeded")
    pods = {pod["metadata"]["uid"]: pod for pod in running.pods()}
    assert pods[kept["metadata"]["uid"]]["status"]["containerStatuses"][0]["restartCount"] == 0
    status = running.status()
    assert "goodput" not in status
    assert status["restarts"]["failures"] == 0
    assert status["restarts"]["preemptions"] == 1
    assert status.get("statesLost", 0) == 0


def test_every_process_of_a_pod_is_a_worker_of_the_job(start: Callable[..., RunningJob]) -> None:
    running = start("pairs", workers=1, processes=2, epochs=40)
    running.until_condition("Succeeded")
    status = running.status()
    assert (status["data"]["repeated"], status["data"]["lost"]) == (0, 0)
    assert status["data"]["totalSeen"] == 40 * 64
    assert status["restarts"]["failures"] == 0
    (pod,) = running.pods()
    container = pod["spec"]["containers"][0]
    assert container["command"][:5] == ["springtide", "launch", "--processes", "2", "--"]
    log = running.cluster.api.text(
        f"/api/v1/namespaces/{running.namespace}/pods/{pod['metadata']['name']}/log"
    )
    assert "[1] step 25 of 2 workers" in log

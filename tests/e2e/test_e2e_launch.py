"""Pods of two processes each, whose script knows nothing of the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e_jobs import RunningJob

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CODE = """
import os, time
print("round", os.environ["TORCHELASTIC_RESTART_COUNT"], "of", os.environ["WORLD_SIZE"], flush=True)
while open(os.environ["PACE_FILE"]).read() != "0":
    time.sleep(0.1)
"""


def test_scripts_begin_again_and_the_other_pod_stays(start: Callable[..., RunningJob]) -> None:
    command = ["springtide", "launch", "--torchrun-env", "--", "python", "/scripts/train.py"]
    running = start("ranks", code=CODE, command=command, workers=2, minimum=2, processes=2, pace="1")
    running.until_trains(2)
    lost, kept = running.pods()
    first = running.until_said(kept["metadata"]["name"], r"\[3\] round (\d+) of 4")
    running.delete_pod(lost["metadata"]["name"], "--force", "--grace-period=0")
    running.until_said(kept["metadata"]["name"], rf"\[3\] round (?!{first}\b)(\d+) of 4")
    running.set_pace("0")
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
    assert "springtide launch --processes 2 --" in " ".join(container["command"])
    log = running.cluster.api.text(
        f"/api/v1/namespaces/{running.namespace}/pods/{pod['metadata']['name']}/log"
    )
    assert "[1] step 25 of 2 workers" in log

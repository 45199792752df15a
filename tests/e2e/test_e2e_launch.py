"""Pods of two processes each, whose script knows nothing of the library."""

from __future__ import annotations

import re
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

# A model in two parts. In the pod that the file names behind its pace, the process with local rank 1 dies.
DIVIDED = """
import gc, os, signal, time
gc.disable()  # Python would look for garbage among all that torch imports
import torch
from torch.distributed.fsdp import fully_shard
import springtide

springtide.init()
mesh = springtide.mesh()
torch.manual_seed(0)
x = torch.randn(64, 6)
model = torch.nn.Linear(6, 6)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
springtide.distribute(model, optimizer)
epochs = int(os.environ["EPOCHS"])
for step, batch in enumerate(springtide.batches((x, x.flip(1)), batch_size=16, epochs=epochs, seed=0)):
    with open(os.environ["PACE_FILE"]) as file:
        pace, doomed = (file.read() + " -").split()[:2]
    with springtide.step():
        time.sleep(float(pace))
        if doomed == os.environ["SPRINGTIDE_POD_UID"] and springtide.local_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (model(batch[0]) - batch[1]).square().mean().backward()
        optimizer.step()
    if step % 2 == 0:
        print(f"step {step} of {springtide.world_size()}", flush=True)
average = optimizer.state[model.weight]["exp_avg"]
print("part", model.weight.to_local().flatten().tolist(), average.to_local().flatten().tolist())
"""


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert "[1] step 25 of 2 workers" in running.log(pod["metadata"]["name"])


@pytest.mark.slow
def test_dead_process_ends_its_pod_of_a_divided_model(start: Callable[..., RunningJob]) -> None:
    # Few steps, and slow ones: a divided model's take a hundred times as long as those of others.
    running = start("divided", code=DIVIDED, workers=2, processes=2, epochs=20, pace="2")
    running.until_trains(2)
    lost, kept = running.pods()
    for rank in (0, 1):
        running.until_said(kept["metadata"]["name"], rf"\[{rank}\] step (\d+) of 4")
    running.set_pace(f"2 {lost['metadata']['uid']}")
    known = {pod["metadata"]["uid"] for pod in (lost, kept)}

    def added() -> str:
        return "".join(p["metadata"]["name"] for p in running.pods() if p["metadata"]["uid"] not in known)

    name = running.cluster.until(120, "a pod in the place of the lost one", added)
    running.until_said(name, r"\[1\] step (\d+) of 4")
    running.set_pace("0")
    running.until_condition("Succeeded")
    status = running.status()
    assert (status["data"]["repeated"], status["data"]["lost"]) == (0, 0)
    assert status["restarts"]["failures"] == 1
    assert status.get("statesLost", 0) == 0
    logs = [running.log(pod) for pod in (kept["metadata"]["name"], name)]
    # Nobody began again in the pod that stayed.
    assert len(re.findall(r"runs as pid", logs[0])) == 2
    parts = [[re.findall(rf"\[{rank}\] part (.*)", log) for rank in (0, 1)] for log in logs]
    assert parts[0] == parts[1]
    assert parts[0][0] != parts[0][1]

"""The examples for other libraries' trainers as jobs, through a worker's death and a scale-up.

All of them train at once, since each imports for longer than it trains.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_cluster import E2ECluster
from e2e_jobs import RunningJob

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"
PACE = '''
import os, time, warnings

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

warnings.simplefilter("ignore")  # of these libraries with the newest torch
torch.set_num_threads(1)


def _pace(*_):
    """Make each step as slow as the ConfigMap says at the moment."""
    try:
        with open(os.environ["PACE_FILE"]) as file:
            time.sleep(float(file.read()))
    except (OSError, ValueError):
        pass


register_optimizer_step_post_hook(_pace)
'''
JOBS: dict[str, dict[str, Any]] = {
    "transformers": {
        "example": "trainer",
        "environment": {"STEPS": "40"},
        "samples": 40 * 32,
    },
    "lightning": {
        "example": "lightning",
        "environment": {"EPOCHS": "2"},
        "samples": 2 * 1438,
    },
}
"""Examples by the library that has to be installed; they have 40, 46 and 46 steps."""


@pytest.mark.slow
def test_trainers_survive_a_kill_and_grow(
    e2e: E2ECluster, start: Callable[..., RunningJob], tmp_path: Path
) -> None:
    """Each job loses a worker, gets another one in its place and two more, and counts each sample once."""
    found = {name: case for name, case in JOBS.items() if importlib.util.find_spec(name)}
    if not found:
        pytest.skip(f"none of {', '.join(JOBS)} is installed")
    jobs = {}
    for name, case in found.items():
        code = PACE + (EXAMPLES / case["example"] / "train.py").read_text()
        environment = case["environment"] | {"OUTPUT": str(tmp_path / name)}
        jobs[name] = start(name, code, pace="2", workers=2, environment=environment)
    for running in jobs.values():
        running.until_trains(2, seconds=300.0)
    for running in jobs.values():
        running.delete_pod(running.pods()[0]["metadata"]["name"], "--force", "--grace-period=0")
    for running in jobs.values():
        running.until_trains(2, seconds=300.0)  # not after the scale-up, for a short job would be over
        running.scale(3)
    for running in jobs.values():
        running.until_trains(3, seconds=300.0)
        running.set_pace(0)
    for name, running in jobs.items():
        running.until_condition("Succeeded", seconds=300.0)
        status = running.status()
        assert (status["data"]["repeated"], status["data"]["lost"]) == (0, 0)
        assert status["data"]["totalSeen"] == found[name]["samples"]
        assert (status["restarts"]["failures"], status["statesLost"]) == (0, 0)
        assert status["values"]

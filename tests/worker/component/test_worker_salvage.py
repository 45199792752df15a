"""A step that loses a member costs what the lost one had computed, and nothing of what the others have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_checks import check
from worker_cluster import Worker, WorkerCluster, Zygote
from worker_reference import Reference, train_alone

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 4, "pace": 0.03}
# The others have computed what they do before they hear of it.
FAULTS = {2: "body:6:sleep=1;gradients:6:kill", 3: "body:10:sleep=1;backward:10:kill"}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_cluster(new_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    environment = {"SPRINGTIDE_SALVAGE": "Always"}
    return lambda options=OPTIONS, **settings: new_cluster(options, environment=environment | settings)


def computed_before(worker: Worker) -> dict[int, tuple[int, int]]:
    """Return by step how much of it all members, and this one, had computed when it was done again."""
    pattern = r"step (\d+): (\d+) of \d+ (?:samples|parts) are computed already, (\d+) of them here"
    return {int(step): (int(all_), int(own)) for step, all_, own in re.findall(pattern, worker.log())}


@pytest.mark.parametrize(
    ("options", "shard"),
    [({}, "None"), ({"scaler": True, "split": 3}, "None"), ({"split": 2, "clip_norm": 1e3}, "Optimizer")],
)
def test_survivors_keep_what_they_have_computed(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, options: dict[str, Any], shard: str
) -> None:
    """One dies when all gradients are there, one in the middle of its backward: each loses its own alone."""
    cluster = make_cluster(OPTIONS | options, SPRINGTIDE_SHARD=shard)
    steady, other, *victims = cluster.start(4, faults=FAULTS)
    cluster.until(lambda: not any(victim.running for victim in victims), "both deaths")
    cluster.until_done()
    assert computed_before(steady)[6] == (24, 8)
    total, own = computed_before(steady)[10]
    assert total >= 2 * own > 0
    check(cluster, reference, [steady, other])


def test_batch_statistics_of_kept_samples_stay(
    make_cluster: Callable[..., WorkerCluster], tmp_path: Path, zygote: Zygote
) -> None:
    """The survivor of two goes on as one process does after the first of two micro-batches."""
    options = OPTIONS | {"samples": 32, "epochs": 1, "model": "norm", "same_start": True}
    (tmp_path / "alone").mkdir()
    train_alone(zygote, tmp_path / "alone", options | {"split": 2})
    alone = json.loads((tmp_path / "alone" / "alone.json").read_text())
    cluster = make_cluster(options)
    steady, victim = cluster.start(2, faults={1: "body:1:sleep=1;gradients:1:kill"})
    cluster.until_done()
    assert victim.code == -9
    assert computed_before(steady)[1] == (16, 16)
    result = steady.result()
    assert result is not None, cluster.logs()
    assert (result["buffer_values"], result["buffers"]) == (alone["buffer_values"], alone["buffers"])
    assert result["values"] == pytest.approx(alone["values"], abs=1e-6)

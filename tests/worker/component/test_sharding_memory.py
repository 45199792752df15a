"""Bytes that real processes hold of gradients and of the optimizer's state, with shards and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_cluster import WorkerCluster

SCRIPT = Path(__file__).parents[2] / "support" / "worker_memory_script.py"
OPTIONS: dict[str, Any] = {"width": 160, "depth": 12, "samples": 24, "batch": 12, "epochs": 3, "steps": 6}
FIGURES = ("optimizer_bytes", "gradient_bytes", "gradient_peak_bytes", "tensor_bytes")
UNDER_WAY = 1 / 12


def most(new_cluster: Callable[..., WorkerCluster], shard: str) -> dict[str, float]:
    """Return the most of each figure that one of three workers has."""
    environment = {"SPRINGTIDE_SHARD": shard, "SPRINGTIDE_SHARDS_UNDER_WAY_MIB": "0.02"}
    cluster = new_cluster(OPTIONS, script=SCRIPT, environment=environment)
    # To look at all objects takes a worker's interpreter for long, and none may count as lost meanwhile.
    cluster.everywhere["SPRINGTIDE_KEEPALIVE_SECONDS"] = "30"
    workers = cluster.start(3)
    cluster.until_done()
    results = [worker.result() for worker in workers]
    assert all(results), cluster.logs()
    cluster.close()
    return {name: max(result[name] for result in results if result) for name in FIGURES}


@pytest.mark.slow
def test_a_worker_holds_its_part_of_gradients_and_state(new_cluster: Callable[..., WorkerCluster]) -> None:
    """Two thirds with three workers, a twelfth that is under way, and in backward the newest gradient."""
    whole, part = (most(new_cluster, shard) for shard in ("None", "Gradients"))
    ratios = {name: part[name] / whole[name] for name in FIGURES}
    newest = 1 / OPTIONS["depth"]
    assert ratios["optimizer_bytes"] <= 2 / 3 * 1.05
    assert ratios["gradient_bytes"] <= 2 / 3 * 1.05 + UNDER_WAY
    assert ratios["gradient_peak_bytes"] <= 2 / 3 * 1.05 + UNDER_WAY + newest
    assert ratios["tensor_bytes"] < 0.8

"""Real processes whose copies of shards differ: found, both named, mended, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from worker_cluster import WorkerCluster

from springtide.coordination import outcome
from springtide.train_step.replica_digest import INTERVAL

OPTIONS: dict[str, Any] = {
    "samples": 64,
    "batch": 16,
    "epochs": 20,
    "lr": 0.003,
    "optimizer": "adam",
    "hidden": 96,
}
STEPS = 80


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["Optimizer", "Gradients"])
def test_a_copy_that_differs_is_sent_again(new_cluster: Callable[..., WorkerCluster], shard: str) -> None:
    options = OPTIONS | {"spoilt_state": [[20, 1]]}
    cluster = new_cluster(options, environment={"SPRINGTIDE_SHARD": shard})
    cluster.start(3)
    cluster.until_done()
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in cluster.workers), cluster.logs()
    results = [worker.result() for worker in cluster.workers]
    assert len({result["parameters"] for result in results}) == 1
    assert all(result["step"] == STEPS and not result["audit"]["lost"] for result in results)
    for worker in cluster.workers:
        said = [line for line in worker.log().splitlines() if "differ; nobody can tell" in line]
        assert said, worker.log()
        assert all("worker-1" in line and "sent to the buddy again" in line for line in said)
        first = int(said[0].partition("step ")[2].partition(":")[0])
        assert first % INTERVAL == 0
        assert len({line.partition("step ")[2].partition(":")[0] for line in said}) == 1  # mended at once

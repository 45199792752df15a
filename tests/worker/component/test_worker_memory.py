"""Real processes with too little memory for their model: they say so before they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker_cluster import WorkerCluster

from springtide.coordination import outcome
from springtide_operator.plan.memory import ERROR
from springtide_protocol.codec import memory_from_proto
from springtide_protocol.memory import ModelMemory, fewest

OPTIONS: dict[str, Any] = {
    "samples": 64,
    "batch": 16,
    "epochs": 6,
    "lr": 0.003,
    "optimizer": "adam",
    "hidden": 96,
}
PARAMETERS = 4 * (13 * 96 + 97 * 96 + 97 * 3)
LIMIT = int(3.5 * PARAMETERS)
"""Room for the model of three workers, which share out the optimizer's state, and not for that of one."""
ENVIRONMENT = {"SPRINGTIDE_SHARD": "Optimizer", "SPRINGTIDE_MEMORY_BYTES": str(LIMIT)}


def told(cluster: WorkerCluster) -> ModelMemory | None:
    return None if cluster.reply is None else memory_from_proto(cluster.reply.memory)


def test_job_without_room_at_its_minimum_does_not_begin(new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster(OPTIONS, environment=ENVIRONMENT)
    (worker,) = cluster.start(1)
    cluster.until_done()
    ended = worker.outcome()
    assert isinstance(ended, outcome.Failed)
    assert ended.exception == ERROR
    assert "with 1 worker, as few as workers.minReplicas allows" in ended.message
    assert "Set workers.minReplicas to 3, or raise the limit" in ended.message
    assert not worker.commits()
    found = told(cluster)
    assert found is not None
    assert (found.parameters, found.limit, fewest(found)) == (PARAMETERS, LIMIT, 3)


def test_enough_workers_train_and_one_with_less_is_sent_away(
    new_cluster: Callable[..., WorkerCluster],
) -> None:
    cluster = new_cluster(OPTIONS | {"pace": 0.02}, environment=ENVIRONMENT)
    workers = cluster.start(3)
    cluster.until_step(3)
    assert (told(cluster) or ModelMemory(1)).state == 2 * PARAMETERS
    cluster.environment["SPRINGTIDE_MEMORY_BYTES"] = str(2 * PARAMETERS)
    small = cluster.add()
    cluster.until_done()
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in workers), cluster.logs()
    ended = small.outcome()
    assert isinstance(ended, outcome.Failed)
    assert ended.exception != ERROR
    assert "this worker has no room for the model" in ended.message
    assert not small.commits()


def test_state_of_an_unknown_optimizer_is_measured(new_cluster: Callable[..., WorkerCluster]) -> None:
    environment = ENVIRONMENT | {"SPRINGTIDE_MEMORY_BYTES": str(10 * PARAMETERS)}
    cluster = new_cluster(OPTIONS | {"optimizer": "own"}, environment=environment)
    cluster.start(3)
    cluster.until(lambda: (told(cluster) or ModelMemory(1)).state > 0, "the first step's figures")
    found = told(cluster)
    assert found is not None
    assert abs(found.state - 2 * PARAMETERS) < 0.3 * PARAMETERS  # shards are no smaller than 256 elements
    cluster.until_done()

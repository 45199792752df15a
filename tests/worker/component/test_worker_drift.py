"""Replicas that drift apart: found, named, and sent the state again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from worker_cluster import Worker, WorkerCluster

from springtide.coordination import outcome
from springtide.train_step.replica_digest import INTERVAL

OPTIONS: dict[str, Any] = {"samples": 64, "batch": 16, "epochs": 20, "lr": 0.01}
STEPS = 80


def ended(cluster: WorkerCluster) -> list[Worker]:
    cluster.until_done()
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in cluster.workers), cluster.logs()
    return cluster.workers


@pytest.mark.parametrize("odd", [0, 2])
def test_the_odd_one_of_three_is_sent_the_state(odd: int, new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster(OPTIONS | {"spoilt": [[20, odd]]})
    cluster.start(3)
    workers = ended(cluster)
    results = [worker.result() for worker in workers]
    assert len({result["parameters"] for result in results}) == 1
    assert all(result["step"] == STEPS and not result["audit"]["lost"] for result in results)
    for worker in workers:
        said = [line for line in worker.log().splitlines() if "are not those of the other workers" in line]
        assert len(said) == 1
        assert f"step {2 * INTERVAL}: the parameters of worker-{odd} are not" in said[0]
        assert "it is sent the state again" in said[0]


def test_with_two_the_first_one_counts(new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster(OPTIONS | {"spoilt": [[20, 1]]})
    cluster.start(2)
    first, second = ended(cluster)
    assert first.result()["parameters"] == second.result()["parameters"]
    assert "the parameters of worker-1 are not those" in first.log()


def test_one_that_drifts_on_is_left_alone_in_the_end(new_cluster: Callable[..., WorkerCluster]) -> None:
    """A worker that drifts again and again is at last sent the state no more.

    A machine that computes otherwise is not helped by stopping all others for it.
    """
    cluster = new_cluster(OPTIONS | {"spoilt": [[step, 1] for step in range(1, 76)], "epochs": 25})
    cluster.start(2)
    first, _ = ended(cluster)
    assert first.log().count("it is sent the state again") == 3
    assert "it is not sent the state any more: its machine computes otherwise" in first.log()

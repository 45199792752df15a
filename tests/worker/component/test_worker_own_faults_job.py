"""A worker that fails for a reason of its own while a generation forms ends at once, and alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from worker_cluster import WorkerCluster

from springtide.coordination import outcome

OPTIONS: dict[str, Any] = {"samples": 64, "batch": 16, "epochs": 30, "lr": 0.01}


def test_joiner_without_memory_ends_alone_and_says_so(new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster(OPTIONS)
    first = cluster.start(2)
    cluster.until_step(4)
    joiner = cluster.add(no_memory=[2])
    cluster.until_done(joiner)
    end = joiner.outcome()
    assert isinstance(end, outcome.Failed), cluster.logs()
    said = str(end)
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB" in said
    assert "for a reason of its own" in said
    assert "network" not in said
    cluster.until_done()
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in first), cluster.logs()
    # The one that it came to, and the one without it.
    assert cluster.reply is not None
    assert cluster.reply.generation.number == 3
    for worker in first:
        assert worker.result()["step"] == 120
        assert "Check that pods can reach each other" not in worker.log()


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_joiner_takes_a_buffer_that_was_expanded(
    frozen: int, new_cluster: Callable[..., WorkerCluster]
) -> None:
    cluster = new_cluster(OPTIONS | {"expanded": True, "frozen": frozen})
    cluster.start(2)
    cluster.until_step(4)
    cluster.add()
    cluster.until_done()
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in cluster.workers), cluster.logs()
    results = [worker.result() for worker in cluster.workers]
    assert len({result["parameters"] for result in results}) == 1
    assert [2.0] * 16 in results[-1]["buffer_values"]
    assert cluster.reply is not None
    assert cluster.reply.generation.number <= 2 + len(cluster.workers)

"""Parts by speed in real processes: a slow worker does less of each batch, and nothing else changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from worker_checks import check
from worker_cluster import Worker, WorkerCluster
from worker_reference import Reference

from springtide.coordination import outcome

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 7}
QUICK, SLOW = 0.002, 0.006
SPEEDS = {"0": QUICK, "1": QUICK, "2": SLOW}
"""Seconds per sample, by slot."""

pytestmark = pytest.mark.timeout(300)


def parts(worker: Worker) -> list[int]:
    """The samples of a whole batch that a worker had in turn, after even ones."""
    return [int(found) for found in re.findall(r"this worker has (\d+) of 32 samples", worker.log())]


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["None", "Gradients"])
def test_slow_worker_does_less_over_kill_join_and_leave(
    new_cluster: Callable[..., WorkerCluster], reference: Reference, shard: str
) -> None:
    """Sizes 3, 2, 3, 2: the cut follows, each sample counts once, and the losses are one process's."""
    options = OPTIONS | {"sample_seconds": SPEEDS}
    cluster = new_cluster(options, environment={"SPRINGTIDE_SHARD": shard, "SPRINGTIDE_BALANCE": "Speed"})
    first, second, slow = cluster.start(3)
    cluster.until_step(12, slow)
    assert parts(slow)[-1] <= 7
    assert parts(first)[-1] >= 12
    second.kill()
    cluster.until_step(20, slow)
    joiner = cluster.add()
    cluster.until_step(32, joiner)
    # Its first steps are slow where others use the same processors; its part grows with what it does then.
    cluster.until(lambda: parts(joiner)[-1] >= 11, "a whole part for the joiner")
    first.terminate()
    cluster.until_done()
    assert isinstance(first.outcome(), outcome.Left)
    check(cluster, reference, [slow, joiner])

"""Parameter groups that a script adds while it trains: workers that join, and a job that is restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import compatibility
import pytest
import torch
from compatibility import plain
from halt import Halt
from worker_cluster import READY, WorkerCluster

from springtide.checkpoint import names, restore
from springtide.checkpoint.storage import Storage
from springtide.coordination import outcome

CASE = "added_group"
FIRST_LOOP = 3
"""Steps before the group is added."""


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["None", "Optimizer"])
def test_added_groups_are_restored(
    shard: str, new_cluster: Callable[..., WorkerCluster], tmp_path: Path
) -> None:
    """Processes whose optimizers have one group when the state comes end with the same numbers."""
    volume = tmp_path / "volume"
    volume.mkdir()
    storage = Storage(str(volume), "default-test-alone")

    def newest() -> int:
        found = [state for name in restore.candidates(storage) if (state := names.parse(name))]
        return found[0].step if found else 0

    cluster = new_cluster(
        {"case": CASE},
        script=Path(compatibility.__file__),
        environment={
            "SPRINGTIDE_CHECKPOINT_URI": str(volume),
            "SPRINGTIDE_CHECKPOINT_SECONDS": "0.01",
            "SPRINGTIDE_SHARD": shard,
        },
    )
    early, late = Halt(tmp_path, "early"), Halt(tmp_path, "late")
    slow = ";".join(f"body:{number}:sleep=0.3" for number in (6, 7, 8))
    cluster.start(2, faults={0: f"{early.at('committed:5')};{late.at('committed:10')};{slow}"})
    cluster.until(early.reached, "a step with both groups")
    joiner = cluster.add()
    cluster.until(lambda: READY in joiner.log(), "a third worker")
    early.go()
    cluster.until(
        lambda: bool(joiner.commits()) and late.reached() and newest() > FIRST_LOOP + 1,
        "a joiner, and a checkpoint with both groups",
    )
    for worker in list(cluster.workers):
        worker.kill()
    cluster.until_done()
    second = [cluster.add(), cluster.add()]
    cluster.until_done(seconds=100)
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in second), cluster.logs()
    assert second[0].commits()[0]["step"] > FIRST_LOOP + 1
    assert "is read by rank 0 alone" not in second[0].log()
    results = [torch.load(tmp_path / f"{worker.name}.pt") for worker in second]
    expected = plain(CASE)
    for name, value in expected.items():
        assert torch.equal(results[0][name], results[1][name])
        torch.testing.assert_close(results[0][name], value, rtol=0, atol=1e-5)

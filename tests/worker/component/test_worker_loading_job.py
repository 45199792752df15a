"""Reading ahead in a job: the numbers of an undisturbed run, and a death is seen at once nevertheless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worker_checks import check
from worker_cluster import WorkerCluster, Zygote
from worker_reference import train_alone

OPTIONS: dict[str, Any] = {"samples": 150, "batch": 32, "epochs": 4, "pace": 0.02}

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_killed_while_processes_read_ahead(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    reference = train_alone(zygote, tmp_path / "alone", OPTIONS)
    cluster = WorkerCluster(zygote, tmp_path, OPTIONS | {"loader_workers": 1})
    try:
        first, second = cluster.start(2, faults={1: "backward:5:kill"})
        cluster.until(lambda: not second.running, "the death")
        third = cluster.add()
        cluster.until_done()
        check(cluster, reference, [first, third])
        # The reductions failed by the dead worker's closed connections, which its readers did not hold.
        assert "REDUCTION_FAILED" in first.log() or "DROPPED" in first.log()
    finally:
        cluster.close()


def test_killed_in_loops_over_several_datasets(zygote: Zygote, tmp_path: Path) -> None:
    """One that is drawn by weights, one that is read in ranges, one without its last batch."""
    options = OPTIONS | {"datasets": True, "loops": 3, "epochs": 2, "pace": 0.03}
    (tmp_path / "alone").mkdir()
    reference = train_alone(zygote, tmp_path / "alone", options)
    # Five batches, four, and three, twice each.
    assert max(reference.losses) == 24
    assert reference.audit["totalSeen"] == 2 * (150 + 100 + 96)
    cluster = WorkerCluster(zygote, tmp_path, options)
    try:
        faults = {1: "backward:4:kill", 2: "reduced:13:kill", 3: "gradients:21:kill"}
        steady, *victims = cluster.start(4, faults=faults)
        cluster.until_done()
        assert [victim.code for victim in victims] == [-9] * 3
        check(cluster, reference, [steady])
    finally:
        cluster.close()

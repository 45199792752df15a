"""Workers of two releases in one job: they train together, or the one that comes later is told why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from worker_cluster import WorkerCluster, Zygote

SCRIPT = Path(__file__).parents[1] / "support" / "skew_unused_script.py"

pytestmark = pytest.mark.timeout(200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("members", "joiner", "fits"),
    [("today", "last", False), ("last", "today", False), ("today", "next", True)],
)
def test_joiner_of_another_release_trains_or_is_told_why_not(
    zygote_of: Callable[[str], Zygote], tmp_path: Path, members: str, joiner: str, fits: bool
) -> None:
    """The others train on in any case, also without a bucket of gradients that nobody uses."""
    cluster = WorkerCluster(zygote_of(members), tmp_path, {"epochs": 4, "pace": 0.02}, script=SCRIPT)
    cluster.coordinator_zygote = zygote_of("today")
    try:
        trained = cluster.start(2)
        cluster.until_step(6)
        cluster.change_release(zygote_of(joiner), SCRIPT)
        late = cluster.add()
        if fits:
            trained.append(late)
            cluster.until_step(16, late)
        else:
            cluster.until(lambda: not late.running, "the joiner's end")
            assert late.code != 0
            assert "give this pod the others' image" in late.log()
        cluster.until_done()
        assert cluster.finished() == trained
    finally:
        cluster.close()
    values = [json.loads((tmp_path / f"{worker.name}.values").read_text()) for worker in trained]
    assert all(other == values[0] for other in values)

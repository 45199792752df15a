"""The steps that a job has at its end: the steps of its loop, or those that the script says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from worker_alone import library
from worker_cluster import WorkerCluster

import springtide
from springtide.coordination import outcome
from springtide.errors import UsageError

SCRIPT = Path(__file__).parents[2] / "support" / "worker_loops_script.py"

pytestmark = pytest.mark.timeout(300)


def planned(cluster: WorkerCluster) -> int:
    assert cluster.reply is not None
    return cluster.reply.planned_steps


def test_several_loops_are_planned_only_where_the_script_says(
    new_cluster: Callable[..., WorkerCluster],
) -> None:
    cluster = new_cluster({"loops": 3, "says": False}, script=SCRIPT)
    cluster.start(2)
    cluster.until(lambda: planned(cluster) == 4, "the steps of the first loop", stop_at=1)
    cluster.until_step(5)
    cluster.until(lambda: planned(cluster) == 0, "nobody to know how many loops come", stop_at=5)
    cluster.until_done()
    assert planned(cluster) == 0


def test_said_steps_stand_through_loops_and_a_lost_coordinator(
    new_cluster: Callable[..., WorkerCluster],
) -> None:
    cluster = new_cluster({"loops": 3, "says": True}, script=SCRIPT)
    first, second = cluster.start(2)
    cluster.until_step(2)
    cluster.until(lambda: planned(cluster) == 12, "the script's word")
    cluster.kill_coordinator()
    cluster.start_coordinator()
    first.kill()
    cluster.until_step(6, second)
    cluster.until(lambda: planned(cluster) == 12, "the script's word, by the other worker")
    cluster.until_done()
    assert isinstance(second.outcome(), outcome.Finished), cluster.logs()


@pytest.mark.parametrize("steps", [0, -1, True, 1.5, "10", None, 2**63], ids=repr)
def test_steps_that_are_no_number_are_refused(steps: object) -> None:
    with library(), pytest.raises(ValueError, match=r"set_total_steps\(\): steps must be an integer of 1"):
        springtide.set_total_steps(steps)  # type: ignore[arg-type]


def test_steps_before_init_are_an_error() -> None:
    with pytest.raises(UsageError, match=r"springtide.set_total_steps\(\) before springtide.init\(\)"):
        springtide.set_total_steps(10)


def test_the_newest_word_counts() -> None:
    with library() as runtime:
        assert runtime.state.job_steps == 0
        springtide.set_total_steps(10)
        springtide.set_total_steps(7)
        assert runtime.state.job_steps == 7

"""The order in which several threads bring shards to their steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide_ps.server.cores import available_cores
from springtide_ps.server.step_queue import Job, StepQueue


def queue_of(*jobs: Job) -> StepQueue:
    queue = StepQueue()
    for job in jobs:
        queue.put(job)
    return queue


def test_jobs_are_taken_in_their_order() -> None:
    jobs = [Job("b", 1, False), Job("a", 1, False), Job("c", 1, True)]
    queue = queue_of(*jobs)
    assert [queue.take() for _ in range(4)] == [*jobs, None]


def test_second_job_of_a_shard_waits_for_the_first() -> None:
    first, second, other = Job("a", 1, True), Job("a", 2, False), Job("b", 2, False)
    queue = queue_of(first, second, other)
    assert [queue.take(), queue.take(), queue.take()] == [first, other, None]
    assert not queue.done(other)
    assert queue.take() is None
    assert queue.done(first)
    assert queue.take() == second
    assert queue
    assert not queue.done(second)
    assert not queue


def test_next_step_of_a_shard_goes_behind_those_of_others() -> None:
    jobs = [Job(key, step, False) for step in (1, 2) for key in "abc"]
    queue, order = queue_of(*jobs), list[Job]()
    while (job := queue.take()) is not None:
        order.append(job)
        queue.done(job)
    assert order == jobs


def test_steps_that_are_open_are_those_of_each_shard_first() -> None:
    queue = queue_of(Job("a", 3, False), Job("a", 4, False), Job("b", 5, False))
    queue.take()
    assert sorted(queue.steps()) == [3, 5]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "900000 100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_cores_are_counted_within_the_cpu_limit(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 2, 3, 5})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == cores

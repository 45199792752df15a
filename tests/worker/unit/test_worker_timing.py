"""The parts of a step's time that the worker counts."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from springtide.coordination.metrics import Metrics
from springtide.train_step.timing import Timing


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_fetching_in_the_body_is_no_computing() -> None:
    clock = Clock()
    timing = Timing(clock)

    def fetch(seconds: float) -> float:
        clock.now += seconds
        return seconds

    timed = timing.timed(fetch)
    timing.note_assigned()
    timing.opened()
    assert timed(0.25) == 0.25
    assert timing.committed(1.0, 0.75, 0.125) == (0.25, 0.0)
    told = timing.take()
    assert told is not None
    assert (told.steps, told.step_seconds, told.data_seconds) == (1, 1.0, 0.25)
    assert (told.compute_seconds, told.wait_seconds) == (0.5, 0.125)
    assert timing.take() is None


def test_fetching_before_body_is_data_and_not_computing() -> None:
    clock = Clock()
    timing = Timing(clock)

    def fetch(seconds: float) -> None:
        clock.now += seconds

    timed = timing.timed(fetch)
    timing.note_assigned()
    timed(0.5)
    timing.opened()
    timed(0.25)
    assert timing.committed(1.0, 0.75, 0.0)[0] == 0.75
    told = timing.take()
    assert told is not None
    assert told.compute_seconds == 0.5


def test_a_dropped_step_and_a_failed_fetch_leave_nothing_behind() -> None:
    clock = Clock()
    timing = Timing(clock)

    def broken(_: object) -> None:
        clock.now += 5.0
        raise OSError("the file server is gone")

    timing.note_assigned()
    timing.opened()
    with pytest.raises(OSError, match="file server"):
        timing.timed(broken)(None)
    timing.note_assigned()
    timing.opened()
    assert timing.committed(1.0, 0.5, 0.0) == (0.0, 0.0)


def test_means_cover_steps_and_checkpoints_since_the_last_take() -> None:
    timing = Timing()
    timing.paused(0.5)
    timing.paused(0.25)
    assert timing.committed(1.0, 0.5, 0.25) == (0.0, 0.75)
    assert timing.committed(3.0, 1.5, 0.75) == (0.0, 0.0)
    told = timing.take()
    assert told is not None
    assert (told.steps, told.step_seconds, told.compute_seconds, told.wait_seconds) == (2, 2.0, 1.0, 0.5)


def test_overlap_is_what_computing_hid() -> None:
    metrics = Metrics("job", "ns")
    metrics.communicated(0.4, 0.1, 1000)
    page = generate_latest(metrics.registry).decode()
    labels = '{job_namespace="ns",training_job="job"}'
    assert f"springtide_worker_overlap_ratio{labels} 0.75" in page
    assert f"springtide_worker_reduced_bytes_total{labels} 1000.0" in page
    metrics.communicated(0.0, 0.0, 0)
    assert f"springtide_worker_overlap_ratio{labels} 0.0" in generate_latest(metrics.registry).decode()

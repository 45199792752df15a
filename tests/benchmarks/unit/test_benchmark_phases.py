"""Moments to strike: each part of a step has one, and none lies in the past."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.phases import pause, spread


@given(st.integers(1, 20), st.integers())
def test_each_part_of_a_step_has_one_event(count: int, seed: int) -> None:
    points = spread(count, random.Random(seed))
    assert sorted(int(point * count) for point in points) == list(range(count))


def test_the_order_is_random() -> None:
    assert len({tuple(int(3 * point) for point in spread(3, random.Random(seed))) for seed in range(50)}) == 6


@given(
    point=st.floats(0.0, 0.999),
    step=st.floats(0.01, 10.0),
    ago=st.floats(0.0, 100.0),
)
def test_the_wait_ends_at_the_point_of_a_step(point: float, step: float, ago: float) -> None:
    now = 1000.0
    seconds = pause(point, now - ago, step, now)
    assert -1e-6 <= seconds <= max(step, point * step) + 1e-6
    steps = (ago + seconds) / step - point
    assert steps == pytest.approx(round(steps), abs=1e-6)

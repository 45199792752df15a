"""Figures of the benchmark of trackers."""

from __future__ import annotations

import pytest

from benchmarks import trackers


def test_ratio_is_the_median_of_pairs() -> None:
    seconds = {True: [0.011, 0.030, 0.022], False: [0.010, 0.010, 0.020]}
    result = trackers.figures(seconds, {True: 300, False: 301})
    assert result["tracker_ratio"] == pytest.approx(1.1)
    assert (result["step_seconds_on"], result["step_seconds_off"]) == (0.022, 0.010)
    assert (result["pairs"], result["steps_on"], result["steps_off"]) == (3, 300, 301)

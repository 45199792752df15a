"""The figures that benchmarks.join makes of its observations."""

from __future__ import annotations

import pytest

from benchmarks.join import Seen, figures, longest_pause, report, stop_before


def test_longest_pause_begins_before_the_join() -> None:
    times = [0.0, 5.0, 6.0, 7.0, 7.5, 11.0]
    assert longest_pause(times, 4.0, 7.5) == 5.0
    assert longest_pause(times, 5.5, 7.5) == 1.0
    with pytest.raises(ValueError, match="no two commits"):
        longest_pause(times, 12.0, 13.0)


def test_stop_is_what_the_first_step_takes_beyond_the_next_ones() -> None:
    assert stop_before([0.0, 1.0, 4.0, 5.0, 6.5, 7.5], 2) == pytest.approx(2.0)
    for first in (0, 5):
        with pytest.raises(ValueError, match="too few commits"):
            stop_before([0.0, 1.0, 4.0, 5.0, 6.5, 7.5], first)


def test_ratio_is_the_median_of_the_joins() -> None:
    seen = Seen(gaps=[2.0, 9.0, 1.0], stops=[0.5, 0.6, 0.1], steps=[1.0, 3.0, 1.0], full=[4.0, 5.0, 9.0])
    found = figures(seen)
    assert found["gap_over_step"] == 2.0
    assert (found["stop_over_step"], found["stop_over_step_max"]) == (pytest.approx(0.2), 0.5)
    assert (found["gap_over_step_max"], found["joins"], found["seconds_to_full_size"]) == (3.0, 3, 5.0)


def test_standby_of_the_size_nearest_to_its_limit_stands_on_top() -> None:
    small = figures(Seen(stood_in=[0.5, 0.4, 0.9], stood_in_steps=[0.5, 0.5, 0.5]))
    large = figures(Seen(stood_in=[2.0], stood_in_steps=[1.0]))
    assert small["with_standby"]["limit_seconds"] == 1.5
    found = report({"64MiB": small, "1GiB": large})
    assert found["with_standby_seconds_to_full_size"] == 2.0
    assert found["with_standby_step_seconds"] == 1.0
    assert found["64MiB"]["with_standby"]["seconds_to_full_size_max"] == 0.9


def test_no_join_is_null_with_a_reason() -> None:
    found = report({"1GiB": figures(Seen(), "waited 90 s")})
    assert found["with_standby_seconds_to_full_size"] is None
    assert found["1GiB"]["with_standby"]["kills"] == 0
    assert found["gap_over_step"] == found["stop_over_step"] == {"1GiB": None}
    assert (found["1GiB"]["reason"], found["1GiB"]["joins"]) == ("waited 90 s", 0)

from __future__ import annotations

import math

import pytest
from demo_histories import FIRST, SECOND, THIRD, commit, steady
from hypothesis import given
from hypothesis import strategies as st

from springtide_demo.gaps import gap_after


def test_gap_of_killed_worker_ends_with_first_commit_after() -> None:
    # The last commit before at 0.99, the first after at 1.30; later pauses belong to somebody else.
    curve = steady(1, 100, 0.0) + steady(101, 200, 1.30, SECOND) + steady(201, 300, 9.0, SECOND)
    gap = gap_after(curve, 1.0, math.inf)
    assert gap.seconds == pytest.approx(0.31)
    assert gap.generation == SECOND


def test_commits_between_event_and_generation_divide_the_pause() -> None:
    # Scaled up at 1.0: training goes on for two seconds, then stops for 0.2 s to take the new ones in.
    curve = steady(1, 300, 0.0) + steady(301, 400, 3.19, SECOND)
    gap = gap_after(curve, 1.0, math.inf)
    assert gap.seconds == pytest.approx(0.2)
    assert gap.generation == SECOND


def test_event_without_generation_is_watched_for_ten_seconds() -> None:
    curve = steady(1, 1100, 0.0) + steady(1101, 1500, 11.05) + steady(1501, 1600, 20.0)
    gap = gap_after(curve, 5.0, 15.0)
    assert gap.generation is None
    assert gap.seconds == pytest.approx(0.06)


def test_pause_begun_within_ten_seconds_counts_as_a_whole() -> None:
    curve = [*steady(1, 1400, 0.0), commit(1401, 19.99)]
    gap = gap_after(curve, 5.0, 100.0)
    assert gap.seconds == pytest.approx(6.0, abs=0.01)


def test_generation_of_the_next_event_is_not_caused_by_this() -> None:
    curve = steady(1, 1300, 0.0) + steady(1301, 1400, 14.0, SECOND)
    assert gap_after(curve, 2.0, 12.5).generation is None
    assert gap_after(curve, 12.6, math.inf).generation == SECOND


def test_only_the_first_generation_counts() -> None:
    curve = steady(1, 100, 0.0) + steady(101, 200, 1.1, SECOND) + steady(201, 300, 9.0, THIRD)
    gap = gap_after(curve, 1.0, math.inf)
    assert gap.generation == SECOND
    assert gap.seconds == pytest.approx(0.11)


@pytest.mark.parametrize(("at", "words"), [(-1.0, "before"), (5.0, "after")])
def test_an_event_outside_of_the_training_is_refused(at: float, words: str) -> None:
    with pytest.raises(ValueError, match=f"no commit {words}"):
        gap_after(steady(1, 10, 0.0), at, math.inf)


@given(
    st.lists(st.floats(0.01, 4.0), min_size=2, max_size=40),
    st.integers(0, 40),
    st.floats(0.01, 0.99),
)
def test_gap_is_longest_pause_between_neighbours_and_generation(
    pauses: list[float], change: int, where: float
) -> None:
    times = [sum(pauses[:index]) for index in range(1, len(pauses) + 1)]
    at = times[0] + where * (times[-1] - times[0])
    curve = [commit(i + 1, t, SECOND if i >= max(change, 1) else FIRST) for i, t in enumerate(times)]
    before = max(i for i, t in enumerate(times) if t < at)
    gap = gap_after(curve, at, math.inf)
    if gap.generation is None:
        stop = next((i for i, t in enumerate(times) if t >= at + 10.0), len(times) - 1)
    else:
        stop = next(i for i, c in enumerate(curve) if c.generation == SECOND)
        assert curve[before].generation == FIRST
    assert gap.seconds == max(times[i + 1] - times[i] for i in range(before, stop))

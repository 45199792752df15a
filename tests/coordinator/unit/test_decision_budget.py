"""Decisions follow each other at once in a small job, and take their share of the time in a large one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_coordinator.decision_budget import MOST_PAUSE, SAVED_SECONDS, SHARE, DecisionBudget


def test_what_follows_a_loss_is_decided_without_a_pause() -> None:
    budget, now = DecisionBudget(), 100.0
    for _ in range(10):  # a stream broke, two have parked, the generation is made, all have formed
        assert budget.pause(now) == 0
        now += 0.0005
        budget.spend(0.0005, now)


def test_long_rounds_wait_until_they_have_had_their_share() -> None:
    budget = DecisionBudget()
    assert budget.pause(5.0) == 0
    budget.spend(0.05, 5.05)
    assert budget.pause(5.05) == pytest.approx((0.05 - SAVED_SECONDS) / SHARE, rel=0.1)
    assert budget.pause(5.05 + 0.8) == 0


def test_a_round_in_which_the_machine_stood_still_costs_a_second() -> None:
    budget = DecisionBudget()
    budget.spend(40.0, 50.0)
    assert budget.pause(50.0) == MOST_PAUSE
    assert budget.pause(51.0) == 0


def test_a_calm_job_saves_no_more_than_its_burst() -> None:
    budget = DecisionBudget()
    budget.pause(0.0)
    budget.pause(1e6)
    budget.spend(2 * SAVED_SECONDS, 1e6)
    assert budget.pause(1e6) == pytest.approx(SAVED_SECONDS / SHARE)


@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 2)), max_size=60))
def test_rounds_take_their_share_of_any_time_at_most(rounds: list[tuple[float, float]]) -> None:
    """Rounds that begin as soon as they may, or later, take what was saved and their share at most."""
    budget, now, spent = DecisionBudget(), 10.0, 0.0
    for took, later in rounds:
        now += budget.pause(now) + later
        assert budget.pause(now) <= 1e-9
        # A second's share covers what any of these rounds takes, so no pause is cut short.
        took = min(took, SHARE * MOST_PAUSE)
        now += took
        budget.spend(took, now)
        spent += took
        assert spent <= SAVED_SECONDS + SHARE * (now - 10.0) + took + 1e-9

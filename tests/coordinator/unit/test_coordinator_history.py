"""Commits merged by step, recoveries, rates and goodput."""

from __future__ import annotations

import pytest
from coordinator_room import generation, info, state
from hypothesis import given
from hypothesis import strategies as st

from springtide_coordinator.history import KEPT_COMMITS, Commit, History
from springtide_coordinator.membership.messages import Start
from springtide_protocol.names import StateName


def commit(step: int, number: int = 1, at: float = 0.0, samples: int = 10, seconds: float = 0.1) -> Commit:
    return Commit(state(step, number), at or 100 + step / 10, seconds, samples)


def start(number: int, base: StateName, reason: str = "because") -> Start:
    return Start(generation(number), (info("w0"),), base, (), fresh=False, reason=reason)


def test_commits_that_did_not_survive_go_at_next_generation() -> None:
    history = History()
    history.add([commit(step) for step in range(1, 6)], 0.5, now=101)
    history.generation_made(start(2, state(3)), "failure", now=101)
    assert history.known == state(3)
    history.add([commit(4, 2)], 0.6, now=102)
    assert [one.state for one in history.since(2, 10)] == [state(3), state(4, 2)]


def test_a_late_report_of_an_older_generation_replaces_nothing() -> None:
    history = History()
    history.add([commit(1), commit(2), commit(3, 2)], 0, now=101)
    history.add([commit(3), commit(4)], 0, now=101)
    assert history.known == state(3, 2)


def test_late_report_of_the_last_generation_replaces_nothing() -> None:
    history = History()
    history.add([commit(1), commit(2)], 0, now=101)
    history.generation_made(start(2, state(1)), "failure", now=101)
    history.add([commit(2), commit(3)], 0, now=101)
    assert history.known == state(1)


def test_a_greater_name_replaces_what_it_contradicts() -> None:
    history = History()
    history.add([commit(1), commit(2), commit(3)], 0, now=101)
    history.add([commit(2, 2)], 0, now=101)
    assert [one.state for one in history.commits] == [state(1), state(2, 2)]


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), max_size=40))
def test_the_record_is_always_one_history(reports: list[tuple[int, int]]) -> None:
    history = History()
    for step, number in reports:
        history.add([commit(step, number)], 0, now=101)
    steps = [one.state.step for one in history.commits]
    numbers = [one.state.generation.number for one in history.commits]
    assert steps == sorted(set(steps))
    assert numbers == sorted(numbers)
    if reports:
        assert max(number for _, number in reports) == numbers[-1]


def test_a_recovery_lasts_from_the_last_commit_to_the_first() -> None:
    history = History()
    history.add([commit(1, at=100.0)], 0.1, now=100)
    history.generation_made(start(2, state(1)), "failure", now=100.2)
    history.add([commit(2, 2, at=100.7)], 0.2, now=100.7)
    assert history.last_recovery is not None
    assert history.last_recovery.seconds == pytest.approx(0.7)
    assert history.last_recovery.cause == "failure"
    assert history.recoveries["failure"] == 1
    history.add([commit(3, 2, at=100.8)], 0.3, now=100.8)
    assert sum(history.recoveries.values()) == 1


def test_a_generation_that_never_commits_prolongs_the_recovery() -> None:
    history = History()
    history.add([commit(1, at=100.0)], 0.1, now=100)
    history.generation_made(start(2, state(1)), "failure", now=101)
    history.generation_made(start(3, state(1)), "failure", now=105)
    history.add([commit(2, 3, at=106.0)], 0.2, now=106)
    assert history.last_recovery is not None
    assert history.last_recovery.seconds == pytest.approx(6.0)


def test_failures_are_told_of_with_their_reasons_and_numbers() -> None:
    history = History()
    history.add([commit(1, at=100.0)], 0.1, now=100)
    history.generation_made(start(2, state(1), "w1 is lost"), "failure", now=101)
    history.generation_made(start(3, state(1), "w3 joins"), "join", now=102)
    history.add([commit(2, 3, at=103.0)], 0.2, now=103)
    history.generation_made(start(4, state(2), "w4 joins"), "join", now=104)
    history.add([commit(3, 4, at=105.0)], 0.3, now=105)
    history.generation_made(start(5, state(3), "w2 is lost"), "failure", now=106)
    history.generation_made(start(6, state(3), "w2 is lost"), "failure", now=106)
    history.add([commit(4, 6, at=107.0)], 0.4, now=107)
    told = [(failure.number, failure.generation.number, failure.reason) for failure in history.failures]
    assert told == [(1, 3, "w1 is lost; w3 joins"), (3, 6, "w2 is lost")]
    assert history.recoveries == {"failure": 2, "join": 1}
    assert history.lost_seconds["failure"] == pytest.approx(5.0 - 2 * 0.1, abs=0.2)


def test_the_first_start_is_no_recovery() -> None:
    history = History()
    history.generation_made(start(1, state(0)), "start", now=100)
    history.add([commit(1)], 0.1, now=101)
    assert history.last_recovery is None


def test_goodput_is_surviving_time_by_wall_time() -> None:
    history = History()
    history.add([commit(step, at=100 + step * 0.1) for step in range(1, 11)], 1.0, now=101)
    assert history.goodput(101.0) == pytest.approx(1.0)
    assert history.goodput(102.0) == pytest.approx(0.5)


def test_new_coordinator_counts_goodput_from_first_known_commit() -> None:
    history = History()
    history.add([commit(500, at=1000.0)], productive_seconds=400.0, now=1000)
    history.add([commit(501, at=1001.0)], productive_seconds=400.5, now=1001)
    assert history.goodput(1001.0) == pytest.approx(0.6 / 1.1)


def test_goodput_goes_on_where_the_last_coordinator_left_it() -> None:
    history = History()
    history.add([commit(500, at=1000.0)], productive_seconds=400.0, now=1000, began_unix=500.0)
    assert history.goodput(1000.0) == pytest.approx(0.8)
    history.add([commit(501, at=1001.0)], productive_seconds=400.5, now=1001, began_unix=500.0)
    assert history.goodput(1001.0) == pytest.approx(400.5 / 501)


def test_a_job_that_starts_again_keeps_the_time_it_lost() -> None:
    history = History()
    history.add([commit(10, at=200.0)], productive_seconds=80.0, now=200, began_unix=100.0)
    history.add([commit(1, 2, at=301.0)], productive_seconds=1.0, now=301, began_unix=300.0)
    assert history.goodput(301.0) == pytest.approx(1.0 / 201)


def test_samples_per_second_are_recent_and_fall_to_nothing() -> None:
    history = History()
    history.add([commit(step, at=100 + step * 0.5) for step in range(1, 21)], 0, now=110)
    assert history.samples_per_second(110) == pytest.approx(20.0)
    assert history.samples_per_second(116) == 0.0


def test_only_the_recent_commits_are_kept() -> None:
    history = History()
    for first in range(1, KEPT_COMMITS * 2, 1000):
        history.add([commit(step) for step in range(first, first + 1000)], 0, now=101)
    assert KEPT_COMMITS <= len(history.commits) <= KEPT_COMMITS * 1.1
    assert history.steps_total == KEPT_COMMITS * 2


def test_steps_count_where_one_word_is_about_several() -> None:
    """Count the steps of all from one report, since without common steps the first member reports for all."""
    history = History()
    history.add([commit(3), commit(7), commit(12)], 0, now=101)
    assert history.steps_total == 1 + 4 + 5
    history.add([commit(9)], 0, now=101)  # told late
    assert history.steps_total == 10
    history.generation_made(start(2, state(7)), "failure", now=101)
    history.add([commit(10, 2)], 0, now=101)
    assert history.steps_total == 13

from __future__ import annotations

from dataclasses import replace

import pytest

from springtide_demo.scenario import EXPLANATION, ORDER, Done, Observation, Pace, decide

CALM = Observation(
    now=100.0,
    active=3,
    generation_since=90.0,
    coordinator_pid=10,
    operator_pid=20,
    operator_ready=True,
    seconds_left=60.0,
)


def after(kind: str, at: float, pid: int | None = None) -> tuple[Done, ...]:
    """Return the events of the story up to `kind`, which happened at `at`."""
    return (*(Done(earlier, at - 20.0) for earlier in ORDER[: ORDER.index(kind)]), Done(kind, at, pid))


def test_every_event_is_explained() -> None:
    assert set(EXPLANATION) == set(ORDER)
    assert len(ORDER) == 6


def test_nothing_happens_before_the_first_commit() -> None:
    assert decide(replace(CALM, generation_since=None, active=0), ()).kind is None


def test_first_event_waits_until_all_workers_train_calmly() -> None:
    assert decide(replace(CALM, active=2), ()).reason == "2 of 3 workers train"
    assert decide(replace(CALM, generation_since=99.0), ()).kind is None
    assert decide(CALM, ()).kind == "kill-worker"


@pytest.mark.parametrize(
    ("last", "next_", "active"),
    [("kill-worker", "scale-up", 3), ("scale-up", "drain-node", 5), ("drain-node", "kill-coordinator", 5)],
)
def test_event_changing_members_ends_when_they_are_complete(last: str, next_: str, active: int) -> None:
    done = after(last, 80.0)
    assert decide(replace(CALM, active=active - 1), done).kind is None
    assert (
        decide(replace(CALM, active=active, generation_since=79.0), done).kind is None
    )  # still the old generation
    assert decide(replace(CALM, active=active, generation_since=99.0), done).kind is None  # not calm yet
    assert decide(replace(CALM, active=active, generation_since=90.0), done).kind == next_


@pytest.mark.parametrize(
    ("last", "next_", "seen"),
    [
        ("kill-coordinator", "kill-operator", "coordinator_pid"),
        ("kill-operator", "scale-down", "operator_pid"),
    ],
)
def test_killed_controller_has_pauses_and_new_process_watched(last: str, next_: str, seen: str) -> None:
    five = replace(CALM, active=5)
    assert decide(five, after(last, 95.0, pid=7)).reason.startswith("watches for pauses")
    assert decide(five, after(last, 85.0, pid=7)).kind == next_
    assert "comes back" in decide(replace(five, **{seen: 7}), after(last, 85.0, pid=7)).reason
    assert "comes back" in decide(replace(five, **{seen: None}), after(last, 85.0, pid=7)).reason


def test_an_operator_that_is_not_ready_is_not_back() -> None:
    assert (
        decide(replace(CALM, active=5, operator_ready=False), after("kill-operator", 85.0, pid=7)).kind
        is None
    )


def test_patience_ends() -> None:
    stuck = replace(CALM, active=2)
    assert decide(stuck, after("kill-worker", 71.0)).kind is None
    decision = decide(stuck, after("kill-worker", 69.0))
    assert decision.kind == "scale-up"
    assert "patience is over" in decision.reason


def test_story_hurries_with_its_windows_if_training_ends_first() -> None:
    waiting = replace(CALM, active=4, seconds_left=20.0)
    assert decide(waiting, after("scale-up", 97.0)).kind == "drain-node"
    assert decide(waiting, after("scale-up", 98.0)).kind is None
    assert decide(replace(waiting, seconds_left=60.0), after("scale-up", 97.0)).kind is None
    assert decide(replace(waiting, seconds_left=3.0), after("kill-coordinator", 97.0)).kind is None


def test_at_the_end_nothing_more_happens() -> None:
    assert decide(replace(CALM, finished=True), after("kill-worker", 50.0)).reason == "the job has ended"
    assert decide(CALM, after("scale-down", 50.0)).kind is None


def test_whole_story_runs_in_order_against_fake_training() -> None:
    """Five seconds after an event that changes the members, training goes on with as many as it should."""
    pace, done, now, since, active = Pace(), (), 0.0, 0.0, 3
    size = {"kill-worker": 3, "scale-up": 5, "drain-node": 5, "scale-down": 2}
    while len(done) < 6 and now < 200.0:
        seen = Observation(
            now, active, since, 1000 + len(done), 1000 + len(done), True, seconds_left=120.0 - now
        )
        kind = decide(seen, done, pace).kind
        if kind:
            done = (*done, Done(kind, now, 1000 + len(done)))
        elif done and done[-1].kind in size and since < done[-1].at and now - done[-1].at >= 5.0:
            since, active = now, size[done[-1].kind]
        now += 0.25
    assert tuple(event.kind for event in done) == ORDER
    assert done[-1].at < 60.0

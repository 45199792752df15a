from __future__ import annotations

import pytest
from demo_histories import FIRST, SECOND, THIRD, commit, steady

from springtide_demo import report
from springtide_demo.machine import Machine, Reading
from springtide_demo.scenario import KILL_WORKER, ORDER, Done
from springtide_demo.survivors import Target, WorkerProcess, unexpected_ends

OUTCOME = {
    "outcome": "Finished",
    "data": {"totalSeen": 640, "repeated": 0, "lost": 0},
    "values": {"test_accuracy": 0.98},
}


def test_the_report_has_the_keys_that_it_promises() -> None:
    curve = steady(1, 10, 100.0)
    made = report.build(curve, steady(1, 10, 0.0), [], OUTCOME, [], 2)
    assert set(made) == {
        "test_accuracy", "samples", "first_commit_unix", "median_step_seconds", "events",
        "survivor_restarts", "final_workers", "loss_curve_max_difference",
    }  # fmt: skip
    assert made["samples"] == {"expected": 640, "seen": 640, "repeated": 0, "lost": 0}
    assert made["first_commit_unix"] == pytest.approx(curve[0].unix_time)
    assert made["median_step_seconds"] == pytest.approx(0.01)
    assert made["loss_curve_max_difference"] == 0.0


def test_events_count_from_first_commit_and_name_generation() -> None:
    curve = (
        steady(1, 200, 100.0)
        + steady(201, 400, 102.2, SECOND)
        + steady(401, 3000, 105.0, SECOND)
        + steady(3001, 3100, 131.2, THIRD)
    )
    events = report.events(
        curve, [Done("kill-worker", 101.995), Done("kill-coordinator", 110.0), Done("scale-down", 130.995)]
    )
    assert [(e["kind"], e["at_seconds"], e["generation"]) for e in events] == [
        ("kill-worker", 1.995, 2), ("kill-coordinator", 10.0, None), ("scale-down", 30.995, 3),
    ]  # fmt: skip
    assert [e["gap_seconds"] for e in events] == pytest.approx([0.21, 0.01, 0.21], abs=1e-3)


def test_an_event_that_cannot_be_measured_is_named() -> None:
    with pytest.raises(ValueError, match="scale-down: no commit after"):
        report.events(steady(1, 10, 0.0), [Done("scale-down", 5.0)])


def test_losses_are_compared_as_float32_step_by_step() -> None:
    ours = [commit(1, 0.0, loss=0.1), commit(2, 0.1, loss=0.5)]
    theirs = [commit(1, 9.0, loss=0.1 + 1e-10), commit(2, 9.1, loss=0.5003)]
    assert report.loss_curve_max_difference(ours[:1], theirs[:1]) == 0.0
    assert report.loss_curve_max_difference(ours, theirs) == pytest.approx(3e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (steady(1, 9, 0.0), steady(1, 10, 0.0), "the job has no record of 1 steps.*10"),
        (steady(1, 10, 0.0), steady(2, 10, 0.0), "the undisturbed run has no record of 1 steps.*1"),
        ([commit(1, 0.0, loss=None)], steady(1, 1, 0.0), "step 1 has no loss"),
    ],
)
def test_a_part_of_the_curve_is_no_comparison(ours: list, theirs: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        report.loss_curve_max_difference(ours, theirs)


def test_an_outcome_without_its_audit_is_refused() -> None:
    with pytest.raises(ValueError, match="test_accuracy"):
        report.build(steady(1, 2, 0.0), steady(1, 2, 0.0), [], OUTCOME | {"values": {}}, [], 2)
    with pytest.raises(ValueError, match="totalSeen"):
        report.build(steady(1, 2, 0.0), steady(1, 2, 0.0), [], OUTCOME | {"data": None}, [], 2)


GOOD = {
    "test_accuracy": 0.98,
    "samples": {"expected": 640, "seen": 640, "repeated": 0, "lost": 0},
    "median_step_seconds": 0.01,
    "events": [{"kind": kind, "at_seconds": 1.0, "gap_seconds": 0.09, "generation": None} for kind in ORDER],
    "survivor_restarts": 0,
    "final_workers": 2,
    "loss_curve_max_difference": 1e-6,
}


def gaps(**seconds: float) -> dict:
    return {
        "events": [
            e | {"gap_seconds": seconds.get(e["kind"].replace("-", "_"), 0.09)} for e in GOOD["events"]
        ]
    }


def test_all_promises_hold_for_a_good_run() -> None:
    assert [p.text for p in report.promises(GOOD) if not p.holds] == []


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"test_accuracy": 0.96}, "it learned"),
        ({"samples": {"expected": 640, "seen": 640, "repeated": 1, "lost": 1}}, "every sample"),
        ({"samples": {"expected": 640, "seen": 576, "repeated": 0, "lost": 0}}, "every sample"),
        ({"survivor_restarts": 1}, "no survivor"),
        ({"final_workers": 3}, "it ends at the size"),
        ({"loss_curve_max_difference": 2e-4}, "the same loss curve"),
        (gaps(kill_worker=1.01), "a killed worker"),
        (gaps(kill_coordinator=0.11), "a killed coordinator"),
        (gaps(kill_operator=0.11), "a killed operator"),
        ({"events": GOOD["events"][1:]}, "all six"),
    ],
)
def test_each_broken_promise_is_seen(change: dict, broken: str) -> None:
    assert any(p.text.startswith(broken) and not p.holds for p in report.promises(GOOD | change))


def test_slow_steps_widen_what_counts_as_unnoticed() -> None:
    slow = GOOD | gaps(kill_operator=0.4) | {"median_step_seconds": 0.1}
    assert all(p.holds for p in report.promises(slow))


def process(name: str, ended_at: float | None, outcome: str = "") -> WorkerProcess:
    return WorkerProcess(name, f"uid-{name}", 1, "node-1", ended_at, outcome)


def test_an_end_counts_as_a_restart_only_when_nobody_aimed_at_it() -> None:
    targets = [Target("kill-worker", 10.0, frozenset({"uid-a"}))]
    assert (
        unexpected_ends([process("a", 10.1), process("b", None), process("c", 50.0, "Finished")], targets)
        == []
    )
    assert [p.pod for p in unexpected_ends([process("a", 9.0), process("b", 10.1, "Left")], targets)] == [
        "a",
        "b",
    ]
    assert FIRST < SECOND


QUIET, BUSY = {"others": 0.05, "idle": 0.4}, {"others": 0.55, "idle": 0.01}
FULL_OF_OURS = {"others": 0.1, "idle": 0.0}
ROOM_LEFT = {"others": 0.5, "idle": 0.3}


def missed(machine: dict[str, float] | None) -> list[report.Promise]:
    """Return what is missed where each event costs 9 s on such a machine."""
    seen = {} if machine is None else {"machine": machine}
    events = [dict(event, gap_seconds=9.0, **seen) for event in GOOD["events"]]
    return [promise for promise in report.promises(GOOD | {"events": events}) if not promise.holds]


def test_seconds_missed_on_a_busy_machine_are_not_judged() -> None:
    found = missed(BUSY)
    assert len(found) == 3
    assert not any(promise.broken for promise in found)
    assert all(
        "9.000 s; not judged: the machine is busy (others took 55% of its processors, 1% was idle)"
        in p.measured
        for p in found
    )


@pytest.mark.parametrize("machine", [QUIET, FULL_OF_OURS, ROOM_LEFT, None])
def test_seconds_missed_on_any_other_machine_are_shown(machine: dict[str, float] | None) -> None:
    found = missed(machine)
    assert [(promise.judged, promise.broken) for promise in found] == [(True, False)] * 3


def test_an_event_that_did_not_happen_is_broken() -> None:
    events = [event for event in GOOD["events"] if event["kind"] != KILL_WORKER]
    lines = report.promises(GOOD | {"events": events})
    assert "did not happen" in [line.measured for line in lines if line.broken]


def test_a_busy_machine_excuses_nothing_but_seconds() -> None:
    events = [dict(event, machine=BUSY) for event in GOOD["events"]]
    for change in ({"survivor_restarts": 1}, {"final_workers": 3}):
        lines = report.promises(GOOD | {"events": events} | change)
        assert [line.broken for line in lines if not line.holds] == [True]


def test_an_event_says_what_others_took_meanwhile() -> None:
    readings = iter([Reading(99.0, 0, 0, 0), Reading(101.5, 5, 1, 3), Reading(103.0, 8, 1, 4)])
    machine = Machine(lambda: next(readings), every=0.0)
    machine.sample()
    machine.sample()
    curve = steady(1, 200, 100.0) + steady(201, 400, 102.2, SECOND)
    (event,) = report.events(curve, [Done("kill-worker", 101.995)], machine)
    assert event["machine"] == {"others": 0.667, "idle": 0.0}

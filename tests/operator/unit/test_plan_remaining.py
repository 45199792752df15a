"""status.progress and status.estimatedCompletionTime: from figures, and in a job's life."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_world import World, finished_message, job_object

from springtide_operator.coordinator_connection import news, to_report
from springtide_operator.metrics import Metrics
from springtide_operator.plan.progress import INTERVAL_SECONDS
from springtide_operator.plan.remaining import Figures, completion, percent
from springtide_operator.plan.values import LAST_SECOND, parse_time, timestamp
from springtide_protocol import coordinator_pb2 as pb

NOW = 1_800_000_000.0
HALF = Figures(step=50, planned=100, seconds_per_step=2.0, committed_at=NOW, trains=True)


def test_figures_give_percent_and_completion() -> None:
    assert percent(HALF) == 50
    assert completion(HALF, NOW) == NOW + 100


@pytest.mark.parametrize(
    "changes",
    [
        {"planned": 0},
        {"step": None},
        {"seconds_per_step": 0.0},
        {"trains": False},
        {"step": 100},
        {"step": 101},
        {"seconds_per_step": 1e300},
    ],
    ids=str,
)
def test_no_estimate_without_its_grounds(changes: dict[str, Any]) -> None:
    assert completion(replace(HALF, **changes), NOW) is None


def test_all_steps_done_is_99_until_the_job_succeeded() -> None:
    assert percent(replace(HALF, step=100)) == 99
    assert percent(replace(HALF, step=200)) == 99
    assert percent(replace(HALF, step=0)) == 0


def test_estimate_does_not_move_within_a_long_step() -> None:
    slow = replace(HALF, seconds_per_step=600.0)
    assert completion(slow, NOW) == completion(slow, NOW + 500)


def test_noise_leaves_the_estimate_as_it_was() -> None:
    assert completion(replace(HALF, seconds_per_step=2.05), NOW, before=NOW + 100) == NOW + 100
    assert completion(replace(HALF, seconds_per_step=3.0), NOW, before=NOW + 100) == NOW + 150
    assert completion(HALF, NOW, before=NOW - 1) == NOW + 100, "it is over, and was wrong"


@given(
    st.builds(
        Figures,
        step=st.none() | st.integers(0, 2**63),
        planned=st.integers(0, 2**63),
        seconds_per_step=st.floats(0, 1e12),
        committed_at=st.none() | st.floats(-1e12, 1e12),
        trains=st.booleans(),
    ),
    st.floats(0, LAST_SECOND),
    st.none() | st.floats(0, LAST_SECOND),
)
def test_any_figures_give_what_the_status_can_hold(
    figures: Figures, now: float, before: float | None
) -> None:
    share, at = percent(figures), completion(figures, now, before)
    assert share is None or 0 <= share <= 99
    assert at is None or now <= at <= LAST_SECOND
    assert at is None or share is not None, "who knows the end knows the share"
    if at is not None:
        assert parse_time(timestamp(at)) == pytest.approx(at, abs=1.0)


@given(st.integers(0, 1000), st.integers(1, 1000), st.integers(0, 100))
def test_more_steps_are_never_less_progress(step: int, planned: int, more: int) -> None:
    before, after = (percent(replace(HALF, step=s, planned=planned)) for s in (step, step + more))
    assert before is not None
    assert after is not None
    assert before <= after


def trained(**changes: Any) -> World:
    world = World(job=job_object(2))
    world.settle()
    tell(world, **changes)
    world.round()
    return world


def tell(world: World, **changes: Any) -> None:
    world.reports(**{"step": 50, "planned_steps": 100, "seconds_per_step": 2.0, **changes})


def shown(world: World) -> tuple[Any, Any]:
    return world.status.get("progress"), world.status.get("estimatedCompletionTime")


def test_a_training_job_has_both() -> None:
    world = trained()
    assert shown(world) == (50, timestamp(world.now + 100))


def test_a_job_whose_end_nobody_knows_has_neither() -> None:
    assert shown(trained(planned_steps=0)) == (None, None)


def test_progress_without_a_measured_pace_has_no_estimate() -> None:
    world = trained(seconds_per_step=0.0)
    assert shown(world) == (50, None)
    world.now += INTERVAL_SECONDS
    tell(world)
    world.round()
    assert shown(world) == (50, timestamp(world.now + 100))


def test_they_are_written_as_seldom_as_steps() -> None:
    world = trained()
    for seconds in range(1, int(INTERVAL_SECONDS)):
        world.now += 1
        tell(world, step=50 + 3 * seconds)
        assert world.plan().status == world.status, seconds
    world.now += 1
    tell(world, step=95)
    world.round()
    assert shown(world) == (95, timestamp(world.now + 10))


def test_standing_still_takes_the_estimate_away_at_once() -> None:
    world = trained()
    world.now += 1
    tell(world, still=True)
    world.round()
    assert shown(world) == (50, None)
    world.now += 1
    tell(world, step=51)
    world.round()
    assert shown(world) == (51, timestamp(world.now + 98))


def test_a_recovery_that_lasts_has_no_estimate() -> None:
    world = trained()
    tell(world, phase="FORMING", members=(), last_commit_at=world.now)
    world.now += 10
    world.round()
    assert shown(world) == (50, None)


def test_coordinators_restart_keeps_both_until_their_time() -> None:
    world = trained()
    told = shown(world)
    world.report = None
    world.now += 20
    world.round()
    assert shown(world) == told
    world.now += 100
    world.reports(step=None, planned_steps=0, last_commit_at=None)
    world.round()
    assert shown(world) == (50, None), "the new coordinator has heard of no step yet"
    world.now += INTERVAL_SECONDS
    tell(world, step=60)
    world.round()
    assert shown(world) == (60, timestamp(world.now + 80))


def test_second_loop_without_a_word_takes_progress_away() -> None:
    world = trained(step=100)
    assert shown(world) == (99, None)
    world.now += INTERVAL_SECONDS
    tell(world, step=101, planned_steps=0)
    world.round()
    assert shown(world) == (None, None)


def test_suspended_job_keeps_progress_alone() -> None:
    world = trained()
    world.job["spec"]["suspend"] = True
    world.round()
    assert shown(world) == (50, None)


def test_lost_state_takes_progress_back() -> None:
    world = trained()
    tell(world, step=10, states_lost=1)
    world.round()
    assert world.status["progress"] == 10


def test_succeeded_job_has_100_and_no_estimate() -> None:
    world = trained()
    tell(world, phase="AFTER_LOOP", step=100)
    for pod in world.workers():
        world.end(pod, 0, finished_message(1))
    world.round()
    assert world.status["state"] == "Succeeded"
    assert shown(world) == (100, None)
    world.now += 100
    world.round()
    assert shown(world) == (100, None)


def test_failed_job_keeps_how_far_it_came() -> None:
    world = trained()
    world.job["spec"]["failurePolicy"] = {"backoffLimit": 0}
    world.fail(world.workers()[0])
    world.round()
    assert world.status["state"] == "Failed"
    assert shown(world) == (50, None)


def test_the_coordinators_figures_are_read() -> None:
    report = to_report(pb.SyncReply(planned_steps=7, seconds_per_step=0.5), 5.0)
    assert (report.planned_steps, report.seconds_per_step) == (7, 0.5)
    assert not news(report, to_report(pb.SyncReply(), 6.0)), "it moves always, and wakes nobody"
    older = to_report(pb.SyncReply(seconds_per_step=float("nan")), 5.0)
    assert (older.planned_steps, older.seconds_per_step) == (0, 0.0)


def test_metrics_have_share_and_unix_time() -> None:
    status = {"progress": 37, "estimatedCompletionTime": "2026-05-01T12:00:00Z"}
    metrics = Metrics(lambda: [("ns", "job", status), ("ns", "endless", {})], lambda: True)
    read = metrics.registry.get_sample_value
    labels = {"training_job": "job", "job_namespace": "ns"}
    assert read("springtide_job_progress_ratio", labels) == 0.37
    at = read("springtide_job_estimated_completion_timestamp_seconds", labels)
    assert at == parse_time("2026-05-01T12:00:00Z")
    assert read("springtide_job_progress_ratio", {**labels, "training_job": "endless"}) is None

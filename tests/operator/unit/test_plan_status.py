"""Conditions, state, progress and the word for the coordinator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from operator_world import World, finished_message, job_object

from springtide_operator.api import reasons
from springtide_operator.api.crd import custom_resource_definition
from springtide_operator.coordinator_connection import to_request
from springtide_operator.plan.coordinator_sync import UNREACHABLE_LOST_SECONDS, make_sync
from springtide_operator.plan.decide import invalid
from springtide_operator.plan.observation import FailureReport
from springtide_operator.plan.progress import rounded
from springtide_operator.plan.values import timestamp


def started(replicas: int = 3) -> World:
    world = World(job=job_object(replicas))
    world.settle()
    return world


def condition(world: World, kind: str) -> dict[str, object]:
    return next(c for c in world.status["conditions"] if c["type"] == kind)


def test_training_at_size() -> None:
    world = started()
    world.reports()
    decided = world.round()
    assert world.status["state"] == "Running"
    assert world.status["workers"]["summary"] == "3/3"
    assert condition(world, "Running")["message"] == "3 of 3 workers train in generation 1"
    assert condition(world, "Rescaling")["reason"] == reasons.AT_SIZE
    assert [e.reason for e in decided.events] == [reasons.TRAINING]
    assert world.status["workers"]["selector"] == "springtide.dev/job=digits,springtide.dev/role=worker"


def test_states_before_training() -> None:
    world = World(job=job_object(2))
    world.round()
    assert world.status["state"] == "Pending"
    world.settle()
    assert world.status["state"] == "Starting"
    world.reports(phase="WAITING", generation=None, members=(), waiting_for=("digits-worker-1-0",))
    world.round()
    assert condition(world, "Running")["reason"] == reasons.WAITING_FOR_WORKERS
    assert "digits-worker-1-0" in world.status["message"]


def test_scaling_up_and_down_are_named() -> None:
    world = started(2)
    world.reports()
    world.round()
    world.scale(4)
    decided = world.round()
    assert condition(world, "Rescaling")["reason"] == reasons.SCALING_UP
    assert world.status["state"] == "Rescaling"
    assert [e.message for e in decided.events] == ["from 2 to 4 workers"]
    world.settle()
    world.reports()
    world.round()
    world.scale(3)
    world.round()
    world.round()
    assert condition(world, "Rescaling")["reason"] == reasons.SCALING_DOWN
    assert condition(world, "Rescaling")["message"] == "1 worker leaves, 3 wanted"


def test_replacing_is_named() -> None:
    world = started(3)
    world.reports()
    world.round()
    world.fail(world.workers()[0])
    world.reports()
    world.round()
    assert condition(world, "Rescaling")["reason"] == reasons.REPLACING_WORKERS


def test_a_short_pause_is_no_news_and_a_long_one_is() -> None:
    world = started()
    world.reports()
    world.round()
    world.reports(phase="FORMING", generation=2, members=(), last_commit_at=world.now)
    world.now += 3
    assert world.plan().wake_at == world.now + 1
    world.round()
    assert condition(world, "Running")["status"] == "True"
    world.now += 1
    world.round()
    assert condition(world, "Running")["status"] == "False"
    assert world.status["state"] == "Recovering"


def test_the_word_of_another_incarnation_is_not_believed() -> None:
    world = started()
    world.reports(incarnation=99, generation=50)
    world.round()
    assert "generation" not in world.status
    assert condition(world, "Running")["status"] == "False"


def test_progress_is_written_every_15_s_conditions_at_once() -> None:
    world = started()
    world.reports(step=1)
    world.round()
    for seconds, step in ((5, 2), (9, 3)):
        world.now += seconds
        world.reports(step=step)
        assert world.plan().status == world.status
    world.now += 1
    world.reports(step=4, samples_per_second=1234.5, goodput=0.98765, values={"loss": 0.123456789})
    world.round()
    assert world.status["step"] == 4
    assert world.status["samplesPerSecond"] == "1234"
    assert world.status["goodput"] == "0.988"
    assert world.status["values"] == {"loss": "0.123457"}
    world.now += 1
    world.reports(step=5, generation=2)
    world.round()
    assert world.status["step"] == 5  # a new generation is written at once, progress with it


def test_the_last_goodput_is_that_of_the_whole_loop() -> None:
    world = started(1)
    world.reports(goodput=0.1, samples_per_second=500.0)
    world.round()
    world.reports(phase="AFTER_LOOP", goodput=0.9, samples_per_second=0.0, step=2400)
    world.end(world.workers()[0], 0, finished_message(1))
    world.round()
    assert (world.status["state"], world.status["goodput"]) == ("Succeeded", "0.900")
    assert world.status["samplesPerSecond"] == "500"


def test_nothing_new_is_never_written() -> None:
    world = started()
    world.reports(step=4)
    world.round()
    world.now += 1000
    world.report = replace(world.report, at=world.now)  # type: ignore[type-var]
    assert world.plan().status == world.status


def test_recoveries_add_up_over_coordinators() -> None:
    world = started()
    world.reports(recoveries=3, recovery_seconds=0.1234)
    world.round()
    assert world.status["recoveries"] == 3
    world.now += 20
    world.reports(recoveries=1, restart=1)
    world.round()
    assert world.status["recoveries"] == 4
    world.now += 20
    world.reports(recoveries=2, restart=1, states_lost=1)
    decided = world.round()
    assert world.status["recoveries"] == 5
    assert world.status["statesLost"] == 1
    assert reasons.STATE_LOST in [e.reason for e in decided.events]
    assert world.status["lastRecoverySeconds"] == "0.123"


@pytest.mark.parametrize(
    ("shard", "said"), [("None", "no worker with the job's state survived"), ("Optimizer", "shards of the")]
)
def test_lost_state_is_told_as_what_it_was(shard: str, said: str) -> None:
    """Workers may have survived a loss of shards, and hold the rest of the state."""
    spec = job_object(3)
    spec["spec"].setdefault("strategy", {"type": "AllReduce"})["allReduce"] = {"shard": shard}
    world = World(job=spec)
    world.settle()
    world.reports()
    world.round()
    world.now += 20
    world.reports(states_lost=1)
    (event,) = (event for event in world.round().events if event.reason == reasons.STATE_LOST)
    assert event.message.startswith(said)


def test_what_training_has_gone_on_after_is_an_event_once() -> None:
    def told(*numbers: int, **report: Any) -> list[str]:
        failures = tuple(FailureReport(n, 1 + n, 0.504, f"digits-worker-{n}-0 is lost") for n in numbers)
        world.reports(recoveries=max(numbers), failures=failures, **report)
        return [e.message for e in world.round().events if e.reason == reasons.EVENT_RECOVERED]

    world = started()
    world.reports()
    world.round()
    text = "digits-worker-{} is lost; training goes on in generation {}, 0.50 s after the step before"
    assert told(1) == [text.format("1-0", 2)]
    assert told(1) == []
    world.now += 1
    assert told(1, 3, 4) == [text.format("3-0", 4), text.format("4-0", 5)]
    assert told(1, 3, 4) == []
    assert told(1, restart=1) == [text.format("1-0", 2)]  # another process counts anew
    assert told(1, restart=1) == []


def test_a_silent_worker_is_named_after_a_minute() -> None:
    world = started(2)
    uid = world.workers()[0]["metadata"]["uid"]
    world.run(world.workers()[0])
    world.reports(phase="WAITING", generation=None, silent=frozenset({uid}))
    world.now += 59
    world.round()
    assert condition(world, "Degraded")["status"] == "False"
    world.now += 1
    world.round()
    assert condition(world, "Degraded")["reason"] == reasons.WORKER_SILENT
    assert "digits-worker-0-0" in world.status["message"]
    assert "springtide.init()" in world.status["message"]
    assert "digits-coordinator-1 cannot be reached from there" in world.status["message"]


def test_a_worker_that_runs_and_is_heard_no_more_is_named() -> None:
    world = started(3)
    pods = world.workers()
    world.reports(vanished=frozenset({pods[1]["metadata"]["uid"]}))
    decided = world.round()
    assert condition(world, "Degraded")["reason"] == reasons.WORKER_SILENT
    assert "digits-worker-1-0 runs, and is not heard of any more" in world.status["message"]
    assert not decided.actions
    world.reports(vanished=frozenset(pod["metadata"]["uid"] for pod in pods[:2]))
    world.round()
    assert "digits-worker-0-0, digits-worker-1-0 run, and are not heard of" in world.status["message"]
    world.reports()
    world.round()
    assert condition(world, "Degraded")["status"] == "False"


def test_the_same_trouble_of_many_is_said_once() -> None:
    world = World(job=job_object(30))
    for _ in range(4):
        world.round()
    for pod in world.workers():
        state = {"waiting": {"reason": "ErrImagePull"}}
        pod["status"]["containerStatuses"] = [{"name": "worker", "image": "img", "state": state}]
    decided = world.round()
    message = str(condition(world, "Degraded")["message"])
    assert message.count("img") == 1
    assert "and 29 more" in message
    assert [e.reason for e in decided.events if e.warning] == [reasons.IMAGE_PULL_FAILED]
    assert world.plan().events == ()


def test_transition_times_move_only_with_the_status() -> None:
    world = started()
    world.reports()
    world.round()
    since = condition(world, "Running")["lastTransitionTime"]
    world.now += 100
    world.scale(2)
    world.round()
    assert condition(world, "Running")["lastTransitionTime"] == since
    assert condition(world, "Running")["observedGeneration"] == 2


def test_outdated_workers_are_counted() -> None:
    world = started(3)
    world.job["spec"]["workers"]["template"]["spec"]["containers"][0]["image"] = "newer"
    world.fail(world.workers()[0])
    world.settle()
    assert world.status["workers"]["outdated"] == 2


def test_the_word_for_the_coordinator_lists_who_may_still_run() -> None:
    world = started(4)
    gone, leaving, lost, _ = world.workers()
    world.fail(gone)
    world.ask_deletion(leaving, 30)
    world.ask_deletion(lost, 30)
    lost["metadata"]["deletionTimestamp"] = "2020-01-01T00:00:00Z"
    said = make_sync(world.parsed(), world.observe(), 5, world.now)
    assert (said.target, said.minimum, said.maximum, said.incarnation) == (4, 1, 1000, 5)
    by_uid = {pod.uid: pod for pod in said.living}
    assert gone["metadata"]["uid"] not in by_uid
    assert lost["metadata"]["uid"] not in by_uid
    assert by_uid[leaving["metadata"]["uid"]].leave_by == world.now + 30
    assert sum(pod.leave_by == 0 for pod in said.living) == 1
    assert all(pod.started for pod in said.living)


def test_coordinator_is_told_how_long_a_pod_has_to_leave() -> None:
    """The API server's clock is another one than the coordinator's, and does not count.

    The word that is compared to find news stays the same while time passes.
    """
    world = started(2)
    leaving, _ = world.workers()
    world.ask_deletion(leaving, 30)
    leaving["metadata"]["deletionTimestamp"] = timestamp(world.now + 3600 + 30)
    seen = world.observe()
    words = []
    for later in (5.0, 12.0):
        pods = tuple(
            replace(pod, going_since=1000.0) if pod.gone_by is not None else pod for pod in seen.workers
        )
        observation = replace(seen, workers=pods, steady=1000.0 + later)
        words.append(make_sync(world.parsed(), observation, 5, world.now + later))
        asked = {pod.uid: pod.leave_in_seconds for pod in to_request(words[-1]).living}
        assert asked.pop(leaving["metadata"]["uid"]) == pytest.approx(30 - later)
        assert set(asked.values()) == {0.0}
    assert words[0] == words[1]
    late = replace(seen, workers=pods, steady=1000.0 + 50)
    (asked_late,) = (
        pod.leave_in_seconds
        for pod in to_request(make_sync(world.parsed(), late, 5, world.now)).living
        if pod.leave_by
    )
    assert 0 < asked_late < 0.1


def test_pod_of_lost_node_is_gone_long_before_its_grace_ends() -> None:
    world = started(2)
    lost, drained = world.workers()
    for pod, ready in ((lost, "False"), (drained, "True")):
        world.ask_deletion(pod, 120)
        pod["status"]["conditions"] = [
            {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"},
            {"type": "Ready", "status": ready},
        ]
    both = make_sync(world.parsed(), world.observe(), 5, world.now + UNREACHABLE_LOST_SECONDS - 1)
    assert len(both.living) == 2
    later = make_sync(world.parsed(), world.observe(), 5, world.now + UNREACHABLE_LOST_SECONDS)
    assert [pod.uid for pod in later.living] == [drained["metadata"]["uid"]], "its kubelet keeps to the grace"


def test_the_coordinator_hears_whether_the_job_has_trained() -> None:
    world = started(2)
    assert make_sync(world.parsed(), world.observe(), 1, world.now).generation == 0
    world.reports(generation=4)
    world.round()
    assert make_sync(world.parsed(), world.observe(), 1, world.now).generation == 4


def test_a_stand_still_for_members_out_of_reach_is_no_training() -> None:
    world = started(3)
    world.reports()
    world.round()
    away: dict[str, Any] = {"reason": "Reconnecting", "message": "streams are broken", "step_seconds": 5.0}
    away |= {"waiting_for": ("digits-worker-1-0",), "last_commit_at": world.now}
    world.reports(**away)
    world.round()
    assert world.status["state"] == "Running"
    since = timestamp(world.now)
    world.reports(**away, still=True)
    world.round()
    assert world.status["state"] == "Recovering"
    assert world.status["samplesPerSecond"] == "0"
    text = f"no step since {since}: streams are broken (waits for digits-worker-1-0)"
    assert condition(world, "Running")["message"] == text


def test_a_spec_that_cannot_be_read_is_said_once() -> None:
    first = invalid({}, 3, "spec.workers: Field required", 0.0)
    assert [e.reason for e in first.events] == [reasons.INVALID_SPEC]
    assert first.actions == ()
    again = invalid(first.status, 3, "spec.workers: Field required", 60.0)
    assert again.events == ()
    assert again.status == first.status


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1.23456, "1.23"), (99.96, "100"), (12345.6, "12346")]
)
def test_rounding(value: float, text: str) -> None:
    assert rounded(value) == text


def test_every_status_fits_the_crd_and_nothing_gets_pruned() -> None:
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    status = closed(schema["properties"]["status"])
    world = World(job=job_object(3))
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 1
    seen = []
    for _ in range(3):
        world.round()
        seen.append(world.status)
    world.kubelet()
    world.reports(data={"epoch": 1, "seen": 5}, values={"a": 1.0}, recoveries=1, recovery_seconds=0.5)
    world.fail(world.workers()[0])
    world.round()
    seen.append(world.status)
    world.end(world.workers()[0], 0, finished_message(1))
    world.settle()
    seen.append(world.status)
    seen.append(invalid({}, 1, "wrong", 0.0).status)
    for one in seen:
        jsonschema.Draft202012Validator(status).validate(one)


def closed(schema: dict[str, object]) -> dict[str, object]:
    """The schema with additionalProperties: false wherever properties are listed."""
    result = dict(schema)
    if isinstance(result.get("properties"), dict):
        result["properties"] = {key: closed(child) for key, child in result["properties"].items()}  # type: ignore[attr-defined]
        result["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(result.get(key), dict):
            result[key] = closed(result[key])  # type: ignore[arg-type]
    return result

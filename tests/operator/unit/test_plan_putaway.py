"""A job with checkpoints is suspended in two steps: its workers save and leave, then its pods go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from operator_world import World, finished_message, job_object
from pydantic import ValidationError

from springtide_operator.api.checkpoint import Checkpoint
from springtide_operator.coordinator_connection import to_request
from springtide_operator.manifests.coordinator import coordinator_pod
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.plan.actions import DeletePod
from springtide_operator.plan.cleanup import PATIENCE_SECONDS
from springtide_operator.plan.coordinator_sync import CoordinatorUpdate, make_sync
from springtide_operator.plan.first_seen import FirstSeen, with_first_seen
from springtide_operator.plan.observation import CheckpointReport, Observation
from springtide_operator.plan.suspend import DEAF_SECONDS, LAST_REPORT_SECONDS, SAVE_SECONDS

NAME = "step-000000000030-g1.0.1"


@dataclass
class SteadyWorld(World):
    """An operator with a steady clock beside the wall clock, which may jump."""

    steady: float = 1000.0
    seen: FirstSeen = field(default_factory=FirstSeen)
    deaf_since: float | None = None

    def observe(self) -> Observation:
        found = replace(super().observe(), steady=self.steady, deaf_since=self.deaf_since)
        return with_first_seen(self.observe_job(), found, self.seen)

    def die(self) -> None:
        super().die()
        self.seen = FirstSeen()

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.steady += seconds


def suspended(jump: float = 0.0) -> SteadyWorld:
    """A job whose workers were told to save, by an operator whose clock jumps then."""
    world = training(SteadyWorld(job=job_object(2)))
    suspend(world)
    world.round()
    world.now += jump
    world.round()
    return world


def training(world: World | None = None, **checkpoint: Any) -> Any:
    world = world or World(job=job_object(2))
    world.job["spec"]["checkpoint"] = {"uri": "/volume", **checkpoint}
    world.settle()
    world.reports()
    world.round()
    return world


def suspend(world: World, value: bool = True) -> None:
    world.job["spec"]["suspend"] = value
    world.job["metadata"]["generation"] += 1


def tell(world: World, **fields: Any) -> None:
    """The coordinator answers a call."""
    assert world.report is not None
    steady = getattr(world, "steady", None)
    world.report = replace(world.report, at=world.now, steady_at=steady, **fields)


def saved(step: int = 30) -> CheckpointReport:
    return CheckpointReport(NAME, "/volume/default-digits-job-uid-", step, 1_800_000_000.0)


def said(world: World) -> CoordinatorUpdate:
    return make_sync(world.observe_job(), world.observe(), 1, world.now)


def deleted(world: World) -> list[str]:
    return [action.name for action in world.round().actions if isinstance(action, DeletePod)]


def condition(world: World, kind: str) -> dict[str, Any]:
    return next((c for c in world.status["conditions"] if c["type"] == kind), {})


def test_workers_save_and_leave_before_their_pods_go() -> None:
    world = training()
    assert said(world).suspend_by == 0.0
    suspend(world)
    assert said(world).suspend_by == 0.0  # first status says so
    assert deleted(world) == []
    assert said(world).suspend_by == pytest.approx(world.now + SAVE_SECONDS, abs=1.0)
    assert said(world).target == 0
    assert "its state is being saved" in world.status["message"]
    assert condition(world, "Degraded")["status"] == "False"
    world.now += 5
    tell(world, checkpoint=saved(), phase="WAITING")
    assert deleted(world) == []
    tell(world, put_away=True, all_saved=True)
    assert sorted(deleted(world)) == ["digits-worker-0-0", "digits-worker-1-0"]
    world.settle()
    assert world.pods == {}
    assert world.status["restarts"]["total"] == 0
    assert world.status["checkpoint"] == {
        "name": NAME,
        "uri": "/volume/default-digits-job-uid-",
        "step": 30,
        "time": "2027-01-15T08:00:00Z",
        "upToDate": True,
    }
    assert condition(world, "Degraded")["status"] == "False"
    # The next coordinator is told that nothing is lost.
    suspend(world, False)
    world.round()
    assert said(world).saved == NAME
    assert said(world).suspend_by == 0.0


def test_workers_that_leave_by_themselves_are_not_counted() -> None:
    world = training()
    suspend(world)
    world.round()
    for pod in world.workers():
        world.end(pod, 0, '{"outcome": "Left", "reason": "the job is suspended"}')
    world.settle()
    assert world.pods == {}
    assert world.status["restarts"]["total"] == 0


def left(world: World) -> None:
    """All workers save and leave before the coordinator is asked again."""
    suspend(world)
    world.round()
    for pod in world.workers():
        world.end(pod, 0, '{"outcome": "Left", "reason": "the job is suspended"}')
    some_rounds(world)


def some_rounds(world: World) -> None:
    for _ in range(5):
        world.kubelet()
        world.round()
        world.now += 1


@pytest.mark.parametrize("replaced", [False, True])
def test_coordinator_left_by_its_workers_is_heard_before_it_goes(replaced: bool) -> None:
    world = training()
    left(world)
    before = world.report
    if replaced:  # the operator, which has heard nothing yet
        world.report = None
    some_rounds(world)
    assert len(world.coordinators()) == 1
    world.report = before
    tell(world, checkpoint=saved(), put_away=True, all_saved=True, phase="WAITING")
    world.settle()
    assert world.pods == {}
    assert (world.status["checkpoint"]["name"], world.status["checkpoint"]["upToDate"]) == (NAME, True)
    assert condition(world, "Degraded")["status"] == "False"


def test_missing_last_word_is_not_awaited_longer_than_said() -> None:
    world = training()
    left(world)
    ended_at = world.now
    world.now += LAST_REPORT_SECONDS - 12
    tell(world)
    some_rounds(world)
    assert len(world.coordinators()) == 1
    assert world.round().wake_at == pytest.approx(ended_at + LAST_REPORT_SECONDS, abs=6)
    world.now += 10
    world.settle()
    assert world.pods == {}
    assert condition(world, "Degraded")["reason"] == "ProgressNotSaved"


def test_training_goes_ahead_of_the_checkpoint() -> None:
    world = training()
    tell(world, checkpoint=saved(), all_saved=True)
    world.round()
    assert world.status["checkpoint"]["upToDate"] is False
    assert said(world).saved == ""


def test_what_new_coordinator_does_not_know_stays_until_training() -> None:
    world = training()
    world.job["status"]["checkpoint"] = {"name": NAME, "upToDate": True}
    tell(world, checkpoint=None, step=None)
    world.round()
    assert said(world).saved == NAME
    tell(world, step=31)
    world.round()
    assert said(world).saved == ""


@pytest.mark.parametrize(
    ("why", "seconds"), [("nobody saves", SAVE_SECONDS), ("deaf", DEAF_SECONDS), ("no coordinator", 1.0)]
)
def test_what_cannot_be_saved_is_not_waited_for(why: str, seconds: float) -> None:
    world = training()
    suspend(world)
    world.round()
    if why == "deaf":
        world.unreachable_since = world.now
    if why == "no coordinator":
        for pod in list(world.coordinators()):
            world.pods.pop(pod["metadata"]["uid"])
    else:
        world.now += seconds - 2
        tell(world)
        assert deleted(world) == []
    world.now += 4
    assert len(deleted(world)) == 2
    world.settle()
    assert condition(world, "Degraded")["reason"] == "ProgressNotSaved"


@pytest.mark.parametrize("jump", [SAVE_SECONDS + 60, -SAVE_SECONDS - 60])
def test_clock_that_jumps_leaves_workers_their_time_to_save(jump: float) -> None:
    world = suspended(jump)
    tell(world)
    assert deleted(world) == []
    assert to_request(said(world)).suspend_in_seconds == pytest.approx(SAVE_SECONDS)
    world.passes(SAVE_SECONDS - 1)
    decided = world.round()
    assert not [action for action in decided.actions if isinstance(action, DeletePod)]
    assert decided.wake_at == pytest.approx(world.now + 1)
    world.passes(1)
    assert len(deleted(world)) == 2


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_clock_that_jumps_makes_no_silence_and_no_answer(jump: float) -> None:
    world = training(SteadyWorld(job=job_object(2)))
    tell(world, put_away=True)  # of an earlier suspension
    world.passes(1)
    suspend(world)
    world.round()
    world.deaf_since, world.unreachable_since = world.steady, world.now
    world.now += jump
    assert deleted(world) == []
    world.passes(DEAF_SECONDS - 1)
    assert deleted(world) == []
    world.passes(1)
    assert len(deleted(world)) == 2


def test_clock_that_jumps_leaves_the_coordinator_its_last_word() -> None:
    world = suspended()
    for pod in world.workers():
        world.end(pod, 0, '{"outcome": "Left", "reason": "the job is suspended"}')
    world.round()
    world.now += 3600
    world.round()
    world.passes(LAST_REPORT_SECONDS - 1)
    world.round()
    assert len(world.coordinators()) == 1
    world.passes(1)
    world.round()
    assert world.coordinators() == []


def test_operator_that_takes_over_gives_workers_time_anew() -> None:
    world = suspended()
    world.passes(SAVE_SECONDS - 10)
    report = world.report
    world.die()
    world.report, world.secret_made = report, True
    tell(world)
    assert deleted(world) == []
    world.passes(SAVE_SECONDS - 1)
    assert deleted(world) == []


def test_clock_that_jumps_ends_no_worker_of_a_finished_job() -> None:
    world = training(SteadyWorld(job=job_object(2)))
    first, second = world.workers()
    world.end(first, 0, finished_message(1))
    tell(world, asked_living=frozenset({second["metadata"]["uid"]}))
    world.round()
    assert world.status["state"] == "Succeeded"
    world.now += 3600
    assert deleted(world) == []
    world.passes(PATIENCE_SECONDS - 1)
    assert deleted(world) == []
    world.passes(1)
    assert second["metadata"]["name"] in deleted(world)


def test_an_older_checkpoint_is_told_as_what_it_is() -> None:
    world = training()
    suspend(world)
    world.round()
    tell(world, checkpoint=saved(), put_away=True, all_saved=False)
    world.settle()
    degraded = condition(world, "Degraded")
    assert degraded["reason"] == "ProgressNotSaved"
    assert "(step 30)" in degraded["message"]
    assert said(world).saved == ""


def test_an_answer_from_before_the_suspension_is_no_answer() -> None:
    world = training()
    tell(world, put_away=True)
    world.now += 60
    suspend(world)
    world.round()
    assert deleted(world) == []


def test_resumed_while_they_leave_others_take_their_places() -> None:
    world = training()
    suspend(world)
    world.round()
    suspend(world, False)
    assert sorted(deleted(world)) == ["digits-worker-0-0", "digits-worker-1-0"]
    world.settle()
    assert sorted(p["metadata"]["name"] for p in world.workers()) == [
        "digits-worker-0-1",
        "digits-worker-1-1",
    ]
    assert world.status["restarts"]["total"] == 0


def test_a_job_that_never_trained_goes_at_once() -> None:
    world = World(job=job_object(2))
    world.job["spec"]["checkpoint"] = {"uri": "/volume"}
    world.settle()
    suspend(world)
    assert len(deleted(world)) == 2


def test_failing_checkpoints_degrade_the_job_and_stop_nothing() -> None:
    world = training()
    tell(world, checkpoint_error="cannot write /volume: OSError: Read-only file system")
    decided = world.round()
    degraded = condition(world, "Degraded")
    assert degraded["reason"] == "CheckpointFailing"
    assert "Read-only file system" in degraded["message"]
    assert [event.reason for event in decided.events] == ["CheckpointFailing"]
    assert world.status["state"] == "Running"
    tell(world, checkpoint_error="")
    world.round()
    assert condition(world, "Degraded")["status"] == "False"


def test_low_limits_of_open_files_degrade_and_stop_nothing() -> None:
    world = training()
    tell(world, held_back="there is room on digits-worker-1-0 for generations of 2")
    world.round()
    degraded = condition(world, "Degraded")
    assert degraded["reason"] == "OpenFilesLimitSize"
    assert "digits-worker-1-0" in degraded["message"]
    assert world.status["state"] == "Running"
    tell(world, held_back="")
    world.round()
    assert condition(world, "Degraded")["status"] == "False"


def test_a_restored_checkpoint_is_told_once() -> None:
    world = training()
    tell(world, restored="/volume/x/" + NAME, restored_step=30, not_restored=("step-9: cut short",))
    decided = world.round()
    (event,) = [event for event in decided.events if event.reason == "CheckpointRestored"]
    assert "(step 30); newer ones could not be used: step-9: cut short" in event.message
    assert world.status["restored"] == "/volume/x/" + NAME
    assert world.round().events == ()


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in pod["spec"]["containers"][0]["env"]}


def test_workers_are_told_where_to() -> None:
    world = World(job=job_object(1))
    assert not [key for key in environment(worker_pod(world.parsed(), 0, 0, "x:1")) if "CHECKPOINT" in key]
    world.job["spec"]["checkpoint"] = {"uri": "s3://b/p", "intervalSeconds": 5, "restoreFrom": "s3://b/old"}
    worker = environment(worker_pod(world.parsed(), 0, 0, "x:1"))
    assert worker["SPRINGTIDE_CHECKPOINT_URI"] == "s3://b/p"
    assert worker["SPRINGTIDE_CHECKPOINT_SECONDS"] == "5"
    assert worker["SPRINGTIDE_CHECKPOINT_KEEP"] == "3"
    assert worker["SPRINGTIDE_RESTORE_FROM"] == "s3://b/old"
    assert environment(coordinator_pod(world.parsed(), 1))["SPRINGTIDE_CHECKPOINT_SECONDS"] == "5"


@pytest.mark.parametrize("uri", ["/volume", "file:///volume", "s3://bucket", "s3://bucket/a/b", "gs://b/p"])
def test_places(uri: str) -> None:
    assert Checkpoint(uri=uri).uri == uri


@pytest.mark.parametrize("uri", ["", "volume", "./volume", "s3:/bucket", "/with space", "S3://bucket"])
def test_no_places(uri: str) -> None:
    with pytest.raises(ValidationError):
        Checkpoint(uri=uri)

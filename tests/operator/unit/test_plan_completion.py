"""Completion: when a job succeeds, and which of its objects go then."""

from __future__ import annotations

import json

import pytest
from operator_world import World, finished_message, job_object

from springtide_operator.api import reasons
from springtide_operator.plan.actions import DeletePod, DeleteService
from springtide_operator.plan.completion import LAST_CALLS_SECONDS
from springtide_operator.plan.retry import refuse


def started(replicas: int = 3, cleanup: str = "Running") -> World:
    world = World(job=job_object(replicas))
    world.job["spec"]["podCleanup"] = cleanup
    world.settle()
    world.reports()
    return world


def deleted(world: World) -> set[str]:
    return {a.name for a in world.plan().actions if isinstance(a, DeletePod)}


def test_exit_codes_alone_are_no_success() -> None:
    world = started(2)
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 0
    for pod in world.workers():
        world.end(pod, 0)
    world.round()
    assert world.status["state"] == "Failed"
    assert "without finishing" in world.status["message"]


def test_one_finished_worker_is_success_and_its_numbers_are_kept() -> None:
    world = started()
    world.end(world.workers()[2], 0, finished_message(1))
    decided = world.round()
    status = world.status
    assert status["state"] == "Succeeded"
    assert status["step"] == 2400
    assert status["data"]["totalSeen"] == 431100
    assert status["values"] == {"test_accuracy": "0.978"}
    assert "completionTime" in status
    assert [e.reason for e in decided.events] == [reasons.TRAINING, reasons.SUCCEEDED]
    conditions = {c["type"]: c["status"] for c in status["conditions"]}
    assert conditions == {
        **dict.fromkeys(("Running", "Rescaling", "Degraded", "Reconciling", "Stalled"), "False"),
        **dict.fromkeys(("Ready", "Succeeded"), "True"),
    }


def test_job_ended_between_two_calls_is_told_by_coordinator() -> None:
    """Read a job that was resumed, trained and ended before anybody asked: status still has its beginning."""
    world = World(job=job_object(2))
    world.settle()
    uids = [pod["metadata"]["uid"] for pod in world.workers()]
    for pod in world.workers():
        world.end(pod, 0, finished_message(1))
    assert world.round().wake_at == pytest.approx(world.now, abs=1.0)
    assert world.status["state"] == "Starting"
    world.reports(restored="/volume/step-30", restored_step=30, asked_living=frozenset(uids[:1]))
    world.round()
    assert world.status["state"] == "Starting", "it was asked before the first worker's end was known"
    world.reports(restored="/volume/step-30", restored_step=30, states_lost=1, asked_living=frozenset())
    decided = world.round()
    assert world.status["state"] == "Succeeded"
    assert world.status["restored"] == "/volume/step-30"
    assert world.status["step"] == 2400, "the worker's own last word is newer"
    told = [e.reason for e in decided.events]
    assert told == [reasons.EVENT_RESTORED, reasons.STATE_LOST, reasons.TRAINING, reasons.SUCCEEDED]
    assert decided.events[2].message == "the workers have trained in generation 7, up to step 2400"


def test_training_is_told_once_however_it_ends() -> None:
    """Seen while it went on, and then not any more; or never before the job failed."""
    world = started(2)
    assert [e.reason for e in world.round().events] == [reasons.TRAINING]
    world.reports(phase="WAITING", members=(), step=2400, generation=7)
    world.now += 60
    world.round()
    assert not any(c["status"] == "True" for c in world.status["conditions"] if c["type"] == "Running")
    for pod in world.workers():
        world.end(pod, 0, finished_message(1))
    assert [e.reason for e in world.round().events] == [reasons.SUCCEEDED]

    world = World(job=job_object(1))
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 0
    world.settle()
    world.reports(step=3)
    world.end(world.workers()[0], 1)
    assert [e.reason for e in world.round().events][-2:] == [reasons.TRAINING, reasons.FAILED]
    world = World(job=job_object(1))
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 0
    world.settle()
    world.end(world.workers()[0], 1)
    assert reasons.TRAINING not in [e.reason for e in world.round().events], "it never trained"
    assert world.status["state"] == "Failed"


@pytest.mark.parametrize("why", ["it does not answer", "it is gone", "it said nothing for a minute"])
def test_end_does_not_wait_for_an_absent_coordinator(why: str) -> None:
    world = World(job=job_object(1))
    world.settle()
    world.end(world.workers()[0], 0, finished_message(1))
    world.round()
    assert world.status["state"] == "Starting"
    if why == "it does not answer":
        world.unreachable_since = world.now
        world.now += LAST_CALLS_SECONDS - 1
        world.round()
        assert world.status["state"] == "Starting", "it may not have listened yet when it was called"
        world.now += 1
    elif why == "it is gone":
        world.vanish(world.coordinators()[0])
    else:
        world.now += 61
    world.round()
    assert world.status["state"] == "Succeeded"


def test_coordinator_silent_before_the_end_is_asked_once_more() -> None:
    """Ask a coordinator that was slow to listen while its job trained and ended at once."""
    world = World(job=job_object(1))
    world.settle()
    world.unreachable_since = world.now
    world.coordinators()[0]["status"] = {"phase": "Pending"}
    world.now += 30
    world.end(world.workers()[0], 0, finished_message(1))
    world.round()
    assert world.status["state"] == "Starting"
    world.unreachable_since = None
    world.reports(restored="/volume/step-30", restored_step=30, asked_living=frozenset())
    world.round()
    assert (world.status["state"], world.status["restored"]) == ("Succeeded", "/volume/step-30")


def test_running_worker_gets_time_and_coordinator_goes_last() -> None:
    world = started()
    done, saving, pending = world.workers()
    pending["status"] = {"phase": "Pending"}
    world.end(done, 0, finished_message(1))
    decided = world.round()
    assert {a.name for a in decided.actions if isinstance(a, DeletePod)} == {pending["metadata"]["name"]}
    assert decided.wake_at == world.now + 60
    world.now += 59
    del world.pods[pending["metadata"]["uid"]]
    assert deleted(world) == set()
    world.now += 1
    assert deleted(world) == {saving["metadata"]["name"]}
    world.end(saving, 0, finished_message(1))
    assert deleted(world) == {"digits-coordinator-1"}


@pytest.mark.parametrize(
    ("cleanup", "left"),
    [
        ("All", set()),
        ("Running", {"digits-worker-0-0"}),
        ("None", {"digits-worker-0-0", "digits-worker-1-0"}),
    ],
)
def test_pod_cleanup(cleanup: str, left: set[str]) -> None:
    world = started(2, cleanup)
    first = min(world.workers(), key=lambda p: p["metadata"]["name"])
    world.end(first, 0, finished_message(1))
    for _ in range(20):
        world.round()
        world.kubelet()
        world.now += 10
    assert {p["metadata"]["name"] for p in world.workers(live=False)} == left
    serves = cleanup == "None"  # a worker runs on, and may still talk to it
    assert bool(world.coordinators()) == serves
    assert (world.service is not None) == serves
    assert bool(world.status["coordinator"]["address"]) == serves


def test_service_goes_once_after_coordinator_also_at_takeover() -> None:
    world = started(1)
    world.end(world.workers()[0], 0, finished_message(1))
    first = world.round()
    assert not any(isinstance(a, DeleteService) for a in first.actions)  # the coordinator is still there
    world.kubelet()
    world.die()
    assert [type(a) for a in world.round().actions] == [DeleteService]
    world.die()  # before status says so
    assert [type(a) for a in world.round().actions] == [DeleteService]
    world.round()
    assert world.status["coordinator"]["address"] == ""
    world.die()
    assert world.plan().actions == ()


def test_undeletable_service_is_tried_ever_more_slowly() -> None:
    world = started(1)
    world.end(world.workers()[0], 0, finished_message(1))
    world.round()
    world.kubelet()
    world.refusals["service"] = refuse(None, 403, "forbidden", world.now)
    assert world.plan().actions == ()
    world.now += 2
    assert [type(a) for a in world.plan().actions] == [DeleteService]


def test_a_failed_job_lets_no_worker_run_on() -> None:
    world = started(3)
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 0
    world.fail(world.workers()[0])
    world.round()
    assert world.workers() == []
    world.kubelet()
    world.settle()
    assert world.coordinators() == []


def test_finished_of_an_older_coordinator_waits_for_the_others() -> None:
    """Another history may go on under the new coordinator: an old Finished does not end it."""
    world = started(2)
    world.ask_deletion(world.coordinators()[0], 5)
    world.round()
    assert world.status["coordinator"]["incarnation"] == 2
    first, second = world.workers()
    world.end(first, 0, finished_message(1))
    for _ in range(5):
        world.round()
        world.now += 5
    assert world.status["state"] != "Succeeded"
    assert [p["metadata"]["uid"] for p in world.workers()] == [
        second["metadata"]["uid"]
    ]  # nobody in its place
    assert first["metadata"]["uid"] in world.pods  # its word is kept
    world.end(second, 0, finished_message(1))
    world.round()
    assert world.status["state"] == "Succeeded"


def test_finished_counts_from_an_adopted_generation() -> None:
    world = started(2)
    world.ask_deletion(world.coordinators()[0], 5)
    world.round()
    world.reports(generation=7, generation_incarnation=1)
    world.end(world.workers()[0], 0, finished_message(1))  # says generation 7
    world.round()
    assert world.status["state"] == "Succeeded"


def test_a_later_failure_changes_nothing() -> None:
    world = started(2)
    first, second = world.workers()
    world.end(first, 0, finished_message(1))
    world.round()
    before = json.dumps(world.status["conditions"])
    world.fail(second)
    world.settle()
    assert json.dumps(world.status["conditions"]) == before
    assert world.status["restarts"]["failures"] == 0


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    world = started(2)
    world.job["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    world.fail(world.workers()[0])
    decided = world.plan()
    assert decided.actions == ()
    assert decided.status == world.status


def test_a_template_that_cannot_be_used_fails_the_job() -> None:
    world = World(job=job_object(1))
    world.job["spec"]["workers"]["template"]["spec"]["containers"][0]["env"] = {"A": "b"}
    world.round()
    assert world.status["state"] == "Failed"
    failed = next(c for c in world.status["conditions"] if c["type"] == reasons.FAILED)
    assert failed["reason"] == reasons.INVALID_TEMPLATE
    assert "env" in failed["message"]


@pytest.mark.parametrize("runs_on", [False, True], ids=["ended as a whole", "a sidecar runs on"])
def test_ended_pod_is_kept_while_its_phase_is_late(runs_on: bool) -> None:
    """Kubelets say first that the containers have ended, and the phase up to seconds later."""
    world = started(2)
    ended, other = world.workers()
    for pod in (ended, other):
        world.end(pod, 0, finished_message(1))
    ended["status"]["phase"] = "Running"
    if runs_on:
        ended["status"]["containerStatuses"].append({"name": "proxy", "state": {"running": {}}})
    world.round()
    assert world.status["state"] == "Succeeded"
    gone = {pod["metadata"]["name"] for pod in (ended, other)} - {
        pod["metadata"]["name"]
        for pod in world.workers(live=False)
        if "deletionTimestamp" not in pod["metadata"]
    }
    assert gone == ({ended["metadata"]["name"]} if runs_on else set())

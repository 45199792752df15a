"""Suspending and resuming, the deadline, and the job's own deletion."""

from __future__ import annotations

from typing import Any

import pytest
from operator_world import World, finished_message, job_object

from springtide_operator.api import names
from springtide_operator.api.job import InvalidJob, Job
from springtide_operator.manifests.coordinator import coordinator_pod
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.plan.actions import CreateCoordinator, CreateWorker, DeleteJob, DeletePod
from springtide_operator.plan.coordinator_sync import make_sync
from springtide_operator.plan.values import parse_time, timestamp


def world_of(replicas: int = 2, **spec: Any) -> World:
    world = World(job=job_object(replicas))
    world.job["spec"] |= spec
    return world


def training(replicas: int = 2, **spec: Any) -> World:
    world = world_of(replicas)
    world.settle()
    world.job["spec"] |= spec  # a world with a deadline would settle after it
    world.job["status"]["startTime"] = timestamp(world.now)
    world.reports()
    world.round()
    return world


def condition(world: World, kind: str) -> dict[str, Any]:
    return next((c for c in world.status["conditions"] if c["type"] == kind), {})


def suspend(world: World, value: bool = True) -> None:
    world.job["spec"]["suspend"] = value
    world.job["metadata"]["generation"] += 1


def test_job_made_suspended_gets_no_pods_until_resumed() -> None:
    world = world_of(suspend=True)
    world.settle()
    assert world.pods == {}
    assert world.status["state"] == "Suspended"
    assert "startTime" not in world.status
    assert condition(world, "Degraded")["status"] == "False"  # there was no progress to lose
    suspend(world, False)
    world.settle()
    assert len(world.workers()) == 2
    assert condition(world, "Suspended")["status"] == "False"


def test_suspending_ends_workers_then_coordinator_uncounted() -> None:
    world = training(3)
    suspend(world)
    decided = world.round()
    gone = [a for a in decided.actions if isinstance(a, DeletePod)]
    assert sorted(a.name for a in gone) == [f"digits-worker-{n}-0" for n in range(3)]
    assert {a.because for a in gone} == {"Suspended"}
    assert [e.reason for e in decided.events] == ["ProgressNotSaved", "JobSuspended"]
    assert make_sync(world.parsed(), world.observe(), 1, world.now).target == 0
    assert len(world.coordinators()) == 1  # the leaving workers still talk to it
    assert "3 workers leave" in world.status["message"] or world.round()
    assert world.status["state"] == "Suspended"
    world.settle()
    assert world.pods == {}
    assert world.status["restarts"]["total"] == 0
    assert world.status["workers"]["summary"] == "0/0"
    degraded = condition(world, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ProgressNotSaved")
    assert not world.plan().actions


def test_resuming_makes_new_pods_and_coordinator_by_new_names() -> None:
    world = training(2)
    suspend(world)
    world.settle()
    suspend(world, False)
    decided = world.round()
    assert [a.incarnation for a in decided.actions if isinstance(a, CreateCoordinator)] == [2]
    assert "JobResumed" in [e.reason for e in decided.events]
    world.settle()
    assert sorted(p["metadata"]["name"] for p in world.workers()) == [
        "digits-worker-0-1",
        "digits-worker-1-1",
    ]
    # The coordinator is told that the job had state: it must not begin anew without saying so.
    assert make_sync(world.parsed(), world.observe(), 2, world.now).generation == 1
    assert condition(world, "Degraded")["status"] == "False"


def test_resuming_at_once_takes_no_pod_back_that_leaves() -> None:
    world = training(2)
    before = {pod["metadata"]["name"] for pod in world.workers()}
    suspend(world)
    world.round()
    suspend(world, False)
    world.round()
    now = {pod["metadata"]["name"] for pod in world.workers()}
    assert len(now) == 2
    assert not now & before


def test_suspending_survives_operator_deaths_between_any_steps() -> None:
    for cut in range(6):
        world = training(3)
        suspend(world)
        world.round(cut)
        world.die()
        world.settle()
        assert world.pods == {}, cut
        assert world.status["restarts"]["total"] == 0


def test_failure_or_finish_while_suspended_still_counts() -> None:
    world = training(2)
    suspend(world)
    world.end(world.workers()[0], 0, finished_message(1))
    world.settle()
    assert world.status["state"] == "Succeeded"


def test_the_deadline_fails_the_job_with_its_reason() -> None:
    world = training(2, activeDeadlineSeconds=600)
    began = parse_time(world.status["startTime"])
    assert began is not None
    assert world.plan().wake_at == began + 600
    world.now = began + 599
    world.round()
    assert world.status["state"] == "Running"
    world.now = began + 600
    decided = world.round()
    assert condition(world, "Failed")["reason"] == "DeadlineExceeded"
    assert "600" in condition(world, "Failed")["message"]
    assert len([a for a in decided.actions if isinstance(a, DeletePod)]) == 2
    world.settle()
    assert world.pods == {}


def test_suspending_stops_and_resets_the_deadline() -> None:
    world = training(1, activeDeadlineSeconds=600)
    world.now += 500
    suspend(world)
    world.settle()
    world.now += 5000
    world.round()
    assert world.status["state"] == "Suspended"
    suspend(world, False)
    world.round()
    world.now += 590
    world.round()
    assert "Failed" not in {c["type"] for c in world.status["conditions"]}
    world.now += 10
    world.round()
    assert condition(world, "Failed")["reason"] == "DeadlineExceeded"


def test_job_finished_in_time_is_not_failed_by_its_deadline() -> None:
    world = training(1, activeDeadlineSeconds=600)
    world.end(world.workers()[0], 0, finished_message(1))
    world.now += 601
    world.round()
    assert world.status["state"] == "Succeeded"


def test_an_ended_job_is_deleted_after_its_ttl() -> None:
    world = training(1, ttlSecondsAfterFinished=300)
    world.end(world.workers()[0], 0, finished_message(1))
    decided = world.round()
    ended = parse_time(world.status["completionTime"])
    assert ended is not None
    assert decided.wake_at is not None
    assert decided.wake_at <= ended + 300
    world.kubelet()
    world.round()
    world.now = ended + 299
    world.kubelet()
    assert not any(isinstance(a, DeleteJob) for a in world.round().actions)
    assert world.plan().wake_at == ended + 300
    world.now = ended + 300
    world.round()
    assert world.deleted


def test_zero_ttl_deletes_in_round_after_end_no_running_job() -> None:
    world = training(1, ttlSecondsAfterFinished=0)
    assert not world.deleted
    world.end(world.workers()[0], 0, finished_message(1))
    world.round()
    assert not world.deleted  # status says how it ended first
    world.round()
    assert world.deleted


def test_a_job_without_a_ttl_stays() -> None:
    world = training(1)
    world.end(world.workers()[0], 0, finished_message(1))
    world.round()
    world.now += 10 * 365 * 86400
    world.settle()
    assert not world.deleted


def test_pods_carry_jobs_labels_and_the_templates_win() -> None:
    obj = job_object(1)
    obj["spec"]["podMetadata"] = {
        "labels": {"team": "a", "cost": "b"},
        "annotations": {"sidecar.istio.io/inject": "false"},
    }
    obj["spec"]["workers"]["template"]["metadata"] = {"labels": {"team": "mine"}}
    job = Job.parse(obj)
    worker, coordinator = worker_pod(job, 0, 0, "h:1"), coordinator_pod(job, 1)
    assert worker["metadata"]["labels"]["team"] == "mine"
    assert coordinator["metadata"]["labels"]["team"] == "a"
    for pod, role in ((worker, "worker"), (coordinator, "coordinator")):
        assert pod["metadata"]["labels"]["cost"] == "b"
        assert pod["metadata"]["labels"][names.LABEL_ROLE] == role
        assert pod["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"


@pytest.mark.parametrize(
    "spec", [{"activeDeadlineSeconds": 0}, {"ttlSecondsAfterFinished": -1}, {"activeDeadlineSeconds": 2**31}]
)
def test_times_out_of_range_are_refused_by_name(spec: dict[str, int]) -> None:
    obj = job_object(1)
    obj["spec"] |= spec
    with pytest.raises(InvalidJob, match=next(iter(spec))):
        Job.parse(obj)


def test_nothing_is_made_while_suspended_whatever_pods_do() -> None:
    world = training(3)
    suspend(world)
    for accident in (world.fail, world.vanish, world.evict):
        live = world.workers()
        if live:
            accident(live[0])
        decided = world.round()
        assert not any(isinstance(a, CreateWorker | CreateCoordinator) for a in decided.actions)
        world.now += 1

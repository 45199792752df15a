"""Hangs: what is told to the coordinator, what is done once, and what never counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_failure_table import stalled, worker
from operator_world import World, job_object

from springtide_operator.coordinator_connection import news, to_report, to_request
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.plan import hangs
from springtide_operator.plan.actions import CreateWorker, DeletePod
from springtide_operator.plan.coordinator_sync import make_sync
from springtide_protocol import coordinator_pb2 as pb


def trains(**policy: Any) -> World:
    world = World(job=job_object(3))
    world.job["spec"]["failurePolicy"].update(policy)
    world.settle()
    world.now += 100
    world.reports()
    return world


def test_the_coordinator_is_told_the_limit_and_whom_to_cut_off() -> None:
    world = trains(hangTimeoutSeconds=60, onHang="Replace")
    said = make_sync(world.parsed(), world.observe(), 1, world.now)
    assert (said.hang_seconds, said.hung) == (60.0, ())
    uid = worker(world, 1)["metadata"]["uid"]
    stalled(world, 1, seconds=60.0)
    said = make_sync(world.parsed(), world.observe(), 1, world.now)
    assert said.hung == (), "not before its end is counted: the coordinator would forget the stall"
    decided = world.round()
    gone = next(action for action in decided.actions if isinstance(action, DeletePod))
    assert (gone.because, gone.grace_seconds) == ("Hung", 1)
    world.reports()
    said = make_sync(world.parsed(), world.observe(), 1, world.now)
    assert said.hung == (uid,), "it goes, and its process may still be there"
    assert uid not in {pod.uid for pod in said.living}
    request = to_request(said)
    assert (request.hang_seconds, list(request.hung)) == (60.0, [uid])


def test_hang_counts_once_and_replacement_is_not_the_late_one() -> None:
    world = trains(onHang="Replace")
    stalled(world, 1)
    report = world.report
    first = world.round()
    assert [(a.slot, a.attempt) for a in first.actions if isinstance(a, CreateWorker)] == [(1, 1)]
    for _ in range(5):
        world.now += 2.0
        world.report = report  # an answer that is not newer
        again = world.round()
        assert not [a for a in again.actions if isinstance(a, CreateWorker)]
        assert world.status["restarts"]["failures"] == 1
    world.kubelet()
    world.reports()
    world.settle()
    assert sorted(p["metadata"]["name"] for p in world.workers()) == [
        "digits-worker-0-0",
        "digits-worker-1-1",
        "digits-worker-2-0",
    ]
    assert world.status["restarts"]["failures"] == 1
    assert "hung: no step was committed for 600 s" in world.status["lastFailure"]["message"]


def test_operator_dying_before_deletion_is_made_up_for() -> None:
    world = trains(onHang="Replace")
    stalled(world, 1)
    report = world.report
    world.round(stop_after=1)
    world.die()
    world.now += 20.0
    world.report = report
    world.round()
    world.report = report
    world.round()
    world.reports()
    world.settle()
    names = sorted(p["metadata"]["name"] for p in world.workers())
    assert names == ["digits-worker-0-0", "digits-worker-1-1", "digits-worker-2-0"]
    assert world.status["restarts"]["failures"] == 1


@pytest.mark.parametrize("phase", ["WAITING", "FORMING", "AFTER_LOOP"])
def test_a_job_that_does_not_train_does_not_hang(phase: str) -> None:
    world = trains(onHang="FailJob")
    stalled(world, 1)
    assert world.report is not None
    world.report = replace(world.report, phase=phase)
    world.round()
    assert not any(c["type"] == "Failed" for c in world.status["conditions"])
    assert hangs.stall(world.parsed(), world.observe()) is None


def test_suspended_job_and_other_coordinators_word_are_no_hang() -> None:
    world = trains(onHang="FailJob")
    stalled(world, 1)
    assert hangs.stall(world.parsed(), world.observe()) is not None
    world.job["spec"]["suspend"] = True
    assert hangs.stall(world.parsed(), world.observe()) is None
    world.job["spec"]["suspend"] = False
    assert world.report is not None
    world.report = replace(world.report, incarnation=7)
    assert hangs.stall(world.parsed(), world.observe()) is None


def test_the_message_does_not_change_while_it_lasts() -> None:
    world = trains()
    stalled(world, 1, 2)
    world.round()
    before = world.status
    assert world.report is not None
    assert world.report.stall is not None
    world.report = replace(world.report, stall=replace(world.report.stall, seconds=700.0))
    decided = world.round()
    assert [c["message"] for c in decided.status["conditions"]] == [
        c["message"] for c in before["conditions"]
    ]
    assert decided.events == ()


def test_many_late_workers_are_counted_not_listed() -> None:
    world = trains()
    stalled(world, 0, 1, 2)
    assert world.report is not None
    assert world.report.stall is not None
    found = replace(world.report.stall, late=world.report.stall.late * 3)
    text = hangs.describe(world.parsed(), found, world.observe())
    assert text.endswith("; and 6 more")
    assert text.count("digits-worker") == 3


def test_an_answer_is_read_and_only_its_beginning_is_news() -> None:
    reply = pb.SyncReply(phase=pb.RUNNING)
    calm = to_report(reply, 5.0)
    reply.stall.CopyFrom(pb.Stall(seconds=61, since_unix=900, step=4, waiting=1))
    late = reply.stall.late.add(pod_uid="u", pod_name="p", since_unix=930)
    late.activity.CopyFrom(pb.Activity(step=4, doing=pb.DOING_STEPPING, where="train.py:9"))
    reply.stall.late.add(pod_uid="v", pod_name="q")
    stuck = to_report(reply, 6.0)
    assert stuck.stall is not None
    assert (stuck.stall.seconds, stuck.stall.step, stuck.stall.waiting) == (61, 4, 1)
    assert [(one.pod, one.doing) for one in stuck.stall.late] == [("p", "in the optimizer's step"), ("q", "")]
    reply.stall.seconds = 63
    assert news(calm, stuck)
    assert not news(stuck, to_report(reply, 8.0))


def test_every_activity_has_a_word() -> None:
    for value in pb.Doing.values():
        reply = pb.SyncReply()
        reply.stall.late.add().activity.doing = value
        found = to_report(reply, 0.0).stall
        assert found is not None
        assert bool(found.late[0].doing) == bool(value)


@pytest.mark.parametrize(("limit", "expected"), [(600, None), (900, None), (3600, "7200")])
def test_collectives_wait_longer_than_a_hang_is_noticed(limit: int, expected: str | None) -> None:
    job = World(job=job_object(1))
    job.job["spec"]["failurePolicy"]["hangTimeoutSeconds"] = limit
    pod = worker_pod(job.parsed(), 0, 0, "10.0.0.1:7070")
    env = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
    assert env.get("SPRINGTIDE_COLLECTIVE_SECONDS") == expected


@pytest.mark.parametrize(("slots", "replaced"), [((1,), 1), ((1, 2), 0)])
def test_worker_that_stands_still_is_replaced_by_policy(slots: tuple[int, ...], replaced: int) -> None:
    """Never when more than a third stands still: then it is the job or the network."""
    for policy, expected in (("Replace", replaced), ("Warn", 0)):
        world = trains(onHang=policy)
        uids = frozenset(worker(world, slot)["metadata"]["uid"] for slot in slots)
        world.reports(vanished=uids)
        decided = world.round()
        gone = [action for action in decided.actions if isinstance(action, DeletePod)]
        assert [action.because for action in gone] == ["Hung"] * expected
        assert world.status["restarts"]["failures"] == expected
        degraded = next(c for c in world.status["conditions"] if c["type"] == "Degraded")
        assert (degraded["reason"] == "WorkerSilent") == (not expected)
        said = "see the job and the network" in degraded["message"]
        assert said == (policy == "Replace" and not expected)


@given(st.integers(1, 100), st.integers(0, 100))
def test_more_than_a_third_that_stand_still_are_left_alone(vanished: int, others: int) -> None:
    workers = vanished + others
    assert hangs.too_many_vanished(vanished, workers) == (vanished > max(1, workers // 3))

"""Which workers are made and which are given back."""

from __future__ import annotations

import itertools
from dataclasses import replace

from operator_world import World, job_object

from springtide_operator.api import names
from springtide_operator.plan.actions import CreateWorker, DeletePod
from springtide_operator.plan.decide import plan
from springtide_operator.plan.observation import MemberReport


def started(replicas: int) -> World:
    world = World(job=job_object(replicas))
    world.settle()
    return world


def given_back(world: World) -> list[str]:
    return [a.name for a in world.plan().actions if isinstance(a, DeletePod)]


def test_all_workers_of_the_target_are_made_at_once() -> None:
    world = World(job=job_object(4))
    world.round()
    decided = world.round()
    made = [a for a in decided.actions if isinstance(a, CreateWorker)]
    assert [(a.slot, a.attempt) for a in made] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert {a.address for a in made} == {"10.0.0.1:7070"}


def test_no_worker_is_made_before_the_service_has_an_address() -> None:
    world = World(job=job_object(2))
    decided = world.round()
    assert not any(isinstance(a, CreateWorker) for a in decided.actions)


def test_the_highest_slots_are_given_back() -> None:
    world = started(5)
    world.scale(2)
    assert given_back(world) == ["digits-worker-4-0", "digits-worker-3-0", "digits-worker-2-0"]


def test_a_pod_that_does_not_run_is_given_back_first() -> None:
    world = started(4)
    pending = next(p for p in world.workers() if p["metadata"]["labels"][names.LABEL_SLOT] == "1")
    pending["status"] = {"phase": "Pending"}
    world.scale(3)
    assert given_back(world) == ["digits-worker-1-0"]


def test_worker_not_training_yet_is_given_back_before_others() -> None:
    world = started(3)
    joiner = world.workers()[0]
    world.reports()
    assert world.report is not None
    members = tuple(m for m in world.report.members if m.pod_uid != joiner["metadata"]["uid"])
    world.reports(members=(*members, MemberReport(joiner["metadata"]["uid"], False, True, False)))
    world.scale(2)
    assert given_back(world) == ["digits-worker-0-0"]


def test_training_worker_runs_although_its_node_is_silent() -> None:
    world = started(2)
    first, second = world.workers()
    world.reports()
    assert world.report is not None
    first["status"] = {"phase": "Pending"}
    world.scale(1)
    assert given_back(world) == ["digits-worker-1-0"]
    world.report = replace(world.report, members=world.report.members[1:])
    assert given_back(world) == [first["metadata"]["name"]]
    assert world.report.members[0].pod_uid == second["metadata"]["uid"]


def test_scaling_up_again_fills_lowest_slots_by_new_attempts() -> None:
    world = started(4)
    world.scale(2)
    world.settle()
    world.scale(3)
    world.settle()
    assert sorted(p["metadata"]["name"] for p in world.workers()) == [
        "digits-worker-0-0",
        "digits-worker-1-0",
        "digits-worker-2-1",
    ]


def test_replacement_does_not_wait_for_a_pod_stuck_terminating() -> None:
    world = started(2)
    world.ask_deletion(world.workers()[0])
    world.round()
    assert "digits-worker-0-1" in {p["metadata"]["name"] for p in world.workers()}


def test_names_that_others_hold_are_passed_over() -> None:
    world = World(job=job_object(1))
    world.round()
    observation = world.observe()
    taken = replace(observation, taken=frozenset({"digits-worker-0-0", "digits-worker-0-1"}))
    made = [a for a in plan(world.parsed(), taken, world.now).actions if isinstance(a, CreateWorker)]
    assert [(a.slot, a.attempt) for a in made] == [(0, 2)]


def test_refused_pods_are_retried_ever_more_slowly_uncounted() -> None:
    world = World(job=job_object(2))
    world.refuse_workers = (403, 'pods "digits-worker-0-0" is forbidden: exceeded quota')
    world.round()
    tries = []
    for _ in range(600):
        decided = world.round()
        if any(isinstance(a, CreateWorker) for a in decided.actions):
            tries.append(world.now)
            made = {(a.slot, a.attempt) for a in decided.actions if isinstance(a, CreateWorker)}
            assert made == {(0, 0), (1, 0)}
        world.now += 0.5
    gaps = [round(b - a) for a, b in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 2
    assert 55 <= gaps[-1] <= 65
    degraded = next(c for c in world.status["conditions"] if c["type"] == "Degraded")
    assert degraded["reason"] == "PodCreationRefused"
    assert "exceeded quota" in degraded["message"]
    assert world.status["restarts"]["failures"] == 0
    world.refuse_workers = None
    world.settle()
    assert len(world.workers()) == 2
    assert next(c for c in world.status["conditions"] if c["type"] == "Degraded")["status"] == "False"


def test_invalid_template_fails_job_at_once_in_servers_words() -> None:
    world = World(job=job_object(2))
    world.refuse_workers = (422, "Pod is invalid: spec.containers[0].image: Required value")
    world.round()
    world.round()
    world.round()
    assert world.status["state"] == "Failed"
    assert "spec.containers[0].image: Required value" in world.status["message"]
    world.settle()
    assert world.coordinators() == []

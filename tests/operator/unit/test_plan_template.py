"""Templates that cannot be used: new jobs fail at once, jobs that train lose nothing by an edit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_failure_table import Object, disrupted, done, refused, server, worker
from operator_world import World, job_object

from springtide_operator.api import reasons
from springtide_operator.plan.observation import Refusal
from springtide_operator.plan.retry import answers_to, refuse, room_was_made


def trained(servers: int = 0) -> World:
    """Three workers that train."""
    world = World(job=job_object(3))
    if servers:
        world.job["spec"] |= {
            "strategy": {"type": "ParameterServer"},
            "parameterServers": {"replicas": servers},
        }
    world.settle()
    world.now += 100
    world.reports()
    world.round()
    assert world.status["state"] == "Running"
    return world


def condition(world: World, kind: str) -> Object:
    return next(c for c in world.status["conditions"] if c["type"] == kind)


def edit(world: World, **container: object) -> None:
    world.job["metadata"]["generation"] += 1
    world.job["spec"]["workers"]["template"]["spec"]["containers"][0].update(container)


def label(world: World) -> None:
    world.job["metadata"]["generation"] += 1
    world.job["spec"]["podMetadata"] = {"labels": {"springtide.dev/slot": "7"}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: edit(w, image=""), "container 'worker' has no image"),
        (lambda w: edit(w, env=[{"name": "SPRINGTIDE_SLOT", "value": "1"}]), "has SPRINGTIDE_SLOT"),
        (label, "spec.podMetadata.labels has springtide.dev/slot"),
    ],
    ids=["image", "variable", "label"],
)
def test_edit_making_template_useless_costs_an_untrained_job(change: object, says: str) -> None:
    world = trained()
    change(world)  # type: ignore[operator]
    before = {pod["metadata"]["uid"] for pod in world.workers()}
    first = world.round()
    assert done(first) == set()
    assert [event.reason for event in first.events] == [reasons.INVALID_TEMPLATE]
    degraded = condition(world, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", reasons.INVALID_TEMPLATE)
    assert "goes on with the pods that it has" in degraded["message"]
    assert says in degraded["message"]
    assert {pod["metadata"]["uid"] for pod in world.workers()} == before
    assert world.status["state"] == "Running"
    assert world.round().events == ()


def test_ended_worker_waits_for_correction_coordinator_does_not() -> None:
    world = trained()
    edit(world, image="")
    world.round()
    disrupted(world, 1, "PreemptionByScheduler")
    world.vanish(world.coordinators()[0])
    world.reports()
    assert done(world.round()) == {"+c2"}
    assert len(world.workers()) == 2
    assert condition(world, "Degraded")["reason"] == reasons.INVALID_TEMPLATE
    edit(world, image="img:2")
    world.settle()
    assert sorted(pod["metadata"]["name"] for pod in world.workers()) == [
        "digits-worker-0-0",
        "digits-worker-1-1",
        "digits-worker-2-0",
    ]
    world.reports()
    world.round()
    assert condition(world, "Degraded")["reason"] == reasons.HEALTHY
    assert world.status["workers"]["outdated"] == 2


def test_job_fails_when_no_worker_of_earlier_template_is_left() -> None:
    world = trained()
    edit(world, image="")
    for slot in (0, 1):
        world.vanish(worker(world, slot))
        world.round()
        assert world.status["state"] != "Failed"
    world.vanish(worker(world, 2))
    world.round()
    failed = condition(world, "Failed")
    assert (failed["status"], failed["reason"]) == ("True", reasons.INVALID_TEMPLATE)
    assert "has no image" in failed["message"]


def test_edit_fails_a_suspended_job_only_when_it_is_resumed() -> None:
    world = trained()
    world.job["spec"]["suspend"] = True
    world.settle()
    edit(world, image="")
    world.round()
    degraded = condition(world, "Degraded")
    assert degraded["reason"] == reasons.INVALID_TEMPLATE
    assert "cannot go on like this when it is resumed: spec.workers" in degraded["message"]
    edit(world, image="img:2")
    world.round()
    assert condition(world, "Degraded")["reason"] != reasons.INVALID_TEMPLATE
    edit(world, image="")
    world.job["spec"]["suspend"] = False
    world.round()
    assert condition(world, "Failed")["reason"] == reasons.INVALID_TEMPLATE


def test_a_job_that_has_not_trained_fails_at_once_whatever_runs() -> None:
    world = World(job=job_object(3))
    world.settle()
    assert len(world.workers()) == 3
    edit(world, image="")
    world.round()
    assert condition(world, "Failed")["reason"] == reasons.INVALID_TEMPLATE


def test_replacement_the_api_server_finds_invalid_is_awaited() -> None:
    world = trained()
    edit(world, workingDir=7)
    world.refuse_workers = (422, "spec.containers[0].workingDir: Invalid value")
    disrupted(world, 1, "PreemptionByScheduler")
    world.round()
    world.round()
    degraded = condition(world, "Degraded")
    assert degraded["reason"] == reasons.INVALID_TEMPLATE
    assert "the API server refuses the worker pod as invalid: spec.containers[0]" in degraded["message"]
    assert "PodCreationRefused" not in str(world.status["conditions"])
    edit(world, workingDir="/w")
    world.refuse_workers = None
    world.refusals = answers_to(world.refusals, world.job["metadata"]["generation"])
    world.settle()
    assert len(world.workers()) == 3


def test_an_edit_of_the_servers_template_costs_nothing_either() -> None:
    world = trained(servers=2)
    world.job["spec"]["parameterServers"]["template"] = {"spec": {"restartPolicy": "Never"}}
    assert done(world.round()) == set()
    world.vanish(server(world, 1))
    assert done(world.round()) == set()
    degraded = condition(world, "Degraded")
    assert degraded["reason"] == reasons.INVALID_TEMPLATE
    assert "spec.parameterServers.template.spec.restartPolicy" in degraded["message"]
    world.vanish(server(world, 0))
    world.round()
    assert condition(world, "Failed")["reason"] == reasons.INVALID_TEMPLATE


def test_edit_forgets_invalid_refusals_and_keeps_those_of_quotas() -> None:
    now = 1000.0
    invalid = refuse(None, 422, "spec.containers[0].name: Invalid value", now, generation=3)
    quota = refuse(None, 403, "exceeded quota: small", now, generation=3)
    found = {"worker": invalid, "server": quota}
    assert answers_to(found, 3) == found
    assert answers_to(found, 4) == {"server": quota}
    unsaid = {"worker": Refusal(422, "x", now, now)}
    assert answers_to(unsaid, 4) == unsaid


def test_room_that_a_deletion_makes_is_asked_for_soon() -> None:
    now = 1000.0
    long = Refusal(403, "exceeded quota", now + 60, now - 300)
    over = Refusal(403, "terminating", math.inf, now, terminating=True)
    found = room_was_made({"worker": long, "service": long, "server": over}, now)
    assert {role: refusal.retry_at for role, refusal in found.items()} == {
        "worker": now + 1,
        "service": now + 60,
        "server": math.inf,
    }


def test_a_refusal_of_a_pod_that_may_come_yet_fails_no_job() -> None:
    world = World(job=job_object(3))
    world.settle()
    refused(world, 403, "exceeded quota: small")
    world.round()
    assert condition(world, "Degraded")["reason"] == reasons.POD_CREATION_REFUSED


EVENTS = ["kubelet", "report", "die", "break", "mend", "vanish", "evict", "fail", "wait"]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), min_size=4, max_size=20))
def test_no_edit_ends_a_job_with_workers_and_corrections_help(
    history: list[tuple[str, int]],
) -> None:
    world = trained()
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 1000
    for what, which in history:
        if what == "kubelet":
            world.kubelet()
        elif what == "report":
            world.reports()
        elif what == "die":
            world.die()
        elif what == "break":
            edit(world, image="")
        elif what == "mend":
            edit(world, image="img:2")
        elif what == "wait":
            world.now += 10.0**which / 100
        elif world.workers():
            pod = world.workers()[which % len(world.workers())]
            {"vanish": world.vanish, "evict": world.evict, "fail": world.fail}[what](pod)
        left = len(world.workers())
        world.round()
        if world.status["state"] == "Failed":
            assert condition(world, "Failed")["reason"] == reasons.INVALID_TEMPLATE
            assert left == 0, "it failed although a worker was left"
            return
    edit(world, image="img:3")
    world.settle()
    assert len(world.workers()) == 3
    assert condition(world, "Degraded")["reason"] != reasons.INVALID_TEMPLATE

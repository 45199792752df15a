"""Ready, Reconciling and Stalled: what kstatus makes of a job at each stage of its life."""

from __future__ import annotations

from typing import Any

import pytest
from kstatus import status_of
from operator_world import World, finished_message, job_object

from springtide_operator.api import reasons
from springtide_operator.plan.decide import invalid


def condition(kind: str, status: str = "True") -> dict[str, str]:
    return {"type": kind, "status": status}


@pytest.mark.parametrize(
    ("meta", "status", "expected"),
    [
        ({"deletionTimestamp": "x"}, {"conditions": [condition("Ready")]}, "Terminating"),
        ({"generation": 2}, {"observedGeneration": 1, "conditions": [condition("Ready")]}, "InProgress"),
        ({"generation": 2}, {"conditions": [condition("Ready")]}, "Current"),
        ({}, {"conditions": [condition("Reconciling")]}, "InProgress"),
        ({}, {"conditions": [condition("Stalled")]}, "Failed"),
        ({}, {"conditions": [condition("Ready"), condition("Reconciling")]}, "InProgress"),
        ({}, {"conditions": [condition("Stalled", "False"), condition("Ready")]}, "Current"),
        ({}, {"conditions": [condition("Ready", "False")]}, "InProgress"),
        ({}, {"conditions": [condition("Ready", "Unknown")]}, "InProgress"),
        ({}, {}, "Current"),
    ],
    ids=str,
)
def test_restated_rules_are_those_that_kstatus_documents(
    meta: dict[str, Any], status: dict[str, Any], expected: str
) -> None:
    assert status_of({"metadata": meta, "status": status}) == expected


def shown(world: World) -> tuple[str, str]:
    """Return what kstatus says, and the True ones of the three conditions: R(eady), P(rogress), S(talled)."""
    found = {c["type"]: c for c in world.status["conditions"]}
    letters = "".join(
        letter
        for letter, kind in zip("RPS", reasons.READINESS, strict=True)
        if found[kind]["status"] == "True"
    )
    generation = world.job["metadata"]["generation"]
    assert all(found[kind]["observedGeneration"] == generation for kind in reasons.READINESS)
    return status_of({"metadata": world.job["metadata"], "status": world.status}), letters


def started(replicas: int = 2) -> World:
    world = World(job=job_object(replicas))
    world.settle()
    return world


def trained(replicas: int = 2) -> World:
    world = started(replicas)
    world.reports()
    world.round()
    return world


def test_a_job_that_starts_is_in_progress() -> None:
    world = World(job=job_object(2))
    world.round()
    assert shown(world) == ("InProgress", "P")
    world.settle()
    assert shown(world) == ("InProgress", "P")


def test_a_job_that_trains_at_size_is_current() -> None:
    assert shown(trained()) == ("Current", "R")


def test_a_job_on_the_way_to_its_size_is_ready_and_in_progress() -> None:
    world = trained()
    world.scale(4)
    world.round()
    assert shown(world) == ("InProgress", "RP")
    world.settle()
    world.reports()
    world.round()
    assert shown(world) == ("Current", "R")


def test_a_recovery_is_in_progress() -> None:
    world = trained()
    world.reports(phase="FORMING", members=(), last_commit_at=world.now)
    world.now += 10
    world.round()
    assert shown(world) == ("InProgress", "P")


def test_suspending_is_in_progress_and_suspended_is_current() -> None:
    world = trained()
    world.job["spec"]["suspend"] = True
    world.job["metadata"]["generation"] += 1
    world.round()
    assert shown(world) == ("InProgress", "P")
    world.report = None
    world.settle()
    assert not world.workers(live=False)
    assert not world.coordinators()
    assert shown(world) == ("Current", "R")
    found = next(c for c in world.status["conditions"] if c["type"] == "Ready")
    assert found["reason"] == reasons.JOB_SUSPENDED


def test_a_failed_job_is_failed_with_its_reason() -> None:
    world = trained()
    world.job["spec"]["failurePolicy"] = {"backoffLimit": 0}
    world.fail(world.workers()[0])
    world.round()
    assert shown(world) == ("Failed", "S")
    by_type = {c["type"]: c for c in world.status["conditions"]}
    assert by_type["Stalled"]["message"] == by_type["Failed"]["message"]


def test_a_succeeded_job_is_current() -> None:
    world = trained()
    for pod in world.workers():
        world.end(pod, 0, finished_message(1))
    world.round()
    assert world.status["state"] == "Succeeded"
    assert shown(world) == ("Current", "R")


def test_a_spec_that_cannot_be_read_is_failed_until_it_is_edited() -> None:
    world = trained()
    status = invalid(world.status, 2, "spec.workers: no", world.now).status
    assert status_of({"metadata": {"generation": 2}, "status": status}) == "Failed"
    assert len({c["type"] for c in status["conditions"]}) == len(status["conditions"])
    world.status.clear()
    world.status.update(status)
    world.job["metadata"]["generation"] = 3
    world.reports()
    world.round()
    assert shown(world) == ("Current", "R")


def test_no_stage_is_both_in_progress_and_stalled() -> None:
    world = trained()
    for _ in range(3):
        world.fail(world.workers()[0])
        world.round()
        world.settle()
        world.reports()
        world.round()
        _, letters = shown(world)
        assert letters in ("R", "P", "RP", "S")

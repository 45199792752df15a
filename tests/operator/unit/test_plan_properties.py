"""plan() under any mix of pod states, disturbances and operators that die between any two steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, finished_message, job_object

from springtide_operator.api import names, reasons
from springtide_operator.plan.actions import CreateCoordinator, CreateWorker, DeletePod, EnsureSecret

INDEX = st.integers(0, 20)
STEPS = st.one_of(
    st.tuples(st.just("round"), st.none()),
    st.tuples(st.just("round"), st.integers(0, 8)),
    st.tuples(st.just("kubelet"), st.none()),
    st.tuples(st.just("run"), INDEX),
    st.tuples(st.just("fail"), INDEX),
    st.tuples(st.just("exit0"), INDEX),
    st.tuples(st.just("left"), INDEX),
    st.tuples(st.just("evict"), INDEX),
    st.tuples(st.just("delete"), INDEX),
    st.tuples(st.just("vanish"), INDEX),
    st.tuples(st.just("scale"), st.integers(1, 6)),
    st.tuples(st.just("lose coordinator"), st.sampled_from(["delete", "fail", "vanish"])),
    st.tuples(st.just("refuse"), st.booleans()),
    st.tuples(st.just("edit"), st.integers(1, 3)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.4, 3.0, 70.0, 400.0])),
    st.tuples(st.just("die"), st.none()),
)
HISTORY = st.lists(STEPS, max_size=40)


def patient_world(replicas: int) -> World:
    """A job that endures any number of failures."""
    world = World(job=job_object(replicas))
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 10_000
    return world


def apply_step(world: World, kind: str, argument: object) -> None:
    workers = world.workers()
    pod = workers[argument % len(workers)] if isinstance(argument, int) and workers else None
    if kind == "round":
        checked_round(world, argument if isinstance(argument, int) else None)
        if argument is not None:
            world.die()
    elif kind == "kubelet":
        world.kubelet()
    elif kind == "scale":
        assert isinstance(argument, int)
        world.scale(argument)
    elif kind == "refuse":
        world.refuse_workers = (403, "exceeded quota: pods") if argument else None
    elif kind == "edit":
        world.job["metadata"]["generation"] += 1
        world.job["spec"]["workers"]["template"]["spec"]["priorityClassName"] = f"class-{argument}"
    elif kind == "wait":
        assert isinstance(argument, float)
        world.now += argument
    elif kind == "die":
        world.die()
    elif kind == "lose coordinator":
        for coordinator in world.coordinators()[:1]:
            {
                "delete": lambda c: world.ask_deletion(c, 5),
                "fail": lambda c: world.end(c, 1),
                "vanish": world.vanish,
            }[str(argument)](coordinator)
    elif pod is not None:
        disturb(world, kind, pod)


def disturb(world: World, kind: str, pod: dict[str, object]) -> None:
    if kind == "run":
        world.run(pod)
    elif kind == "fail":
        world.fail(pod)
    elif kind == "exit0":
        world.end(pod, 0)
        world.count_failure(pod)
    elif kind == "left":
        world.end(pod, 0, '{"outcome": "Left", "reason": "SIGTERM"}')
    elif kind == "evict":
        world.evict(pod)
    elif kind == "delete":
        world.ask_deletion(pod)
    elif kind == "vanish":
        world.vanish(pod)


def checked_round(world: World, stop_after: int | None = None) -> None:
    """A round that never exceeds the target and deletes no healthy worker without need."""
    before = world.workers()
    target = world.job["spec"]["workers"]["replicas"]
    decided = world.round(stop_after)
    assert len(world.workers()) <= max(target, len(before))
    healthy = {pod["metadata"]["uid"] for pod in before}
    killed = [a for a in decided.actions if isinstance(a, DeletePod) and a.uid in healthy]
    edited = {a.uid for a in killed if a.because == reasons.DELETE_OUTDATED}
    assert len(killed) - len(edited) <= max(0, len(before) - target)
    assert len(edited) <= 1
    begun = {pod["metadata"]["uid"] for pod in before if pod["status"]["phase"] != "Pending"}
    assert not edited & begun
    slots = [pod["metadata"]["labels"][names.LABEL_SLOT] for pod in world.workers()]
    assert len(slots) == len(set(slots))
    assert len(world.coordinators()) <= 1
    assert all(action.reason for action in decided.actions)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(replicas=st.integers(1, 5), history=HISTORY)
def test_converges_and_counts_each_failure_once(replicas: int, history: list[tuple[str, object]]) -> None:
    world = patient_world(replicas)
    for kind, argument in history:
        apply_step(world, kind, argument)
    world.refuse_workers = None
    world.settle()
    assert len(world.workers()) == world.job["spec"]["workers"]["replicas"]
    assert len(world.coordinators()) == 1
    assert world.status["workers"]["replicas"] == len(world.workers())
    restarts = world.status["restarts"]
    assert restarts["failedWorkers"] == len(world.failed_by_themselves)
    assert restarts["failures"] <= restarts["failedWorkers"]
    assert (restarts["failures"] == 0) == (restarts["failedWorkers"] == 0)
    assert world.service is not None
    assert world.service.incarnation == world.status["coordinator"]["incarnation"]
    again = world.plan()
    assert again.actions == ()
    assert again.status == world.status


@settings(max_examples=100, deadline=None)
@given(replicas=st.integers(1, 5), history=HISTORY)
def test_the_same_look_twice_asks_for_nothing_new(replicas: int, history: list[tuple[str, object]]) -> None:
    """A second operator that sees what the first saw, after the first wrote status and died, repeats its
    names.
    """
    world = patient_world(replicas)
    for kind, argument in history:
        apply_step(world, kind, argument)
    first = world.plan()
    world.write(first.status)
    second = world.plan()
    counted = ("restarts", "slots")
    assert {key: second.status[key] for key in counted} == {key: first.status[key] for key in counted}
    wanted = {(a.slot, a.attempt) for a in first.actions if isinstance(a, CreateWorker)}
    assert {(a.slot, a.attempt) for a in second.actions if isinstance(a, CreateWorker)} == wanted
    gone = {a.uid for a in first.actions if isinstance(a, DeletePod)}
    assert {a.uid for a in second.actions if isinstance(a, DeletePod)} == gone
    made = [a.incarnation for a in first.actions if isinstance(a, CreateCoordinator)]
    again = [a.incarnation for a in second.actions if isinstance(a, CreateCoordinator)]
    # It cannot be known whether the first number was used: a second pod never gets it.
    assert not set(made) & set(again)
    assert [type(a) for a in first.actions] == [type(a) for a in second.actions]
    assert sum(isinstance(a, EnsureSecret) for a in second.actions) <= 1


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(replicas=st.integers(1, 4), history=HISTORY, limit=st.integers(0, 3))
def test_fails_exactly_when_failures_exceed_the_limit(
    replicas: int, history: list[tuple[str, object]], limit: int
) -> None:
    world = World(job=job_object(replicas))
    world.job["spec"]["failurePolicy"]["backoffLimit"] = limit
    for kind, argument in history:
        if kind != "refuse":
            apply_loosely(world, kind, argument)
    world.settle()
    failed = world.status["state"] == "Failed"
    assert failed == (world.status["restarts"]["failures"] > limit)
    assert world.status["restarts"]["failedWorkers"] <= len(world.failed_by_themselves)
    if failed:
        assert world.workers() == []
        assert world.coordinators() == []
        assert "backoffLimit" in world.status["message"]


def apply_loosely(world: World, kind: str, argument: object) -> None:
    """Apply a step without the checks that hold only for a running job."""
    if kind == "round":
        world.round(argument if isinstance(argument, int) else None)
        if argument is not None:
            world.die()
    else:
        apply_step(world, kind, argument)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(replicas=st.integers(1, 4), history=HISTORY, slot=INDEX, cut=st.integers(0, 6))
def test_one_finished_worker_ends_the_job_and_everything_goes(
    replicas: int, history: list[tuple[str, object]], slot: int, cut: int
) -> None:
    world = patient_world(replicas)
    for kind, argument in history:
        apply_step(world, kind, argument)
    world.refuse_workers = None
    world.settle()
    workers = world.workers()
    incarnation = world.status["coordinator"]["incarnation"]
    world.end(workers[slot % len(workers)], 0, finished_message(incarnation))
    world.round(cut)
    world.die()
    world.settle()
    assert world.status["state"] == "Succeeded"
    assert world.status["step"] == 2400
    assert world.workers() == []
    assert world.coordinators() == []
    assert world.plan().actions == ()

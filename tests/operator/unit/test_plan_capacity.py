"""Policy Capacity: extra workers that are tried, kept, given back and tried again."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, job_object

from springtide_operator.plan.actions import CreateWorker, DeletePod, Plan
from springtide_operator.plan.capacity import RETRY_LIMIT_SECONDS, Extras, Room, step, wait
from springtide_operator.plan.coordinator_sync import make_sync
from springtide_operator.plan.decide import plan
from springtide_operator.plan.observation import Node, Refusal
from springtide_operator.plan.values import timestamp

ROOM = Room(replicas=3, maximum=6, patience=30.0, placed=3, open_nodes=2)


def test_all_room_is_tried_once_the_replicas_have_nodes() -> None:
    assert step(Extras(), replace(ROOM, placed=2), 0.0).extra == 0
    tried = step(Extras(), ROOM, 10.0)
    assert (tried.extra, tried.trying_since, tried.workers) == (3, 10.0, 3)
    taken = step(tried, replace(ROOM, placed=6), 20.0)
    assert (taken.extra, taken.trying_since, taken.workers, taken.failures) == (3, None, 6, 0)
    assert taken.reason == "AtMaximum"


def test_what_no_node_takes_within_the_patience_is_given_back() -> None:
    tried = step(Extras(), ROOM, 100.0)
    assert step(tried, replace(ROOM, placed=4), 129.0).extra == 3
    after = step(tried, replace(ROOM, placed=4), 130.0)
    assert (after.extra, after.workers, after.reason) == (1, 4, "ExtraWorkers")
    assert after.retry_at == 130.0 + 60.0
    assert "no node took 2 of the extra workers within 30 s" in after.message
    assert after.wakes(replace(ROOM, placed=4), 130.0) == [190.0]


def test_tries_without_room_are_made_ever_more_seldom() -> None:
    state, now, tries = Extras(), 0.0, []
    while len(tries) < 7:
        before, state = state, step(state, ROOM, now)
        if state.extra > before.extra:
            tries.append(now)
        now += 1.0
    pauses = [b - a - 30.0 for a, b in itertools.pairwise(tries)]
    assert pauses == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert wait(10_000, 3600.0) == RETRY_LIMIT_SECONDS


def test_a_node_that_comes_brings_the_next_try_forward() -> None:
    failed = step(step(Extras(), ROOM, 0.0), ROOM, 30.0)
    assert (failed.extra, failed.reason) == (0, "NoRoom")
    assert step(failed, replace(ROOM, open_nodes=1), 31.0).extra == 0
    again = step(failed, replace(ROOM, open_nodes=3), 31.0)
    assert again.extra == 3
    assert "a node has come" in again.message
    assert step(failed, replace(ROOM, open_nodes=None), 31.0).extra == 0, "nodes cannot be read"


def test_extras_are_given_back_one_for_each_pod_that_waits() -> None:
    full = step(Extras(extra=3, workers=6), replace(ROOM, placed=6), 0.0)
    crowd = replace(ROOM, placed=6, crowd=("default/other-worker-1-0",))
    one = step(full, crowd, 50.0)
    assert (one.extra, one.workers, one.reason) == (2, 5, "OthersWait")
    assert "default/other-worker-1-0" in one.message
    # While the first leaves, and while the scheduler looks, no second one goes.
    assert step(one, replace(crowd, placed=5, leaving=1), 70.0).extra == 2
    assert step(one, replace(crowd, placed=5), 55.0).extra == 2
    assert one.wakes(replace(crowd, placed=5), 55.0) == [60.0]
    assert step(one, replace(crowd, placed=5), 61.0).extra == 1
    several = step(full, replace(crowd, crowd=tuple("abcd")), 50.0)
    assert several.extra == 0
    assert "a, b, c and 1 more" in several.message


def test_no_extra_worker_is_tried_while_another_pod_waits() -> None:
    crowd = replace(ROOM, crowd=("default/other",))
    state = step(Extras(), crowd, 0.0)
    assert (state.extra, state.reason) == (0, "OthersWait")
    assert step(state, crowd, 10_000.0) == state
    assert step(state, ROOM, 10_001.0).extra == 3


def test_extras_go_first_when_the_job_s_own_workers_find_no_node() -> None:
    full = Extras(extra=2, workers=5)
    lost = replace(ROOM, placed=2)
    assert step(full, lost, 0.0).extra == 2, "the scheduler has not looked yet"
    gone = step(full, replace(lost, stuck=True), 1.0)
    assert (gone.extra, gone.workers) == (0, 3)
    assert "1 of this job's own 3 workers" in gone.message


def test_refused_extras_end_the_try_at_once() -> None:
    tried = step(Extras(), ROOM, 0.0)
    after = step(tried, replace(ROOM, placed=4, refused="exceeded quota: pods"), 1.0)
    assert after.extra == 1
    assert "exceeded quota: pods" in after.message


def test_failed_workers_to_be_made_again_do_not_end_a_try() -> None:
    tried = step(Extras(), ROOM, 0.0)
    assert step(tried, replace(ROOM, placed=4, held_back=True), 500.0).extra == 3


def test_scaling_moves_the_extras_along() -> None:
    full = Extras(extra=3, workers=6)
    assert step(full, replace(ROOM, replicas=5, placed=6), 0.0).extra == 1
    assert step(full, replace(ROOM, maximum=4, placed=6), 0.0).extra == 1
    assert step(full, replace(ROOM, replicas=6, placed=6), 0.0).reason == "AtMaximum"


ROOMS = st.builds(
    Room,
    replicas=st.integers(1, 4),
    maximum=st.integers(4, 7),
    patience=st.sampled_from([1.0, 30.0]),
    placed=st.integers(0, 7),
    stuck=st.booleans(),
    leaving=st.integers(0, 2),
    crowd=st.sampled_from([(), ("a",), ("a", "b", "c")]),
    refused=st.sampled_from(["", "quota"]),
    open_nodes=st.sampled_from([None, 0, 1, 3]),
    may_grow=st.booleans(),
    held_back=st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(ROOMS, st.sampled_from([0.5, 20.0, 700.0])), max_size=30))
def test_under_any_weather(weather: list[tuple[Room, float]]) -> None:
    """Stay within the limits, survive status, change nothing on a second look, try nobody in a crowd."""
    state, now = Extras(), 1_800_000_000.0
    for room, seconds in weather:
        now += seconds
        before, state = state, step(state, room, now)
        assert 0 <= state.extra <= room.maximum - room.replicas
        assert state.reason
        assert room.replicas <= state.workers <= room.replicas + state.extra
        if room.crowd:
            assert state.extra <= before.extra
        if state.trying_since is None and room.placed >= room.replicas and not (room.crowd or room.held_back):
            assert state.extra <= room.placed - room.replicas
        read = Extras.from_status(state.to_status())
        assert read.to_status() == state.to_status()
        if state.extra <= before.extra:
            assert step(state, room, now) == state
        assert all(at > now for at in state.wakes(room, now))


# ---- through the whole plan


def elastic(nodes: int = 3, **spec: object) -> World:
    """Three workers wanted, six at most; each node takes any number, or none when cordoned."""
    world = World(job=job_object(3, minReplicas=1, maxReplicas=6))
    world.job["spec"]["elasticity"] = {"policy": "Capacity", "patienceSeconds": 30, **spec}
    for number in range(nodes):
        world.nodes[f"node-{number}"] = Node(f"node-{number}")
    return world


def let_in(world: World, places: int) -> None:
    """A kubelet and a scheduler with room for so many workers in all."""
    for pod in world.workers():
        have = sum("nodeName" in other["spec"] for other in world.workers())
        if "nodeName" in pod["spec"] or have < places:
            world.bind(pod)
            world.run(pod)
        else:
            said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}
            pod["status"] = {"phase": "Pending", "conditions": [said]}
    for pod in world.coordinators():
        world.bind(pod)
        if pod["status"]["phase"] == "Pending":
            world.run(pod)


def live_on(world: World, places: int, seconds: float) -> list[Plan]:
    """Rounds, two seconds apart; pods that are asked to go do."""
    plans = []
    for _ in range(int(seconds / 2)):
        for pod in list(world.pods.values()):
            if world.deleting(pod):
                world.vanish(pod)
        let_in(world, places)
        if world.status.get("coordinator"):
            world.reports()
        plans.append(world.round())
        world.now += 2.0
    return plans


def condition(world: World, kind: str) -> tuple[str, str]:
    found = next(c for c in world.status["conditions"] if c["type"] == kind)
    return found["status"], found["reason"]


def test_job_takes_the_room_there_is_and_is_not_degraded() -> None:
    world = elastic()
    first = live_on(world, 4, 20)
    assert len(world.workers()) == 6
    assert condition(world, "Degraded")[0] == condition(world, "Rescaling")[0] == "False"
    assert world.status["workers"]["summary"] == "4/4"
    live_on(world, 4, 40)
    assert len(world.workers()) == 4
    assert world.status["elasticity"]["workers"] == world.status["workers"]["desired"] == 4
    assert world.status["restarts"]["total"] == 0
    events = [event for decided in first for event in decided.events if event.reason == "Scaled"]
    assert events == []
    world.nodes["node-3"] = Node("node-3")
    plans = live_on(world, 6, 10)
    assert len(world.workers()) == 6
    assert world.status["elasticity"]["reason"] == "AtMaximum"
    said = [event.message for decided in plans for event in decided.events if event.reason == "Scaled"]
    assert len(said) == 1
    assert said[0].startswith("from 4 to 6 workers: nodes have taken all 3 extra workers")


def test_coordinator_is_told_the_size_that_stands_in_status() -> None:
    world = elastic()
    live_on(world, 6, 12)
    said = make_sync(world.parsed(), world.observe(), 1, world.now)
    assert (said.target, said.maximum) == (6, 6)
    world.die()
    assert make_sync(world.parsed(), world.observe(), 1, world.now).target == 6
    assert not [a for a in world.plan().actions if isinstance(a, CreateWorker | DeletePod)]


@pytest.mark.parametrize("who", ["coordinator", "server"])
def test_extras_make_room_for_own_coordinator_and_servers(who: str) -> None:
    world = elastic()
    world.job["spec"] |= {"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": 1}}
    for _ in range(3):
        live_on(world, 6, 6)
        for pod in world.servers():
            world.bind(pod)
            world.run(pod)
    assert len(world.workers()) == 6
    pod = {"coordinator": world.coordinators, "server": world.servers}[who]()[0]
    del pod["spec"]["nodeName"]
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}
    pod["metadata"]["creationTimestamp"] = timestamp(world.now)
    pod["status"] = {"phase": "Pending", "conditions": [said]}
    decided = world.round()
    assert [a.because for a in decided.actions if isinstance(a, DeletePod)] == ["ScaledDown"]
    assert world.status["elasticity"]["reason"] == "OthersWait"
    assert pod["metadata"]["name"] in world.status["elasticity"]["message"]
    assert world.status["restarts"]["total"] == 0


def test_a_policy_that_is_taken_back_gives_the_extras_back() -> None:
    world = elastic()
    live_on(world, 6, 12)
    world.job["spec"]["elasticity"] = {"policy": "Manual"}
    live_on(world, 6, 6)
    assert len(world.workers()) == 3
    assert "elasticity" not in world.status


def test_a_suspended_job_begins_anew_with_its_replicas() -> None:
    world = elastic()
    live_on(world, 6, 12)
    world.job["spec"]["suspend"] = True
    live_on(world, 6, 6)
    assert world.workers() == []
    assert "elasticity" not in world.status
    world.job["spec"]["suspend"] = False
    decided = world.round()
    world.round()
    assert decided.status["elasticity"]["extra"] == 0


def test_lack_of_room_for_replicas_degrades_and_tries_no_extras() -> None:
    world = elastic()
    live_on(world, 2, 60)
    assert len(world.workers()) == 3
    assert condition(world, "Degraded") == ("True", "Unschedulable")
    assert condition(world, "Running")[0] == "True", "a pending worker holds nobody up"
    assert world.status["elasticity"]["extra"] == 0


def test_a_quota_that_refuses_extras_is_no_problem_of_the_job() -> None:
    world = elastic()
    live_on(world, 3, 4)
    world.refuse_workers = (403, "exceeded quota: pods")
    live_on(world, 6, 20)
    assert len(world.workers()) == 3
    assert condition(world, "Degraded")[0] == "False"
    assert "exceeded quota" in world.status["elasticity"]["message"]


@pytest.mark.parametrize("transient", [500, 0])
def test_an_api_server_that_does_not_answer_is_no_word_on_room(transient: int) -> None:
    world = elastic()
    live_on(world, 3, 8)
    world.refusals["worker"] = Refusal(transient, "no answer", world.now + 60, world.now)
    decided = world.round()
    assert decided.status["elasticity"]["extra"] == 3


def test_the_highest_slots_go_first_and_are_not_counted() -> None:
    world = elastic()
    live_on(world, 6, 12)
    world.reports()
    observation = replace(world.observe(), crowd=("default/other-worker-0-0",))
    decided = plan(world.parsed(), observation, world.now)
    gone = [(a.name, a.because) for a in decided.actions if isinstance(a, DeletePod)]
    assert gone == [("digits-worker-5-0", "ScaledDown")]
    assert [event.reason for event in decided.events] == ["Scaled"]

"""How long pods that are deleted are waited for, through the real plan()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from operator_bad_days import worker
from operator_world import World, job_object

from springtide_operator.api import names
from springtide_operator.plan import grace
from springtide_operator.plan.actions import DeletePod, ShortenGrace
from springtide_operator.plan.clock import timestamp
from springtide_operator.plan.coordinator import LEARNING_SECONDS
from springtide_operator.plan.observation import MemberReport, Node, ServerReport
from springtide_operator.plan.relay import word

Object = dict[str, Any]


def training() -> World:
    """Three workers that train; nobody goes."""
    world = World(job=job_object(3))
    world.settle()
    world.now += 100
    world.reports()
    world.round()
    return world


def going(world: World, slot: int = 2, seconds: int = 120) -> Object:
    """Delete a worker as somebody else, with so much grace."""
    pod = worker(world, slot)
    world.ask_deletion(pod, seconds)
    return pod


def told(world: World, pod: Object, *of_pod: MemberReport, **changes: Any) -> None:
    """The coordinator answers when it was told of the deletion: the others train, and `of_pod`."""
    uid = pod["metadata"]["uid"]
    others = [p["metadata"]["uid"] for p in world.workers(live=False) if p["metadata"]["uid"] != uid]
    members = (*(MemberReport(other, True, True, False) for other in others), *of_pod)
    world.reports(**{"members": members, "told_leaving": frozenset({uid}), **changes})


def shortened(world: World) -> dict[str, int]:
    """Names and seconds of what the next round would shorten."""
    return {a.name: a.seconds for a in world.plan().actions if isinstance(a, ShortenGrace)}


def member(pod: Object, **changes: Any) -> MemberReport:
    values = {"active": False, "connected": True, "leaving": True, **changes}
    return MemberReport(pod["metadata"]["uid"], **values)


# What the coordinator says of the pod that goes -> seconds that it gets, None: its own.
WORDS: dict[str, tuple[Callable[[Object], dict[str, Any]], int | None]] = {
    "its script has not said Hello": (lambda pod: {"silent": frozenset({pod["metadata"]["uid"]})}, 2),
    "the same, to an older question": (
        lambda pod: {"silent": frozenset({pod["metadata"]["uid"]}), "told_leaving": frozenset()},
        None,
    ),
    "the same, by one that does not know who trains": (
        lambda pod: {"silent": frozenset({pod["metadata"]["uid"]}), "generation": None, "members": ()},
        None,
    ),
    "the same, by one that has not heard all": (
        lambda pod: {"silent": frozenset({pod["metadata"]["uid"]}), "reason": "Reconnecting"},
        None,
    ),
    "it was a member and is none": (lambda pod: {}, 5),
}


@pytest.mark.parametrize("word", WORDS)
def test_word_of_the_coordinator_decides_the_grace(word: str) -> None:
    world = training()
    pod = going(world)
    says, seconds = WORDS[word]
    told(world, pod, **says(pod))
    assert shortened(world) == ({} if seconds is None else {pod["metadata"]["name"]: seconds})


@pytest.mark.parametrize(
    ("members", "seconds"),
    [
        ([{"active": True}], None),
        ([{"active": True, "connected": False}], None),  # it may come back, and holds the state
        ([{}], None),  # it writes a checkpoint, or waits to be let go
        ([{"starting": True}], 2),
        ([{"starting": True}, {"active": True}], None),  # of two processes
    ],
)
def test_members_have_their_grace_unless_they_start(
    members: list[dict[str, bool]], seconds: int | None
) -> None:
    world = training()
    pod = going(world)
    told(world, pod, *(member(pod, **one) for one in members))
    assert list(shortened(world).values()) == ([] if seconds is None else [seconds])


def test_coordinator_that_is_not_heard_shortens_nothing() -> None:
    world = training()
    pod = going(world)
    told(world, pod, silent=frozenset({pod["metadata"]["uid"]}))
    world.unreachable_since = world.now
    assert shortened(world) == {}


def test_coordinator_that_began_anew_shortens_nothing_yet() -> None:
    """A worker on its way out, in no generation any more, has not come back to it and may write."""
    world = training()
    pod = going(world)
    container = world.coordinators()[0]["status"]["containerStatuses"][0]
    container["state"]["running"]["startedAt"] = timestamp(world.now)
    silent = frozenset({pod["metadata"]["uid"]})
    told(world, pod, silent=silent, restart=1)
    assert shortened(world) == {}
    world.now += LEARNING_SECONDS + 1
    told(world, pod, silent=silent, restart=1)
    assert shortened(world) == {pod["metadata"]["name"]: 2}


def test_pod_that_nobody_deleted_is_left_alone() -> None:
    world = training()
    uid = worker(world, 2)["metadata"]["uid"]
    world.reports(silent=frozenset({uid}), members=(), told_leaving=frozenset({uid}))
    assert shortened(world) == {}


def test_grace_is_shortened_once() -> None:
    world = training()
    pod = going(world)
    told(world, pod, silent=frozenset({pod["metadata"]["uid"]}))
    world.round()
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 2
    assert shortened(world) == {}


def test_scale_down_of_a_silent_worker_takes_two_rounds() -> None:
    """The first deletes it with its reason written on it; the second has the coordinator's word."""
    world = training()
    world.job["spec"]["workers"]["replicas"] = 2
    uid = worker(world, 2)["metadata"]["uid"]
    others = tuple(
        MemberReport(p["metadata"]["uid"], True, True, False)
        for p in world.workers()
        if p["metadata"]["uid"] != uid
    )
    world.reports(members=others, silent=frozenset({uid}))
    assert [a.uid for a in world.round().actions if isinstance(a, DeletePod)] == [uid]
    world.reports(members=others, silent=frozenset({uid}), told_leaving=frozenset({uid}))
    assert list(shortened(world).values()) == [2]


def test_other_containers_get_less_when_the_worker_has_ended() -> None:
    world = training()
    pod = going(world)
    statuses = pod["status"]["containerStatuses"]
    statuses[0]["state"] = {
        "terminated": {"exitCode": 0, "message": '{"outcome": "Left", "reason": "asked"}'}
    }
    assert list(shortened(world).values()) == [5]


def test_worker_on_a_lost_node_keeps_its_times() -> None:
    world = training()
    pod = going(world)
    pod["spec"]["nodeName"] = "n1"
    world.nodes = {"n1": Node("n1", ready=None, since=world.now - 100)}
    told(world, pod)
    assert shortened(world) == {}


@pytest.mark.parametrize("coordinator", [True, False])
def test_suspended_workers_without_coordinator_get_less(coordinator: bool) -> None:
    world = training()
    world.job["spec"]["suspend"] = True
    world.round()
    assert all(world.deleting(pod) for pod in world.workers(live=False))
    if not coordinator:
        for pod in world.coordinators():
            world.vanish(pod)
        world.report = None
    assert list(shortened(world).values()) == ([] if coordinator else [5, 5, 5])


@pytest.mark.parametrize(
    ("ended", "checkpoint", "seconds"),
    [("Failed", False, [5, 5, 5]), ("Failed", True, []), ("Succeeded", False, [])],
)
def test_workers_of_a_failed_job_leave_what_they_can_save(
    ended: str, checkpoint: bool, seconds: list[int]
) -> None:
    """After a success the others may be saving what the script made: they keep their grace."""
    world = training()
    if checkpoint:
        world.job["spec"]["checkpoint"] = {"uri": "s3://bucket/jobs"}
    condition = {"type": ended, "status": "True", "reason": "x", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    world.job["status"]["conditions"] = [condition]
    for slot in range(3):
        going(world, slot)
    world.reports(
        members=tuple(member(pod, active=True) for pod in world.workers(live=False)),
        told_leaving=frozenset(pod["metadata"]["uid"] for pod in world.workers(live=False)),
    )
    assert list(shortened(world).values()) == seconds
    told = word(world.parsed(), world.observe(), 1, world.now)
    assert told.target == (0 if ended == "Failed" else 3)


@pytest.mark.parametrize("serves", [True, False])
def test_server_that_has_not_come_to_serve_gets_less(serves: bool) -> None:
    world = World(job=job_object(2))
    world.job["spec"] |= {"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": 1}}
    world.settle()
    world.reports()
    world.round()
    (server,) = world.servers()
    uid = server["metadata"]["uid"]
    world.ask_deletion(server, 50)
    serving = (ServerReport(uid, True, True),) if serves else ()
    world.reports(servers=serving, told_leaving=frozenset({uid}))
    assert list(shortened(world).values()) == ([] if serves else [5])


def test_all_pods_of_a_job_being_deleted_get_less() -> None:
    """With foreground deletion the job stays until its pods are gone."""
    world = training()
    world.job["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    first = going(world, 0)
    going(world, 1, seconds=3)
    (coordinator,) = world.coordinators()
    world.ask_deletion(coordinator, 5)
    assert shortened(world) == {first["metadata"]["name"]: 5}


def test_job_that_is_gone_shortens_only_what_is_deleted() -> None:
    world = training()
    going(world, 0)
    going(world, 1, seconds=5)
    observed = world.observe()
    assert [(a.name, a.seconds) for a in grace.of_gone_job(observed.workers)] == [
        (names.worker_name("digits", 0, 0), 5)
    ]

"""Pods that have not begun when the template is edited are made anew; nobody else is."""

from __future__ import annotations

from typing import Any

import pytest
from operator_world import World, job_object

from springtide_operator.api import names

Object = dict[str, Any]


def names_of(pods: list[Object]) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in pods)


def edit(world: World, **spec: object) -> None:
    """Edit the worker template's pod."""
    world.job["metadata"]["generation"] += 1
    world.job["spec"]["workers"]["template"]["spec"].update(spec)


def waiting(replicas: int = 3, servers: int = 0) -> World:
    """No node takes anything."""
    world = World(job=job_object(replicas))
    if servers:
        world.job["spec"] |= {
            "strategy": {"type": "ParameterServer"},
            "parameterServers": {"replicas": servers},
        }
    world.node("node-a", ready=True, cordoned=True)
    world.settle()
    return world


def trains(replicas: int = 3) -> World:
    world = World(job=job_object(replicas))
    world.settle()
    world.reports()
    world.round()
    return world


def pass_time(world: World) -> None:
    """Let time pass where a request is refused again and again, so that nothing settles."""
    for _ in range(10):
        world.now += 10
        world.kubelet()
        world.round()


def test_job_waiting_for_a_node_is_made_anew_as_edited() -> None:
    world = waiting(servers=2)
    edit(world, nodeSelector={"disk": "ssd"})
    world.settle()
    assert names_of(world.workers()) == [f"digits-worker-{slot}-1" for slot in range(3)]
    assert names_of(world.servers()) == ["digits-ps-0-1", "digits-ps-1-1"]
    assert names_of(world.coordinators()) == ["digits-coordinator-2"]
    for pod in [*world.workers(), *world.servers(), *world.coordinators()]:
        assert pod["spec"]["nodeSelector"] == {"disk": "ssd"}
    world.node("node-a", ready=True, cordoned=False)
    world.settle()
    world.reports()
    world.round()
    assert world.status["state"] == "Running"
    assert world.status["restarts"]["total"] == 0
    assert world.status["workers"]["outdated"] == world.status["parameterServers"]["outdated"] == 0
    assert not any(slot.get("replaces") for slot in world.status["serverSlots"].values())


def test_servers_that_wait_follow_an_edit_of_their_own_template() -> None:
    world = waiting(servers=2)
    world.job["metadata"]["generation"] += 1
    image = {"containers": [{"name": "server", "image": "own/ps:2"}]}
    world.job["spec"]["parameterServers"]["template"] = {"spec": image}
    world.settle()
    assert names_of(world.servers()) == ["digits-ps-0-1", "digits-ps-1-1"]
    assert names_of(world.workers()) == [f"digits-worker-{slot}-0" for slot in range(3)]
    assert names_of(world.coordinators()) == ["digits-coordinator-1"]


def test_who_has_begun_stays() -> None:
    world = trains(2)
    world.scale(4)
    world.round()
    before = {pod["metadata"]["name"]: pod for pod in world.workers()}
    pulls = before["digits-worker-2-0"]
    pulls["spec"]["nodeName"] = "node-a"
    pulls["status"]["initContainerStatuses"] = [{"name": "data", "state": {"running": {}}}]
    edit(world, priorityClassName="high")
    told = [event.reason for _ in range(5) for event in world.round().events]
    assert told.count("OutdatedPodReplaced") == 1
    assert names_of(world.workers()) == [f"digits-worker-{slot}-{int(slot == 3)}" for slot in range(4)]
    assert world.status["workers"]["outdated"] == 3
    assert world.status["restarts"]["total"] == 0


@pytest.mark.parametrize(
    ("worker", "attempt"),
    [
        ({"waiting": {"reason": "ImagePullBackOff"}}, 1),
        ({"waiting": {"reason": "ContainerCreating"}}, 0),  # nothing stands in its way
        ({"running": {"startedAt": "2026-01-01T00:00:00Z"}}, 0),  # and its sidecar's image is missing
    ],
)
def test_beside_sidecars_that_run_the_scripts_container_decides(worker: Object, attempt: int) -> None:
    world = waiting(1)
    (pod,) = world.workers()
    pod["spec"]["nodeName"] = "node-a"
    other = {"waiting": {"reason": "ImagePullBackOff"}} if "running" in worker else {"running": {}}
    pod["status"]["initContainerStatuses"] = [{"name": "logs", "state": {"running": {}}}]
    pod["status"]["containerStatuses"] = [{"name": "worker", "state": worker}, {"name": "x", "state": other}]
    edit(world, priorityClassName="high")
    world.round()
    world.round()
    assert names_of(world.workers()) == [f"digits-worker-0-{attempt}"]
    assert world.status["restarts"]["total"] == 0


def test_when_its_successor_is_refused_no_other_pod_goes() -> None:
    world = waiting(4)
    world.refuse_workers = (403, "exceeded quota")
    edit(world, priorityClassName="high")
    pass_time(world)
    assert len(world.workers()) == 3
    world.refuse_workers = None
    world.settle()
    hashes = {pod["metadata"]["annotations"][names.ANNOTATION_TEMPLATE] for pod in world.workers()}
    assert (len(world.workers()), len(hashes)) == (4, 1)


def test_operator_dying_before_the_deletion_makes_up_for_it() -> None:
    world = waiting(1, servers=1)
    edit(world, priorityClassName="high")
    world.round(stop_after=1)  # status is written
    assert world.status["slots"]["0"]["ended"] == "Outdated"
    world.settle()
    assert names_of(world.workers()) == ["digits-worker-0-1"]
    assert names_of(world.servers()) == ["digits-ps-0-1"]
    assert world.status["restarts"]["total"] == 0


def test_trained_job_outlives_an_edit_the_api_server_refuses() -> None:
    world = trains(1)
    world.node("node-a", ready=True, cordoned=True)
    world.evict(world.workers()[0])
    world.settle()
    assert names_of(world.workers()) == ["digits-worker-0-1"]  # and it waits for a node
    world.refuse_workers = (422, "no such quantity")
    edit(world, priorityClassName="high")
    pass_time(world)
    assert not world.workers()
    assert world.status["state"] != "Failed"
    degraded = next(c for c in world.status["conditions"] if c["type"] == "Degraded")
    assert (degraded["reason"], degraded["status"]) == ("InvalidTemplate", "True")
    world.refuse_workers = None
    edit(world, priorityClassName="low")
    world.settle()
    assert [pod["spec"]["priorityClassName"] for pod in world.workers()] == ["low"]

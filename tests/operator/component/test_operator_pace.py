"""How often calm jobs are looked at, and what makes a job calm."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from functools import partial
from typing import Any

import kopf
import pytest
from operator_cluster import FakeCluster, FakeCoordinator
from operator_lists import FakeLists
from operator_world import World

from springtide_coordinator.membership import Membership
from springtide_coordinator.membership.events import Synced
from springtide_coordinator.membership.machine import take_in_sync
from springtide_coordinator.membership.settings import Settings as Rules
from springtide_operator.api import names
from springtide_operator.cache import Cache
from springtide_operator.coordinator_connection import CoordinatorConnection
from springtide_operator.executor import ClusterExecutor
from springtide_operator.handlers import configure
from springtide_operator.intervals import backoff_seconds, calm_seconds, resync_seconds
from springtide_operator.job_credentials import JobCredentials
from springtide_operator.job_loop import JobLoop, calm
from springtide_operator.lease import DURATION, RETRY, STANDBY_RETRY, Lease
from springtide_operator.manifests.maker import ManifestMaker
from springtide_operator.manifests.protection import Doors
from springtide_operator.metrics import Metrics
from springtide_operator.perform import Performer
from springtide_operator.plan.actions import ApplyService
from springtide_operator.plan.decide import plan
from springtide_operator.plan.observation import Node
from springtide_operator.runtime import Operator
from springtide_operator.settings import Settings
from springtide_operator.stateless import NoDifferences, NoProgress
from springtide_operator.warm_takeover import patience, trusted_service
from springtide_protocol.names import Incarnation


@pytest.mark.parametrize(
    ("jobs", "tick", "seconds"),
    [(0, 2, 2), (40, 2, 2), (200, 2, 10), (1000, 2, 50), (9000, 2, 50), (9000, 60, 60)],
)
def test_many_jobs_are_looked_at_more_seldom(jobs: int, tick: float, seconds: float) -> None:
    assert calm_seconds(jobs, tick) == seconds


@pytest.mark.parametrize(("took", "seconds"), [(0.01, 15), (0.15, 15), (1.0, 100), (60.0, 3600)])
def test_a_list_that_takes_long_is_taken_seldom(took: float, seconds: float) -> None:
    assert resync_seconds(took, 15.0) == seconds


@pytest.mark.parametrize(("failures", "seconds"), [(1, 2), (2, 4), (4, 16), (5, 30), (500, 30)])
def test_what_fails_is_tried_ever_more_seldom(failures: int, seconds: float) -> None:
    assert backoff_seconds(failures, 2.0) == seconds
    assert backoff_seconds(failures, 60.0) == 60.0


def trained() -> World:
    """A job of three workers that train."""
    world = World()
    world.settle()
    world.reports()
    world.settle()
    return world


def test_a_job_that_trains_is_calm_also_while_its_numbers_move() -> None:
    world = trained()
    assert calm(world.status, world.plan(), world.now)
    assert world.report is not None
    world.now += 60
    world.report = replace(world.report, step=500, samples_per_second=12.0, goodput=0.5)
    decided = world.plan()
    assert decided.status["step"] == 500
    assert calm(world.status, decided, world.now)


def _scaled(world: World) -> None:
    world.scale(4)


def _failed(world: World) -> None:
    world.fail(world.workers()[0])


def _silent(world: World) -> None:
    world.unreachable_since = world.now - 100
    world.now += 100


def _left(world: World) -> None:
    assert world.report is not None
    world.report = replace(world.report, phase="WAITING", members=world.report.members[:1])


@pytest.mark.parametrize("happens", [_scaled, _failed, _silent, _left])
def test_a_job_to_which_something_happens_is_not(happens: Any) -> None:
    world = trained()
    happens(world)
    assert not calm(world.status, world.plan(), world.now)


def test_a_worker_on_a_node_that_is_not_ready_is_watched_closely() -> None:
    world = trained()
    world.nodes["n0"] = Node("n0")
    for pod in world.workers():
        pod["spec"]["nodeName"] = "n0"
    world.round()
    assert calm(world.status, world.plan(), world.now)
    world.node("n0", ready=None)
    assert not calm(world.status, world.plan(), world.now)


def test_a_job_that_starts_is_not_calm() -> None:
    world = World()
    world.round()
    assert not calm(world.status, world.plan(), world.now)


def test_coordinator_waits_for_operator_that_calls_seldom() -> None:
    m = Membership(Incarnation(1, 0), 0.0, 1, 1, 1, Rules(operator_silence=15.0))
    take_in_sync(m, Synced(1, 1, 1, ()), 100.0)
    assert not m.deaf(114.0)
    assert m.deaf(116.0)
    take_in_sync(m, Synced(1, 1, 1, (), pause=40.0), 120.0)
    assert not m.deaf(219.0)
    assert m.deaf(221.0)
    take_in_sync(m, Synced(1, 1, 1, (), pause=2.0), 230.0)
    assert m.deaf(246.0)


async def test_the_coordinator_is_told_how_long_the_pause_is() -> None:
    """Call soon after a promise to do so, although the job has become calm meanwhile."""
    cluster, coordinator = FakeCluster(), FakeCoordinator()
    cluster.add_job(replicas=1)
    settings = Settings(tick=0.05, bind="127.0.0.1", metrics_port=0, root_key=b"0" * 32)
    lists = FakeLists(cluster)
    operator = Operator(settings, lists, cluster=cluster, connect=coordinator.connect)
    lists.feed = operator
    cluster.watchers.append(operator.take_event)
    await operator.start()
    try:
        async with asyncio.timeout(30):
            while not coordinator.told:
                cluster.run_pods()
                await asyncio.sleep(0.02)
    finally:
        await operator.stop()
    assert {request.pause_seconds for _, _, request in coordinator.told} == {0.05}


def test_kopf_keeps_nothing_of_objects() -> None:
    settings = kopf.OperatorSettings()
    configure(settings)
    assert isinstance(settings.persistence.diffbase_storage, NoDifferences)
    assert isinstance(settings.persistence.progress_storage, NoProgress)
    body = kopf.Body({"metadata": {"name": "a", "annotations": {f"{names.GROUP}/x": "1"}}, "spec": {"a": 1}})
    storage = settings.persistence.diffbase_storage
    patch = kopf.Patch()
    essence = storage.build(body=body)
    assert settings.persistence.progress_storage.clear(essence=essence) == {}
    storage.store(body=body, patch=patch, essence=essence)
    settings.persistence.progress_storage.touch(body=body, patch=patch, value="x")
    assert storage.fetch(body=body) is None
    assert dict(patch) == {}


def test_few_jobs_are_handled_at_once_and_many_one_by_one() -> None:
    assert {patience(f"uid-{number}", 50) for number in range(50)} == {0.0}
    found = sorted(patience(f"uid-{number}", 1000) for number in range(1000))
    assert 0 <= found[0] < 3
    assert 45 < found[-1] < 50
    assert all(found[at] < 0.06 * at + 3 for at in range(1000)), "spread evenly"


def test_only_training_job_with_settled_coordinator_is_trusted() -> None:
    world = World()
    world.round()
    world.kubelet()
    world.reports()
    world.round()
    world.settle(seconds=1.0)
    world.reports()
    world.settle(seconds=1.0)
    assert trusted_service(world.status, world.observe(), world.now) is None, "its coordinator is young"
    assert trusted_service({}, world.observe(), world.now + 40) is None, "nothing is known of the job"
    found = trusted_service(world.status, world.observe(), world.now + 40)
    assert found is not None
    assert (found.address, found.incarnation) == ("10.0.0.1:7070", 1)
    world.die()
    seen = replace(world.observe(), service=found, unreachable_since=world.now, secret_made=True)
    again = plan(world.parsed(), seen, world.now + 40).actions
    assert any(isinstance(action, ApplyService) for action in again), "mended at once where it is missed"
    for pod in world.coordinators():
        world.vanish(pod)
    assert trusted_service(world.status, world.observe(), world.now + 40) is None


async def test_a_take_over_of_many_jobs_mends_them_by_and_by() -> None:
    """A second operator process: nothing is applied in its first round, and everything a while later."""
    world = trained()
    now = [world.now + 100]
    cluster = FakeCluster()
    cluster.put("trainingjobs", world.job, "ADDED")
    former: dict[str, Any] = {"name": "digits-pods", "namespace": "default", "uid": "older"}
    former["ownerReferences"] = [{"uid": world.job["metadata"]["uid"], "controller": True}]
    cluster.put("networkpolicies", {"kind": "NetworkPolicy", "metadata": former})
    cache = Cache()
    cache.put_job(cluster.job())
    for number, pod in enumerate(world.pods.values()):
        pod["metadata"]["resourceVersion"] = str(100 + number)
        cache.put_pod(pod)
    key, uid = ("default", "digits"), world.job["metadata"]["uid"]

    def clock() -> float:
        return now[0]

    make = ManifestMaker(partial(JobCredentials.of, b"k" * 16), "img", doors=Doors("ns"))
    performer = Performer(ClusterExecutor(cluster, cache, key, make, clock=clock), lambda: True, clock=clock)
    connection = CoordinatorConnection("t" * 16, 1.0, FakeCoordinator().connect)
    meter = Metrics(list, lambda: True)
    loop = JobLoop(
        key, uid, cluster, cache, performer, connection, lambda: True, meter, clock=clock, patience=20.0
    )
    await loop.reconcile()
    applied = ("create_secret", "apply_service", "apply_network_policy")
    assert [cluster.calls[call] for call in applied] == [0, 0, 0]
    now[0] += 21
    await loop.reconcile()
    assert [cluster.calls[call] for call in applied] == [1, 1, 1]
    assert ("networkpolicies", "default", "digits-pods") in cluster.objects
    now[0] += 100
    await loop.reconcile()
    assert [cluster.calls[call] for call in applied] == [1, 1, 1]
    assert ("networkpolicies", "default", "digits-pods") not in cluster.objects


def test_what_a_job_sees_of_its_pods_follows_every_change() -> None:
    world = trained()
    cache, key, uid = Cache(), ("default", "digits"), world.job["metadata"]["uid"]
    cache.put_job(world.job)
    for number, pod in enumerate(world.pods.values()):
        pod["metadata"]["resourceVersion"] = str(100 + number)
        cache.put_pod(copy.deepcopy(pod))
    assert [len(found) for found in cache.pods(key, uid)] == [3, 1]
    assert (cache.pods(key, "other"), len(cache.foreign_names(key, "other"))) == (((), ()), 4)
    first = world.workers()[0]
    world.end(first, 1)
    first["metadata"]["resourceVersion"] = "200"
    cache.put_pod(first)
    assert sum(pod.end is not None for pod in cache.pods(key, uid)[0]) == 1
    cache.drop_pod(first)
    assert len(cache.pods(key, uid)[0]) == 2
    assert len(cache.foreign_names(key, "other")) == 3
    assert cache.foreign_names(key, uid) == frozenset()


async def test_standby_tries_when_lease_ends_not_a_retry_later() -> None:
    cluster, now = FakeCluster(), [100.0]
    holder = Lease(cluster, "ns", "a", clock=lambda: now[0])
    standby = Lease(cluster, "ns", "b", clock=lambda: now[0])
    await holder.step()
    await standby.step()
    assert (holder.held, standby.held, standby.pause) == (True, False, STANDBY_RETRY)
    now[0] += DURATION - 0.2  # the holder is dead
    await standby.step()
    assert not standby.held
    assert 0.2 <= standby.pause < 0.3
    now[0] += standby.pause
    await standby.step()
    assert standby.held
    assert standby.pause == RETRY


async def test_a_lease_that_lapsed_is_not_renewed_past_an_obstacle() -> None:
    """A release that did not act for a while may have got a rival, and nobody has written its Lease."""
    cluster, now, rival = FakeCluster(), [100.0], [""]
    lease = Lease(cluster, "ns", "a", clock=lambda: now[0], obstacle=lambda: rival[0] or None)
    await lease.step()
    rival[0] = "another release runs the same jobs"
    now[0] += 1.0
    await lease.step()
    assert lease.held  # what acts ends by itself
    now[0] += DURATION
    await lease.step()
    assert (lease.held, lease.trouble) == (False, rival[0])
    rival[0] = ""
    await lease.step()
    assert lease.held

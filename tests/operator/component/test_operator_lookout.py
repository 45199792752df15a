"""How the operator looks beyond a coordinator that does not answer: pods' metrics and nodes' leases."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from operator_cluster import FakeCluster, FakeCoordinator
from operator_running import operator, until
from operator_world import avoided
from prometheus_client import generate_latest

from springtide.coordination.metrics import Metrics
from springtide_kube.errors import ApiError
from springtide_operator.api import names
from springtide_operator.cluster import Listing
from springtide_operator.lookout import LEASES_NAMESPACE, Hearing, Leases, Lookout, ask, chosen, read
from springtide_operator.plan.observation import CoordinatorPod, Observation, ServerPod, WorkerPod

Object = dict[str, Any]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def page(missing: float, idle: float, job: str = "digits") -> bytes:
    metrics = Metrics(job, "default")
    metrics.coordinator_missing.set(missing)
    metrics.since_commit.set(idle)
    return generate_latest(metrics.registry)


# ---- what pods say


def test_worker_tells_what_it_misses() -> None:
    assert read(page(7.5, 3.0), "default", "digits") == (7.5, 3.0)
    assert read(page(7.5, float("nan")), "default", "digits") == (7.5, None)


def test_of_several_processes_the_best_off_counts() -> None:
    assert read(page(7.5, 9.0) + page(0.0, 2.0), "default", "digits") == (0.0, 2.0)


def test_page_of_another_job_says_nothing() -> None:
    assert read(page(7.5, 3.0), "default", "another") == (None, None)
    assert read(b'springtide_worker_coordinator_missing_seconds{x="y"} nonsense\n', "default", "digits") == (
        None,
        None,
    )


async def test_answers_refusals_and_silence_are_told_apart() -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=b"page")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        assert await ask(("127.0.0.1", port)) == b"page"
    finally:
        await runner.cleanup()
    assert await ask(("127.0.0.1", port)) == b"", "the machine lives"
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections and says nothing
        assert await ask(listener.getsockname()[:2]) is None


# ---- leases


class Renewals(FakeCluster):
    """Leases of nodes by name; the number of reads."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed: dict[str, str] = {}
        self.reads = 0
        self.code = 404

    async def get_lease(self, namespace: str, name: str) -> Object:
        if namespace != LEASES_NAMESPACE:
            return await super().get_lease(namespace, name)
        self.reads += 1
        if name not in self.renewed:
            raise ApiError(self.code, "NotFound", f'leases "{name}" not found')
        return {"spec": {"renewTime": self.renewed[name]}}


async def test_lease_is_late_by_the_operators_own_clock() -> None:
    cluster, clock = Renewals(), Clock()
    leases = Leases(cluster, clock)
    cluster.renewed["n0"] = "long ago"
    await leases.look(["n0"])
    assert leases.seen(["n0"])["n0"].unchanged == 0.0
    clock.now += 9.0
    await leases.look(["n0"])
    assert leases.seen(["n0"])["n0"] == replace(leases.seen(["n0"])["n0"], unchanged=9.0, renewed=False)
    cluster.renewed["n0"] = "now"
    clock.now += 2.0
    await leases.look(["n0"])
    seen = leases.seen(["n0"])["n0"]
    assert (seen.unchanged, seen.renewed) == (0.0, True)


async def test_leases_are_read_seldom_and_forgotten() -> None:
    cluster, clock = Renewals(), Clock()
    leases = Leases(cluster, clock)
    cluster.renewed["n0"] = "x"
    for _ in range(5):
        await leases.look(["n0"])
    assert cluster.reads == 1
    clock.now += 31.0
    await leases.look([])
    assert leases.seen(["n0"]) == {}


@pytest.mark.parametrize("code", [403, 404, 500])
async def test_lease_that_cannot_be_read_is_no_evidence(code: int) -> None:
    cluster, clock = Renewals(), Clock()
    cluster.code = code
    leases = Leases(cluster, clock)
    for _ in range(3):
        await leases.look(["n0"])
        clock.now += 20.0
    assert leases.seen(["n0"]) == {}


# ---- one job


def observed() -> Observation:
    coordinator = CoordinatorPod("c", "uid-c", 1, phase="Running", running_since=1.0, node="n0")
    workers = tuple(
        WorkerPod(f"w{i}", f"uid-{i}", i, 0, running=True, node=f"n{i % 3}", address=(f"10.0.0.{i}", 9400))
        for i in range(20)
    )
    servers = (ServerPod("s", "uid-s", 0, 0, running=True, node="n0", address=("10.0.1.0", 9402)),)
    return Observation(workers=workers, coordinators=(coordinator,), servers=servers)


def test_few_pods_are_asked_on_the_suspect_and_elsewhere() -> None:
    found = chosen(observed(), "n0")
    nodes = [pod.node for pod in found]
    assert len(found) == 12
    assert {node: nodes.count(node) for node in set(nodes)} == {"n0": 6, "n1": 3, "n2": 3}


async def test_silence_is_counted_from_the_last_answer() -> None:
    clock = Clock()
    lookout = Lookout("default", "digits", clock=clock)
    pod = observed().coordinators[0]
    assert not lookout.asks(pod)  # it has not begun to serve, as far as is known
    assert lookout.asks(replace(pod, ready_since=1.0))
    lookout.answered()
    clock.now += 50.0
    assert lookout.silence == 0.0  # nobody has asked
    assert lookout.asks(pod)
    assert lookout.silence == 2.0
    clock.now += 5.0
    lookout.asks(pod)
    assert lookout.silence == 7.0
    lookout.asks(replace(pod, running_since=9.0))  # its container began anew
    assert lookout.silence == 0.0


def test_pods_heard_of_are_remembered_with_their_time() -> None:
    clock = Clock()
    lookout = Lookout("default", "digits", clock=clock)
    assert lookout.listening_since is None
    lookout.answered(["uid-0", "uid-1"])
    began = clock.now
    clock.now += 5.0
    lookout.answered(["uid-1"])
    assert lookout.heard_at == {"uid-0": began, "uid-1": began + 5.0}
    assert lookout.listening_since == began
    clock.now += 61.0
    lookout.answered(["uid-2"])
    assert (lookout.heard_at, lookout.listening_since) == ({"uid-2": clock.now}, clock.now)


async def test_coordinators_that_owe_an_answer_are_counted_by_node() -> None:
    clock = Clock()
    hearing = Hearing(clock)
    lookouts = [Lookout("default", f"job-{i}", clock=clock, hearing=hearing) for i in range(5)]
    pod = replace(observed().coordinators[0], ready_since=1.0)
    for number, lookout in enumerate(lookouts[:4]):
        lookout.asks(replace(pod, node=f"n{number % 2}"))
        lookout.answered()
    clock.now += 10.0
    for number, lookout in enumerate(lookouts[:4]):
        lookout.asks(replace(pod, node=f"n{number % 2}"))
    clock.now += 4.0
    lookouts[3].answered()
    lookouts[4].asks(replace(pod, ready_since=None))  # it has not begun to serve: it owes nothing
    assert hearing.tally() == ({"n0": 2, "n1": 1}, 1)
    await lookouts[0].look(observed())
    seen = lookouts[0].seen()
    assert seen is not None
    assert (seen.unanswered, seen.answering) == ({"n0": 2, "n1": 1}, 1)
    del lookouts[1], lookout
    clock.now += 1.0
    assert hearing.tally() == ({"n0": 2}, 1)


async def test_pods_that_answer_again_were_silent_for_nothing() -> None:
    clock, silent = Clock(), {"10.0.0.0"}

    async def how(address: tuple[str, int]) -> bytes | None:
        return None if address[0] in silent else page(4.0, 4.0)

    lookout = Lookout("default", "digits", how=how, clock=clock)
    lookout.asks(observed().coordinators[0])
    assert lookout.seen() is None
    await lookout.look(observed())
    clock.now += 3.0
    await lookout.look(observed())
    seen = lookout.seen()
    assert seen is not None
    told = {one.uid: one for one in seen.testimonies}
    assert (told["uid-0"].reached, told["uid-0"].silent) == (False, 3.0)
    assert (told["uid-1"].reached, told["uid-1"].missing) == (True, 4.0)
    silent.clear()
    await lookout.look(observed())
    seen = lookout.seen()
    assert seen is not None
    assert all(one.reached for one in seen.testimonies)
    lookout.rest()
    assert lookout.seen() is None


# ---- the operator


class OnNodes(Renewals):
    async def list_of(self, plural: str) -> Listing:
        if plural != "nodes":
            return await super().list_of(plural)
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        items = [
            {"metadata": {"name": name, "uid": name, "resourceVersion": "1"}, "status": ready}
            for name in ("n0", "n1")
        ]
        return Listing(items, "1")


async def test_silent_coordinator_on_a_ready_node_has_a_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide_operator.plan.sight.GIVEN_UP_SECONDS", 1.0)
    monkeypatch.setattr("springtide_operator.plan.sight.LATE_SECONDS", 1.5)
    cluster, coordinator = OnNodes(), FakeCoordinator()
    cluster.renewed["n0"] = "before it died"
    cluster.add_job()
    async with operator(cluster, coordinator):
        await until(lambda: cluster.pods(names.ROLE_COORDINATOR) and len(cluster.pods()) == 2, "pods")
        cluster.run_pods()
        for pod in [*cluster.pods(), *cluster.pods(names.ROLE_COORDINATOR)]:
            pod["spec"]["nodeName"] = "n0"
            cluster.put("pods", pod)
        await until(lambda: cluster.job()["status"]["coordinator"].get("reachable"), "an answer")
        assert cluster.reads == 0, "no lease is read while it answers"
        coordinator.error = "silence"
        await until(lambda: len(cluster.pods(names.ROLE_COORDINATOR)) == 2, "a successor")
    made = max(cluster.pods(names.ROLE_COORDINATOR), key=lambda pod: pod["metadata"]["name"])
    assert avoided(made) == {"n0"}
    assert not [pod for pod in cluster.pods() if "deletionTimestamp" in pod["metadata"]], "no worker goes"

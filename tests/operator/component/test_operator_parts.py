"""The operator's parts by themselves: cache, lease, link, requests, root key, metrics."""

from __future__ import annotations

import asyncio
import base64
import re
import subprocess
from collections.abc import AsyncIterator
from typing import Any, get_args

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from kopf._core.engines import peering
from kube_connections import to
from operator_cluster import FakeCluster, FakeCoordinator
from operator_world import World, job_object
from prometheus_client import generate_latest
from required import require_tool

from springtide_kube.errors import ApiError, CredentialsError
from springtide_local.api.patch import merge_patch as merged
from springtide_operator import rootkey
from springtide_operator.__main__ import prepare
from springtide_operator.cache import UNCLAIMED, Cache
from springtide_operator.cluster import KubeCluster, merge_patch
from springtide_operator.coordinator_connection import CoordinatorConnection, news, to_report
from springtide_operator.credentials import find_connection
from springtide_operator.kube import Kube
from springtide_operator.lease import DEADLINE, DURATION, NAME, Lease
from springtide_operator.manifests.coordinator import coordinator_pod
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.metrics import Metrics
from springtide_operator.plan.actions import Action
from springtide_operator.plan.coordinator_sync import CoordinatorUpdate, LivingPod
from springtide_operator.plan.observation import CoordinatorPod
from springtide_operator.settings import read_settings
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.versions import OWN

Object = dict[str, Any]

VALUES = st.recursive(
    st.one_of(st.integers(0, 3), st.text("ab", max_size=2), st.lists(st.integers(0, 2), max_size=2)),
    lambda inner: st.dictionaries(st.text("xyz", min_size=1, max_size=1), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text("xyz", min_size=1, max_size=1), VALUES, max_size=3)


@given(OBJECTS, OBJECTS)
def test_a_merge_patch_turns_one_status_into_the_other(old: Object, new: Object) -> None:
    assert merged(old, merge_patch(old, new)) == new
    assert merge_patch(new, new) == {}


# ---- cache


def pod(version: int, uid: str = "p", owner: str = "job-uid-1234", **meta: Any) -> Object:
    world = World(job=job_object())
    made = worker_pod(world.parsed(), 0, 0, "10.0.0.1:7070")
    made["metadata"] |= {"uid": uid, "resourceVersion": str(version), **meta}
    made["metadata"]["ownerReferences"][0]["uid"] = owner
    made["status"] = {"phase": "Pending"}
    return made


KEY = ("default", "digits")


def test_the_newest_word_about_a_pod_wins() -> None:
    heard: list[object] = []
    cache = Cache(heard.append)
    cache.put_job(job_object())
    heard.clear()
    assert cache.put_pod(pod(5))
    assert not cache.put_pod(pod(4))
    assert not cache.put_pod(pod(5))
    assert cache.put_pod(pod(6))
    assert len(heard) == 2
    cache.drop_pod(pod(7))
    assert not cache.put_pod(pod(8))  # a late answer revives nobody
    assert cache.pods(KEY, "job-uid-1234") == ((), ())


def test_list_removes_what_it_lacks_unless_that_is_newer() -> None:
    cache = Cache()
    cache.put_job(job_object())
    cache.put_pod(pod(5, "old"))
    cache.put_pod(pod(9, "new"))
    cache.keep_pods(set(), "7", namespace="elsewhere")
    assert [p.uid for p in cache.pods(KEY, "job-uid-1234")[0]] == ["old", "new"]
    cache.keep_pods(set(), "7")
    assert [p.uid for p in cache.pods(KEY, "job-uid-1234")[0]] == ["new"]
    cache.keep_jobs(set(), "0")
    cache.keep_jobs(set(), "1", namespace="elsewhere")
    assert cache.job_keys() == [KEY]
    cache.keep_jobs(set(), "1")
    assert cache.job_keys() == []


def test_pods_of_another_owner_are_names_that_are_taken() -> None:
    cache = Cache()
    cache.put_pod(pod(5, "p", owner="an earlier job of that name"))
    assert cache.pods(KEY, "job-uid-1234") == ((), ())
    assert cache.foreign_names(KEY, "job-uid-1234") == {"digits-worker-0-0"}


def test_pods_that_come_before_their_job_are_its() -> None:
    lacks: list[bool] = []
    cache = Cache(on_lack=lambda: lacks.append(True))
    cache.put_pod(pod(5, "first"))
    cache.put_pod(pod(6, "foreign", owner="another job"))
    assert cache.pods(KEY, "job-uid-1234") == ((), ())
    cache.put_job(job_object())
    assert [p.uid for p in cache.pods(KEY, "job-uid-1234")[0]] == ["first"]
    assert not lacks
    assert cache.put_pod(pod(7, "first"))


def test_of_many_pods_without_their_job_the_list_tells() -> None:
    lacks: list[bool] = []
    cache = Cache(on_lack=lambda: lacks.append(True))
    for number in range(UNCLAIMED + 1):
        cache.put_pod(pod(5 + number, f"pod-{number}"))
    cache.put_job(job_object())
    assert lacks == [True]
    assert len(cache.pods(KEY, "job-uid-1234")[0]) == UNCLAIMED
    assert cache.put_pod(pod(5, "pod-0")), "from the list, as it was"
    assert len(cache.pods(KEY, "job-uid-1234")[0]) == UNCLAIMED + 1


def lost_node(version: int, ready: str = "Unknown") -> Object:
    said = {"type": "Ready", "status": ready, "lastTransitionTime": "2001-01-01T00:00:00Z"}
    meta = {"name": "n0", "uid": "n", "resourceVersion": str(version)}
    return {"metadata": meta, "status": {"conditions": [said]}}


def test_lost_node_is_counted_from_when_it_was_seen() -> None:
    now = [100.0]
    cache = Cache(clock=lambda: now[0])
    cache.put_node(lost_node(1))
    cache.keep_nodes({"n"}, "1")
    now[0] = 130.0
    cache.put_node(lost_node(2))
    nodes = cache.nodes()
    assert nodes is not None
    assert nodes["n0"].since == 100.0, "whatever another machine's clock says"
    cache.put_node(lost_node(3, ready="True"))
    now[0] = 140.0
    cache.put_node(lost_node(4))
    assert nodes["n0"].since == 140.0
    now[0] = 150.0
    cache.drop_node(lost_node(5))
    assert (nodes["n0"].gone, nodes["n0"].since) == (True, 150.0)


def test_deletion_is_counted_from_when_it_was_seen() -> None:
    now = [100.0]
    cache = Cache(clock=lambda: now[0])
    cache.put_job(job_object())
    going = {"deletionTimestamp": "2001-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}
    cache.put_pod(pod(5, **going))
    now[0] = 110.0
    cache.put_pod(pod(6, **going))
    assert cache.pods(KEY, "job-uid-1234")[0][0].going_since == 100.0
    cache.put_pod(pod(7, **{**going, "deletionGracePeriodSeconds": 1}))
    assert cache.pods(KEY, "job-uid-1234")[0][0].going_since == 110.0


def test_coordinators_start_is_counted_from_when_it_was_seen() -> None:
    now = [100.0]
    cache = Cache(clock=lambda: now[0])
    cache.put_job(job_object())

    def seen(version: int, started: str | None) -> float | None:
        obj = coordinator_pod(World().parsed(), 1)
        obj["metadata"] |= {"uid": "uid-c", "resourceVersion": str(version)}
        state = {"running": {"startedAt": started}} if started else {"waiting": {}}
        container = {"name": obj["spec"]["containers"][0]["name"], "state": state}
        obj["status"] = {"phase": "Running", "containerStatuses": [container]}
        cache.put_pod(obj)
        return cache.pods(KEY, "job-uid-1234")[1][0].running_seen_at

    assert seen(1, None) is None
    assert seen(2, "2001-01-01T00:00:00Z") == 100.0
    now[0] = 110.0
    assert seen(3, "2001-01-01T00:00:00Z") == 100.0, "whatever another machine's clock says"
    assert seen(4, "2001-01-01T00:00:05Z") == 110.0


def test_port_of_metrics_is_kept() -> None:
    cache, made = Cache(), pod(5)
    cache.put_job(job_object())
    made["status"]["podIP"] = "10.0.0.7"
    cache.put_pod(made)
    assert cache.pods(KEY, "job-uid-1234")[0][0].address == ("10.0.0.7", 9400)
    made = pod(6)
    made["status"]["podIP"] = "10.0.0.7"
    made["spec"]["containers"][0]["ports"] = [{"name": "metrics", "containerPort": 1234}]
    cache.put_pod(made)
    assert cache.pods(KEY, "job-uid-1234")[0][0].address == ("10.0.0.7", 1234)


# ---- lease


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_lease_has_one_holder_believed_for_its_duration() -> None:
    cluster, clock = FakeCluster(), Clock()
    first = Lease(cluster, "ns", "first", clock=clock)
    second = Lease(cluster, "ns", "second", clock=clock)
    await first.step()
    await second.step()
    assert (first.held, second.held) == (True, False)
    assert second.trouble == "stands by: first holds the lease"
    clock.now += DURATION - 0.1
    await second.step()
    assert not first.held  # it has not renewed: it stops by itself before anybody takes over
    assert not second.held
    clock.now += 0.2
    await second.step()
    assert second.held
    assert cluster.objects["leases", "ns", NAME]["spec"]["leaseTransitions"] == 1
    await first.step()
    assert not first.held


async def test_standby_hears_once_of_each_silence_of_all() -> None:
    cluster, clock, heard = FakeCluster(), Clock(), list[object]()
    first = Lease(cluster, "ns", "first", clock=clock)
    second = Lease(cluster, "ns", "second", clock=clock)
    second = Lease(
        cluster, "ns", "second", on_silence=lambda: heard.append(second.last_of_another), clock=clock
    )
    for silences in range(1, 3):
        await first.step()
        await second.step()
        clock.now += DEADLINE + 0.1
        await second.step()
        assert len(heard) == silences - 1
        clock.now += 0.5
        for _ in range(3):
            await second.step()
        assert not first.held
        assert not second.held
        assert len(heard) == silences
    assert heard[0] != heard[1]


@pytest.mark.parametrize("turns", range(12))
async def test_cancellation_with_the_answer_ends_the_lease_loop(turns: int) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    class Slow(FakeCluster):
        async def get_lease(self, namespace: str, name: str) -> dict[str, Any]:
            asked.set()
            await answer.wait()
            return await super().get_lease(namespace, name)

    running = asyncio.create_task(Lease(Slow(), "ns", "one", clock=Clock()).run())
    await asyncio.wait((asyncio.ensure_future(asked.wait()),), timeout=60)
    answer.set()
    for _ in range(turns):  # of the event loop
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait((running,), timeout=30)
    running.cancel()
    assert done


async def test_renewing_holder_keeps_lease_and_release_frees_at_once() -> None:
    cluster, clock = FakeCluster(), Clock()
    first = Lease(cluster, "ns", "first", clock=clock)
    second = Lease(cluster, "ns", "second", clock=clock)
    for _ in range(20):
        await first.step()
        await second.step()
        clock.now += 2
        assert (first.held, second.held) == (True, False)
    assert cluster.calls["get_lease"] == 1 + 20, "the holder knows what it wrote"
    await first.release()
    await second.step()
    assert (first.held, second.held) == (False, True)


async def test_holder_whose_lease_was_written_by_others_reads_it() -> None:
    cluster, clock = FakeCluster(), Clock()
    lease = Lease(cluster, "ns", "one", clock=clock)
    await lease.step()
    touched = cluster.objects["leases", "ns", NAME]
    cluster.put("leases", {**touched, "metadata": {**touched["metadata"], "annotations": {"a": "b"}}})
    clock.now += 2
    await lease.step()
    clock.now += DEADLINE - 1
    assert lease.held, "it was renewed, though what it knew was old"
    cluster.remove("leases", "ns", NAME)
    await lease.step()
    assert cluster.objects["leases", "ns", NAME]["spec"]["holderIdentity"] == "one"
    stolen = cluster.objects["leases", "ns", NAME]
    cluster.put("leases", {**stolen, "spec": {**stolen["spec"], "holderIdentity": "two"}})
    clock.now += DEADLINE
    await lease.step()
    assert not lease.held


async def test_the_same_pod_need_not_wait_for_itself() -> None:
    cluster, clock = FakeCluster(), Clock()
    await Lease(cluster, "ns", "pod_uid", clock=clock).step()
    restarted = Lease(cluster, "ns", "pod_uid", clock=clock)
    await restarted.step()
    assert restarted.held


async def test_a_missing_namespace_and_an_outage_are_named() -> None:
    cluster, clock = FakeCluster(), Clock()
    heard: list[bool] = []
    lease = Lease(cluster, "ns", "one", heard.append, clock=clock)

    def gone(method: str, name: str) -> None:
        raise ApiError(404, "NotFound", 'namespaces "ns" not found')

    cluster.before = gone
    await lease.step()
    assert "'ns' does not exist" in str(lease.trouble)
    cluster.before = lambda method, name: None
    await lease.step()
    cluster.down = True
    clock.now += DEADLINE - 0.5
    await lease.step()
    assert lease.held
    clock.now += 1
    await lease.step()
    assert not lease.held
    assert heard == [True, False]
    assert "does not answer" in str(lease.trouble)


# ---- root key


async def test_the_root_key_is_made_once_and_read_afterwards() -> None:
    cluster = FakeCluster()
    first = await rootkey.obtain(cluster, "ns")
    assert len(first) == 32
    assert await rootkey.obtain(cluster, "ns") == first
    assert cluster.calls["create_secret"] == 1


async def test_two_first_starts_agree_on_the_root_key() -> None:
    cluster = FakeCluster()
    theirs = base64.b64encode(b"t" * 32).decode()

    def race(method: str, name: str) -> None:
        if method == "create_secret" and not cluster.objects:
            secret = {"metadata": {"name": rootkey.NAME, "namespace": "ns"}, "data": {"key": theirs}}
            cluster.put("secrets", secret)

    cluster.before = race
    assert await rootkey.obtain(cluster, "ns") == b"t" * 32


async def test_a_spoiled_root_key_is_named() -> None:
    cluster = FakeCluster()
    cluster.put("secrets", {"metadata": {"name": rootkey.NAME, "namespace": "ns"}, "data": {}})
    with pytest.raises(ApiError, match="ns/springtide-root-key has no key"):
        await rootkey.obtain(cluster, "ns")


# ---- link

WORD = CoordinatorUpdate(3, 1, 6, 2, (LivingPod("u", "digits-worker-0-0", 0, True, 0.0),))
POD = CoordinatorPod("digits-coordinator-2", "c", 2, "Running", ip="10.1.1.1")


async def test_an_answer_of_another_incarnation_is_not_taken() -> None:
    coordinator = FakeCoordinator()
    connection = CoordinatorConnection("token", 1.0, coordinator.connect)
    coordinator.reply.incarnation.number = 1
    assert not await connection.call(POD, WORD)
    assert "it is incarnation 1, not 2" in connection.why
    assert connection.report is None
    assert connection.unreachable_since is not None
    coordinator.reply.incarnation.number = 2
    assert await connection.call(POD, WORD)
    assert connection.unreachable_since is None
    assert connection.report is not None
    assert connection.report.asked_living == {"u"}
    await connection.close()
    assert coordinator.open == 0


async def test_a_failing_line_keeps_the_last_word_and_says_since_when() -> None:
    coordinator, clock = FakeCoordinator(), Clock()
    connection = CoordinatorConnection("token", 1.0, coordinator.connect, clock)
    assert await connection.call(POD, WORD)
    coordinator.error = "UNAVAILABLE: connection refused"
    clock.now = 5.0
    assert not await connection.call(POD, WORD)
    clock.now = 9.0
    assert not await connection.call(POD, WORD)
    assert connection.unreachable_since == 5.0
    assert "connection refused" in connection.why
    assert connection.report is not None
    await connection.close()


async def test_coordinator_of_a_release_too_far_away_is_not_heard() -> None:
    coordinator = FakeCoordinator()
    connection = CoordinatorConnection("token", 1.0, coordinator.connect)
    coordinator.reply.speaks.CopyFrom(pb.Speaks(oldest_version=7, newest_version=8))
    assert not await connection.call(POD, WORD)
    assert connection.why == (
        f"the operator speaks {OWN}, the coordinator protocol versions 7 to 8: upgrade the operator"
    )
    assert connection.report is None
    [(_, _, request)] = coordinator.told
    assert request.speaks.newest_version == OWN.newest
    await connection.close()


def test_versions_of_members_and_servers_are_heard() -> None:
    newer = pb.Speaks(oldest_version=2, newest_version=3)
    reply = pb.SyncReply(members=[pb.MemberStatus(speaks=newer), pb.MemberStatus()])
    reply.servers.add(speaks=newer)
    report = to_report(reply, 1.0)
    assert [member.protocol for member in report.members] == [3, 1]
    assert [server.protocol for server in report.servers] == [3]


def test_who_stands_by_is_read_of_the_answer() -> None:
    told = [(pb.PARKED, True), (pb.PARKED, False), (pb.ACTIVE, True), (pb.STARTING, True)]
    members = [pb.MemberStatus(standing=standing, connected=connected) for standing, connected in told]
    reply = pb.SyncReply(members=members, steps_in="standby a takes the place of b", former_members=["u"])
    report = to_report(reply, 1.0)
    assert [member.waiting for member in report.members] == [True, False, False, False]
    assert not report.seats, "a coordinator that does not say so knows no standbys"
    assert report.steps_in == "standby a takes the place of b"
    assert report.former_members == {"u"}
    knows = pb.Speaks(oldest_version=1, newest_version=2, capabilities=["standby"])
    assert to_report(pb.SyncReply(speaks=knows), 1.0).seats


async def test_new_pod_gets_a_new_line_and_an_old_one_steps_down() -> None:
    coordinator = FakeCoordinator()
    connection = CoordinatorConnection("token", 1.0, coordinator.connect)
    await connection.call(POD, WORD)
    newer = CoordinatorPod("digits-coordinator-3", "d", 3, "Running", ip="fd00::1")
    coordinator.reply.incarnation.number = 3
    await connection.call(newer, WORD)
    await connection.retire(POD, WORD)
    assert [address for _, address, _ in coordinator.told] == [
        "10.1.1.1:7070",
        "[fd00::1]:7070",
        "10.1.1.1:7070",
    ]
    assert coordinator.open == 1
    await connection.close()


def test_numbers_that_always_move_are_no_news() -> None:
    def report(**changes: Any) -> Any:
        reply = pb.SyncReply(phase=pb.RUNNING, samples_per_second=1.0)
        reply.state.step = 5
        for key, value in changes.items():
            setattr(reply, key, value)
        return to_report(reply, 1.0)

    assert not news(report(), report(samples_per_second=2.0, goodput=0.5, last_commit_unix=7.0))
    assert news(report(), report(phase=pb.WAITING))
    assert news(None, report())
    assert not news(None, None)


# ---- requests


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, list[web.Request]]]:
    """Answers as an API server would; /api/v1/pods in two pages."""
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        if request.path == "/api/v1/pods":
            if "continue" in request.query:
                return web.json_response(
                    {"items": [{"metadata": {"name": "2"}}], "metadata": {"resourceVersion": "8"}}
                )
            return web.json_response(
                {
                    "items": [{"metadata": {"name": "1"}}],
                    "metadata": {"resourceVersion": "8", "continue": "t"},
                }
            )
        if request.path.endswith("/broken"):
            return web.Response(status=502, text="<html>bad gateway</html>")
        status = {"kind": "Status", "reason": "Forbidden", "message": "exceeded quota"}
        return web.json_response(status, status=403)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    await runner.cleanup()


async def test_lists_are_read_by_pages_and_refusals_keep_their_words(
    server: tuple[str, list[web.Request]],
) -> None:
    url, seen = server
    errors: list[int] = []
    kube = Kube(to(url, "secret"), on_error=errors.append)
    async with kube:
        found = await KubeCluster(kube).list_waiting_pods()
        assert found.resource_version == "8"
        assert [item["metadata"]["name"] for item in found.items] == ["1", "2"]
        assert seen[0].headers["Authorization"] == "Bearer secret"
        assert seen[0].query["fieldSelector"] == "spec.nodeName=,status.phase=Pending"
        with pytest.raises(ApiError, match="exceeded quota") as refused:
            await KubeCluster(kube).create_pod({"metadata": {"namespace": "a", "name": "b"}})
        assert (refused.value.code, refused.value.reason) == (403, "Forbidden")
        assert seen[-1].query["fieldValidation"] == "Strict"
        with pytest.raises(ApiError, match="bad gateway"):
            await kube.request("GET", "/broken")
    assert errors == [403, 502]
    assert kube.answered_at is not None


async def test_an_unreachable_server_is_an_error_without_a_code() -> None:
    async with Kube(to("http://127.0.0.1:9")) as kube:
        with pytest.raises(ApiError, match="does not answer: Connection refused") as refused:
            await kube.request("GET", "/version")
    assert refused.value.code == 0
    assert kube.answered_at is None


async def test_no_credentials_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(CredentialsError, match="set KUBECONFIG"):
        await find_connection()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(CredentialsError, match="missing not found"):
        await find_connection()


def test_the_identity_is_the_pods_when_it_is_known() -> None:
    own = read_settings({"POD_NAME": "op", "POD_UID": "u", "POD_NAMESPACE": "ns"})
    assert (own.identity, own.namespace) == ("op_u", "ns")
    assert read_settings({}).identity != read_settings({}).identity


# ---- metrics


def test_a_user_without_a_name_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start as a user without a name, which clusters assign to a namespace."""

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 1000650000")

    monkeypatch.setattr("getpass.getuser", nobody)
    monkeypatch.delenv("POD_ID", raising=False)
    with pytest.raises(KeyError):
        peering.detect_own_id(manual=False)
    environ: dict[str, str] = {"GRPC_VERBOSITY": "DEBUG"}
    prepare(environ, "springtide-operator-0")
    assert environ["GRPC_VERBOSITY"] == "DEBUG"
    monkeypatch.setenv("POD_ID", environ["POD_ID"])
    assert peering.detect_own_id(manual=False) == "springtide-operator-0"


def test_metrics_are_clean_by_prometheus_own_check() -> None:
    status = {
        "state": "Running",
        "workers": {"desired": 3, "replicas": 3, "ready": 3, "active": 2},
        "generation": 4,
        "step": 100,
        "samplesPerSecond": "12.5",
        "goodput": "0.9",
        "recoveries": 2,
        "lastRecoverySeconds": "0.12",
        "restarts": {"failures": 1, "preemptions": 2, "total": 3},
    }
    metrics = Metrics(lambda: [("default", "digits", status)], lambda: True)
    metrics.reconciled("success", 0.01)
    metrics.api_error(403)
    metrics.acted("create_worker")
    text = generate_latest(metrics.registry)
    assert b'springtide_job_last_recovery_seconds{job_namespace="default",training_job="digits"} 0.12' in text
    assert b'springtide_jobs{state="Running"} 1.0' in text
    promtool = require_tool("promtool")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr.decode()


def test_the_help_of_the_actions_names_every_kind() -> None:
    kinds = {action.kind for action in get_args(Action)}
    assert len(kinds) == len(get_args(Action))
    page = generate_latest(Metrics(list, lambda: True).registry).decode()
    said = next(line for line in page.splitlines() if line.startswith("# HELP springtide_operator_actions"))
    assert kinds <= set(re.findall(r"[a-z_]+", said))

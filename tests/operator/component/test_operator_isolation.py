"""One bad object is one bad object: what nobody foresaw in it is its job's condition, and nobody else's."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kube_connections import to
from operator_cluster import FakeCluster, FakeCoordinator
from operator_running import operator, until

from springtide_kube.errors import ApiError
from springtide_operator import records
from springtide_operator.api import names, reasons
from springtide_operator.cache import Cache
from springtide_operator.coordinator_connection import to_report
from springtide_operator.guarded_http import GuardedResponse, Page, Taken, response_class
from springtide_operator.kopf_lists import KopfLists
from springtide_operator.kube import Kube
from springtide_operator.optional_apis import OptionalApis
from springtide_operator.plan import conditions, observe
from springtide_operator.plan.outcome import read_end
from springtide_operator.plan.values import parse_time, timestamp
from springtide_operator.queues import Queues
from springtide_operator.releases import Releases
from springtide_operator.runtime import Operator
from springtide_protocol import coordinator_pb2 as pb

Object = dict[str, Any]
KEY = ("default", "digits")
JOBS = f"/apis/{names.API_VERSION}/{names.PLURAL}"


def degraded(cluster: FakeCluster, name: str = "digits") -> str | None:
    return conditions.reason_of(cluster.job(name).get("status") or {}, reasons.DEGRADED)


def names_of(cluster: FakeCluster) -> set[str]:
    return {pod["metadata"]["name"] for pod in cluster.pods()}


HOSTILE_MESSAGES = [
    '{"outcome":' + "[" * 4_000,
    '{"outcome":"Finished","data":' + '{"a":' * 3_000,
    '{"outcome":"Finished","values":{"a":' + "9" * 400 + "}}",
    '{"outcome":"Finished","step":' + "9" * 400 + "}",
    '{"outcome":"Finished","step":' + "9" * 5_000 + "}",
    '{"outcome":"Finished","values":{"a":1e999,"b":NaN,"c":true},"incarnation":[[]],"data":[]}',
    '{"outcome":"Failed","exception":{"a":[]},"reason":["OOMKilled"],"frame":{}}',
    '{"outcome":"Left","reason":' + json.dumps("x" * 9_000) + "}",
    '{"outcome":{}}',
]


@pytest.mark.parametrize("message", HOSTILE_MESSAGES, ids=range(len(HOSTILE_MESSAGES)))
def test_any_termination_message_is_an_end(message: str) -> None:
    terminated = {"exitCode": 0, "message": message, "finishedAt": "2026-01-01T00:00:00Z"}
    end = read_end({"status": {"phase": "Succeeded"}}, {"state": {"terminated": terminated}})
    assert end is not None
    assert len(end.message) < 2_000
    if end.finished is not None:
        json.dumps(end.finished.__dict__)
        assert end.finished.step is None


async def test_a_hostile_message_hides_no_job() -> None:
    cluster = FakeCluster()
    cluster.add_job(replicas=1)
    meta = {"name": "x-worker-0-0", "namespace": "default", "uid": "poison"}
    meta["labels"] = {names.LABEL_JOB: "x", names.LABEL_ROLE: names.ROLE_WORKER}  # type: ignore[assignment]
    terminated = {"exitCode": 1, "message": HOSTILE_MESSAGES[0]}
    state = [{"name": "worker", "state": {"terminated": terminated}}]
    status = {"phase": "Failed", "containerStatuses": state}
    spec = {"containers": [{"name": "worker"}]}
    cluster.put("pods", {"metadata": meta, "spec": spec, "status": status})
    async with operator(cluster) as made:
        await until(lambda: "digits-worker-0-0" in names_of(cluster), "a worker")
        assert made.unready() is None


async def test_a_pod_that_cannot_be_read_is_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    cluster.add_job(replicas=1)
    cluster.add_job("other", replicas=1)
    whole = observe.worker_pod

    def fragile(pod: Object) -> Any:
        if pod["metadata"]["name"] == "digits-worker-0-0":
            raise RecursionError("so deep")
        return whole(pod)

    monkeypatch.setattr(observe, "worker_pod", fragile)
    async with operator(cluster, resync=0.1) as made:
        await until(lambda: degraded(cluster) == reasons.INTERNAL_ERROR, "the condition")
        assert "digits-worker-0-0" in cluster.job()["status"]["message"]
        await until(
            lambda: "other-worker-0-0" in {p["metadata"]["name"] for p in cluster.pods()}, "the other"
        )
        assert made.unready() is None
        monkeypatch.setattr(observe, "worker_pod", whole)
        pod = next(p for p in cluster.pods() if p["metadata"]["name"] == "digits-worker-0-0")
        cluster.put("pods", pod)
        edited = cluster.job()
        edited["metadata"]["generation"] += 1
        cluster.put("trainingjobs", edited)
        await until(lambda: degraded(cluster) != reasons.INTERNAL_ERROR, "the condition to go")


async def test_a_surprise_is_a_condition_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from springtide_operator import job_loop

    whole = job_loop.plan

    def fragile(job: Any, *rest: Any) -> Any:
        if job.name == "digits":
            raise ZeroDivisionError("nobody foresaw this")
        return whole(job, *rest)

    monkeypatch.setattr(job_loop, "plan", fragile)
    cluster = FakeCluster()
    cluster.add_job(replicas=1)
    cluster.add_job("other", replicas=1)
    with caplog.at_level(logging.WARNING, "springtide.operator"):
        async with operator(cluster, tick=0.01) as made:
            await until(lambda: degraded(cluster) == reasons.INTERNAL_ERROR, "the condition")
            assert "nobody foresaw this" in cluster.job()["status"]["message"]
            await until(lambda: cluster.pods(), "the other job's worker")
            for _ in range(20):  # what changes about its pods or its status brings no try forward
                cluster.put("trainingjobs", copy.deepcopy(cluster.job()))
                await asyncio.sleep(0.01)
            tried = sample(made, "springtide_operator_internal_errors_total", where="round")
            assert 1 <= tried <= 8  # 0.01, 0.02, 0.04, ... s apart
            monkeypatch.setattr(job_loop, "plan", whole)
            edited = cluster.job()
            edited["metadata"]["generation"] += 1
            cluster.put("trainingjobs", edited)
            await until(lambda: len(cluster.pods()) == 2, "its worker after all")
            await until(lambda: degraded(cluster) != reasons.INTERNAL_ERROR, "the condition to go")
    said = [record for record in caplog.records if "cannot be worked with" in record.getMessage()]
    assert len(said) == 1
    assert not any(record.exc_info for record in caplog.records)


def sample(made: Operator, name: str, **labels: str) -> float:
    return made.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_a_task_that_ends_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from springtide_operator.lease import Lease

    async def broken(self: Lease) -> None:
        raise KeyError("spec")

    deaths: list[str] = []
    cluster = FakeCluster()
    async with operator(cluster, on_death=deaths.append) as made:
        assert made.dead() is None
    assert not deaths  # an ordinary end is none
    monkeypatch.setattr(Lease, "step", broken)
    async with operator(cluster, on_death=deaths.append) as made:
        await until(lambda: deaths, "the word of it")
        assert "'lease'" in str(made.dead())
        assert made.unhealthy() is not None
    assert len(deaths) == 1


BACKGROUND = [
    (Queues, "run", "queues"),
    (OptionalApis, "run", "optional APIs"),
    (Releases, "look", "releases"),
]


@pytest.mark.parametrize(("owner", "method", "name"), BACKGROUND, ids=[name for *_, name in BACKGROUND])
async def test_a_task_that_raises_begins_anew(
    owner: type, method: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, calls = getattr(owner, method), []

    async def broken_once(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("spec")
        return await whole(*given)

    monkeypatch.setattr(owner, method, broken_once)
    cluster = FakeCluster()
    cluster.add_job(replicas=1)
    async with operator(cluster) as made:
        await until(lambda: len(calls) > 1, "a second try")
        await until(lambda: cluster.pods(), "a worker")
        assert made.dead() is None
    assert f"the task {name!r}: KeyError" in caplog.text


@pytest.mark.parametrize(("owner", "name"), [(Queues, "queues"), (OptionalApis, "optional APIs")])
async def test_a_task_that_returns_ends_the_process(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def over(self: object) -> None:
        return None

    monkeypatch.setattr(owner, "run", over)
    deaths: list[str] = []
    async with operator(FakeCluster(), on_death=deaths.append) as made:
        await until(lambda: deaths, "the word of it")
        assert repr(name) in str(made.dead())


async def test_a_list_that_fails_by_surprise_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    cluster.add_job(replicas=1)
    failed = []

    def fail(self: Cache, *rest: Any) -> None:
        failed.append(1)
        raise OverflowError("nobody foresaw this")

    whole = Cache.keep_pods
    monkeypatch.setattr(Cache, "keep_pods", fail)
    async with operator(cluster, watch=False, resync=0.05) as made:
        await until(lambda: len(failed) > 1, "a second try")
        assert "OverflowError" in str(made.unready())
        assert made.dead() is None
        monkeypatch.setattr(Cache, "keep_pods", whole)
        await until(lambda: cluster.pods(), "a worker")
        await until(lambda: made.unready() is None, "no trouble")


async def test_lists_that_fail_hide_no_news_of_watches() -> None:
    cluster = FakeCluster()
    async with operator(cluster, resync=0.05) as made:
        await until(lambda: made.unready() is None, "the first list")

        def refuse(method: str, name: str) -> None:
            if method == "list_pods":
                raise ApiError(0, "Unreachable", "no answer in time")

        cluster.before = refuse
        await until(lambda: made.unready() is not None, "the trouble")
        cluster.add_job(replicas=1)
        await until(lambda: cluster.pods(), "its worker all the same")


def hostile_reply() -> pb.SyncReply:
    reply = pb.SyncReply(phase=pb.RUNNING, samples_per_second=float("inf"), goodput=float("nan"))
    reply.checkpoint.written_unix = float("inf")
    reply.checkpoint.name = "n" * 100_000
    reply.last_commit_unix = float("-inf")
    reply.stall.seconds = float("nan")
    reply.stall.since_unix = 1e300
    reply.lost_seconds["failure"] = float("inf")
    reply.values["loss"] = float("nan")
    for number in range(1_000):
        reply.failures.add(number=number + 1, seconds=float("inf"), reason="r")
    return reply


def test_a_hostile_reply_becomes_numbers_of_status() -> None:
    report = to_report(hostile_reply(), 1.8e9)
    assert report.checkpoint is not None
    assert timestamp(report.checkpoint.at) == "1970-01-01T00:00:00Z"
    assert len(report.checkpoint.name) <= 4096
    assert len(report.failures) <= 64
    assert all(value == 0.0 for value in report.lost_seconds.values())
    assert timestamp(float("inf")) == "9999-12-31T23:59:59Z"
    assert timestamp(float("nan")) == timestamp(-1e300) == "1970-01-01T00:00:00Z"
    assert parse_time("9999-12-31T23:59:59-23:00") is not None


async def test_a_hostile_reply_leaves_the_job_running() -> None:
    cluster, coordinator = FakeCluster(), FakeCoordinator()
    cluster.add_job(replicas=1)
    async with operator(cluster, coordinator) as made:
        await until(lambda: cluster.pods(), "a worker")
        cluster.run_pods()
        reply = hostile_reply()
        reply.generation.number = 4
        reply.members.add(standing=pb.ACTIVE, connected=True).member.pod_uid = cluster.pods()[0]["metadata"][
            "uid"
        ]
        coordinator.reply = reply
        await until(lambda: cluster.job()["status"].get("state") == "Running", "state Running")
        assert sample(made, "springtide_operator_internal_errors_total", where="round") == 0


def test_an_incarnation_beyond_reason_is_none() -> None:
    pod = {"metadata": {"name": "x", "uid": "u", "labels": {names.LABEL_INCARNATION: "1" + "0" * 60}}}
    assert observe.coordinator_pod(pod) is None


# ---- over HTTP: what kopf and our own lists read


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def raw_job(name: str, levels: int, version: int) -> str:
    meta = f'{{"name":"{name}","namespace":"t","uid":"u-{name}","resourceVersion":"{version}"}}'
    return f'{{"metadata":{meta},"spec":{{"workers":{{"template":{nested(levels)}}}}}}}'


@pytest.fixture
async def api() -> AsyncIterator[str]:
    """An API server with a job of 9,000 levels between two others, and large pods of nobody."""
    jobs = [raw_job("a", 3, 1), raw_job("bad", 9_000, 2), raw_job("c", 3, 3)]

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            for text in jobs:
                await response.write(f'{{"type":"MODIFIED","object":{text}}}\n'.encode())
            return response
        if request.path.endswith("/pods"):
            pods = [
                f'{{"metadata":{{"name":"p{n}"}},"spec":{{"x":[{"{}," * 200_000}1]}}}}' for n in range(12)
            ]
            return web.Response(text=f'{{"metadata":{{"resourceVersion":"9"}},"items":[{",".join(pods)}]}}')
        return web.Response(text=f'{{"metadata":{{"resourceVersion":"9"}},"items":[{",".join(jobs)}]}}')

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_deep_job_hides_no_other_from_lists(api: str) -> None:
    async with Kube(to(api)) as kube:
        jobs = (await kube.page(JOBS, {}, records.job)).items
        assert [job["metadata"]["name"] for job in jobs] == ["a", "bad", "c"]
        assert [names.UNREADABLE in job for job in jobs] == [False, True, False]
        pods = (await kube.page("/api/v1/pods", {}, records.pod)).items
        assert [pod["metadata"]["name"] for pod in pods] == [f"p{n}" for n in range(12)]
        assert len(json.dumps(pods)) < 2_000


async def test_a_long_page_may_take_its_time() -> None:
    """Somebody's 100 MB must not be a list that never comes: each piece is in time, the whole is not."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"metadata":{"resourceVersion":"9"},"items":[')
        for number in range(8):
            await asyncio.sleep(0.1)
            await response.write(f"{',' if number else ''}{raw_job(f'j{number}', 3, 1)}".encode())
        await response.write(b"]}")
        return response

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with Kube(to(url), timeout=0.5) as kube:
            assert len((await kube.page(JOBS, {}, records.job)).items) == 8
    finally:
        await runner.cleanup()


async def test_a_deep_job_hides_no_other_from_kopf(api: str) -> None:
    """Read lists by `json()` and watches by lines of the content, which is how kopf reads."""
    url = f"{api}/apis/springtide.dev/v1alpha1/trainingjobs"
    async with aiohttp.ClientSession(response_class=GuardedResponse) as session:
        async with session.get(url) as response:
            items = (await response.json())["items"]
            assert [names.UNREADABLE in job for job in items] == [False, True, False]
        async with session.get(url, params={"watch": "true"}) as response:
            text = b"".join([part async for part in response.content.iter_chunked(1024 * 1024)])
        events = [json.loads(line) for line in text.splitlines()]
    assert [event["object"]["metadata"]["name"] for event in events] == ["a", "bad", "c"]
    assert names.UNREADABLE in events[1]["object"]


class Recorder:
    """Remembers what it is fed."""

    def __init__(self) -> None:
        self.objects: list[tuple[str, str | None, str]] = []
        self.lists: list[tuple[str, str, set[str], str]] = []

    def take_event(self, plural: str, kind: str | None, obj: dict[str, Any]) -> None:
        self.objects.append((plural, kind, obj["metadata"]["name"]))

    def begins(self, plural: str, namespace: str) -> None:
        pass

    def listed(self, plural: str, namespace: str, uids: set[str], resource_version: str) -> None:
        self.lists.append((plural, namespace, uids, resource_version))


async def test_objects_go_to_the_feed_and_kopf_goes_on(api: str) -> None:
    """kopf gets an empty list with its version, and bookmarks that carry the versions of the events."""
    url, feed = f"{api}/apis/springtide.dev/v1alpha1/namespaces/a/trainingjobs", Recorder()
    async with aiohttp.ClientSession(response_class=response_class(feed, KopfLists())) as session:
        async with session.get(url) as response:
            assert await response.json() == {"metadata": {"resourceVersion": "9"}, "items": []}
        assert feed.objects == [("trainingjobs", None, name) for name in ("a", "bad", "c")]
        assert feed.lists == [("trainingjobs", "a", {"u-a", "u-bad", "u-c"}, "9")]
        feed.objects.clear()
        async with session.get(url, params={"watch": "true"}) as response:
            text = b"".join([part async for part in response.content.iter_chunked(1024 * 1024)])
    assert {kind for _, kind, _ in feed.objects} == {"MODIFIED"}
    assert [name for _, _, name in feed.objects] == ["a", "bad", "c"]
    events = [json.loads(line) for line in text.splitlines()]
    assert [event["type"] for event in events] == ["BOOKMARK"] * 3
    assert all(set(event["object"]["metadata"]) == {"resourceVersion"} for event in events)


async def test_list_in_pages_is_whole_with_the_last() -> None:
    feed = Recorder()
    taken = Taken(feed, KopfLists())

    def page(name: str, more: str = "") -> Page:
        item = {"metadata": {"name": name, "uid": f"uid-{name}"}}
        return Page([item], {"metadata": {"resourceVersion": "7", "continue": more}})

    assert taken.page("/api/v1/pods", True, page("left-over", "c")) == []
    assert taken.page("/api/v1/pods", True, page("a", "c")) == []  # begun anew
    assert not feed.lists
    assert taken.page("/api/v1/pods", False, page("b")) == []
    assert feed.lists == [("pods", "", {"uid-a", "uid-b"}, "7")]
    definition = page("workloads.kueue.x-k8s.io")
    assert taken.page("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", True, definition)

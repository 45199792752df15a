"""Requests to the API server: who they say they are, how they wait, and what is watched instead."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from aiohttp import web
from operator_cluster import FakeCluster
from operator_running import operator, until

from springtide_operator.api import names
from springtide_operator.cache import Cache
from springtide_operator.cluster import KubeCluster
from springtide_operator.credentials import Credentials, Login
from springtide_operator.kube import MAX_RETRY_SECONDS, Answer, ApiError, Kube, retry_seconds
from springtide_operator.optional_apis import RETRY_SECONDS, TOLD_SECONDS, UNSETTLED_SECONDS, OptionalApis
from springtide_operator.queues import Queues

Object = dict[str, Any]


class Server:
    """An API server that answers what a test has put into `answers`, then `{}`; and remembers requests."""

    def __init__(self) -> None:
        self.answers: list[web.Response] = []
        self.seen: list[web.Request] = []
        self.times: list[float] = []
        self.events: list[Object] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        self.times.append(time.monotonic())
        if request.query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            for event in self.events:
                await response.write(json.dumps(event).encode() + b"\n")
            return response
        return self.answers.pop(0) if self.answers else web.json_response({})


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Server, kopf.ConnectionInfo]]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield server, kopf.ConnectionInfo(server=f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def busy(seconds: str = "1", status: int = 429) -> web.Response:
    body = {"kind": "Status", "reason": "TooManyRequests", "message": "later"}
    return web.json_response(body, status=status, headers={"Retry-After": seconds})


async def test_requests_say_who_they_are() -> None:
    async with served() as (server, info), Kube(lambda: info) as kube:
        await kube.request("GET", "/api/v1/nodes")
        await kube.request("POST", "/api/v1/namespaces/a/pods", {}, query={"fieldValidation": "Strict"})
        await kube.request("PATCH", "/api/v1/namespaces/a/pods/b", {})
        await kube.request("DELETE", "/api/v1/namespaces/a/pods/b", {})
        session = await Login(Credentials(lambda: info)).session()
        async with session.aiohttp_session as of_kopf:
            await of_kopf.get(info.server)
    assert {request.headers["User-Agent"] for request in server.seen} == {"springtide-operator/0.1.0"}
    managers = [request.query.get("fieldManager") for request in server.seen]
    assert managers == [None, names.MANAGER, names.MANAGER, None, None]
    assert server.seen[1].query["fieldValidation"] == "Strict"


@pytest.mark.parametrize("status", [429, 503])
async def test_request_is_sent_again_when_server_says(status: int) -> None:
    errors: list[int] = []
    async with served() as (server, info), Kube(lambda: info, on_error=errors.append) as kube:
        server.answers = [busy("1", status)]
        first = asyncio.create_task(kube.request("POST", "/api/v1/namespaces/a/pods", {}))
        await until(lambda: server.seen, "the request")
        await kube.request("GET", "/lease", urgent=True)
        await until(lambda: errors, "the answer")
        await asyncio.gather(first, kube.request("GET", "/another"))
    assert [request.path for request in server.seen][:2] == ["/api/v1/namespaces/a/pods", "/lease"]
    assert len(server.seen) == 4
    assert min(server.times[2:]) - server.times[0] >= 1.0, "the others wait, too"
    assert errors == [status]


async def test_server_that_stays_busy_is_an_error() -> None:
    async with served() as (server, info), Kube(lambda: info) as kube:
        server.answers = [busy(), web.json_response({"message": "no"}, status=429)]
        with pytest.raises(ApiError) as refused:
            await kube.request("GET", "/x")
    assert (refused.value.code, len(server.seen)) == (429, 2), "without Retry-After nobody waits"


@pytest.mark.parametrize(
    ("said", "seconds"),
    [(None, None), ("0", 1.0), ("7", 7.0), ("999999", MAX_RETRY_SECONDS), ("Fri, 31 Dec 2027", None)],
)
def test_only_sensible_pauses_are_obeyed(said: str | None, seconds: float | None) -> None:
    assert retry_seconds(Answer(429, "", b"", said)) == seconds


async def test_workloads_are_heard_of_by_a_watch() -> None:
    heard: list[tuple[str, str]] = []

    def event(kind: str, name: str) -> Object:
        return {"type": kind, "object": {"metadata": {"name": name, "resourceVersion": "9"}}}

    async with served() as (server, info), Kube(lambda: info) as kube:
        server.events = [event("ADDED", "a"), event("BOOKMARK", ""), event("DELETED", "a")]
        cluster = KubeCluster(kube, ("b", "a"))
        await cluster.watch_workloads(
            names.KUEUE_V1BETA2, "8", lambda kind, obj: heard.append((kind, obj["metadata"]["name"]))
        )
        assert ("ADDED", "a") in heard
        assert ("DELETED", "a") in heard
        assert {request.query["resourceVersion"] for request in server.seen} == {"8"}
        gone = {"code": 410, "reason": "Expired", "message": "too old"}
        server.events = [{"type": "ERROR", "object": gone}]
        with pytest.raises(ApiError, match="too old"):
            await KubeCluster(kube).watch_workloads(names.KUEUE_V1BETA2, "8", lambda kind, obj: None)


def test_written_definition_has_its_api_looked_for() -> None:
    now, cluster = [0.0], FakeCluster()
    apis = OptionalApis(cluster, lambda: None, lambda: now[0], announced=True)
    apis.note_definition("kueue.x-k8s.io")
    assert asyncio.run(apis.look()) is None, "no job needs it"
    apis.known([names.KUEUE_V1BETA1])
    assert asyncio.run(apis.look()) == TOLD_SECONDS
    now[0] = 60.0
    cluster.apis.add(names.KUEUE_V1BETA1)
    apis.note_definition("another.example.com")
    assert asyncio.run(apis.look()) == TOLD_SECONDS - 60.0
    apis.note_definition("kueue.x-k8s.io")
    assert asyncio.run(apis.look()) == RETRY_SECONDS, "it may not be served yet, or not be gone yet"
    assert apis.newest([names.KUEUE_V1BETA1])
    now[0] += UNSETTLED_SECONDS
    assert asyncio.run(apis.look()) == TOLD_SECONDS
    assert cluster.calls["serves"] == 3


async def test_definition_heard_of_by_a_watch_starts_a_waiting_job() -> None:
    """Nobody polls: without the word of the watch the API would be looked for in 15 minutes."""
    cluster = FakeCluster()
    job = cluster.add_job(replicas=1)
    job["metadata"]["labels"] = {names.LABEL_QUEUE: "team-a"}
    cluster.put("trainingjobs", job)
    async with operator(cluster) as made:
        await until(lambda: cluster.calls["serves"] == 2, "a look for both versions")
        await until(lambda: cluster.job().get("status", {}).get("conditions"), "a word")
        assert cluster.calls["list_workloads"] == 0
        cluster.apis.add(names.KUEUE_V1BETA2)
        made.take_event(
            "customresourcedefinitions", "ADDED", {"metadata": {}, "spec": {"group": "kueue.x-k8s.io"}}
        )
        await until(lambda: cluster.calls["create_workload"], "the Workload")
        await until(lambda: cluster.calls["watch_workloads"], "a watch")
    assert cluster.calls["list_workloads"] == cluster.calls["watch_workloads"] == 1


async def test_what_was_forgotten_is_listed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that was lost for a moment: what others did meanwhile came perhaps not by the watch."""
    monkeypatch.setattr("springtide_operator.queues.LIST_SECONDS", 0.05)
    cluster, cache = FakeCluster(), Cache()
    cluster.apis.add(names.KUEUE_V1BETA2)
    job = cluster.add_job(replicas=1)
    job["metadata"]["labels"] = {names.LABEL_QUEUE: "team-a"}
    cache.put_job(cluster.put("trainingjobs", job))
    queues = Queues(cluster, cache, lambda key: None, lambda: names.KUEUE_V1BETA2)
    running = asyncio.create_task(queues.run())
    try:
        await until(lambda: cluster.calls["watch_workloads"] == 1, "a watch")
        queues.forget()
        await until(lambda: cluster.calls["watch_workloads"] == 2, "another one")
        assert queues.listed
        assert cluster.calls["list_workloads"] == 2
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

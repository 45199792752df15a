"""Requests to the API server: who they say they are, how they wait, and what is watched instead."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kube_connections import to
from operator_cluster import FakeCluster
from operator_running import operator, until

from springtide_kube.client import DISRUPTION_BUDGET, MAX_RETRY_SECONDS, RETRIES, retry_seconds
from springtide_kube.connection import Connections
from springtide_kube.errors import ApiError, ApiRefusal
from springtide_operator.api import names
from springtide_operator.cache import Cache
from springtide_operator.cluster import KubeCluster
from springtide_operator.credentials import Login
from springtide_operator.kube import Kube
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
async def served() -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def busy(seconds: str = "1", status: int = 429) -> web.Response:
    body = {"kind": "Status", "reason": "TooManyRequests", "message": "later"}
    return web.json_response(body, status=status, headers={"Retry-After": seconds})


async def test_requests_say_who_they_are() -> None:
    async with served() as (server, url), Kube(to(url)) as kube:
        await kube.request("GET", "/api/v1/nodes")
        await kube.request("POST", "/api/v1/namespaces/a/pods", {}, query={"fieldValidation": "Strict"})
        await kube.request("PATCH", "/api/v1/namespaces/a/pods/b", {})
        await kube.request("DELETE", "/api/v1/namespaces/a/pods/b", {})
        session = await Login(Connections(to(url))).session()
        async with session.aiohttp_session as of_kopf:
            await of_kopf.get(url)
    assert {request.headers["User-Agent"] for request in server.seen} == {"springtide-operator/0.1.0"}
    managers = [request.query.get("fieldManager") for request in server.seen]
    assert managers == [None, names.MANAGER, names.MANAGER, None, None]
    assert server.seen[1].query["fieldValidation"] == "Strict"


@pytest.mark.parametrize("status", [429, 503])
async def test_request_is_sent_again_when_server_says(status: int) -> None:
    errors: list[int] = []
    async with served() as (server, url), Kube(to(url), on_error=errors.append) as kube:
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


def refused(status: int = 429, *causes: str) -> web.Response:
    """Return a refusal that does not say when to ask again."""
    details = {"causes": [{"reason": cause} for cause in causes]}
    body = {"kind": "Status", "reason": "Refused", "message": "no", "details": details}
    return web.json_response(body, status=status)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses that requests make before they are sent again; none of them takes its time."""
    made: list[float] = []

    def counted(*given: Any) -> float | None:
        seconds = retry_seconds(*given)
        if seconds is not None:
            made.append(seconds)
        return None if seconds is None else 0.001

    monkeypatch.setattr("springtide_kube.client.retry_seconds", counted)
    return made


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH", "DELETE"])
async def test_busy_server_is_waited_for_ever_longer(method: str, pauses: list[float]) -> None:
    """429 comes before the server looks at a request, so a create is sent again as well."""
    errors: list[int] = []
    async with served() as (server, url), Kube(to(url), on_error=errors.append) as kube:
        server.answers = [refused(), refused(), refused()]
        assert await kube.request(method, "/x", {} if method != "GET" else None) == {}
    assert (len(server.seen), pauses, errors) == (4, [1.0, 2.0, 4.0], [429, 429, 429])


async def test_server_that_stays_busy_is_an_error(pauses: list[float]) -> None:
    errors: list[int] = []
    async with served() as (server, url), Kube(to(url), on_error=errors.append) as kube:
        server.answers = [refused() for _ in range(20)]
        with pytest.raises(ApiError, match="no \\(429 Refused\\)"):
            await kube.request("POST", "/x", {})
    assert len(server.seen) == len(errors) == RETRIES + 1


@pytest.mark.parametrize(("status", "causes"), [(429, [DISRUPTION_BUDGET]), (503, []), (500, []), (409, [])])
async def test_refusal_that_is_an_answer_is_not_waited_for(
    status: int, causes: list[str], pauses: list[float]
) -> None:
    async with served() as (server, url), Kube(to(url)) as kube:
        server.answers = [refused(status, *causes)]
        with pytest.raises(ApiRefusal) as told:
            await kube.request("POST", "/api/v1/namespaces/a/pods/b/eviction", {})
    assert (told.value.code, len(server.seen), pauses) == (status, 1, [])


@pytest.mark.parametrize(
    ("said", "seconds"),
    [(None, 4.0), ("0", 1.0), ("7", 7.0), ("999999", MAX_RETRY_SECONDS), ("Fri, 31 Dec 2027", 4.0)],
)
def test_only_sensible_pauses_are_obeyed(said: str | None, seconds: float) -> None:
    assert retry_seconds(ApiRefusal(429, "", ""), said, attempt=2) == seconds
    assert retry_seconds(ApiRefusal(504, "", ""), said, attempt=2) is None, "something may have been done"


async def test_list_and_watch_wait_for_a_busy_server(pauses: list[float]) -> None:
    async with served() as (server, url), Kube(to(url)) as kube:
        server.answers = [busy(), web.json_response({"items": [{"metadata": {"name": "a"}}]})]
        page = await kube.page("/api/v1/pods", {}, None)
        assert [item["metadata"]["name"] for item in page.items] == ["a"]
    assert len(server.seen) == 2


async def test_workloads_are_heard_of_by_a_watch() -> None:
    heard: list[tuple[str, str]] = []

    def event(kind: str, name: str) -> Object:
        return {"type": kind, "object": {"metadata": {"name": name, "resourceVersion": "9"}}}

    async with served() as (server, url), Kube(to(url)) as kube:
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

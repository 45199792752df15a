"""kopf's lists made anew, over real connections: a session as kopf has it, read as kopf reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from operator_running import until

from springtide_kube.errors import ApiError
from springtide_operator import kopf_lists
from springtide_operator.guarded_http import response_class
from springtide_operator.kopf_lists import KopfLists

Object = dict[str, Any]


class Server:
    """Lists and watches of pods; `version` grows with each list."""

    def __init__(self) -> None:
        self.version = 0
        self.refuses = False
        self.fails = 0  # watches that end with an error which is no word about the version
        self.held = asyncio.Event()
        self.held.set()
        self.lists: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.refuses:
            said = {"kind": "Status", "reason": "Forbidden", "message": "no right to list pods"}
            return web.json_response(said, status=403)
        if request.query.get("watch") != "true":
            self.version += 1
            version = self.version
            self.lists.append(request.path)
            await self.held.wait()
            meta = {"name": f"p{version}", "uid": f"u{version}", "resourceVersion": str(version)}
            listed = {"metadata": {"resourceVersion": str(version)}, "items": [{"metadata": meta}]}
            return web.json_response(listed)
        response = web.StreamResponse()
        await response.prepare(request)
        if self.fails:
            self.fails -= 1
            status = (
                b'{"kind":"Status","code":500,"reason":"InternalError","message":"etcdserver: no leader"}'
            )
            await response.write(b'{"type":"ERROR","object":' + status + b"}\n")
            return response
        await response.write(b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"1"}}}\n')
        await asyncio.sleep(60)
        return response


class Taker:
    """Remembers what it is fed."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.whole: list[tuple[str, str]] = []

    def take_event(self, plural: str, kind: str | None, obj: Object) -> None:
        self.names.append(obj["metadata"]["name"])

    def begins(self, plural: str, namespace: str) -> None:
        pass

    def listed(self, plural: str, namespace: str, uids: set[str], resource_version: str) -> None:
        self.whole.append((namespace, resource_version))


async def follow(session: aiohttp.ClientSession, url: str) -> None:
    """List and watch for ever, as kopf does: again after 410 and 503, and nothing more after 403."""
    while True:
        async with session.get(url) as response:
            if response.status == 503:
                await asyncio.sleep(0.01)
                continue
            if response.status == 403:
                return
            version = (await response.json())["metadata"]["resourceVersion"]
        async with session.get(url, params={"watch": "true", "resourceVersion": version}) as response:
            async for line in response.content.iter_chunked(1024):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    assert event["object"]["code"] == 410
                    break


class World:
    """A server, and what follows it."""

    def __init__(self, url: str, namespaces: tuple[str, ...] = (), path: str = "/api/v1/pods") -> None:
        self.taker, self.lists = Taker(), KopfLists(namespaces)
        paths = [f"/api/v1/namespaces/{name}/pods" for name in namespaces] or [path]
        self._urls = [url + path for path in paths]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> World:
        self._session = aiohttp.ClientSession(response_class=response_class(self.taker, self.lists))
        self._tasks = [asyncio.create_task(follow(self._session, url)) for url in self._urls]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, Server]]:
    server = Server()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", server
    await runner.cleanup()


async def test_open_watch_ends_and_another_list_comes(served: tuple[str, Server]) -> None:
    url, server = served
    async with World(url) as world, asyncio.timeout(20):
        await world.lists.anew("pods")
        before = len(server.lists)
        for more in range(1, 4):
            await world.lists.anew("pods")
            assert len(server.lists) == before + more
        assert world.taker.whole[-1] == ("", str(server.version))
        assert world.taker.names[-1] == f"p{server.version}"


async def test_error_in_a_watch_ends_nothing(served: tuple[str, Server]) -> None:
    """kopf takes most errors for the end of the operator: it is told to list anew instead."""
    url, server = served
    server.fails = 2
    async with World(url) as world, asyncio.timeout(20):
        await until(lambda: server.fails == 0 and len(server.lists) > 2, "lists after both errors")
        await world.lists.anew("pods")
        assert world.taker.names[-1] == f"p{server.version}"


async def test_list_that_was_sent_for_before_does_not_count(served: tuple[str, Server]) -> None:
    """Wait for the list after the one that is under way: that one may show what was before."""
    url, server = served
    async with World(url) as world, asyncio.timeout(20):
        await world.lists.anew("pods")
        server.held.clear()
        first = asyncio.create_task(world.lists.anew("pods"))
        known = len(server.lists)
        await until(lambda: len(server.lists) > known, "a list")
        under_way = server.version
        second = asyncio.create_task(world.lists.anew("pods"))
        await asyncio.sleep(0.05)
        server.held.set()
        await first
        await second
        assert int(world.taker.whole[-1][1]) > under_way


async def test_all_namespaces_are_listed(served: tuple[str, Server]) -> None:
    url, server = served
    async with World(url, ("a", "b")) as world, asyncio.timeout(20):
        await world.lists.anew("pods")
        server.lists.clear()
        await world.lists.anew("pods")
        assert sorted(server.lists) == ["/api/v1/namespaces/a/pods", "/api/v1/namespaces/b/pods"]


async def test_refusal_is_told_in_the_words_of_the_server(served: tuple[str, Server]) -> None:
    url, server = served
    server.refuses = True
    async with World(url) as world, asyncio.timeout(20):
        with pytest.raises(ApiError, match="no right to list pods") as refused:
            await world.lists.anew("pods")
        assert refused.value.code == 403
        server.refuses = False  # somebody has given the right: it is asked for again
        while not world.taker.names:
            with contextlib.suppress(ApiError):
                await world.lists.anew("pods")
            await asyncio.sleep(0.01)


async def test_whoever_gave_a_kind_up_is_not_waited_for(served: tuple[str, Server]) -> None:
    """Learn at once that nodes may not be read, which kopf asks for once."""
    url, server = served
    server.refuses = True
    async with World(url, path="/api/v1/nodes") as world, asyncio.timeout(20):
        for _ in range(2):
            with pytest.raises(ApiError, match="no right"):
                await world.lists.anew("nodes")


async def test_list_that_never_comes_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kopf_lists, "SILENT_SECONDS", 0.05)
    with pytest.raises(ApiError, match="trainingjobs in a, b have not been listed") as silent:
        await KopfLists(("a", "b")).anew("trainingjobs")
    assert silent.value.code == 0


async def test_silence_is_counted_from_the_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kopf_lists, "SILENT_SECONDS", 0.4)
    lists = KopfLists()
    waiting = asyncio.create_task(lists.anew("pods"))
    for page in range(6):
        await asyncio.sleep(0.15)
        lists.began("/api/v1/pods", page == 0)
    lists.listed("/api/v1/pods", "")
    await waiting

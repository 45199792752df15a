"""Watchers that read nothing: what they have waiting is bounded, they are ended, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from springtide_local.api import collection as collections
from springtide_local.api.collection import BACKLOG_BYTES, Change, Collection, Stored
from springtide_local.api.server import ApiServer
from springtide_local.api.store import Store

PATH = "/api/v1/configmaps?watch=1"
SILENT = 12
FAT = "x" * 200_000
PRIVATE_BYTES = 512 * 1024
"""Most bytes of one watcher's own, in the transport: some pieces, whatever the size of the list and of the
objects.
"""


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Store, int, str, list[asyncio.Transport]]]:
    """A store whose API is served without TLS, the port, the admin's token and all connections."""
    store = Store()
    server = ApiServer(store, folder)
    application = server.application()
    transports: list[asyncio.Transport] = []

    async def note(request: web.Request, _: web.StreamResponse) -> None:
        assert isinstance(request.transport, asyncio.Transport)
        transports.append(request.transport)

    application.on_response_prepare.append(note)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        token = server.tokens.issue_user("admin", ("system:masters",))
        yield store, runner.addresses[0][1], token, transports
    finally:
        store.end_watches()
        await runner.cleanup()


def ask(path: str, token: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


async def silent(port: int, token: str, path: str = PATH) -> socket.socket:
    """A connection that asks for a watch, and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(connection, ask(path, token))
    return connection


class Reader:
    """A watcher that reads; `versions` are those of the events it has seen."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.ended = False

    async def run(self, port: int, token: str, path: str = PATH) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        try:
            writer.write(ask(path, token))
            await reader.readuntil(b"\r\n\r\n")
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
                *lines, body = body.split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    assert event["type"] in ("ADDED", "MODIFIED"), event
                    self.versions.append(int(event["object"]["metadata"]["resourceVersion"]))
            assert not body
            self.ended = True
        finally:
            writer.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.005)


async def test_silent_watchers_cost_little_and_are_ended(tmp_path: Path) -> None:
    async with served(tmp_path) as (store, port, token, transports):
        for number in range(30):
            store.create("configmaps", {"metadata": {"name": f"c{number}"}, "data": {"a": FAT}}, "default")
        collection = store.collection("configmaps")
        idle = [await silent(port, token) for _ in range(SILENT)]
        await until(lambda: len(collection.subscriptions) == SILENT)
        live = list(collection.subscriptions)
        reader = Reader()
        reading = asyncio.create_task(reader.run(port, token))
        await until(lambda: len(reader.versions) == 30 and len(transports) == SILENT + 1)
        expected: list[int] = []
        while any(not one.overrun for one in live):
            assert len(expected) < 400, "they are never ended"

            def change(obj: Any) -> None:
                obj["data"]["b"] = str(len(expected))

            name = f"c{len(expected) % 30}"
            expected.append(
                int(store.mutate("configmaps", name, "default", change)["metadata"]["resourceVersion"])
            )
            await until(lambda: reader.versions[-1] == expected[-1])
            assert all(one.waiting <= BACKLOG_BYTES for one in live)
            assert all(one.get_write_buffer_size() <= PRIVATE_BYTES for one in transports)
        await until(lambda: len(collection.subscriptions) == 1)  # and their connections are closed
        await until(lambda: len([one for one in transports if one.is_closing()]) == SILENT)
        assert [one.get_write_buffer_size() for one in transports if one.is_closing()] == [0] * SILENT
        assert reader.versions[30:] == expected
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        for connection in idle:
            connection.close()


async def test_one_that_fell_behind_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collections, "BACKLOG", 10)
    async with served(tmp_path) as (store, port, token, _):
        store.create("configmaps", {"metadata": {"name": "c"}}, "default")
        reader = Reader()
        reading = asyncio.create_task(reader.run(port, token))
        await until(lambda: reader.versions)
        expected = []
        for number in range(40):  # in one moment, so that nobody could have read meanwhile

            def change(obj: Any, number: int = number) -> None:
                obj["data"] = {"n": str(number)}

            expected.append(
                int(store.mutate("configmaps", "c", "default", change)["metadata"]["resourceVersion"])
            )
        await asyncio.wait_for(reading, 10)
        assert reader.ended, "an end like any other, between two events"
        again = Reader()
        path = f"{PATH}&timeoutSeconds=1&resourceVersion={reader.versions[-1]}"
        await asyncio.wait_for(again.run(port, token, path), 10)
        assert (reader.versions + again.versions)[1:] == expected


def test_watchers_share_the_bytes_of_an_event() -> None:
    collection = Collection(0)
    many = [collection.subscribe(None, limit=BACKLOG_BYTES) for _ in range(3)]
    stored = Stored({"metadata": {"name": "c"}})
    collection.record(Change(1, "ADDED", ("", "c"), stored, None))
    events = [one.next() for one in many]
    assert len({id(event.stored.json) for event in events if event is not None}) == 1
    assert [one.waiting for one in many] == [0, 0, 0]
    assert stored.form("f", lambda obj: {"of": obj}) is stored.form("f", lambda obj: {})

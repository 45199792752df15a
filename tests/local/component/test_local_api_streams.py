"""The end of a watch whose client closes it while there is something to tell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from springtide_local.api.handlers import stream_parts


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
async def test_a_client_that_leaves_ends_its_stream_without_a_word(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    left, done = asyncio.Event(), asyncio.Event()
    told = 0

    async def parts(request: web.Request) -> AsyncIterator[bytes]:
        nonlocal told
        yield b"first\n"
        await left.wait()
        for _ in range(2000):
            if request.transport is None or request.transport.is_closing():
                break
            await asyncio.sleep(0.005)
        for _ in range(100):
            told += 1
            yield b"more\n"

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await stream_parts(request, parts(request), kind)
        finally:
            done.set()

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        async with asyncio.timeout(10):
            await reader.readuntil(b"first\n")
            writer.transport.abort()
            left.set()
            await done.wait()
    finally:
        await runner.cleanup()
    assert told == 1
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []

"""The coordinator's small HTTP server: what it answers, and that no peer can hold it up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

import pytest

from springtide_coordinator import pages
from springtide_coordinator.pages import Answer, PageServer, plain, reply

OPERATOR = Path(__file__).parents[2] / "operator"


def echo(query: Mapping[str, str]) -> Answer:
    return plain(HTTPStatus.OK, str(dict(query)))


def broken(_: Mapping[str, str]) -> Answer:
    raise KeyError("nothing here")


PAGES: dict[str, pages.Page] = {"/": echo, "/large": lambda _: Answer(b"x" * 2**25), "/broken": broken}


def parts(text: bytes) -> tuple[str, dict[str, str], bytes]:
    """(status line, headers, body); the length that the headers say is the body's."""
    head, _, body = text.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
    assert headers["Connection"] == "close"
    return status, headers, body


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        ("GET / HTTP/1.1", "200 OK", "{}"),
        ("GET /?a=1&b=%20x&a=2&c= HTTP/1.0", "200 OK", "{'c': '', 'a': '1', 'b': ' x'}"),
        ("GET http://coordinator:9401/?a=1 HTTP/1.1", "200 OK", "{'a': '1'}"),
        ("GET /other HTTP/1.1", "404 Not Found", "Not Found"),
        ("GET /%2e%2e/etc/passwd HTTP/1.1", "404 Not Found", "Not Found"),
        ("POST / HTTP/1.1", "405 Method Not Allowed", "Method Not Allowed"),
        ("GET /broken HTTP/1.1", "500 Internal Server Error", "Internal Server Error"),
        ("GET / HTTP/2", "400 Bad Request", "Bad Request"),
        ("GET /", "400 Bad Request", "Bad Request"),
        ("GET //[ HTTP/1.1", "400 Bad Request", "Bad Request"),
        ("\xff\x00", "400 Bad Request", "Bad Request"),
        ("", "400 Bad Request", "Bad Request"),
    ],
)
def test_answers(request_line: str, status: str, body: str) -> None:
    said, headers, text = parts(reply(f"{request_line}\r\nHost: x\r\n\r\n".encode("latin-1"), PAGES))
    assert said == f"HTTP/1.1 {status}"
    assert text.decode() == f"{body}\n"
    assert headers["Content-Length"] == str(len(text))
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    assert headers.get("Allow") == ("GET, HEAD" if status.startswith("405") else None)


@pytest.mark.parametrize(("path", "status", "length"), [("/", "200 OK", 3), ("/other", "404 Not Found", 10)])
def test_head_is_the_answer_without_its_body(path: str, status: str, length: int) -> None:
    said, headers, text = parts(reply(f"HEAD {path} HTTP/1.1\r\n\r\n".encode(), PAGES))
    assert (said, headers["Content-Length"], text) == (f"HTTP/1.1 {status}", str(length), b"")


async def test_a_page_is_served_whole_and_too_long_a_head_is_refused() -> None:
    server = await PageServer.start(PAGES, "127.0.0.1", 0)
    try:
        for head, status, length in (
            (b"GET /large HTTP/1.1\r\n\r\n", "200 OK", 2**25),
            (
                b"GET / HTTP/1.1\r\n" + b"x" * (2 * pages.HEAD_BYTES),
                "431 Request Header Fields Too Large",
                32,
            ),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head)
            text = b""
            async with asyncio.timeout(30):
                while b"\r\n\r\n" not in text or len(parts(text)[2]) < length:
                    text += await reader.readexactly(1) + await reader.read(2**20)
            assert parts(text)[0] == f"HTTP/1.1 {status}"
            assert len(parts(text)[2]) == length
            writer.close()
    finally:
        await server.close()


@pytest.mark.parametrize("limit_seconds", [600.0, 0.05])
@pytest.mark.parametrize("said", [b"", b"GET / HTT", b"GET /large HTTP/1.1\r\n\r\n"])
async def test_who_says_nothing_or_reads_nothing_does_not_hold_it_up(
    said: bytes, limit_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()
    converse = PageServer._converse

    async def observed(self: PageServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        try:
            await converse(self, reader, writer)
        finally:
            ended.set()

    monkeypatch.setattr(PageServer, "_converse", observed)
    monkeypatch.setattr(pages, "REQUEST_SECONDS", limit_seconds)
    server = await PageServer.start(PAGES, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(said)
    async with asyncio.timeout(30):
        await begun.wait()
        if limit_seconds > 1:  # otherwise it ends by itself
            await server.close()
        await ended.wait()
    writer.transport.abort()
    await server.close()


def test_a_coordinator_needs_no_web_framework() -> None:
    code = "import sys, springtide_coordinator.web; print('aiohttp' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(OPERATOR)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr

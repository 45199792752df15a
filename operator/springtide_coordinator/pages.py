"""HTTP in a few lines: pages that are fetched with GET, one request on each connection.

A web framework takes as long to import, and as much memory, as all else in a coordinator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self
from urllib.parse import parse_qsl, urlsplit

HEAD_BYTES = 16 * 1024  # of a request's line and its headers
REQUEST_SECONDS = 10.0  # from the connection to the end of the answer
TEXT = "text/plain; charset=utf-8"

log = logging.getLogger("springtide.coordinator")


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    kind: str = TEXT
    status: HTTPStatus = HTTPStatus.OK


# From the query's parameters (the first of each name) to the page.
Page = Callable[[Mapping[str, str]], Answer]


def plain(status: HTTPStatus, text: str = "") -> Answer:
    """A line of text; the status' own words without one."""
    return Answer(f"{text or status.phrase}\n".encode(), status=status)


def reply(head: bytes, pages: Mapping[str, Page]) -> bytes:
    """The whole answer, headers and body, to a request's line and headers."""
    words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return written(plain(HTTPStatus.BAD_REQUEST))
    method, target, _ = words
    try:
        url = urlsplit(target)
    except ValueError:
        return written(plain(HTTPStatus.BAD_REQUEST))
    page = pages.get(url.path)
    if page is None:
        return written(plain(HTTPStatus.NOT_FOUND), with_body=method != "HEAD")
    if method not in ("GET", "HEAD"):
        return written(plain(HTTPStatus.METHOD_NOT_ALLOWED), "Allow: GET, HEAD\r\n")
    query = dict(reversed(parse_qsl(url.query, keep_blank_values=True)))
    try:
        answer = page(query)
    except Exception:
        log.exception("the page %s failed", url.path)
        answer = plain(HTTPStatus.INTERNAL_SERVER_ERROR)
    return written(answer, with_body=method == "GET")


def written(answer: Answer, headers: str = "", *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.kind}\r\nContent-Length: {len(answer.body)}\r\n{headers}"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (answer.body if with_body else b"")


class PageServer:
    """Serves until it is closed. Pages run on the event loop: they must not take long."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, pages: Mapping[str, Page], host: str | None, port: int) -> Self:
        """Listen; None: on every address, 0: on a free port. Raise OSError when it is taken."""
        serving = cls(pages)
        serving._server = await asyncio.start_server(serving._connected, host, port, limit=HEAD_BYTES)
        return serving

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Listen no more, and end the conversations that go on."""
        if self._server is not None:
            self._server.close()
        for task in self._conversations:
            task.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._converse(reader, writer))
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)
        # Also of one that was cancelled before it began; does nothing when all is written and closed.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                try:
                    text = reply(await reader.readuntil(b"\r\n\r\n"), self._pages)
                except asyncio.LimitOverrunError:
                    text = written(plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
                writer.write(text)
                writer.close()
                await writer.wait_closed()
        except (asyncio.IncompleteReadError, TimeoutError, OSError):
            pass  # it went, or was too slow: nobody is there to tell

"""The operator's requests to the Kubernetes API: how many at a time and whose come first, and lists that are
read object by object. How a request is made is `springtide_kube.client`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import aiohttp

from springtide_kube import wire_json
from springtide_kube.client import CONNECT_SECONDS, Caller, Client
from springtide_kube.connection import Connection, Connections
from springtide_kube.content_types import JSON
from springtide_kube.errors import ApiRefusal, Unreachable
from springtide_operator.api import names
from springtide_operator.credentials import find_connection
from springtide_operator.guarded_http import Page, read_page
from springtide_operator.priority_semaphore import PrioritySemaphore
from springtide_operator.records import Reader

Object = dict[str, Any]

AT_A_TIME = 48  # requests; more would only wait in the API server
PAGE_SECONDS = 120.0  # of a list
WATCH_SECONDS = 240.0  # of a watch of our own


class Kube:
    """Requests in turns, each with a time limit. Use as `async with`."""

    def __init__(
        self,
        find: Callable[[], Awaitable[Connection]] = find_connection,
        timeout: float = 10.0,
        on_error: Callable[[int], None] = lambda code: None,
    ) -> None:
        caller = Caller(names.USER_AGENT, names.MANAGER)
        self._client = Client(Connections(find), caller, timeout, on_error)
        self._timeout = timeout
        # A page that somebody has made large takes its time, as long as it comes.
        self._page_timeouts = aiohttp.ClientTimeout(
            total=PAGE_SECONDS, connect=CONNECT_SECONDS, sock_read=timeout
        )
        self._slots = PrioritySemaphore(AT_A_TIME)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    @property
    def answered_at(self) -> float | None:
        """Return monotonic seconds of the last answer of any kind; None before."""
        return self._client.answered_at

    async def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        content_type: str = JSON,
        query: dict[str, str] | None = None,
        urgent: bool = False,
    ) -> Object:
        """Send a request, and return the answer's JSON.

        Args:
            method: of HTTP.
            path: of the URL, from `/api` or `/apis` on.
            body: plain JSON; None: no body.
            content_type: of the body.
            query: parameters of the URL.
            urgent: it waits for no other request.

        Raises:
            ApiError: the server refuses, or does not answer in time (code 0).
        """
        if urgent:
            return await self._client.request(method, path, body, query, content_type)
        async with self._slots.turn(of=_namespace(path)):  # the wait is no part of its time
            await self._client.quiet()
            return await self._client.request(method, path, body, query, content_type)

    async def page(self, path: str, query: dict[str, str], reader: Reader | None) -> Page:
        """Return one page of a list; it waits for no other request.

        Args:
            path: of the URL, from `/api` or `/apis` on.
            query: parameters of the URL.
            reader: makes of each object what is read of it; None: all of it.

        Raises:
            ApiError: the server refuses, or does not answer in time (code 0).
        """
        async with self._client.open("GET", path, query=query, timeout=self._page_timeouts) as response:
            return await read_page(response.content, reader)

    async def watch(self, path: str, query: dict[str, str], hear: Callable[[str, Object], None]) -> None:
        """Call `hear(kind, object)` for each event of a watch, until the server ends it.

        Args:
            path: of the URL, from `/api` or `/apis` on.
            query: parameters of the URL.
            hear: is called for ADDED, MODIFIED and DELETED.

        Raises:
            ApiError: the server refuses, or breaks the watch off; 410: it does not know the version any more.
        """
        query = {**query, "watch": "true", "timeoutSeconds": str(int(WATCH_SECONDS))}
        async for line in self._client.lines(path, query, WATCH_SECONDS + self._timeout):
            try:
                event = wire_json.loads(line)
            except ValueError as error:
                raise Unreachable(f"the watch of {path} was cut in the middle of a line") from error
            kind, found = str(event["type"]), dict(event["object"])
            if kind == "ERROR":
                code = int(found.get("code") or 500)
                raise ApiRefusal(code, str(found.get("reason")), str(found.get("message")))
            if kind != "BOOKMARK":
                hear(kind, found)


def _namespace(path: str) -> str:
    """Return the namespace that a request is about; "" for none."""
    _, found, rest = path.partition("/namespaces/")
    return rest.partition("/")[0] if found else ""

"""HTTP to the Kubernetes API: one session, credentials as kopf finds them, errors as one exception.

A server that has too much to do says so with 429 (or 503) and Retry-After: the request waits as it is told
and is sent again, and so does what comes after it, but for the lease's, which has a flow of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
import kopf
from yarl import URL

from springtide_operator import wire_json
from springtide_operator.api import names
from springtide_operator.credentials import Credentials, find_credentials
from springtide_operator.guarded_http import Page, read_page
from springtide_operator.priority_semaphore import PrioritySemaphore
from springtide_operator.records import Reader

Object = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
AT_A_TIME = 48  # requests; more would only wait in the API server
CONNECT_SECONDS = 5.0
PAGE_SECONDS = 120.0  # of a list
WATCH_SECONDS = 240.0  # of a watch of our own
RETRIES = 4  # of a request that the server asks to be sent again later
MAX_RETRY_SECONDS = 30.0  # until then
WRITES = ("POST", "PUT", "PATCH")  # name their field manager; a deletion has none
CONNECTIONS = AT_A_TIME + 16  # the others are for what waits for no other request


class ApiError(Exception):
    """The API server's refusal: `code` is the HTTP status, `reason` its CamelCase word, `causes` those of
    its details; code 0: no answer came.
    """

    def __init__(self, code: int, reason: str, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(f"{message} ({code} {reason})" if code else message)
        self.causes = causes
        self.code = code
        self.reason = reason
        self.message = message


class Answer(NamedTuple):
    """An answer of the server: status, reason, body, and when it wants to be asked again."""

    code: int
    reason: str
    data: bytes
    retry_after: str | None = None


def retry_seconds(answer: Answer) -> float | None:
    """Return the seconds after which a request is to be sent again; None: never, it has its answer."""
    if answer.retry_after is None or not answer.retry_after.strip().isdigit():
        return None
    return min(MAX_RETRY_SECONDS, max(1.0, float(answer.retry_after)))


class Kube:
    """Requests with a time limit. Use as `async with`."""

    def __init__(
        self,
        credentials: Callable[[], kopf.ConnectionInfo] = find_credentials,
        timeout: float = 10.0,
        on_error: Callable[[int], None] = lambda code: None,
    ) -> None:
        self._credentials = Credentials(credentials)
        self._timeouts = aiohttp.ClientTimeout(total=timeout, connect=CONNECT_SECONDS)
        # A page that somebody has made large takes its time, as long as it comes.
        self._page_timeouts = aiohttp.ClientTimeout(
            total=PAGE_SECONDS, connect=CONNECT_SECONDS, sock_read=timeout
        )
        self._watch_timeouts = aiohttp.ClientTimeout(total=WATCH_SECONDS + timeout, connect=CONNECT_SECONDS)
        self._on_error = on_error
        self._info: kopf.ConnectionInfo | None = None
        self._session: aiohttp.ClientSession | None = None
        self._slots = PrioritySemaphore(AT_A_TIME)
        self._quiet_until = 0.0  # monotonic seconds: the server has asked for so much time
        self.answered_at: float | None = None  # monotonic seconds of the last answer of any kind

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        content_type: str = "application/json",
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
            return await self._ask(method, path, body, content_type, query)
        async with self._slots.turn(of=_namespace(path)):  # the wait is no part of its time
            if (quiet := self._quiet_until - time.monotonic()) > 0:
                await asyncio.sleep(quiet)
            return await self._ask(method, path, body, content_type, query)

    async def page(self, path: str, query: dict[str, str], reader: Reader | None) -> Page:
        """Return one page of a list; it waits for no other request.

        Args:
            path: of the URL, from `/api` or `/apis` on.
            query: parameters of the URL.
            reader: makes of each object what is read of it; None: all of it.

        Raises:
            ApiError: the server refuses, or does not answer in time (code 0).
        """
        found: list[Page] = []

        async def read(response: aiohttp.ClientResponse) -> None:
            found.append(await read_page(response.content, reader))

        await self._ask("GET", path, None, "", query, read)
        return found[0]

    async def watch(self, path: str, query: dict[str, str], hear: Callable[[str, Object], None]) -> None:
        """Call `hear(kind, object)` for each event of a watch, until the server ends it.

        Args:
            path: of the URL, from `/api` or `/apis` on.
            query: parameters of the URL.
            hear: is called for ADDED, MODIFIED and DELETED.

        Raises:
            ApiError: the server refuses, or breaks the watch off; 410: it does not know the version any more.
        """

        async def read(response: aiohttp.ClientResponse) -> None:
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = wire_json.loads(line)
                    kind, found = str(event["type"]), dict(event["object"])
                    if kind == "ERROR":
                        code = int(found.get("code") or 500)
                        raise ApiError(code, str(found.get("reason")), str(found.get("message")))
                    if kind != "BOOKMARK":
                        hear(kind, found)

        query = {**query, "watch": "true", "timeoutSeconds": str(int(WATCH_SECONDS))}
        await self._ask("GET", path, None, "", query, read, self._watch_timeouts)

    async def _ask(
        self,
        method: str,
        path: str,
        body: Object | None,
        content_type: str,
        query: dict[str, str] | None,
        read: Callable[[aiohttp.ClientResponse], Awaitable[None]] | None = None,
        timeouts: aiohttp.ClientTimeout | None = None,
    ) -> Object:
        """The answer's JSON, or what is left when `read` has taken it."""
        if method in WRITES:
            query = {"fieldManager": names.MANAGER, **(query or {})}
        try:
            for retries in range(RETRIES + 1):
                answer = await self._send(method, path, body, content_type, query, read, timeouts)
                pause = retry_seconds(answer)
                if pause is None or retries == RETRIES:
                    break
                self._on_error(answer.code)
                self._quiet_until = max(self._quiet_until, time.monotonic() + pause)
                await asyncio.sleep(pause * (1 + 0.2 * random.random()))  # not all of them at once
            if answer.code >= 400:
                raise _refusal(answer.code, answer.reason, answer.data)
            return dict(wire_json.loads(answer.data)) if answer.data else {}
        except kopf.LoginError as error:
            self._on_error(0)
            raise ApiError(0, "NoCredentials", str(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._on_error(0)
            raise ApiError(0, "Unreachable", f"the API server does not answer: {_plain(error)}") from error
        except ApiError as error:
            self._on_error(error.code)
            raise

    async def _send(
        self,
        method: str,
        path: str,
        body: Object | None,
        content_type: str,
        query: dict[str, str] | None,
        read: Callable[[aiohttp.ClientResponse], Awaitable[None]] | None,
        timeouts: aiohttp.ClientTimeout | None,
    ) -> Answer:
        """Ask once, or twice when a token was replaced on disk since it was read."""
        while True:
            session, info = self._connect()
            who = info.as_http_headers()
            headers = {**who, "Accept": "application/json", "User-Agent": names.USER_AGENT}
            if body is not None:
                headers["Content-Type"] = content_type
            async with session.request(
                method,
                URL(info.server.rstrip("/") + path, encoded=True),
                data=None if body is None else json.dumps(body),
                headers=headers,
                params=query,
                proxy=info.proxy_url,
                timeout=timeouts or (self._timeouts if read is None else self._page_timeouts),
            ) as response:
                self.answered_at = time.monotonic()
                if response.status == 401 and self._credentials.refused(who):
                    continue
                if response.status < 400 and read is not None:
                    await read(response)
                    return Answer(response.status, response.reason or "", b"")
                later = response.headers.get("Retry-After") if response.status in (429, 503) else None
                return Answer(response.status, response.reason or "", await response.read(), later)

    def _connect(self) -> tuple[aiohttp.ClientSession, kopf.ConnectionInfo]:
        before, self._info = self._info, self._credentials.current()
        found = self._info
        if self._session is not None and (before is None or _endpoint(before) != _endpoint(found)):
            old, self._session = self._session, None
            closing = asyncio.ensure_future(old.close())
            closing.add_done_callback(lambda task: task.exception())
        if self._session is None:
            connector = aiohttp.TCPConnector(
                ssl=found.as_ssl_context(), limit=CONNECTIONS, keepalive_timeout=30
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                trust_env=False,
            )
        return self._session, found


def _namespace(path: str) -> str:
    """Return the namespace that a request is about; "" for none."""
    _, found, rest = path.partition("/namespaces/")
    return rest.partition("/")[0] if found else ""


def _endpoint(info: kopf.ConnectionInfo) -> tuple[object, ...]:
    return (info.server, info.ca_data, info.ca_path, info.certificate_data, info.certificate_path)


def _refusal(code: int, reason: str, data: bytes) -> ApiError:
    text = data[:65536].decode(errors="replace")
    try:
        status = wire_json.loads(data)
        details = status.get("details") or {}
        causes = tuple(str(cause.get("reason") or "") for cause in details.get("causes") or [])
        return ApiError(code, status.get("reason") or reason, status.get("message") or text[:500], causes)
    except (ValueError, AttributeError):
        return ApiError(code, reason, text[:500] or reason)


def _plain(error: BaseException) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)

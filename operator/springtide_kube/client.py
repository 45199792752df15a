"""Requests to the Kubernetes API by `kubernetes.aio`, and what it lacks around them.

Bodies are plain JSON and stay so: the models of `kubernetes.aio` take forty times as long for a page of pods.
Added here: a token that was replaced on disk is read again; each request says who asks and,
where it writes, its field manager; a server that has too much to do is obeyed, whatever was asked of it: 429,
and 503 with Retry-After, are waited for some times before they are the caller's, since the server has not
looked at the request yet.

Tasks: all of one event loop, without locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
from kubernetes.aio.client import ApiClient
from yarl import URL

from springtide_kube import wire_json
from springtide_kube.connection import Connection, Connections
from springtide_kube.content_types import JSON
from springtide_kube.errors import (
    ApiError,
    ApiRefusal,
    CredentialsError,
    Unreachable,
    explain,
    refusal,
)

Object = dict[str, Any]

CONNECT_SECONDS = 5.0
RETRIES = 4  # of a request that the server asks to be sent again later
MAX_RETRY_SECONDS = 30.0  # until then
WRITES = ("POST", "PUT", "PATCH")  # name their field manager; a deletion has none
# Of an eviction: 429 is then what the budget says, and no word about the server.
DISRUPTION_BUDGET = "DisruptionBudget"


@dataclass(frozen=True)
class Caller:
    """Names a program to the API server.

    Attributes:
        agent: User-Agent of each request.
        manager: field manager of what is written; None: the server makes one of the agent.
        trust_env: obey HTTPS_PROXY and its like, as kubectl does.
    """

    agent: str
    manager: str | None = None
    trust_env: bool = False


def retry_seconds(refused: ApiRefusal, said: str | None, attempt: int) -> float | None:
    """Return the seconds after which a request is to be sent again; None: never, it has its answer.

    Args:
        refused: the answer.
        said: its Retry-After; None: it has none.
        attempt: how often it was sent again before.
    """
    if refused.code not in (429, 503) or DISRUPTION_BUDGET in refused.causes:
        return None
    if said is not None and said.strip().isdigit():
        return min(MAX_RETRY_SECONDS, max(1.0, float(said)))
    return float(2**attempt) if refused.code == 429 else None


class Client:
    """Requests with a time limit. Use as `async with`.

    Attributes:
        server: URL that was asked last; "" before.
        namespace: in which the caller works, where its credentials say so.
        answered_at: monotonic seconds of the last answer of any kind; None before.
    """

    def __init__(
        self,
        connections: Connections,
        caller: Caller,
        timeout: float = 10.0,
        on_error: Callable[[int], None] = lambda code: None,
    ) -> None:
        """Make a client that has asked nobody yet.

        Args:
            connections: where the server is.
            caller: who asks.
            timeout: of a request, in seconds.
            on_error: is called with the status of each answer that is none, and 0 for silence.
        """
        self._connections = connections
        self._caller = caller
        self._timeouts = aiohttp.ClientTimeout(total=timeout, connect=CONNECT_SECONDS)
        self._on_error = on_error
        self._api: ApiClient | None = None
        self._endpoint: tuple[object, ...] = ()
        self._quiet_until = 0.0  # monotonic seconds: the server has asked for so much time
        self.server = ""
        self.namespace = "default"
        self.answered_at: float | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._api is not None:
            api, self._api = self._api, None
            await api.close()

    async def connect(self) -> None:
        """Read the credentials, so that `server` and `namespace` are known; nobody is asked yet.

        Raises:
            CredentialsError: there are none.
        """
        await self._connect()

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = JSON,
    ) -> Object:
        """Send a request, and return the answer's JSON.

        Args:
            method: of HTTP.
            path: of the URL, from `/api` or `/apis` on.
            body: plain JSON; None: no body.
            query: parameters of the URL.
            content_type: of the body.

        Raises:
            ApiRefusal: the server refuses.
            Unreachable: it does not answer in time.
        """
        async with self.open(method, path, body, query, content_type) as response:
            data = await response.read()
            return dict(wire_json.loads(data)) if data else {}

    async def text(self, path: str, query: Mapping[str, str] | None = None) -> str:
        """Return what is at a path as it is: logs are no JSON.

        Args:
            path: of the URL.
            query: parameters of the URL.

        Raises:
            ApiRefusal: the server refuses.
            Unreachable: it does not answer in time.
        """
        async with self.open("GET", path, query=query) as response:
            return (await response.read()).decode(errors="replace")

    async def lines(
        self, path: str, query: Mapping[str, str] | None = None, seconds: float | None = None
    ) -> AsyncIterator[str]:
        """Yield lines of a streamed answer until the server ends it.

        Args:
            path: of the URL, from `/api` or `/apis` on.
            query: parameters of the URL.
            seconds: after which the stream has to be over; None: never.

        Raises:
            ApiRefusal: the server refuses.
            Unreachable: nobody answers, or the connection breaks.
        """
        timeout = aiohttp.ClientTimeout(total=seconds, connect=CONNECT_SECONDS)
        async with self.open("GET", path, query=query, timeout=timeout) as response:
            rest = b""
            async for chunk in response.content.iter_any():
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace")
            if rest:
                yield rest.decode(errors="replace")

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = JSON,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and hand out the answer before its body is read.

        Args:
            method: of HTTP.
            path: of the URL, from `/api` or `/apis` on.
            body: plain JSON; None: no body.
            query: parameters of the URL.
            content_type: of the body.
            timeout: None: the client's.

        Raises:
            ApiRefusal: the server refuses.
            Unreachable: it does not answer in time, or breaks off while the body is read.
        """
        asked = {"fieldManager": self._caller.manager} if method in WRITES and self._caller.manager else {}
        sent = {**asked, **(query or {})}
        limits = timeout or self._timeouts
        try:
            async with await self._answer(method, path, body, sent, content_type, limits) as response:
                yield response
        except CredentialsError as error:
            self._on_error(0)
            raise Unreachable(str(error), "NoCredentials") from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._on_error(0)
            said = f"the API server at {self.server} does not answer: {explain(error)}"
            raise Unreachable(said) from error
        except ApiError as error:
            self._on_error(error.code)
            raise

    async def quiet(self) -> None:
        """Wait as long as the server has asked anybody of this process to wait."""
        left = self._quiet_until - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)

    async def _answer(
        self,
        method: str,
        path: str,
        body: Any,
        query: Mapping[str, str],
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Send a request until there is an answer; raise what it refuses."""
        for attempt in range(RETRIES + 1):
            response = await self._send(method, path, body, query, content_type, timeout)
            if response.status < 400:
                return response
            async with response:
                refused = refusal(response.status, response.reason or "", await response.read())
            pause = retry_seconds(refused, response.headers.get("Retry-After"), attempt)
            if pause is None:
                raise refused
            if attempt < RETRIES:
                self._on_error(refused.code)
                self._quiet_until = max(self._quiet_until, time.monotonic() + pause)
                await asyncio.sleep(pause * (1 + 0.2 * random.random()))  # not all of them at once
        raise refused

    async def _send(
        self,
        method: str,
        path: str,
        body: Any,
        query: Mapping[str, str],
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Ask once, or twice when a token was replaced on disk since it was read."""
        while True:
            api, connection = await self._connect()
            who = connection.headers
            url = URL(connection.server + path).extend_query(query)
            headers = {**who, "Accept": "application/json, */*", "User-Agent": self._caller.agent}
            if body is not None:
                headers["Content-Type"] = content_type
            answer = await api.call_api(method, url, headers, body, _request_timeout=timeout)
            response: aiohttp.ClientResponse = answer.response
            self.answered_at = time.monotonic()
            if response.status != 401 or not await self._connections.refused(who):
                return response
            response.release()

    async def _connect(self) -> tuple[ApiClient, Connection]:
        found = await self._connections.current()
        self.server, self.namespace = found.server, found.namespace or "default"
        if self._api is None or found.endpoint != self._endpoint:
            # Lists and watches are read as they come: no large buffer is of use.
            made = found.api(trust_env=self._caller.trust_env, read_bufsize=2**16)
            old, self._api, self._endpoint = self._api, made, found.endpoint
            if old is not None:
                closing = asyncio.ensure_future(old.close())
                closing.add_done_callback(lambda task: task.exception())
        return self._api, found

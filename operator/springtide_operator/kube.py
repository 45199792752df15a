"""HTTP to the Kubernetes API: one session, credentials as kopf finds them, errors as one exception."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import aiohttp
import kopf

Object = dict[str, Any]

log = logging.getLogger("springtide.operator")

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
AT_A_TIME = 48  # requests; more would only wait in the API server
CONNECTIONS = AT_A_TIME + 16  # the others are for what waits for no other request
TOKEN_SECONDS = 60.0  # service account tokens are replaced on disk about once an hour


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


def find_credentials(settings: kopf.OperatorSettings | None = None) -> kopf.ConnectionInfo:
    """KUBECONFIG when set, else the pod's service account, else ~/.kube/config.

    Raises kopf.LoginError where there is none of them, or where a file cannot be read.
    """
    settings = settings if settings is not None else kopf.OperatorSettings()
    order = [kopf.login_with_service_account, kopf.login_with_kubeconfig]
    if os.environ.get("KUBECONFIG"):
        order.reverse()
    for login in order:
        try:
            info = login(settings=settings, logger=log)
        except (OSError, KeyError, TypeError, AttributeError) as error:
            raise kopf.LoginError(f"the cluster's credentials cannot be read: {error!r}") from error
        if isinstance(info, kopf.ConnectionInfo):
            return info
    raise kopf.LoginError("no cluster: set KUBECONFIG, or run in a pod with a service account")


class Kube:
    """Requests with a time limit. Use as `async with`."""

    def __init__(
        self,
        credentials: Callable[[], kopf.ConnectionInfo] = find_credentials,
        timeout: float = 10.0,
        on_error: Callable[[int], None] = lambda code: None,
    ) -> None:
        self._credentials = credentials
        self._timeout = timeout
        self._on_error = on_error
        self._info: kopf.ConnectionInfo | None = None
        self._read_at = float("-inf")
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(AT_A_TIME)
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
        """The answer's JSON; `urgent`: it waits for no other request. Raises ApiError."""
        if urgent:
            return await self._ask(method, path, body, content_type, query)
        async with self._slots:  # waiting for one's turn is no part of the request's time
            return await self._ask(method, path, body, content_type, query)

    async def _ask(
        self, method: str, path: str, body: Object | None, content_type: str, query: dict[str, str] | None
    ) -> Object:
        try:
            session, info = self._connect()
            headers = {**info.as_http_headers(), "Accept": "application/json"}
            if body is not None:
                headers["Content-Type"] = content_type
            async with session.request(
                method,
                info.server.rstrip("/") + path,
                data=None if body is None else json.dumps(body),
                headers=headers,
                params=query,
                proxy=info.proxy_url,
            ) as response:
                text = await response.text()
                self.answered_at = time.monotonic()
                if response.status == 401:
                    self._read_at = float("-inf")
                if response.status >= 400:
                    raise _refusal(response.status, response.reason or "", text)
                return dict(json.loads(text)) if text else {}
        except kopf.LoginError as error:
            self._on_error(0)
            raise ApiError(0, "NoCredentials", str(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._on_error(0)
            raise ApiError(0, "Unreachable", f"the API server does not answer: {_plain(error)}") from error
        except ApiError as error:
            self._on_error(error.code)
            raise

    def _connect(self) -> tuple[aiohttp.ClientSession, kopf.ConnectionInfo]:
        now = time.monotonic()
        if self._info is None or now - self._read_at > TOKEN_SECONDS:
            found = self._credentials()
            before = self._info
            self._info, self._read_at = found, now
            if self._session is not None and (before is None or _endpoint(before) != _endpoint(found)):
                old, self._session = self._session, None
                closing = asyncio.ensure_future(old.close())
                closing.add_done_callback(lambda task: task.exception())
        if self._session is None:
            connector = aiohttp.TCPConnector(
                ssl=self._info.as_ssl_context(), limit=CONNECTIONS, keepalive_timeout=30
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=self._timeout, connect=5.0),
                trust_env=False,
            )
        return self._session, self._info


def _endpoint(info: kopf.ConnectionInfo) -> tuple[object, ...]:
    return (info.server, info.ca_data, info.ca_path, info.certificate_data, info.certificate_path)


def _refusal(code: int, reason: str, text: str) -> ApiError:
    try:
        status = json.loads(text)
        details = status.get("details") or {}
        causes = tuple(str(cause.get("reason") or "") for cause in details.get("causes") or [])
        return ApiError(code, status.get("reason") or reason, status.get("message") or text[:500], causes)
    except (ValueError, AttributeError):
        return ApiError(code, reason, text[:500] or reason)


def _plain(error: BaseException) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)

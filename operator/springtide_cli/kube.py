"""The port to Kubernetes: JSON requests and streams of lines, with the user's own kubeconfig.

Everything above it (`apply`, `watch`) is written against `KubePort`, so a test needs no API server.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from springtide_cli.errors import Refused

Object = dict[str, Any]

CALL_SECONDS = 15.0
CONNECT_SECONDS = 5.0


class ApiRefusal(Exception):
    """The API server answered with a Status: its HTTP code, CamelCase reason and message."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message


class Unreachable(Exception):
    """No answer: the message says from where and why."""


class KubePort(Protocol):
    namespace: str  # the context's

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
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
            Unreachable: nobody answers in time.
        """
        ...

    def lines(self, path: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        """Yield lines of a streamed answer until the server ends it.

        Args:
            path: of the URL, from `/api` or `/apis` on.
            query: parameters of the URL.

        Raises:
            ApiRefusal: the server refuses.
            Unreachable: nobody answers, or the connection breaks.
        """
        ...


def refusal(code: int, text: str) -> ApiRefusal:
    """Return the error of an answer, read from its body: a Status where an API server made it.

    Args:
        code: HTTP status of the answer.
        text: its body, JSON or anything else.
    """
    try:
        status = json.loads(text)
    except ValueError:
        status = {}
    if not isinstance(status, dict):
        status = {}
    message = str(status.get("message") or text.strip()[:500] or f"HTTP {code}")
    return ApiRefusal(code, str(status.get("reason") or ""), message)


class Kube:
    """KubePort over aiohttp; use `connect`."""

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        self.server = str(client.configuration.host)

    async def close(self) -> None:
        await self._client.close()

    async def _open(
        self, method: str, path: str, body: Any, query: Mapping[str, str], kind: str, timeout: Any
    ) -> Any:
        arguments = await self._client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": kind},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await self._client.call_api(*arguments, _request_timeout=timeout)
        return answer.response

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
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
            Unreachable: nobody answers within CALL_SECONDS.
        """
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS, sock_connect=CONNECT_SECONDS)
        try:
            async with await self._open(method, path, body, query or {}, content_type, timeout) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error
        if response.status >= 300:
            raise refusal(response.status, text)
        answer: Object = json.loads(text)
        return answer

    async def lines(self, path: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        """Yield lines of a streamed answer until the server ends it.

        Args:
            path: of the URL, from `/api` or `/apis` on.
            query: parameters of the URL.

        Raises:
            ApiRefusal: the server refuses.
            Unreachable: nobody answers, or the connection breaks.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        try:
            async with await self._open("GET", path, None, query, "application/json", timeout) as response:
                if response.status >= 300:
                    raise refusal(response.status, await response.text())
                rest = b""
                async for chunk in response.content.iter_any():
                    *whole, rest = (rest + chunk).split(b"\n")
                    for line in whole:
                        yield line.decode("utf-8", "replace")
                if rest:
                    yield rest.decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException) -> Unreachable:
        return Unreachable(f"the API server at {self.server} does not answer: {explain(error)}")


def explain(error: BaseException) -> str:
    """A network error in one clause."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not accepted ({error.certificate_error})"
    if isinstance(error, ssl.SSLError | aiohttp.ClientSSLError):
        return f"TLS failed ({error})"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # asyncio's own texts only repeat the address
        return os.strerror(number) if number and number > 0 else str(error.os_error) or "no connection"
    return str(error) or type(error).__name__


def kubeconfig_paths(explicit: str | None = None) -> list[str]:
    """The files that kubectl would read: the option, else $KUBECONFIG, else ~/.kube/config."""
    text = explicit or os.environ.get("KUBECONFIG") or os.path.join("~", ".kube", "config")
    return [os.path.expanduser(path) for path in text.split(os.pathsep) if path]


def existing(paths: list[str]) -> list[str]:
    return [path for path in paths if Path(path).is_file()]


async def connect(kubeconfig: str | None = None, context: str | None = None) -> Kube:
    """Connect as kubectl would.

    Args:
        kubeconfig: path; None: KUBECONFIG, or the usual file.
        context: of the kubeconfig; None: its current one.

    Raises:
        Refused: there is no usable kubeconfig.
    """
    from kubernetes.aio import config

    paths = kubeconfig_paths(kubeconfig)
    there = existing(paths)
    if not there:
        raise Refused(
            f"no kubeconfig: {' and '.join(paths)} not found. Set KUBECONFIG or --kubeconfig to reach a "
            "cluster, or use --local to run on an embedded one on this machine"
        )
    merged = os.pathsep.join(there)
    try:
        contexts, current = config.list_kube_config_contexts(merged)
        chosen = next((c for c in contexts if c["name"] == context), None) if context else current
        if chosen is None:
            names = ", ".join(c["name"] for c in contexts)
            raise Refused(f"{merged}: there is no context {context!r}, only: {names}")
        client = await config.new_client_from_config(merged, context=context)
    except config.ConfigException as error:
        raise Refused(f"{merged}: no usable kubeconfig: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise Refused(f"{merged}: no usable kubeconfig: {type(error).__name__}: {error}") from error
    return Kube(client, chosen["context"].get("namespace") or "default")

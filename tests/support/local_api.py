"""The API server under test, and how to talk to it.

Used through the fixtures of `local_api_fixtures`.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import ssl
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import yaml
from required import require_tool

from springtide_local.api.server import ApiServer
from springtide_local.api.store import Store

Object = dict[str, Any]
Result = TypeVar("Result")
_PATIENCE = 40.0


@dataclass
class Kubectl:
    """Result of a kubectl command."""

    code: int
    out: str
    err: str


@dataclass
class Api:
    """A cluster's API, by kubeconfig."""

    kubeconfig: Path
    server: EmbeddedServer | None = None
    _tls: ssl.SSLContext | None = field(default=None, repr=False)
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    _address: str = ""

    def __post_init__(self) -> None:
        config = yaml.safe_load(self.kubeconfig.read_text())
        context = next(c["context"] for c in config["contexts"] if c["name"] == config["current-context"])
        cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == context["cluster"])
        user = next(u["user"] for u in config["users"] if u["name"] == context["user"])
        self._address = cluster["server"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=authority)
        if "token" in user:
            self.headers["Authorization"] = f"Bearer {user['token']}"
        if "client-certificate-data" in user:
            pem = base64.b64decode(user["client-key-data"]) + base64.b64decode(
                user["client-certificate-data"]
            )
            with tempfile.NamedTemporaryFile() as file:
                file.write(pem)
                file.flush()
                self._tls.load_cert_chain(file.name)

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = 60.0) -> Kubectl:
        done = subprocess.run(
            [require_tool("kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "HOME": str(self.kubeconfig.parent)},
        )
        return Kubectl(done.returncode, done.stdout, done.stderr)

    def do(self, *arguments: str, stdin: str | None = None, timeout: float = 60.0) -> str:
        """Run kubectl, which must succeed, and return its output."""
        done = self.kubectl(*arguments, stdin=stdin, timeout=timeout)
        assert done.code == 0, f"kubectl {' '.join(arguments)}: {done.err or done.out}"
        return done.out

    @contextmanager
    def kubectl_running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A kubectl that goes on (watch, logs -f), killed at the end."""
        process = subprocess.Popen(
            [require_tool("kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HOME": str(self.kubeconfig.parent)},
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=10)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, decoded JSON (or text) and headers of one request."""
        with self._connection() as connection:
            payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            sent = {
                "Content-Type": content_type,
                "User-Agent": "api-test/1",
                **self.headers,
                **(headers or {}),
            }
            connection.request(method, path, payload, sent)
            answer = connection.getresponse()
            text = answer.read()
            kind = answer.headers.get("Content-Type", "")
            return answer.status, json.loads(text) if "json" in kind else text.decode(), answer.headers

    def ok(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """The answer of a request that must succeed."""
        status, answer, _ = self.request(method, path, body, content_type)
        assert status < 300, f"{method} {path}: {status} {answer}"
        return answer

    @contextmanager
    def watch(self, path: str, timeout: float = _PATIENCE) -> Iterator[Iterator[Object]]:
        """The events of a watch, as they come; a silence of `timeout` seconds is a TimeoutError."""
        with self._connection(timeout) as connection:
            connection.request("GET", path, headers=self.headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield _lines(answer)

    @contextmanager
    def _connection(self, timeout: float = _PATIENCE) -> Iterator[http.client.HTTPSConnection]:
        address = urlsplit(self._address)
        connection = http.client.HTTPSConnection(
            address.hostname or "", address.port, timeout=timeout, context=self._tls
        )
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def namespace(self) -> Iterator[str]:
        """A namespace of its own."""
        name = f"api-test-{uuid.uuid4().hex[:8]}"
        self.ok("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        try:
            yield name
        finally:
            self.request("DELETE", f"/api/v1/namespaces/{name}")

    def until(self, what: str, attempt: Callable[[], Result], timeout: float = _PATIENCE) -> Result:
        """Ask again until the answer is true."""
        deadline = time.monotonic() + timeout
        while True:
            answer = attempt()
            if answer:
                return answer
            assert time.monotonic() < deadline, (
                f"waited {timeout:g} s for {what}; the last answer: {answer!r}"
            )
            time.sleep(0.02)


def _lines(answer: http.client.HTTPResponse) -> Iterator[Object]:
    while line := answer.readline():
        yield json.loads(line)


class EmbeddedServer:
    """An API server with an event loop in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="api-server", daemon=True)
        self._thread.start()
        self.store = self.call(Store)
        self.server = self.call(lambda: ApiServer(self.store, folder))
        asyncio.run_coroutine_threadsafe(self.server.start(), self.loop).result(30)

    def call(self, function: Callable[[], Result]) -> Result:
        """Run `function` in the server's loop, where the store may be touched."""
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result(30)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

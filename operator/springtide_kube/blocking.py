"""The client for programs without an event loop: a thread runs one.

Threads: any may call; each call waits in its own thread for the one of the event loop, which alone touches
the client.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from springtide_kube.client import Caller, Client
from springtide_kube.connection import Connections, from_kubeconfig
from springtide_kube.content_types import JSON
from springtide_kube.loop_thread import LoopThread

Object = dict[str, Any]
Result = TypeVar("Result")


class BlockingClient:
    """The requests of `Client`, which is at `client`. Use as `with`."""

    def __init__(self, kubeconfig: Path, caller: Caller, timeout: float = 10.0) -> None:
        """Begin the thread; nobody is asked yet.

        Args:
            kubeconfig: path.
            caller: who asks.
            timeout: of a request, in seconds.
        """
        self._thread = LoopThread("kubernetes client")
        self.client = Client(Connections(partial(from_kubeconfig, [str(kubeconfig)])), caller, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, and end the thread."""
        if self._thread.closed:
            return
        try:
            self.run(self.client.close())
        finally:
            self._thread.close()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return what a coroutine does in the event loop of the client; it is cancelled with its caller."""
        return self._thread.run(work)

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = JSON, **query: str
    ) -> Object:
        """Send a request, and return the answer's JSON.

        Args:
            method: of HTTP.
            path: of the URL, from `/api` or `/apis` on.
            body: plain JSON; None: no body.
            content_type: of the body.
            query: parameters of the URL.

        Raises:
            ApiRefusal: the server refuses.
            Unreachable: it does not answer in time.
        """
        return self.run(self.client.request(method, path, body, query, content_type))

    def text(self, path: str, **query: str) -> str:
        """Return what is at a path as it is: logs are no JSON.

        Args:
            path: of the URL.
            query: parameters of the URL.

        Raises:
            ApiRefusal: the server refuses.
            Unreachable: it does not answer in time.
        """
        return self.run(self.client.text(path, query))

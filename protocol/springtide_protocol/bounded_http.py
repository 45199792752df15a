"""The HTTP server behind every metrics port: few connections, few threads, small requests, short times.

Anybody on the pod network may reach such a port, in some pods that of the training process itself. So a
request has a deadline as a whole and one connection carries one request; whoever sends slowly, reads slowly
or comes in hundreds loses connections of its own, and computing an answer takes a bounded share of the
processor.

Threads and locks: one thread accepts; each connection has a thread of its own, at most as many as `_room` has
places, which computes the answer. The lock of a throttled value is held while it computes, so that one thread
computes and the others wait for its result. `in_loop` is called from those threads, for values that live in
an event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Generic, TypeVar
from urllib.parse import parse_qs

from springtide_protocol.lobby import Guest, Lobby

log = logging.getLogger("springtide.http")

MAX_THREADS = 8
MAX_HEAD_BYTES = 16 * 1024
REQUEST_SECONDS = 5.0
"""Limit from the connection to the last byte of the answer."""
SHARE = 0.1
"""Share of one processor that computing answers may take in the long run."""
BURST_SECONDS = 1.0
"""Processor time that may be used at once, so that an ordinary scrape always gets numbers of now."""
PLAIN = "text/plain; charset=utf-8"

_POLL_SECONDS = 0.25

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Request:
    """query: the first value of each name. headers: by name in lower case."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    content_type: str = PLAIN


def in_words(status: int, words: str) -> Reply:
    """Return a reply of plain text.

    Args:
        status: of HTTP.
        words: one line.
    """
    return Reply(status, f"{words}\n".encode())


Answer = Callable[[Request], Reply]


class ThrottledValue(Generic[Value]):
    """Computes a value one at a time, and says the last one again to whoever asks more than their share.

    So asking without a pause costs a tenth of a processor, and a scrape sees numbers of now.
    """

    def __init__(self, compute: Callable[[], Value], clock: Callable[[], float] = time.monotonic) -> None:
        self._compute, self._clock = compute, clock
        self._lock = threading.Lock()
        self._value: Value | None = None
        self._credit = BURST_SECONDS
        self._credited_at = clock()

    def __call__(self) -> Value:
        with self._lock:
            began = self._clock()
            self._credit = min(BURST_SECONDS, self._credit + SHARE * (began - self._credited_at))
            self._credited_at = began
            if self._value is None or self._credit > 0:
                self._value = self._compute()
                self._credit -= min(BURST_SECONDS, self._clock() - began)
            return self._value


def in_loop(loop: asyncio.AbstractEventLoop, compute: Callable[[], Value], seconds: float) -> Value:
    """Compute in the thread of an event loop, for values that live there.

    Args:
        loop: that owns the values; not the caller's own.
        compute: is called in the loop's thread; its exception is raised here.
        seconds: to wait for it.

    Raises:
        TimeoutError: the loop has not got round to it within `seconds`.
    """

    future: concurrent.futures.Future[Value] = concurrent.futures.Future()

    def call() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(compute())
        except Exception as error:
            future.set_exception(error)

    try:
        loop.call_soon_threadsafe(call)
        return future.result(seconds)
    except concurrent.futures.TimeoutError:
        future.cancel()
        raise TimeoutError(f"the event loop has not answered within {seconds:g} s") from None
    except RuntimeError:
        if not loop.is_closed():
            raise
        raise TimeoutError("this process ends") from None


class BoundedServer:
    """Serves GET at once, in threads of its own; `close` ends everything.

    Args:
        answer: called from several threads. Its exceptions become an answer 500 and a line in the log.
        host: the one address to listen on; all when empty.
        port: 0 for a free one.
        threads: connections at a time, and so threads.
        seconds: for a request as a whole.

    Raises:
        OSError: the port cannot be listened on.
    """

    def __init__(
        self,
        answer: Answer,
        host: str,
        port: int,
        *,
        threads: int = MAX_THREADS,
        seconds: float = REQUEST_SECONDS,
    ) -> None:
        self._answer = answer
        self.lobby = Lobby(threads, seconds)
        self._listener = _listen(host, port)
        self._listener.settimeout(_POLL_SECONDS)
        self.port = int(self._listener.getsockname()[1])
        self._room = threading.BoundedSemaphore(threads)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept_for_ever, name="springtide-metrics", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 2.0) -> None:
        """Stop listening and drop the connections that are open. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):  # a blocked accept() is not woken by close() alone
            self._listener.shutdown(socket.SHUT_RDWR)
        self.lobby.close()
        self._thread.join(timeout)
        self._listener.close()

    def _accept_for_ever(self) -> None:
        told = -math.inf
        while not self._closed.is_set():
            self.lobby.expire()
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closed.is_set():
                    return
                if time.monotonic() - told > 60.0:
                    told = time.monotonic()
                    log.warning("metrics: accept: %s", error)
                self._closed.wait(_POLL_SECONDS)
                continue
            self._admit(sock, str(address[0]))

    def _admit(self, sock: socket.socket, address: str) -> None:
        try:
            guest = self.lobby.enter(sock, address)
        except OSError:  # no descriptor for it
            guest = None
        # Whoever was dropped for this one ends at once; its thread needs a moment.
        if guest is None or not self._room.acquire(timeout=1.0):
            if guest is not None:
                self.lobby.leave(guest)
            sock.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(sock, guest), name="springtide-metrics-request", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("metrics: no thread for a request: %s", error)
            self.lobby.leave(guest)
            sock.close()
            self._room.release()

    def _serve(self, sock: socket.socket, guest: Guest) -> None:
        try:
            sock.settimeout(self.lobby.seconds)
            head = _read_head(sock)
            if head is None:
                return
            if not self.lobby.serve(guest):
                return
            exchange = _Exchange(head, sock, guest.address, self._answer)
            self.lobby.served(guest)
            exchange.send()
        except OSError:
            pass  # the peer has gone, or was dropped
        except Exception:
            log.exception("metrics: a request failed")
        finally:
            self.lobby.leave(guest)
            sock.close()
            self._room.release()


def serve(answer: Answer, host: str, port: int) -> BoundedServer:
    """Serve on `port`, or on a free one when that is taken.

    Args:
        answer: called from several threads.
        host: the one address to listen on; all when empty.
        port: 0 for a free one.

    Raises:
        OSError: no port could be had.
    """
    try:
        return BoundedServer(answer, host, port)
    except OSError as error:
        log.warning("metrics port %d is not free (%s): another one is taken", port, error.strerror or error)
        return BoundedServer(answer, host, 0)


def _listen(host: str, port: int) -> socket.socket:
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=64)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=64)


def _read_head(sock: socket.socket) -> bytes | None:
    """A request up to its empty line; None for one that is too large, or that does not come."""
    head = bytearray()
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        if len(head) > MAX_HEAD_BYTES:
            sock.sendall(b"HTTP/1.0 431 Request Header Fields Too Large\r\nConnection: close\r\n\r\n")
            return None
        part = sock.recv(4096)
        if not part:
            return None
        head += part
    return bytes(head)


class _Exchange(BaseHTTPRequestHandler):
    """One request that has come whole, and its answer: parsed by the standard library, sent in one piece."""

    server_version = "springtide"
    sys_version = ""

    def __init__(self, head: bytes, sock: socket.socket, address: str, answer: Answer) -> None:
        self._head, self._answer = head, answer
        super().__init__(sock, (address, 0), None)  # type: ignore[arg-type]

    def setup(self) -> None:
        self.connection = self.request
        self.rfile: io.BufferedIOBase = io.BytesIO(self._head)
        self.wfile: io.BufferedIOBase = io.BytesIO()

    def finish(self) -> None:
        """Send nothing yet: `send` does."""

    def send(self) -> None:
        """Send the answer, to a peer that may read it slowly or not at all. Raises OSError."""
        assert isinstance(self.wfile, io.BytesIO)
        self.connection.sendall(self.wfile.getbuffer())
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def do_GET(self) -> None:
        self._reply(True)

    def do_HEAD(self) -> None:
        self._reply(False)

    def _reply(self, body: bool) -> None:
        path, _, query = self.path.partition("?")
        try:
            asked = {name: values[0] for name, values in parse_qs(query, max_num_fields=16).items()}
        except ValueError as error:
            self.send_error(400, str(error))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            reply = self._answer(Request(path, asked, headers))
        except TimeoutError as error:
            reply = in_words(503, str(error))
        except Exception:
            log.exception("metrics: %s failed", path)
            reply = in_words(500, "this failed: the log says why")
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if body:
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)

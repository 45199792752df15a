"""A worker process's stream to the coordinator, on a thread of its own.

Threads and locks: `_lock` guards the outbox, the call, the kept store entries, the newest incarnation and
`_over`; it is never held across a callback, a connect or a wait. The session's thread (`_run`) connects,
receives, and calls `hello`, `on_message` and `on_disconnected`; gRPC's sending thread takes messages out of
the outbox, which is a queue of its own; a timer cancels a call without a Welcome; `send`, `connected` and
`close` may be called from any thread.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import grpc

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc
from springtide_protocol import tls
from springtide_protocol.channel import client_options, token_metadata
from springtide_protocol.codec import (
    generation_from_proto,
    incarnation_from_proto,
    incarnation_to_proto,
    speaks_from_proto,
)
from springtide_protocol.grpc_errors import describe_error, status_of
from springtide_protocol.heartbeat import LIMIT as HEARTBEAT_LIMIT
from springtide_protocol.limits import MAX_MESSAGE_BYTES, MAX_STORE_VALUE_BYTES
from springtide_protocol.names import WITHOUT_JOB, Incarnation
from springtide_protocol.unknown_kinds import UnknownKinds
from springtide_protocol.versions import OWN, IncompatibleError, agreed, as_coordinator, as_worker, may_send

log = logging.getLogger("springtide.coordinator.client")

BACKOFF_FIRST = 0.1  # s
BACKOFF_LAST = 1.0  # s
WELCOME_TIMEOUT = 5.0  # s from Hello to Welcome


class MessageTooLargeError(ValueError):
    """The message would be refused by the coordinator; the text says the limit."""


class SessionClosedError(RuntimeError):
    """The session was closed by this process, or refused for good; the text says which and why."""


class _Outbox:
    """The messages of one stream; gRPC's sending thread takes them out."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[pb.WorkerMessage | None] = queue.SimpleQueue()

    def put(self, message: pb.WorkerMessage) -> None:
        self._queue.put(message)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[pb.WorkerMessage]:
        while (message := self._queue.get()) is not None:
            yield message


class SessionClient:
    """A worker process's stream to the coordinator, for the whole life of the process.

    A thread of its own connects, says Hello, and hands every message of the coordinator to `on_message`; when
    the stream breaks it connects again, 0.1-1 s later.

    * `hello()` is asked at every connection, on that thread, and returns the present state of the process.
      `send` during a break does nothing, because the next Hello tells the outcome; the exception is
      StoreEntry: those of the newest generation are kept and sent again. Other facts (the reason why it
      parked, commits since `Welcome.known`, the stage of Ended) are sent again by `on_message` when it gets a
      Welcome.
    * The first message handed over on each stream is Welcome or Refused. A coordinator of a lower incarnation
      than the greatest seen is left at once and nothing of it is handed over. `hello()` need not fill
      `newest_incarnation`; it is filled in here.
    * `on_message` gets `Refused`, too. With `retry` the client connects again by itself; without it the
      thread ends, and `send` raises SessionClosedError.
    * A callback must not block: the next message waits for it. An exception that it raises ends the session,
      and `close` or `send` raise SessionClosedError from it.

    Args:
        address: `host:port` of the coordinator's Service.
        token: the job's token.
        hello: gives a fresh Hello.
        on_message: takes every message, in order, on the receiving thread.
        on_disconnected: told on the receiving thread when a stream that was welcomed broke.
        keepalive: seconds until a coordinator that gives no sign of life is left, at most.
        authority: the certificate, in PEM, that the coordinator must have; empty: no TLS.
    """

    def __init__(
        self,
        address: str,
        token: str,
        hello: Callable[[], pb.Hello],
        on_message: Callable[[pb.CoordinatorMessage], None],
        *,
        on_disconnected: Callable[[str], None] | None = None,
        keepalive: float = HEARTBEAT_LIMIT,
        authority: str = "",
    ) -> None:
        self._address = address
        self._authority = authority
        self._metadata = token_metadata(token)
        self._hello = hello
        self._on_message = on_message
        self._on_disconnected = on_disconnected
        self._keepalive = keepalive
        self._lock = threading.Lock()
        self._outbox: _Outbox | None = None
        self._call: grpc.Call | None = None
        self._store: dict[str, pb.WorkerMessage] = {}
        self._store_generation = WITHOUT_JOB
        self._newest: Incarnation | None = None
        self._capabilities: frozenset[str] = frozenset()
        self._unknown = UnknownKinds()
        self._welcomed = threading.Event()
        self._closing = threading.Event()
        self._over: SessionClosedError | None = None
        self.last_error = "not connected yet"
        self._thread = threading.Thread(target=self._run, name="springtide-session", daemon=True)

    def start(self) -> None:
        """Begin to connect; returns at once."""
        self._thread.start()

    def __enter__(self) -> SessionClient:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether a stream is open and was welcomed."""
        return self._welcomed.is_set()

    @property
    def newest_incarnation(self) -> Incarnation | None:
        """Greatest incarnation that welcomed this process or that its Hello named."""
        return self._newest

    def wait_connected(self, timeout: float) -> None:
        """Wait until welcomed.

        Raises:
            TimeoutError: not within `timeout` seconds; names the coordinator and the last error.
            SessionClosedError: refused for good, or closed.
        """
        deadline = time.monotonic() + timeout
        while not self._welcomed.wait(min(0.1, max(0.0, deadline - time.monotonic()))):
            if self._over is not None:
                raise self._over
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the coordinator at {self._address} has not answered within {timeout:g} s:"
                    f" {self.last_error}"
                )

    def send(self, message: pb.WorkerMessage) -> bool:
        """Send from any thread, without waiting; False while there is no stream, and for a message of a kind
        that the coordinator does not understand.

        Raises:
            MessageTooLargeError: the message is not sent.
            SessionClosedError: no stream will come any more.
        """
        check_size(message)
        with self._lock:
            if self._over is not None:
                raise self._over
            if message.WhichOneof("message") == "store_set":
                self._keep_store_entry(message)
            if self._outbox is None or not may_send(message.WhichOneof("message"), self._capabilities):
                return False
            self._outbox.put(message)
            return True

    def close(self, timeout: float = 2.0) -> None:
        """Send what is queued, end the stream and the thread; at the latest after `timeout` seconds.

        Raises:
            SessionClosedError: a callback had failed; its exception is the cause.
        """
        deadline = time.monotonic() + timeout
        self._closing.set()
        with self._lock:
            if self._outbox is not None:
                self._outbox.end()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                with self._lock:
                    call = self._call
                if call is not None:
                    call.cancel()
                self._thread.join(1.0)
        with self._lock:
            failed = self._over
            self._over = self._over or SessionClosedError("this session was closed")
        if failed is not None and failed.__cause__ is not None:
            raise failed

    # ---- the session's thread ----

    def _run(self) -> None:
        backoff = BACKOFF_FIRST
        while not self._closing.is_set():
            started = time.monotonic()
            try:
                welcomed = self._session()
            except SessionClosedError as error:
                self._end(error)
                return
            except Exception as error:  # of a callback: the session cannot go on, and its owner is told
                over = SessionClosedError(f"a callback of the session failed: {error!r}")
                over.__cause__ = error
                log.error("a callback of the session failed", exc_info=error)
                self._end(over)
                return
            if welcomed:
                backoff = BACKOFF_FIRST
            if self._closing.is_set():
                return
            pause = backoff * random.uniform(0.7, 1.0) - (time.monotonic() - started)
            self._closing.wait(max(0.02, pause))
            backoff = min(BACKOFF_LAST, backoff * 2)

    def _end(self, error: SessionClosedError) -> None:
        with self._lock:
            self._over = error

    def _session(self) -> bool:
        """One stream, from Hello to its end; True when it was welcomed."""
        channel = tls.channel(self._address, client_options(self._keepalive), self._authority)
        outbox = _Outbox()
        welcomed = False
        reason = "the coordinator ended the stream"
        try:
            with self._lock:
                # From here on `send` goes to the new stream: nothing is lost between hello() and the stream.
                self._outbox = waiting = _Outbox()
            outbox.put(pb.WorkerMessage(hello=self._fresh_hello()))
            with self._lock:
                for message in self._store.values():
                    outbox.put(message)
                waiting.end()
                for message in waiting:
                    outbox.put(message)
                self._outbox = outbox
                if self._closing.is_set():
                    outbox.end()
                call = pb_grpc.CoordinatorStub(channel).Session(  # type: ignore[no-untyped-call]
                    iter(outbox), metadata=self._metadata
                )
                self._call = call
            watchdog = threading.Timer(WELCOME_TIMEOUT, call.cancel)
            watchdog.daemon = True
            watchdog.start()
            try:
                for message in call:
                    watchdog.cancel()
                    if not welcomed and not self._accepts(message):
                        reason = f"left a coordinator that is out of date: {self.last_error}"
                        return False
                    if message.WhichOneof("message") == "welcome":
                        welcomed = True
                        self._welcomed.set()
                    elif self._unknown.ignores(message, "the coordinator"):
                        continue
                    self._on_message(message)
                    if message.WhichOneof("message") == "refused":
                        reason = f"refused: {message.refused.reason}"
                        if not message.refused.retry:
                            raise SessionClosedError(reason)
            except grpc.RpcError as error:
                reason = describe_error(error)
                if status_of(error)[0] is grpc.StatusCode.UNAUTHENTICATED:
                    raise SessionClosedError(f"the coordinator at {self._address}: {reason}") from None
            finally:
                watchdog.cancel()
                watchdog.join()
            return welcomed
        finally:
            self.last_error = reason
            was_welcome = self._welcomed.is_set()
            self._welcomed.clear()
            with self._lock:
                if self._outbox is not None:
                    self._outbox.end()
                self._outbox = None
                outbox.end()
                if self._call is not None:
                    self._call.cancel()
                self._call = None
            channel.close()
            if was_welcome and self._on_disconnected is not None and not self._closing.is_set():
                self._on_disconnected(reason)

    def _fresh_hello(self) -> pb.Hello:
        hello = pb.Hello()
        hello.CopyFrom(self._hello())
        if hello.newest_incarnation.number:
            named = incarnation_from_proto(hello.newest_incarnation)
            self._newest = named if self._newest is None else max(self._newest, named)
        if self._newest is not None:
            hello.newest_incarnation.CopyFrom(incarnation_to_proto(self._newest))
        return hello

    def _accepts(self, message: pb.CoordinatorMessage) -> bool:
        """Check the first message of a stream. Raise SessionClosedError for a release too far away."""
        kind = message.WhichOneof("message")
        if kind == "refused":
            return True
        if kind != "welcome":
            self.last_error = f"the first message was {kind}, not Welcome"
            return False
        incarnation = incarnation_from_proto(message.welcome.incarnation)
        if self._newest is not None and incarnation < self._newest:
            self.last_error = f"it is incarnation {incarnation}, {self._newest} was seen before"
            return False
        told = speaks_from_proto(message.welcome.speaks, message.welcome.protocol_version)
        try:
            self._capabilities = agreed(as_worker(OWN), as_coordinator(told)).capabilities
        except IncompatibleError as error:
            raise SessionClosedError(f"the coordinator at {self._address}: {error}") from None
        self._newest = incarnation
        return True

    def _keep_store_entry(self, message: pb.WorkerMessage) -> None:
        """Keep what another stream has to be told again: the entries of the newest generation alone. One of a
        group that was given up meanwhile may come late, by another thread.
        """
        entry = message.store_set
        name = generation_from_proto(entry.generation) or WITHOUT_JOB
        if name > self._store_generation:
            self._store_generation, self._store = name, {}
        if name == self._store_generation:
            self._store[entry.key] = message


def check_size(message: pb.WorkerMessage) -> None:
    """Raises MessageTooLargeError when the coordinator would refuse the message."""
    if message.WhichOneof("message") == "store_set" and len(message.store_set.value) > MAX_STORE_VALUE_BYTES:
        raise MessageTooLargeError(
            f"store entry {message.store_set.key!r} has {len(message.store_set.value)} bytes,"
            f" the limit is {MAX_STORE_VALUE_BYTES}"
        )
    size = message.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        kind = message.WhichOneof("message")
        raise MessageTooLargeError(
            f"a {kind} message of {size} bytes, the limit is {MAX_MESSAGE_BYTES}: send it in parts"
        )

"""A parameter server's stream to the coordinator.

Threads and locks: `_lock` guards the call, the queue of the stream and the reason for leaving; it is held for
assignments only. The stream's thread (`_run`) connects, receives and calls the callbacks; a timer cancels a
call without a Welcome; `leave` and `close` may be called from any thread.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc
from springtide_protocol import tls
from springtide_protocol.channel import client_options, token_metadata
from springtide_protocol.codec import (
    incarnation_from_proto,
    incarnation_to_proto,
    speaks_from_proto,
    speaks_to_proto,
)
from springtide_protocol.grpc_errors import describe_error, status_of
from springtide_protocol.heartbeat import LIMIT
from springtide_protocol.names import Incarnation
from springtide_protocol.unknown_kinds import UnknownKinds
from springtide_protocol.versions import OWN, agree, as_coordinator, as_server

log = logging.getLogger("springtide.coordinator.client")

BACKOFF_FIRST = 0.1  # s
BACKOFF_LAST = 1.0  # s
WELCOME_TIMEOUT = 5.0  # s from ServerHello to Welcome


class ServeClient:
    """Keeps one stream open for the life of the process, on a thread of its own; reconnects 0.1-1 s later.

    The stream is how the coordinator knows that the server lives. It ends for good when the coordinator lets
    the server go or refuses it: `on_end` gets the reason and whether that is as it should be, once, on that
    thread. A coordinator of a lower incarnation than the greatest seen is left at once.

    Args:
        address: `host:port` of the coordinator's Service.
        token: the job's token.
        server: who this process is.
        keepalive: seconds until a coordinator that gives no sign of life is left, at most.
        authority: the certificate, in PEM, that the coordinator must have; empty: no TLS.
    """

    def __init__(
        self,
        address: str,
        token: str,
        server: pb.Server,
        on_end: Callable[[str, bool], None],
        *,
        keepalive: float = LIMIT,
        authority: str = "",
    ) -> None:
        self.address = address
        self._authority = authority
        self._metadata = token_metadata(token)
        self._server = server
        self._on_end = on_end
        self._keepalive = keepalive
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[pb.ServerMessage | None] | None = None
        self._call: grpc.Call | None = None
        self._leaving = ""
        self._newest: Incarnation | None = None
        self._connected = False
        self._unknown = UnknownKinds()
        self._closing = threading.Event()
        self.last_error = "not connected yet"
        self._thread = threading.Thread(target=self._run, name="springtide-serve", daemon=True)

    def start(self) -> None:
        """Begin to connect; returns at once."""
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether a stream is open and was welcomed."""
        return self._connected

    def leave(self, reason: str) -> None:
        """Tell the coordinator, now or at the next connection, that the server is to end; returns at once."""
        with self._lock:
            self._leaving = self._leaving or reason
            if self._outbox is not None:
                self._outbox.put(pb.ServerMessage(leaving=pb.ServerLeaving(reason=self._leaving)))

    def close(self, timeout: float = 5.0) -> None:
        """End the stream and the thread.

        Raises:
            TimeoutError: the thread has not ended within `timeout` seconds.
        """
        self._closing.set()
        with self._lock:
            if self._outbox is not None:
                self._outbox.put(None)
            if self._call is not None:
                self._call.cancel()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the stream to {self.address} has not ended within {timeout:g} s")

    # ---- the stream's thread

    def _run(self) -> None:
        backoff = BACKOFF_FIRST
        while not self._closing.is_set():
            began = time.monotonic()
            end = self._stream()
            if end is not None:
                self._closing.set()
                self._on_end(*end)
                return
            welcomed = self._newest is not None and time.monotonic() - began > BACKOFF_LAST
            backoff = BACKOFF_FIRST if welcomed else min(BACKOFF_LAST, backoff * 2)
            self._closing.wait(backoff * random.uniform(0.7, 1.0))

    def _stream(self) -> tuple[str, bool] | None:
        """One stream, until it breaks (None), or until it must not be opened again."""
        channel = tls.channel(self.address, client_options(self._keepalive), self._authority)
        outbox: queue.SimpleQueue[pb.ServerMessage | None] = queue.SimpleQueue()
        watchdog: threading.Timer | None = None
        try:
            with self._lock:
                if self._closing.is_set():
                    return None
                outbox.put(pb.ServerMessage(hello=self._hello()))
                call = pb_grpc.CoordinatorStub(channel).Serve(  # type: ignore[no-untyped-call]
                    _messages(outbox), metadata=self._metadata
                )
                self._outbox, self._call = outbox, call
            watchdog = threading.Timer(WELCOME_TIMEOUT, call.cancel)
            watchdog.daemon = True
            watchdog.start()
            for order in call:
                watchdog.cancel()
                match order.WhichOneof("message"):
                    case "welcome":
                        told = speaks_from_proto(order.welcome.speaks, order.welcome.protocol_version)
                        if isinstance(agreement := agree(as_server(OWN), as_coordinator(told)), str):
                            self.last_error = agreement
                            return self.last_error, False
                        incarnation = incarnation_from_proto(order.welcome.incarnation)
                        if self._newest is not None and incarnation < self._newest:
                            self.last_error = (
                                f"it is incarnation {incarnation}, {self._newest} was seen before"
                            )
                            return None
                        self._newest, self._connected = incarnation, True
                        log.info("the coordinator at %s knows this server", self.address)
                    case "leave":
                        return f"the coordinator lets it go: {order.leave.reason}", True
                    case "refused":
                        self.last_error = f"refused: {order.refused.reason}"
                        return None if order.refused.retry else (self.last_error, False)
                    case None:
                        self._unknown.ignores(order, "the coordinator")
            self.last_error = "the coordinator ended the stream"
        except grpc.RpcError as error:
            self.last_error = describe_error(error)
            if status_of(error)[0] is grpc.StatusCode.UNAUTHENTICATED:
                return f"the coordinator at {self.address}: {self.last_error}", False
        finally:
            with self._lock:
                self._outbox, self._call, self._connected = None, None, False
            outbox.put(None)
            if watchdog is not None:
                watchdog.cancel()
                watchdog.join()
            channel.close()
        return None

    def _hello(self) -> pb.ServerHello:
        hello = pb.ServerHello(
            protocol_version=OWN.oldest,
            speaks=speaks_to_proto(OWN),
            server=self._server,
            leaving=bool(self._leaving),
        )
        if self._newest is not None:
            hello.newest_incarnation.CopyFrom(incarnation_to_proto(self._newest))
        return hello


def _messages(outbox: queue.SimpleQueue[pb.ServerMessage | None]) -> Iterator[pb.ServerMessage]:
    while (message := outbox.get()) is not None:
        yield message

"""A connection that carries frames: bytes go from and to the caller's memory, without a copy of ours.

Threads and locks: one thread receives; any thread sends. `_sending` lets one of them at a time put a frame on
the socket whole, and is held while the socket takes it.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from springtide_ps.wire import auth, congestion
from springtide_ps.wire.frames import (
    HANDSHAKE_META_LIMIT,
    HEADER_BYTES,
    META_LIMIT,
    OLDEST_VERSION,
    PAYLOAD_LIMIT,
    VERSION,
    Frame,
    FrameError,
    Header,
    Kind,
    pack,
    unpack_header,
    unpack_meta,
    version_in,
)
from springtide_ps.wire.keys import KEEPALIVE_KEY
from springtide_ps.wire.tls import ClientContext, TlsSocket

HANDSHAKE_SECONDS: Final = 10.0
_AHEAD: Final = 4096
"""Bytes that are read at once where a frame begins: its header, its JSON and what follows, if it is there."""
_EMPTY: Final = memoryview(b"")


class PeerClosedError(ConnectionError):
    """The peer ended the connection between two frames."""


class RejectedError(ConnectionError):
    """The peer does not know the token, or is no parameter server of this job. A retry does not help."""


class Stream:
    """Frames over one socket. One thread may send while another receives."""

    def __init__(self, sock: socket.socket | TlsSocket) -> None:
        self.socket = sock
        self._ahead = memoryview(bytearray(_AHEAD))
        self._at = self._end = 0  # of what has been read ahead
        self._sending = threading.Lock()
        self._send_rate = read_send_rate(os.environ)
        self._free_again = 0.0
        self._on_tick: Callable[[], None] = lambda: None
        self.version = OLDEST_VERSION
        """The version of sent frames: once the handshake is over, the newest that both sides speak."""
        self.silence = 0
        """Ticks in a row in which a byte was waited for and none came."""
        self.keepalives = False
        """Whether the client wants to hear that the server lives, and the server says so."""
        with contextlib.suppress(OSError):  # a Unix socket has no delay
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frame: Frame, payload: memoryview = _EMPTY, since: float = math.inf) -> None:
        """Send a frame whole.

        Args:
            frame: its header and JSON.
            payload: its bytes.
            since: when it could have left, by `time.monotonic`.

        Raises:
            OSError: the connection is broken.
            FrameError: the frame is over the limits.
        """
        head = pack(frame, self.version)
        with self._sending:
            if not payload:
                self.socket.sendall(head)
                return
            if self._send_rate:
                self._wait_for_turn(len(payload) / self._send_rate, since)
            if isinstance(self.socket, TlsSocket):
                self.socket.sendall(head)
                self.socket.sendall(payload)
                return
            _send_both(self.socket, head, payload)

    def _wait_for_turn(self, seconds: float, since: float) -> None:
        """Wait until a line of `SPRINGTIDE_PS_PACE` would have carried these bytes (in `_sending`).

        A message arrives when it has been on the line for `seconds`; one that was waiting when the line
        became free follows without a gap.

        Args:
            seconds: how long the bytes are on the line.
            since: when they could have left, by `time.monotonic`.
        """
        begins = self._free_again if since <= self._free_again else time.monotonic()
        self._free_again = begins + seconds
        time.sleep(max(0.0, self._free_again - time.monotonic()))

    def receive(
        self, meta_limit: int = META_LIMIT, payload_limit: int = PAYLOAD_LIMIT
    ) -> tuple[Header, dict[str, Any]]:
        """Receive the next frame up to its payload, which is taken by `receive_into` or `skip`.

        Args:
            meta_limit: bytes of JSON at most.
            payload_limit: bytes of the payload at most.

        Returns:
            The header and the JSON.

        Raises:
            PeerClosedError: the stream has ended.
            FrameError: it is no frame.
            OSError: the connection is broken.
        """
        header = unpack_header(self._next(HEADER_BYTES, at_start=True), meta_limit, payload_limit)
        count = header.meta_bytes
        if not count:
            return header, {}
        if count <= _AHEAD:
            return header, unpack_meta(self._next(count))
        meta = bytearray(count)
        self.receive_into(memoryview(meta))
        return header, unpack_meta(meta)

    def receive_into(self, memory: memoryview) -> None:
        """Fill the memory. Raises PeerClosedError when the stream ends before."""
        got = min(len(memory), self._end - self._at)
        if got:
            memory[:got] = self._ahead[self._at : self._at + got]
            self._at += got
        while got < len(memory):
            got += self._receive_some(memory[got:] if got else memory)

    def _next(self, count: int, at_start: bool = False) -> memoryview:
        """Return the next `count` bytes, at most _AHEAD; they stay until the next call."""
        if self._at == self._end:
            self._at = self._end = 0
        elif self._at + count > _AHEAD:
            rest = bytes(self._ahead[self._at : self._end])
            self._at, self._end = 0, len(rest)
            self._ahead[: self._end] = rest
        while self._end - self._at < count:
            self._end += self._receive_some(self._ahead[self._end :], at_start and self._at == self._end)
        self._at += count
        return self._ahead[self._at - count : self._at]

    def _receive_some(self, memory: memoryview, at_start: bool = False) -> int:
        while True:
            try:
                count = self.socket.recv_into(memory)
            except BlockingIOError:
                self.silence += 1
                self._on_tick()
                continue
            self.silence = 0
            if count == 0:
                where = "" if at_start else " in the middle of a frame"
                raise PeerClosedError(f"the peer closed the connection{where}")
            return count

    def tick(self, seconds: float, on_tick: Callable[[], None]) -> None:
        """Call `on_tick` in the receiving thread each time that no byte has come for some time; its error is
        the receiver's.

        Args:
            seconds: without a byte.
            on_tick: called each time.
        """
        self._on_tick = on_tick
        if isinstance(self.socket, TlsSocket):
            self.socket.set_receive_timeout(seconds)
        else:
            whole = int(seconds)
            limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def skip(self, count: int) -> None:
        """Read and forget `count` bytes."""
        scratch = memoryview(bytearray(min(count, 1 << 16)))
        while count:
            taken = scratch[: min(count, len(scratch))]
            self.receive_into(taken)
            count -= len(taken)

    def abort(self) -> None:
        """End the connection now, also under a thread that sends or receives."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self.socket.close()


def _send_both(sock: socket.socket, head: bytes, payload: memoryview) -> None:
    sent = sock.sendmsg((head, payload))
    while sent < len(head):
        sent += sock.send(head[sent:])
    rest = payload[sent - len(head) :]
    if rest:
        sock.sendall(rest)


def read_send_rate(environment: Mapping[str, str]) -> float:
    """Bytes per second at which this process sends on each connection; 0: as fast as it can.

    SPRINGTIDE_PS_PACE is for measurements of how much waiting is hidden. Raise ValueError for no number.
    """
    text = environment.get("SPRINGTIDE_PS_PACE", "") or "0"
    try:
        send_rate = float(text)
    except ValueError:
        send_rate = -1.0
    if not 0 <= send_rate < float("inf"):
        raise ValueError(f"environment variable SPRINGTIDE_PS_PACE: {text!r} is no rate in bytes per second")
    return send_rate


def connect(
    address: tuple[str, int], token: auth.Tokens, timeout: float, tls: ssl.SSLContext | None = None
) -> tuple[Stream, dict[str, Any]]:
    """Connect to a server and prove the token.

    Args:
        address: host and port.
        token: the secret that both sides know; or several, of which the server knows one.
        timeout: seconds.
        tls: None: the connection is not encrypted.

    Returns:
        The stream, and what the server says of itself.

    Raises:
        RejectedError: either side does not know the token.
        OSError: there is no connection (TimeoutError among others).
    """
    sock: socket.socket | TlsSocket
    plain = sock = socket.create_connection(address, timeout=timeout)
    try:
        if tls is not None:
            name = tls.asks_for if isinstance(tls, ClientContext) else address[0]
            plain = tls.wrap_socket(plain, server_hostname=name)
            sock = TlsSocket(plain)
        stream = Stream(sock)
        header, meta = stream.receive(HANDSHAKE_META_LIMIT, 0)
        _expect(header, Kind.CHALLENGE)
        theirs, ours = auth.nonce_in(meta.get("nonce")), auth.nonce()
        if theirs is None:
            raise RejectedError(f"{address[0]}:{address[1]} does not speak as a parameter server")
        version = version_in(meta)
        newest, *others = auth.proofs(token, "client", theirs, ours)
        answer = {"nonce": ours, "proof": newest, KEEPALIVE_KEY: True, "newest": VERSION}
        if others:
            answer["proofs"] = others
        stream.send(Frame(Kind.PROOF, meta=answer))
        # Closed without a word: it has too many connections, or dies. That may pass, unlike its refusal.
        header, meta = stream.receive(META_LIMIT, 0)
        if header.kind is Kind.REFUSED:
            raise RejectedError(f"{address[0]}:{address[1]} refused this process's token")
        _expect(header, Kind.ACCEPTED)
        if auth.known_token([meta.get("proof")], token, "server", theirs, ours) is None:
            raise RejectedError(f"{address[0]}:{address[1]} does not know this job's token")
        stream.keepalives, stream.version = meta.get(KEEPALIVE_KEY) is True, version
        congestion.choose(plain)
        sock.settimeout(None)
        return stream, meta
    except BaseException:
        sock.close()
        raise


def accept(
    accepted: socket.socket, token: auth.Tokens, about: dict[str, Any], tls: ssl.SSLContext | None = None
) -> Stream:
    """Let a client prove the token, as the server of a connection; on errors the socket is closed.

    The limit of time is per wait; the caller bounds the handshake as a whole.

    Args:
        accepted: the connection's socket.
        token: the secret that both sides know; or several, of which the client knows one.
        about: the server's description of itself.
        tls: None: the connection is not encrypted.

    Returns:
        The stream.

    Raises:
        RejectedError: either side does not know the token.
        FrameError: the client does not speak the protocol.
        OSError: the connection ends.
    """
    sock: socket.socket | TlsSocket = accepted
    try:
        accepted.settimeout(HANDSHAKE_SECONDS)
        if tls is not None:
            accepted = tls.wrap_socket(accepted, server_side=True)
            sock = TlsSocket(accepted)
        stream = Stream(sock)
        ours = auth.nonce()
        stream.send(Frame(Kind.CHALLENGE, meta={"nonce": ours, "newest": VERSION}))
        header, meta = stream.receive(HANDSHAKE_META_LIMIT, 0)
        _expect(header, Kind.PROOF)
        theirs = auth.nonce_in(meta.get("nonce"))
        given, more = [meta.get("proof")], meta.get("proofs")
        given += more if isinstance(more, list) else []
        known = None if theirs is None else auth.known_token(given, token, "client", ours, theirs)
        if theirs is None or known is None:
            stream.send(Frame(Kind.REFUSED, meta={"error": "RejectedError", "message": "another token"}))
            raise RejectedError("a client with another token was refused")
        stream.keepalives = meta.get(KEEPALIVE_KEY) is True
        proven = auth.proof(known, "server", ours, theirs)
        answer = {**about, "proof": proven, KEEPALIVE_KEY: stream.keepalives}
        stream.send(Frame(Kind.ACCEPTED, meta=answer))
        stream.version = version_in(meta)
        congestion.choose(accepted)
        sock.settimeout(None)
        return stream
    except BaseException:
        sock.close()
        raise


def _expect(header: Header, kind: Kind) -> None:
    if header.kind is not kind or header.payload_bytes:
        raise FrameError(f"expected {kind.name} at the start of a connection, got {header.kind.name}")


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`. Raise ValueError that says what is wrong."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is no address of a parameter server: write host:port")
    return host.strip("[]"), int(port)


def addresses(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Raise ValueError for none, or for one that is wrong."""
    if not texts:
        raise ValueError("no parameter servers are named: give at least one host:port")
    return [parse_address(text) for text in texts]

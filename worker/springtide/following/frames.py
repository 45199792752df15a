"""Frames between a member and a process that follows it: a JSON header, then raw bytes.

A connection is plain TCP, as those of the process groups are that carry the same gradients. It begins with a
secret that members have from the coordinator.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from springtide.comm.process_group import notice_silence
from springtide_protocol.limits import FOLLOW_SECRET_BYTES
from springtide_ps.wire import congestion

_HEAD: Final = struct.Struct("!IQ")
_MOST_HEADER_BYTES: Final = 16 << 20
_SECRET_SECONDS: Final = 2.0
"""Limit for the secret to come once a connection is there: others wait for it meanwhile."""


class FrameError(ValueError):
    """A frame is none that a process of this job sends."""


class Connection:
    """One connection. A thread sends or receives; any other one may shut it."""

    def __init__(self, sock: socket.socket, silence_seconds: float) -> None:
        """Take a socket over.

        Args:
            sock: connected; blocking.
            silence_seconds: limit of the silence of the peer's machine.
        """
        self._socket = sock
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_silence(sock, silence_seconds)

    def send(self, header: Mapping[str, Any], payload: Sequence[torch.Tensor] = ()) -> int:
        """Send a frame; return its bytes without the header.

        Args:
            header: of JSON's types.
            payload: uint8, one-dimensional, contiguous, on the CPU.

        Raises:
            OSError: the connection is broken, or was shut.
        """
        text = json.dumps(header).encode()
        size = sum(part.numel() for part in payload)
        self._socket.sendall(_HEAD.pack(len(text), size) + text)
        for part in payload:
            if part.numel():
                self._socket.sendall(_view(part))
        return size

    def receive(self) -> tuple[dict[str, Any], int]:
        """Receive a frame's header; return it and the bytes that follow, for `fill`.

        Raises:
            OSError: the connection is broken, was shut, or has ended.
            FrameError: what came is no frame.
        """
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head))
        length, size = _HEAD.unpack(head)
        if length > _MOST_HEADER_BYTES:
            raise FrameError(f"a header of {length} bytes was announced")
        text = bytearray(length)
        self._fill(memoryview(text))
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a header is no JSON: {error}") from None
        if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
            raise FrameError("a header has no kind")
        return header, size

    def fill(self, target: torch.Tensor) -> None:
        """Receive the next bytes of a frame.

        Args:
            target: uint8, one-dimensional, contiguous, on the CPU; it is filled.

        Raises:
            OSError: the connection is broken, was shut, or has ended.
        """
        if target.numel():
            self._fill(_view(target))

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("the connection has ended")
            view = view[count:]

    def shut(self) -> None:
        """Make all calls fail, here and at the peer. Any thread; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, when no call is under way."""
        self.shut()
        self._socket.close()


def _view(part: torch.Tensor) -> memoryview:
    raw: Any = part.numpy()
    return memoryview(raw)


def connect(address: str, secret: bytes, seconds: float) -> Connection:
    """Connect to a process that follows.

    Args:
        address: "ip:port" of it.
        secret: that it knows the members by.
        seconds: limit of the connecting, and then of the silence of its machine.

    Raises:
        OSError: nobody listens there, or not in time.
        ValueError: it is no address.
    """
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), seconds)
    try:
        sock.sendall(secret)
        connection = Connection(sock, seconds)
    except OSError:
        sock.close()
        raise
    congestion.choose(sock)
    return connection


def accept(listener: socket.socket, secret: bytes, seconds: float) -> Connection | None:
    """Accept one connection; None for one that does not know the secret.

    Args:
        listener: whose timeout limits the wait for a connection.
        secret: that was made for this.
        seconds: limit of the silence of the peer's machine, once it has said the secret.

    Raises:
        OSError: nobody connects in time, or the listener was closed.
    """
    sock, _ = listener.accept()
    told = bytearray()
    try:
        deadline = time.monotonic() + _SECRET_SECONDS
        while len(told) < FOLLOW_SECRET_BYTES and (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            if not (more := sock.recv(FOLLOW_SECRET_BYTES - len(told))):
                break
            told += more
        if hmac.compare_digest(bytes(told), secret):
            return Connection(sock, seconds)
    except OSError:
        pass  # as one that says nothing
    sock.close()
    return None

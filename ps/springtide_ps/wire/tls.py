"""TLS for the streams of parameters, where a job asks for it.

OpenSSL lets one thread at a time into a connection, and a stream is sent on and received from by two. So
every call here is short and under one lock, and waiting is done outside of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

from springtide_protocol.tls_names import server_name

_BEGIN: Final = "-----BEGIN "
_SLICE: Final = 256 * 1024  # bytes encrypted at a time

Result = TypeVar("Result")


class TlsSocket:
    """A socket after the handshake, as a stream uses it: one thread may send while another receives."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._timeout = sock.gettimeout()
        self._receive_timeout: float | None = None
        sock.setblocking(False)
        self._socket = sock
        self._lock = threading.Lock()

    def recv_into(self, memory: memoryview) -> int:
        """Bytes received; 0 at the end. Raises OSError (BlockingIOError: none within the receiver's own
        limit).
        """
        return self._attempt(lambda: self._socket.recv_into(memory), self._receive_timeout)

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        """Raises OSError."""
        view = memoryview(data).cast("B")
        while view:
            part = view[:_SLICE]
            view = view[self._attempt(lambda part=part: self._socket.send(part)) :]  # type: ignore[misc]

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket.

        Args:
            level: see `socket.setsockopt`, like `option`.
            option: its number.
            value: the new one.
        """
        self._socket.setsockopt(level, option, value)

    def settimeout(self, seconds: float | None) -> None:
        """How long each wait may take."""
        self._timeout = seconds

    def set_receive_timeout(self, seconds: float) -> None:
        """How long whoever receives waits before BlockingIOError, which breaks nothing."""
        self._receive_timeout = seconds

    def shutdown(self, how: int) -> None:
        """End the connection under whoever uses it. Not SSLSocket's own way: it forgets TLS first, and
        another thread would go on in the clear.
        """
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        self._socket.close()

    def _attempt(self, call: Callable[[], Result], limit: float | None = None) -> Result:
        while True:
            with self._lock:
                try:
                    return call()
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            self._wait(event, limit)

    def _wait(self, event: int, limit: float | None) -> None:
        number = self._socket.fileno()
        if number < 0:
            raise OSError(errno.EBADF, "the connection was closed")
        waiting = select.poll()
        waiting.register(number, event)
        if limit is not None:
            if not waiting.poll(limit * 1000):
                raise BlockingIOError(errno.EAGAIN, "nothing has come")
            return
        if not waiting.poll(None if self._timeout is None else self._timeout * 1000):
            raise TimeoutError("timed out")


class ClientContext(ssl.SSLContext):
    """A client's context, with the name that it asks for: servers with several certificates choose by it."""

    asks_for: str | None = None


def client_context(authority: str) -> ClientContext:
    """Trusts what `authority` (PEM) signs, whatever the server's name; of several, the first is asked for.

    Raises ValueError where it is none.
    """
    context = ClientContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.asks_for = server_name(authority)
    try:
        context.load_verify_locations(cadata=authority)
    except ssl.SSLError as error:
        raise ValueError(f"the certificate to trust cannot be read: {error}") from error
    return context


def server_context(
    certificate: str, key: str, former: Mapping[str, tuple[str, str]] | None = None
) -> ssl.SSLContext:
    """Make a server's TLS context.

    Args:
        certificate: the chain as PEM text, or the name of a file.
        key: its private key, likewise.
        former: certificates and keys that are shown to clients which ask for these names.

    Returns:
        The context.

    Raises:
        ValueError: they cannot be read.
        OSError: a file cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _file(certificate) as certificate_file, _file(key) as key_file:
        try:
            context.load_cert_chain(certificate_file, key_file)
        except ssl.SSLError as error:
            raise ValueError(f"the certificate and its key cannot be read: {error}") from error
    others = {name: server_context(*pair) for name, pair in (former or {}).items()}

    def choose(sock: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        if name in others:
            sock.context = others[name]

    if others:
        context.sni_callback = choose
    return context


@contextlib.contextmanager
def _file(text: str) -> Iterator[str]:
    """A file that holds the PEM text for a moment (Python's ssl reads keys from files alone), or the one that
    is named.
    """
    if not text.lstrip().startswith(_BEGIN):
        yield text
        return
    number, name = tempfile.mkstemp()
    try:
        with os.fdopen(number, "w") as file:
            file.write(text)
        yield name
    finally:
        os.unlink(name)

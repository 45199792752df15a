"""Listens for the processes' lifelines, whose end tells that a process has ended.

A process opens one for each of its streams and says the key that it got with Welcome; nothing more is said
on it, by either side. The kernel of its machine ends it in the orderly way (FIN) as soon as the process is
killed (`springtide_protocol.lifeline`), which is long before the stream breaks. A network that breaks, and a
machine that dies, never end a connection in that way: those are noticed by other means.

The connections are not encrypted, since nothing is said on them but a key that opens nothing: whoever reads
it and is quicker than the process itself could end it only, like everybody who can read and change a
connection.

Threads and tasks: everything here runs in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.lifeline import KEY_BYTES

log = logging.getLogger("springtide.coordinator")

MAX_GUESTS = 1024
"""Connections at a time that have not said a key; the oldest makes room for one more."""
GUEST_SECONDS = 10.0
BACKLOG = 1024


class Lifelines:
    """The lifelines of all streams.

    Args:
        on_ended: called with the stream's number and the member's id when a process has ended.
        host: address to tell processes; empty: the one where they reach the coordinator.
    """

    def __init__(self, on_ended: Callable[[int, str], None], host: str = "") -> None:
        self._on_ended = on_ended
        self._host = host
        self._port = 0
        self._sessions: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._members: dict[int, str] = {}
        self._lines: dict[int, _Line] = {}
        self._guests: dict[_Line, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> None:
        """Listen on a free port.

        Args:
            host: address to listen on; all addresses when empty.

        Raises:
            OSError: there is none to be had.
        """
        dual = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
        self._port = listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Line(self), sock=listener, backlog=BACKLOG)

    def announce(self, session: int, member: str) -> pb.Lifeline | None:
        """Return what to tell the process of a stream; None while nobody listens.

        Args:
            session: number of the stream.
            member: id of the process.
        """
        if self._server is None:
            return None
        self.drop(session)
        key = self._keys[session] = secrets.token_bytes(KEY_BYTES)
        self._sessions[key], self._members[session] = session, member
        return pb.Lifeline(host=self._host, port=self._port, key=key)

    def drop(self, session: int) -> None:
        """End the lifeline of a stream: what becomes of its process is of no interest any more.

        Args:
            session: number of the stream.
        """
        self._sessions.pop(self._keys.pop(session, b""), None)
        self._members.pop(session, None)
        if (line := self._lines.pop(session, None)) is not None:
            line.end()

    def close(self) -> None:
        """End all connections, and listen no more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for session in [*self._keys, *self._lines]:
            self.drop(session)
        for guest in list(self._guests):
            guest.end()

    # ---- called by the connections

    def enter(self, line: _Line) -> None:
        """Take in a connection that has said nothing yet."""
        self._guests[line] = None
        if len(self._guests) > MAX_GUESTS:
            next(iter(self._guests)).end()

    def claim(self, key: bytes) -> int | None:
        """Return the stream that a key is of; None: of none, or it has been said before.

        Args:
            key: said by the process.
        """
        return self._sessions.pop(key, None)

    def known(self, line: _Line, session: int) -> None:
        """Take in that a connection is the lifeline of a stream.

        Args:
            line: the connection.
            session: number of the stream.
        """
        self._guests.pop(line, None)
        self._lines[session] = line

    def ended(self, line: _Line, session: int | None, orderly: bool) -> None:
        """Take in that a connection has ended.

        Args:
            line: the connection.
            session: of which it was; None: it had not said.
            orderly: the other side ended it, and no error did.
        """
        self._guests.pop(line, None)
        if session is None or self._lines.get(session) is not line:
            return
        del self._lines[session]
        if orderly:
            self._on_ended(session, self._members[session])


class _Line(asyncio.Protocol):
    """One connection: first a guest, then the lifeline of a stream."""

    def __init__(self, lines: Lifelines) -> None:
        self._all = lines
        self._said = b""
        self._session: int | None = None
        self._transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._patience = asyncio.get_running_loop().call_later(GUEST_SECONDS, self.end)
        self._all.enter(self)

    def data_received(self, data: bytes) -> None:
        """Take the key; whoever says something else, or more, is cut off."""
        self._said += data
        if len(self._said) < KEY_BYTES:
            return
        if self._session is not None or (session := self._all.claim(self._said)) is None:
            self.end()
            return
        self._session = session
        assert self._patience is not None
        self._patience.cancel()
        self._all.known(self, session)

    def eof_received(self) -> None:
        self._all.ended(self, self._session, orderly=True)

    def connection_lost(self, error: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._all.ended(self, self._session, orderly=False)

    def end(self) -> None:
        """End the connection, and what is known of it."""
        self._all.ended(self, self._session, orderly=False)
        if self._transport is not None:
            self._transport.abort()

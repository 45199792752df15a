"""A TCP proxy that can be cut: while it is, connections stay open and nothing gets through, as on a network
that loses every packet; or they are reset, and so are new ones. For all clients or for some. Needs no rights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

_RESET = struct.pack("ii", 1, 0)  # linger: close with a reset


@dataclasses.dataclass(eq=False, slots=True)
class _Line:
    """One connection of a client (near) and what it is forwarded to (far). port: of the client."""

    near: socket.socket
    far: socket.socket
    port: int
    whole: threading.Event = dataclasses.field(default_factory=threading.Event)
    ended: threading.Barrier = dataclasses.field(default_factory=lambda: threading.Barrier(2))

    def shut(self) -> None:
        for sock in (self.near, self.far):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        for sock in (self.near, self.far):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.whole.set()
        self.shut()


class CutProxy:
    """Forwards 127.0.0.1:`port` to `target` (host, port), which may come and go.

    at: where it listens. holds_ends: while it is cut, nobody hears that the other side has ended, either.
    """

    def __init__(
        self, target: tuple[str, int], at: tuple[str, int] = ("127.0.0.1", 0), *, holds_ends: bool = False
    ) -> None:
        self._target, self._holds_ends = target, holds_ends
        self._listener = socket.create_server(at)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._lines: set[_Line] = set()
        self._is_cut: Callable[[int], bool] | None = None
        self._resets = False
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._spawn(self._accept)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self, of: Callable[[int], bool] | None = None, *, reset: bool = False) -> None:
        """of: whether the client with this port is cut off; None: all are. reset: instead of silence."""
        with self._lock:
            self._is_cut, self._resets = of or (lambda port: True), reset
            for line in self._lines:
                self._cut_line(line)

    def heal(self) -> None:
        with self._lock:
            self._is_cut = None
            for line in self._lines:
                line.whole.set()

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._closed = True
            lines, threads = list(self._lines), list(self._threads)
        for line in lines:
            line.whole.set()
            line.shut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in threads:
            thread.join(10)

    def _cut_line(self, line: _Line) -> None:
        if self._is_cut is None or not self._is_cut(line.port):
            line.whole.set()
        elif self._resets:
            line.reset()
        else:
            line.whole.clear()

    def _spawn(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, client = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for sock in (near, far):  # else small answers wait for acknowledgements of the ones before
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = _Line(near, far, int(client[1]))
            with self._lock:
                if self._closed:
                    near.close()
                    far.close()
                    return
                self._lines.add(line)
                self._cut_line(line)
            self._spawn(self._pump, line, near, far)
            self._spawn(self._pump, line, far, near)

    def _pump(self, line: _Line, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                line.whole.wait()
                sink.sendall(data)
        if self._holds_ends:
            line.whole.wait()
        line.shut()
        # The second of the two pumps closes both.
        if line.ended.wait() == 0:
            with self._lock:
                self._lines.discard(line)
            line.near.close()
            line.far.close()


def ports_of(pid: int) -> set[int]:
    """Local ports of the process's TCP connections (IPv4); empty where it has ended."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it has just been closed
                kind, _, inode = str(descriptor.readlink()).partition(":")
                if kind == "socket":
                    inodes.add(inode.strip("[]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[9] in inodes}

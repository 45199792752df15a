"""A TCP proxy that can be cut: while it is, connections stay open and nothing gets through, as on a network
that loses every packet. Needs no rights.
"""

from __future__ import annotations

import contextlib
import socket
import threading


class CutProxy:
    """Forwards 127.0.0.1:`port` to `target` (host, port), which may come and go. at: where it listens."""

    def __init__(self, target: tuple[str, int], at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target = target
        self._listener = socket.create_server(at)
        self.port = int(self._listener.getsockname()[1])
        self._whole = threading.Event()
        self._whole.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._spawn(self._accept)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._closed = True
            sockets, threads = list(self._sockets), list(self._threads)
        self._whole.set()
        for sock in (self._listener, *sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in threads:
            thread.join(10)

    def _spawn(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            ended = threading.Barrier(2)
            with self._lock:
                if self._closed:
                    near.close()
                    far.close()
                    return
                self._sockets |= {near, far}
            self._spawn(self._pump, near, far, ended)
            self._spawn(self._pump, far, near, ended)

    def _pump(self, source: socket.socket, sink: socket.socket, ended: threading.Barrier) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._whole.wait()
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        # The second of the two pumps closes both.
        if ended.wait() == 0:
            with self._lock:
                self._sockets -= {source, sink}
            source.close()
            sink.close()

"""A connection that ends as soon as its process does, long before the process's other ones.

The kernel takes a killed process apart in an order: first its memory, which takes 15 to 25 ms for a small
training process and 100 ms for one with 2.4 GB, then its descriptors, with which its connections end. Also,
children that it forked (a DataLoader's workers) keep what they inherited open, and
with it the connections, until they notice.

A thread may have a descriptor table of its own (`close_range(2)` with CLOSE_RANGE_UNSHARE, since Linux 5.9;
the default seccomp profiles of container runtimes allow it, unlike `unshare(2)`). That table goes when the
thread does, and threads end at once. So the lifeline's descriptor is in such a table alone: a kill ends the
connection within a millisecond, whatever the process is like. (The thread that happens to end last gives the
memory back. Where that is the lifeline's, once in six kills, all other connections end at once instead.)

Threads: `hold` makes a thread that connects and ends, which makes the one that holds the connection. The
latter may run no code that opens or closes descriptors, since their numbers mean others in its table: it has
all signals blocked, and waits in the kernel until the coordinator ends the connection. Two events tell each
of them how far the other is.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import signal
import socket
import threading

log = logging.getLogger("springtide.coordinator.client")

KEY_BYTES = 16
CONNECT_SECONDS = 5.0

_SYS_CLOSE_RANGE = 436  # on every architecture but alpha
_CLOSE_RANGE_UNSHARE = 2
_LAST_DESCRIPTOR = 0xFFFF_FFFF
# Where nobody answers any more, the kernel ends the connection, and with it the thread, after a minute.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))

_libc = ctypes.CDLL(None, use_errno=True)


def hold(host: str, port: int, key: bytes) -> None:
    """Open a connection to the coordinator, say a key on it, and keep it; return at once.

    It is kept until this process ends or the coordinator does not want it any more. The process does without
    one where it cannot be had: then its other connections tell of its end.

    Args:
        host: IP address of the coordinator. A name is not looked up: that would read the environment, which
            the script may be changing (docs/decisions/0125).
        port: at which the coordinator listens for lifelines.
        key: of the stream that this process has to the coordinator, KEY_BYTES long.
    """
    threading.Thread(target=_open, args=(host, port, key), name="springtide-lifeline", daemon=True).start()


def _open(host: str, port: int, key: bytes) -> None:
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(CONNECT_SECONDS)
            connection.connect((host, port))
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            _Holder(connection.fileno()).start()
            # Only now, when the end of the connection means the end of the process. This thread's descriptor
            # of it is closed at once, so that a child that is forked later inherits none.
            connection.sendall(key)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no thread to be had
        log.info("no lifeline to %s port %d: %s", host, port, error)


class _Holder:
    """A thread with a descriptor table of its own, in which there is one connection alone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._byte = ctypes.create_string_buffer(1)
        self._has_table, self._looked_at, self._is_alone = (threading.Event() for _ in range(3))
        self._error = 0
        self._own = False

    def start(self) -> None:
        """Start the thread; return when the connection is the only descriptor in its table.

        Raises:
            OSError: it has no table of its own, or not within CONNECT_SECONDS. No descriptor that was open
                before is closed.
        """
        probe = os.dup(self._descriptor)
        threading.Thread(target=self._hold, args=(probe,), name="springtide-lifeline", daemon=True).start()
        in_time = self._has_table.wait(CONNECT_SECONDS)
        try:
            if in_time and not self._error:
                # It raises where the thread has closed the probe for all: such a kernel knows the call, and
                # not its flag.
                os.fstat(probe)
                self._own = True
            os.close(probe)
        finally:
            self._looked_at.set()
        if self._error:
            raise OSError(self._error, os.strerror(self._error), "close_range")
        if not (in_time and self._is_alone.wait(CONNECT_SECONDS)):
            raise TimeoutError(f"its thread has no table of its own after {CONNECT_SECONDS:g} s")

    def _hold(self, probe: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._error = _close_range(probe, probe)
        self._has_table.set()
        self._looked_at.wait()
        if not self._own:
            return
        if self._descriptor > 0:
            _close_range(0, self._descriptor - 1)
        _close_range(self._descriptor + 1, _LAST_DESCRIPTOR)
        self._is_alone.set()
        while _libc.recv(self._descriptor, self._byte, 1, 0) > 0:
            pass


def _close_range(first: int, last: int) -> int:
    """Close descriptors in a table of the calling thread's own; return 0, or the number of the error."""
    arguments = (_SYS_CLOSE_RANGE, first, last, _CLOSE_RANGE_UNSHARE)
    return 0 if _libc.syscall(*map(ctypes.c_long, arguments)) == 0 else ctypes.get_errno()

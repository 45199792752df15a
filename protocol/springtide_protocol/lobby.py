"""Connections that have not said who they are yet: few at a time, each for a short time.

Threads and locks: `_lock` guards the list of guests and is held while a connection is shut down and closed,
which does not wait. The accepting thread enters guests and lets them expire; the thread of each connection
serves and leaves.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MAX_DESCRIPTORS = 65_536


@dataclass(eq=False, slots=True)
class Guest:
    """One connection in the lobby.

    address: of the peer's machine, without the port. busy: it has said all it has to say and waits for us, so
    no other takes its place. handle: a second descriptor of the connection, since TLS takes the first over.
    """

    address: str
    since: float
    handle: socket.socket
    busy: bool = False
    dropped: bool = False

    def drop(self) -> None:
        """End the connection under whichever thread reads or writes it."""
        self.dropped = True
        with contextlib.suppress(OSError):
            self.handle.shutdown(socket.SHUT_RDWR)


class Lobby:
    """Bounds how many connections may wait before they have proven anything, and for how long.

    Where it is full, a new connection takes the place of another one: of the address that has most of them,
    the oldest. So an address that floods the port drops its own connections, and a rightful client that is
    quick comes through even from the same address.

    Args:
        most: connections at a time.
        seconds: until a connection is dropped that has not left the lobby; `expire` does it.
    """

    def __init__(self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.seconds, self._clock = most, seconds, clock
        self.dropped = 0
        self._guests: list[Guest] = []  # the oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._guests)

    def enter(self, sock: socket.socket, address: str) -> Guest | None:
        """Take a connection in, dropping another one where the lobby is full.

        Args:
            sock: the connection; it is duplicated.
            address: of the peer, by which connections are counted.

        Returns:
            None when no other may be dropped.
        """
        with self._lock:
            if len(self._guests) >= self.most and not self._drop_one():
                return None
            guest = Guest(address, self._clock(), sock.dup())
            self._guests.append(guest)
            return guest

    def leave(self, guest: Guest) -> None:
        """Forget a connection, which has proven itself or has ended. A second call does nothing."""
        with self._lock, contextlib.suppress(ValueError):
            self._guests.remove(guest)
            guest.handle.close()

    def serve(self, guest: Guest) -> bool:
        """Mark that the rest is ours to do; False when the connection was dropped before."""
        with self._lock:
            guest.busy = not guest.dropped
            return guest.busy

    def served(self, guest: Guest) -> None:
        """Mark that the rest is the peer's to take: where it is slow, others may have its place."""
        with self._lock:
            guest.busy = False

    def expire(self) -> None:
        """Drop all that have been here for too long, also those that are served: they do not read."""
        until = self._clock() - self.seconds
        with self._lock:
            for guest in self._guests:
                if guest.since <= until and not guest.dropped:
                    self.dropped += 1
                    guest.drop()

    def close(self) -> None:
        """Drop all."""
        with self._lock:
            for guest in self._guests:
                guest.drop()
                guest.handle.close()
            self._guests.clear()

    def _drop_one(self) -> bool:
        waiting = [guest for guest in self._guests if not guest.busy]
        if not waiting:
            return False
        held = Counter(guest.address for guest in self._guests)
        # Of equals the first, which is the oldest.
        victim = max(waiting, key=lambda guest: held[guest.address])
        self.dropped += 1
        victim.drop()
        victim.handle.close()
        self._guests.remove(victim)
        return True


def raise_descriptor_limit(most: int = MAX_DESCRIPTORS) -> int:
    """Raise the process's soft limit of descriptors as far as it may, at most to `most`; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return most if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted

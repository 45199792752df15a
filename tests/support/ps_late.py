"""Servers whose values come as late as they may, so that whoever does not wait for them has old ones."""

from __future__ import annotations

import threading
from typing import Any

from ps_loose import until

from springtide.ps.backend import PsBackend
from springtide_ps.server.server import Server


class Late:
    """Servers whose answers come only when somebody waits for them.

    The last two steps are excepted: at their ends the servers are waited for anyway.

    Args:
        steps: how many the loop has.
    """

    def __init__(self, exchange: PsBackend, running: list[Server], steps: int) -> None:
        self._locks: list[threading.Lock] = []
        self._left = steps - 2
        self._offers = sum(chunk.nbytes for chunk in exchange.chunks) if exchange.asynchronous else 0
        self._running, self._commit, self._settle = running, exchange.active.commit, exchange.active.settle
        exchange.active.commit = self.commit  # type: ignore[method-assign]
        exchange.active.settle = self.settle  # type: ignore[method-assign]

    def commit(self, *args: Any, **named: Any) -> None:
        self._left -= 1
        if self._left < 0:
            self._commit(*args, **named)
            return
        # Else an offer would wait for the lock, and the question for a range behind it.
        until(lambda: sum(server.stashed_bytes for server in self._running) == self._offers, "all gradients")
        for server in self._running:
            for held in map(server.sync_handler.store.shard, server.sync_handler.store.keys):
                assert held.lock.acquire(timeout=30)
                self._locks.append(held.lock)
        self._commit(*args, **named)

    def settle(self, *args: Any, **named: Any) -> None:
        self.let_go()
        self._settle(*args, **named)

    def let_go(self) -> None:
        while self._locks:
            self._locks.pop().release()

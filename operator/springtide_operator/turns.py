"""Turns: so many jobs are planned and carried out at a time; those that train come first.

Without a limit a thousand jobs that start together have thousands of requests wait for the API server at
once, and all of them run into their timeouts. A job that waits for its turn is planned from what is known
when it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

AT_A_TIME = 32


class Turns:
    """For one event loop. Within a class, first come, first served."""

    def __init__(self, at_a_time: int = AT_A_TIME) -> None:
        self._free = at_a_time
        self._urgent: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait for a turn."""
        return sum(not future.done() for queue in (self._urgent, self._others) for future in queue)

    @contextlib.asynccontextmanager
    async def turn(self, urgent: bool = False) -> AsyncIterator[None]:
        """Wait for a turn and have it."""
        await self._take(self._urgent if urgent else self._others)
        try:
            yield
        finally:
            self._give()

    async def _take(self, queue: deque[asyncio.Future[None]]) -> None:
        if self._free > 0:
            self._free -= 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._give()  # the turn had just come
            raise

    def _give(self) -> None:
        for queue in (self._urgent, self._others):
            while queue:
                future = queue.popleft()
                if not future.done():
                    future.set_result(None)
                    return
        self._free += 1

"""A semaphore by namespace: so many jobs are planned and carried out at a time, each namespace in its turn.

Without a limit a thousand jobs that start together have thousands of requests wait for the API server at
once, and all of them run into their timeouts. Without an order among namespaces, two hundred jobs of one
tenant make another one's first pod wait for all of theirs. A job that waits for its turn is planned from what
is known when it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

AT_A_TIME = 32
PATIENCE = 4
"""Number of a namespace's urgent entries that come before another one of it: jobs that train never pause."""


@dataclass
class _Line:
    """Waiters of one namespace; urgent ones come first, but not for ever."""

    urgent: deque[asyncio.Future[None]] = field(default_factory=deque)
    others: deque[asyncio.Future[None]] = field(default_factory=deque)

    passed: int = 0  # urgent ones that came before another, one after the other

    def next(self) -> asyncio.Future[None] | None:
        """Take the first who still waits out of the line."""
        order = (self.others, self.urgent) if self.passed >= PATIENCE else (self.urgent, self.others)
        for queue in order:
            while queue:
                future = queue.popleft()
                if not future.done():
                    self.passed = self.passed + 1 if queue is self.urgent and self.others else 0
                    return future
        return None

    def waiting(self) -> int:
        return sum(not future.done() for queue in (self.urgent, self.others) for future in queue)


class PrioritySemaphore:
    """Semaphore for one event loop. Namespaces take turns, none has more than its share at a time, and within
    each one the urgent come first, then the order of arrival counts; every fifth turn is for the others.
    """

    def __init__(self, at_a_time: int = AT_A_TIME, share: int | None = None) -> None:
        """
        Args:
            at_a_time: How many have a turn.
            share: How many of one namespace; a quarter of all when left out: another finds one at once, and
                few requests before its own.
        """
        self._free = at_a_time
        self._share = share if share is not None else max(1, at_a_time // 4)
        self._held: Counter[str] = Counter()
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # whose turn comes next is first

    @property
    def waiting(self) -> int:
        """How many wait for a turn."""
        return sum(line.waiting() for line in self._lines.values())

    @contextlib.asynccontextmanager
    async def turn(self, urgent: bool = False, of: str = "") -> AsyncIterator[None]:
        """Wait for a turn and have it.

        Args:
            urgent: It comes before others of its namespace.
            of: The namespace.
        """
        await self._take(urgent, of)
        try:
            yield
        finally:
            self._give(of)

    async def _take(self, urgent: bool, of: str) -> None:
        if self._free > 0 and self._held[of] < self._share:  # who waits has its share, or none were free
            self._free -= 1
            self._held[of] += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._lines.setdefault(of, _Line())
        (line.urgent if urgent else line.others).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._give(of)  # the turn had just come
            raise

    def _give(self, of: str) -> None:
        self._free += 1
        self._held[of] -= 1
        if not self._held[of]:
            del self._held[of]
        for namespace in list(self._lines):
            if self._free == 0:
                return
            if self._held[namespace] >= self._share:
                continue
            future = self._lines[namespace].next()
            if future is None:
                del self._lines[namespace]
                continue
            self._lines.move_to_end(namespace)
            self._free -= 1
            self._held[namespace] += 1
            future.set_result(None)

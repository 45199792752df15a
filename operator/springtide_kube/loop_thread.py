"""An event loop in a thread of its own, for programs without one, or with one that is theirs (notebooks).

Threads: any may call `run`, and waits there; coroutines run in the thread of the loop alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

CLOSE_SECONDS = 5.0


class LoopThread:
    """Runs coroutines for callers that wait for them."""

    def __init__(self, name: str) -> None:
        """Begin the thread, which does not keep the interpreter alive. name: of the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Return whether the thread has ended."""
        return self._loop.is_closed()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin a coroutine; the future's `cancel()` cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return what a coroutine returns; it is cancelled with its caller."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread, and leave coroutines that still run as they are."""
        if self.closed:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        self._loop.close()

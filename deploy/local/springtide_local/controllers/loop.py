"""The loop of every controller: keys that may need work, one `reconcile` per key, again later when it fails.

Tasks: one event loop. Informers' callbacks add keys and set `_wake`; one task reconciles key after key, so a
controller never works on two at a time.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable

from springtide_local.informer import Change, Key, key_of
from springtide_local.ports import ApiError

_log = logging.getLogger(__name__)
_FIRST_RETRY = 0.05
_LONGEST_RETRY = 30.0


class Controller:
    """Level-triggered: any number of wishes for a key before its turn are one. `reconcile` looks at what is
    and does the rest.

    It returns when (seconds from now) the key is to be looked at again although nothing happens, or None.
    """

    def __init__(self, name: str, reconcile: Callable[[str, str], float | None]) -> None:
        self.name = name
        self._reconcile = reconcile
        self._due: dict[Key, None] = {}
        self._later: list[tuple[float, Key]] = []
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()

    def enqueue(self, namespace: str, name: str) -> None:
        """Note that an object may need work.

        Args:
            namespace: of the object.
            name: of the object.
        """
        self._due[(namespace, name)] = None
        self._wake.set()

    def on_change(self, change: Change) -> None:
        """A handler for the informer of the objects that are reconciled."""
        self.enqueue(*key_of(change.object))

    async def run(self) -> None:
        while True:
            now = time.monotonic()
            while self._later and self._later[0][0] <= now:
                self._due[heapq.heappop(self._later)[1]] = None
            if not self._due:
                timeout = self._later[0][0] - now if self._later else None
                try:
                    async with asyncio.timeout(timeout):
                        await self._wake.wait()
                except TimeoutError:
                    continue
                self._wake.clear()
                continue
            key = next(iter(self._due))
            del self._due[key]
            self._turn(key)
            # Others have their turn between two keys, however many there are.
            await asyncio.sleep(0)

    def _turn(self, key: Key) -> None:
        try:
            again = self._reconcile(*key)
        except Exception as error:
            count = self._failures[key] = self._failures.get(key, 0) + 1
            again = min(_FIRST_RETRY * 2 ** (count - 1), _LONGEST_RETRY)
            if isinstance(error, ApiError):
                _log.info("%s: %s/%s: %s; again in %.2g s", self.name, *key, error.message, again)
            else:
                _log.exception("%s: %s/%s: again in %.2g s", self.name, *key, again)
        else:
            self._failures.pop(key, None)
        if again is not None:
            heapq.heappush(self._later, (time.monotonic() + again, key))

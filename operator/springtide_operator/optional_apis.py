"""Which APIs that a cluster may have or not are served: found out by discovery, and looked at again now and
then, since they may be installed or removed at any time.

Tasks: one event loop; `run` is the only task that looks, and others ask by setting `_wanted`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from springtide_operator.kube import ApiError

log = logging.getLogger("springtide.operator")

ABSENT_SECONDS = 30.0
PRESENT_SECONDS = 300.0
RETRY_SECONDS = 2.0


class Discovery(Protocol):
    """The part of the port to Kubernetes that is used here."""

    async def serves(self, api: str) -> bool: ...


class OptionalApis:
    """Asks only for what a job needs. `changed` is called when an answer is new."""

    def __init__(
        self,
        discovery: Discovery,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._discovery = discovery
        self._changed = changed
        self._clock = clock
        self._served: dict[str, bool] = {}
        self._due: dict[str, float] = {}
        self._wanted = asyncio.Event()

    def known(self, needed: Iterable[str]) -> dict[str, bool]:
        """Return whether the needed APIs are served, as far as is known; the others are asked for."""
        found: dict[str, bool] = {}
        for api in needed:
            if api in self._served:
                found[api] = self._served[api]
            elif api not in self._due:
                self._due[api] = float("-inf")
                self._wanted.set()
        return found

    def served(self, api: str) -> bool:
        """Whether somebody has asked for it and it is there."""
        return self._served.get(api, False)

    async def run(self) -> None:
        """Look for optional APIs for ever."""
        while True:
            self._wanted.clear()
            pause = await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wanted.wait()

    async def look(self) -> float | None:
        """Ask for what is due; return the seconds until something else is, None for nothing."""
        news = False
        for api, due in list(self._due.items()):
            if due > self._clock():
                continue
            try:
                served = await self._discovery.serves(api)
            except ApiError as error:
                log.warning("cannot find out whether %s is served: %s", api, error)
                self._due[api] = self._clock() + RETRY_SECONDS
                continue
            self._due[api] = self._clock() + (PRESENT_SECONDS if served else ABSENT_SECONDS)
            if self._served.get(api) is not served:
                self._served[api] = served
                news = True
                log.info("%s is %s", api, "served" if served else "not served by this cluster")
        if news:
            self._changed()
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None

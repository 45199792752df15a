"""Which APIs that a cluster may have or not are served: found out by discovery, and looked at again when the
watch of CustomResourceDefinitions says that one of them was written; now and then where there is no right to
watch these.

Tasks: one event loop; `run` is the only task that looks, and others ask by setting `_wanted`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from springtide_kube.errors import ApiError
from springtide_operator.plan.observation import newest_served

log = logging.getLogger("springtide.operator")

ABSENT_SECONDS = 30.0
PRESENT_SECONDS = 300.0
TOLD_SECONDS = 900.0  # where definitions are watched: for APIs that have none
RETRY_SECONDS = 2.0
UNSETTLED_SECONDS = 10.0  # after a definition was written its API comes or goes


class Discovery(Protocol):
    """The part of the port to Kubernetes that is used here."""

    async def serves(self, api: str) -> bool: ...


class OptionalApis:
    """Asks only for what a job needs."""

    def __init__(
        self,
        discovery: Discovery,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        announced: bool = False,
    ) -> None:
        """
        Args:
            discovery: is asked.
            changed: is called when an answer is new.
            clock: seconds that never jump.
            announced: `heard` is called for each definition that is written.
        """
        self._announced = announced
        self._unsettled: dict[str, float] = {}  # by API: until then it is looked for again and again
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

    def note_definition(self, group: str) -> None:
        """Look soon for the APIs of a group, of which a definition was written."""
        for api in self._due:
            if api.partition("/")[0] == group:
                self._due[api] = float("-inf")
                self._unsettled[api] = self._clock() + UNSETTLED_SECONDS
                self._wanted.set()

    def newest(self, apis: Sequence[str]) -> str:
        """The first of several versions that is there; "" where none is, or one before it is not known."""
        return newest_served(self._served, apis) or ""

    async def run(self) -> None:
        """Look for optional APIs for ever."""
        while True:
            self._wanted.clear()
            pause = await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wanted.wait()

    def _pause(self, api: str, served: bool) -> float:
        if self._unsettled.get(api, float("-inf")) > self._clock():
            return RETRY_SECONDS
        if self._announced:
            return TOLD_SECONDS
        return PRESENT_SECONDS if served else ABSENT_SECONDS

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
            self._due[api] = self._clock() + self._pause(api, served)
            if self._served.get(api) is not served:
                self._served[api] = served
                news = True
                log.info("%s is %s", api, "served" if served else "not served by this cluster")
        if news:
            self._changed()
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None

"""What follows pods from afar: the statuses of disruption budgets and quotas; old events go."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from springtide_local.api import eviction
from springtide_local.api.collection import Change

if TYPE_CHECKING:
    from springtide_local.api.store import Store


class Housekeeper:
    """Listens, and refreshes the namespaces that changed in a task of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._due: set[str] = set()
        self._wake = asyncio.Event()
        store.listeners.append(self._changed)

    def _changed(self, storage: str, change: Change) -> None:
        if storage in ("pods", eviction.PDBS) and change.key[0] not in self._due:
            self._due.add(change.key[0])
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(0)
            self.work()

    def work(self) -> None:
        while self._due:
            eviction.refresh_status(self._store, self._due.pop())

"""What follows pods from afar: the statuses of disruption budgets and quotas; old events go."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from springtide_local.api import eviction
from springtide_local.api.admission import quota_usage
from springtide_local.api.collection import Change
from springtide_local.api.objects import format_quantity, parse_timestamp
from springtide_local.ports import Object

if TYPE_CHECKING:
    from springtide_local.api.store import Store

QUOTAS = "resourcequotas"
_EVENT_SECONDS = 3600.0
_EXPIRY_INTERVAL = 300.0


class Housekeeper:
    """Listens, and refreshes the namespaces that changed in a task of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._budgets: set[str] = set()
        self._quotas: set[str] = set()
        self._next_expiry = store.now() + _EXPIRY_INTERVAL
        self._wake = asyncio.Event()
        store.listeners.append(self._changed)

    def _changed(self, storage: str, change: Change) -> None:
        namespace = change.key[0]
        if storage in ("pods", eviction.PDBS) and namespace not in self._budgets:
            self._budgets.add(namespace)
            self._wake.set()
        counted = storage == QUOTAS or change.type != "MODIFIED" or storage == "pods"
        if counted and namespace and namespace not in self._quotas and self._store.scan(QUOTAS, namespace):
            self._quotas.add(namespace)
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(0)
            self.work()

    def work(self) -> None:
        """Do everything that is due now."""
        while self._budgets:
            eviction.refresh_status(self._store, self._budgets.pop())
        while self._quotas:
            refresh_quotas(self._store, self._quotas.pop())
        self._forget_events()

    def _forget_events(self) -> None:
        """Events expire, as on a cluster; looked at now and then, when something happens anyway."""
        now = self._store.now()
        if now < self._next_expiry:
            return
        self._next_expiry = now + _EXPIRY_INTERVAL
        for event in self._store.scan("events"):
            meta = event["metadata"]
            seen = event.get("lastTimestamp") or meta["creationTimestamp"]
            if parse_timestamp(seen) < now - _EVENT_SECONDS:
                self._store.delete("events", meta["name"], meta["namespace"])


def refresh_quotas(store: Store, namespace: str) -> None:
    """Bring the status of a namespace's quotas up to date; written only where it changed."""
    for item in list(store.scan(QUOTAS, namespace)):
        used = {name: format_quantity(amount) for name, amount in quota_usage(store, item).items()}
        status = {"hard": dict(item["spec"].get("hard") or {}), "used": used}

        def change(obj: Object, status: Object = status) -> None:
            obj["status"] = status

        store.mutate(QUOTAS, item["metadata"]["name"], namespace, change, subresource="status")

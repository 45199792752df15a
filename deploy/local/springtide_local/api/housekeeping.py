"""Objects that follow others from afar: the statuses of disruption budgets and quotas, aggregated roles, each
namespace's service account and authority; old events go.

Tasks: one task in the API server's event loop; changes of the store set `_wake`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from springtide_local.api import eviction, writes
from springtide_local.api.admission import quota_usage
from springtide_local.api.collection import Change
from springtide_local.api.given import GIVEN
from springtide_local.api.objects import format_quantity, parse_timestamp
from springtide_local.api.rights import ROLES
from springtide_local.api.store import Store
from springtide_local.ports import ApiError, Object

_LOG = logging.getLogger(__name__)
QUOTAS = "resourcequotas"
_EVENT_SECONDS = 3600.0
_EXPIRY_INTERVAL = 300.0


class Housekeeper:
    """Listens, and refreshes the namespaces that changed in a task of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._roles = False
        self._namespaces: set[str] = set()
        self._budgets: set[str] = set()
        self._quotas: set[str] = set()
        self._next_expiry = store.now() + _EXPIRY_INTERVAL
        self._wake = asyncio.Event()
        store.listeners.append(self._changed)
        for space in store.scan("namespaces"):
            self._given(space["metadata"]["name"])

    def _given(self, namespace: str) -> None:
        """See to it that the namespace has what every namespace is given."""
        self._namespaces.add(namespace)
        self._wake.set()

    def _changed(self, storage: str, change: Change) -> None:
        namespace = change.key[0]
        if storage == ROLES[1] and not self._roles:
            self._roles = True
            self._wake.set()
        elif (storage, change.key[1]) in GIVEN and change.type != "ADDED":
            self._given(namespace)
        if storage in ("pods", eviction.PDBS) and namespace not in self._budgets:
            self._budgets.add(namespace)
            self._wake.set()
        counted = storage == QUOTAS or change.type != "MODIFIED" or storage == "pods"
        if counted and namespace and namespace not in self._quotas and self._store.scan(QUOTAS, namespace):
            self._quotas.add(namespace)
            self._wake.set()

    async def run(self) -> None:
        """Refresh after changes until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(0)
            self.work()

    def work(self) -> None:
        """Do everything that is due now."""
        while self._roles:
            self._roles = writes.aggregate_roles(self._store)
        while self._namespaces:
            namespace = self._namespaces.pop()
            try:
                writes.provide(self._store, namespace)
            except ApiError as error:  # a quota that is full
                _LOG.warning("namespace %s lacks what every namespace has: %s", namespace, error)
        while self._budgets:
            self._try(eviction.refresh_status, self._budgets.pop())
        while self._quotas:
            self._try(refresh_quotas, self._quotas.pop())
        self._forget_events()

    def _try(self, refresh: Callable[[Store, str], None], namespace: str) -> None:
        """Refresh one namespace; what is wrong with an object there must not end the work for all others."""
        try:
            refresh(self._store, namespace)
        except Exception:
            _LOG.exception("%s of namespace %s failed", refresh.__name__, namespace)

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
    """Bring the status of a namespace's quotas up to date; written only where it changed.

    Args:
        store: of all objects.
        namespace: whose quotas are meant.
    """
    for item in list(store.scan(QUOTAS, namespace)):
        used = {name: format_quantity(amount) for name, amount in quota_usage(store, item).items()}
        status = {"hard": dict(item["spec"].get("hard") or {}), "used": used}

        def change(obj: Object, status: Object = status) -> None:
            obj["status"] = status

        store.mutate(QUOTAS, item["metadata"]["name"], namespace, change, subresource="status")

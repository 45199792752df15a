"""Read-only copies of what the API server holds, kept current by its watches: one watch per resource,
shared by all that need it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from springtide_local.ports import StorePort

Object = dict[str, Any]
Key = tuple[str, str]
_log = logging.getLogger(__name__)


class Change(NamedTuple):
    """A change of one object. `old` is the object as it was known before (None when it is new)."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Object
    old: Object | None


def key_of(obj: Object) -> Key:
    """(namespace, name); the namespace is empty for cluster-wide kinds."""
    metadata = obj["metadata"]
    return metadata.get("namespace") or "", metadata["name"]


class Informer:
    """All objects of one resource. Handlers are called in order of registration; they must not block and
    must not change the objects.
    """

    def __init__(self, store: StorePort, resource: str) -> None:
        self.resource = resource
        self._store = store
        self._objects: dict[Key, Object] = {}
        self._handlers: list[Callable[[Change], None]] = []

    def get(self, namespace: str | None, name: str) -> Object | None:
        """Return an object, which nobody may change; None when it is not there.

        Args:
            namespace: of the object; None: it has none.
            name: of the object.
        """
        return self._objects.get((namespace or "", name))

    def all(self, namespace: str | None = None) -> Iterator[Object]:
        """Every object, or those of one namespace, as they are at the moment of the call."""
        for obj in list(self._objects.values()):
            if namespace is None or obj["metadata"].get("namespace") == namespace:
                yield obj

    def on_change(self, handler: Callable[[Change], None]) -> None:
        """Call `handler` for everything that exists now and for every change to come."""
        self._handlers.append(handler)
        for obj in list(self._objects.values()):
            handler(Change("ADDED", obj, None))

    async def run(self) -> None:
        """Watch until the resource is served no more. A watch that fell behind is begun again; no change is
        missed.
        """
        while True:
            try:
                async for event in self._store.watch(self.resource):
                    if event.type != "BOOKMARK":
                        self._take(event.type, event.object)
                return
            except RuntimeError as error:
                _log.warning("%s; it begins again", error)
                there = {key_of(obj) for obj in self._store.list(self.resource)}
                for key in [key for key in self._objects if key not in there]:
                    self._take("DELETED", self._objects[key])

    def _take(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], obj: Object) -> None:
        key = key_of(obj)
        old = self._objects.get(key)
        if kind == "DELETED":
            self._objects.pop(key, None)
        else:
            self._objects[key] = obj
        change = Change(kind, obj, old)
        for handler in self._handlers:
            try:
                handler(change)
            except Exception:
                # One component's mistake must not take the news from all others.
                _log.exception("a handler of %s failed on %s", self.resource, key)


class Informers:
    """Makes each resource's informer once. `run` runs them all until it is cancelled; ask for all informers
    before.
    """

    def __init__(self, store: StorePort) -> None:
        self._store = store
        self._informers: dict[str, Informer] = {}

    def of(self, resource: str) -> Informer:
        if resource not in self._informers:
            self._informers[resource] = Informer(self._store, resource)
        return self._informers[resource]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for informer in self._informers.values():
                group.create_task(informer.run(), name=f"informer:{informer.resource}")

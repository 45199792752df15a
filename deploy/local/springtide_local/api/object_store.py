"""All objects of the cluster, in memory, behind one counter of resource versions.

Reads, and the plumbing of writes, which makes a change known; the rules of a write are in `writes`, whose
functions get a store as an argument. Everything runs on one event loop, and each call is atomic. Stored
objects are never changed in place, so that they can be shared with watchers and encoders.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

from springtide_local.api.collection import Change, ChangeType, Collection, Key, Stored
from springtide_local.api.kinds.registry import builtin_resources
from springtide_local.api.kinds.services import ServiceAddresses
from springtide_local.api.objects import clone
from springtide_local.api.resources import Registry, ResourceType
from springtide_local.api.selectors import (
    FieldSelector,
    LabelSelector,
    parse_field_selector,
    parse_label_selector,
)
from springtide_local.ports import Object, WatchEvent

Listener = Callable[[str, Change], None]


class ObjectStore:
    """Objects as they are stored, and the versions of their changes.

    Args:
        clock: gives seconds since the epoch.
        services: the CIDR of cluster addresses.
    """

    def __init__(self, clock: Callable[[], float] = time.time, services: str = "127.96.0.0/16") -> None:
        self.registry = Registry(builtin_resources())
        self.service_addresses = ServiceAddresses(services)
        self.by_uid: dict[str, tuple[str, Key]] = {}
        self.listeners: list[Listener] = []
        self.authority = ""  # PEM: what pods trust, published in every namespace
        self._clock = clock
        self._version = 1
        self._collections: dict[str, Collection] = {}

    def now(self) -> float:
        return self._clock()

    @property
    def version(self) -> int:
        """The resourceVersion of the latest change."""
        return self._version

    def collection(self, storage: str) -> Collection:
        found = self._collections.get(storage)
        if found is None:
            found = self._collections[storage] = Collection(self._version)
        return found

    def drop_collection(self, storage: str) -> None:
        """The resource is served no more: its watches end."""
        collection = self._collections.pop(storage, None)
        if collection is not None:
            for subscription in tuple(collection.subscriptions):
                subscription.end()

    def end_watches(self) -> None:
        """The server stops: every watch ends."""
        for collection in self._collections.values():
            for subscription in tuple(collection.subscriptions):
                subscription.end()

    def peek(self, resource: str, name: str, namespace: str | None = None) -> Object | None:
        """Return a stored object.

        Args:
            resource: name of the storage, as `pods`.
            name: of the object.
            namespace: of the object; None: it has none.

        Returns:
            The object itself, which nobody may change; None when it is not there.
        """
        stored = self.collection(resource).items.get((namespace or "", name))
        return stored.object if stored is not None else None

    def scan(self, resource: str, namespace: str | None = None) -> list[Object]:
        """Return the stored objects of a resource.

        Args:
            resource: name of the storage, as `pods`.
            namespace: of the objects; None: all.

        Returns:
            The objects themselves, which nobody may change.
        """
        items = self.collection(resource).items
        if namespace is None:
            return [stored.object for stored in items.values()]
        return [stored.object for key, stored in items.items() if key[0] == namespace]

    def get_stored(self, resource: ResourceType, name: str, namespace: str | None) -> Stored:
        """Return a stored object with its bytes.

        Args:
            resource: its type.
            name: of the object.
            namespace: of the object; None: it has none.

        Raises:
            ApiError: 404: it is not there.
        """
        stored = self.collection(resource.storage).items.get((namespace or "", name))
        if stored is None:
            raise resource.not_found(name)
        return stored

    def get(self, resource: str, name: str, namespace: str | None = None) -> Object:
        """Return a copy of a stored object.

        Args:
            resource: name of the storage, as `pods`.
            name: of the object.
            namespace: of the object; None: it has none.

        Raises:
            ApiError: 404: it is not there.
        """
        return clone(self.get_stored(self.registry.stored(resource), name, namespace).object)

    def list(
        self, resource: str, namespace: str | None = None, label_selector: str = "", field_selector: str = ""
    ) -> list[Object]:
        """Return copies of the stored objects that are selected.

        Args:
            resource: name of the storage, as `pods`.
            namespace: of the objects; None: all.
            label_selector: as `kubectl -l` has it; "" for all.
            field_selector: as `kubectl --field-selector` has it; "" for all.

        Raises:
            ApiError: 400: a selector cannot be read.
        """
        found = self.registry.stored(resource)
        labels = parse_label_selector(label_selector)
        fields = parse_field_selector(field_selector, found.field_getters)
        return [clone(obj) for obj in self.scan(resource, namespace) if selected(obj, labels, fields)]

    async def watch(self, resource: str, namespace: str | None = None) -> AsyncIterator[WatchEvent]:
        """Yield what is there, then every change.

        Args:
            resource: name of the storage, as `pods`.
            namespace: of the objects; None: all.

        Raises:
            RuntimeError: the reader fell too far behind.
        """
        self.registry.stored(resource)
        collection = self.collection(resource)
        subscription = collection.subscribe(namespace)
        try:
            for obj in self.scan(resource, namespace):
                yield WatchEvent("ADDED", clone(obj))
            while not subscription.closed:
                await subscription.wait(None)
                if subscription.overrun:
                    raise RuntimeError(f"a watch of {resource} in this process fell too far behind")
                while (event := subscription.next()) is not None:
                    yield WatchEvent(event.type, clone(event.stored.object))
        finally:
            subscription.cancel()

    def commit(self, resource: ResourceType, type_: ChangeType, obj: Object, old: Stored | None) -> Stored:
        """Give an object the next resourceVersion and make it, or its removal, known.

        Args:
            resource: its type.
            type_: of the change.
            obj: belongs to the store from now on.
            old: as it was stored; None: it is new.

        Returns:
            As it is stored now.
        """
        self._version += 1
        meta = obj["metadata"]
        meta["resourceVersion"] = str(self._version)
        key = (meta.get("namespace") or "", meta["name"])
        stored = Stored(obj)
        change = Change(self._version, type_, key, stored, old)
        if type_ == "DELETED":
            self.by_uid.pop(meta["uid"], None)
        else:
            self.by_uid[meta["uid"]] = (resource.storage, key)
        self.collection(resource.storage).record(change)
        for listener in tuple(self.listeners):
            listener(resource.storage, change)
        return stored


def selected(obj: Object, labels: LabelSelector, fields: FieldSelector) -> bool:
    """Return whether an object is selected by both selectors.

    Args:
        obj: the object.
        labels: an empty one selects all.
        fields: an empty one selects all.
    """
    if labels and not labels.matches(obj["metadata"].get("labels")):
        return False
    return not fields or fields.matches(obj)

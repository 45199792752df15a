"""The store as the components in this process use it: reads, and writes by the rules of every write."""

from __future__ import annotations

import time
from collections.abc import Callable

from springtide_local.api import writes
from springtide_local.api.object_store import ObjectStore
from springtide_local.api.objects import clone, lookup
from springtide_local.api.writes import LOCAL, Options
from springtide_local.ports import Object


class Store(ObjectStore):
    """Implements `ports.StorePort`; a new one holds what every cluster begins with.

    Args:
        clock: gives seconds since the epoch.
        services: the CIDR of cluster addresses.
    """

    def __init__(self, clock: Callable[[], float] = time.time, services: str = "127.96.0.0/16") -> None:
        super().__init__(clock, services)
        writes.bootstrap(self)

    def create(self, resource: str, obj: Object, namespace: str | None = None) -> Object:
        """Add an object by the rules of every write.

        Args:
            resource: name of the storage, as `pods`.
            obj: the object; it is copied.
            namespace: of the object; None: the one that it says.

        Returns:
            A copy of the object as it is stored.

        Raises:
            ApiError: the write is refused.
        """
        found = self.registry.stored(resource)
        made = clone(obj)
        space = namespace or lookup(made, "metadata", "namespace")
        return clone(writes.create(self, found, made, space, Options(manager=LOCAL)).object)

    def mutate(
        self,
        resource: str,
        name: str,
        namespace: str | None,
        change: Callable[[Object], None],
        subresource: str | None = None,
    ) -> Object:
        """Change an object by the rules of every write; nothing is written when nothing changed.

        Args:
            resource: name of the storage, as `pods`.
            name: of the object.
            namespace: of the object; None: it has none.
            change: changes a copy in place.
            subresource: that is written; None: the object itself.

        Returns:
            A copy of the object as it is stored.

        Raises:
            ApiError: 404: it is not there. Another code: the write is refused.
        """
        found = self.registry.stored(resource)
        obj = clone(self.get_stored(found, name, namespace).object)
        change(obj)
        options = Options(manager=LOCAL, subresource=subresource)
        return clone(writes.update(self, found, name, namespace, obj, options).object)

    def delete(
        self,
        resource: str,
        name: str,
        namespace: str | None = None,
        grace_period_seconds: int | None = None,
        uid: str | None = None,
    ) -> Object:
        """Delete an object, or mark it for that.

        Args:
            resource: name of the storage, as `pods`.
            name: of the object.
            namespace: of the object; None: it has none.
            grace_period_seconds: for a bound pod; None: as its spec says.
            uid: that it must have; None: any.

        Returns:
            A copy of the object's last state.

        Raises:
            ApiError: 404: it is not there; 409: it is another one.
        """
        found = self.registry.stored(resource)
        request = writes.Deletion(grace=grace_period_seconds, uid=uid)
        return clone(writes.delete(self, found, name, namespace, request, Options(manager=LOCAL)).object)

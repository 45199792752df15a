"""The seam between the generic write path and a kind's own rules."""

from __future__ import annotations

from typing import Any, Protocol

from springtide_local.api.errors import FieldError
from springtide_local.ports import Object


class Reader(Protocol):
    """Read access to the store while an object is prepared or admitted. Objects are shared: never change
    them.
    """

    def peek(self, resource: str, name: str, namespace: str | None = None) -> Object | None:
        """Return a stored object.

        Args:
            resource: name of its storage, as `pods`.
            name: of the object.
            namespace: of the object; None: it has none.

        Returns:
            The object itself; None when it is not there.
        """
        ...

    def scan(self, resource: str, namespace: str | None = None) -> list[Object]:
        """Return all stored objects of a resource.

        Args:
            resource: name of their storage, as `pods`.
            namespace: of the objects; None: all.

        Returns:
            The objects themselves.
        """
        ...

    def now(self) -> float: ...

    @property
    def service_addresses(self) -> Any: ...


class Kind:
    """Rules of one kind. The defaults here are those of a plain stored object.

    Order on a write: `default`, `prepare`, schema validation, `check` (or `check_update` too), admission.
    """

    def default(self, obj: Object) -> None:
        """Fill what the API server fills, in place."""

    def prepare_create(self, store: Reader, obj: Object) -> None:
        """Reset what only the system sets, and allocate addresses.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.

        Raises:
            ApiError: what is asked for cannot be had.
        """

    def prepare_update(self, store: Reader, obj: Object, old: Object, subresource: str | None) -> None:
        """Keep what a writer may not change.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """

    def check(self, obj: Object) -> list[FieldError]:
        return []

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        """Return what is wrong with a change; nothing here.

        Args:
            obj: the object as it is to be stored.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        return []

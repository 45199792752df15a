"""The seam between the generic write path and a kind's own rules."""

from __future__ import annotations

from typing import Any, Protocol

from springtide_local.api.errors import FieldError
from springtide_local.ports import Object


class Reader(Protocol):
    """Read access to the store while an object is prepared or admitted. Objects are shared: never change
    them.
    """

    def peek(self, resource: str, name: str, namespace: str | None = None) -> Object | None: ...

    def scan(self, resource: str, namespace: str | None = None) -> list[Object]: ...

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
        """Reset what only the system sets, allocate addresses; may raise ApiError."""

    def prepare_update(self, store: Reader, obj: Object, old: Object, subresource: str | None) -> None:
        """Keep what a writer may not change."""

    def check(self, obj: Object) -> list[FieldError]:
        return []

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        return []

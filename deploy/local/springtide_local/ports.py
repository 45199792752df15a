"""The seam between the API server and what runs beside it in the same process.

Those are the scheduler, the kubelet and the controllers. The implementation is
`springtide_local.api.store.Store`. All calls but `watch` are synchronous and atomic: everything runs on one
event loop. Objects are plain dicts; what comes back is a copy that the caller may change. Writes through this
port go through the same validation, defaulting, admission and resourceVersion rules as writes over HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, NamedTuple, Protocol

Object = dict[str, Any]


class ApiError(Exception):
    """A refusal that becomes a Kubernetes `Status` object.

    code: of HTTP. reason: CamelCase.
    """

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}


class WatchEvent(NamedTuple):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object


class StorePort(Protocol):
    """Reads and writes of objects.

    `resource` is the plural, with `.group` unless it is the core group: `pods`, `deployments.apps`,
    `trainingjobs.springtide.dev`.
    """

    def create(self, resource: str, obj: Object, namespace: str | None = None) -> Object:
        """Add an object.

        Args:
            resource: plural, with `.group` unless it is the core group.
            obj: the object; it is copied.
            namespace: of the object; None: the one that it says.

        Returns:
            The object as it is stored.

        Raises:
            ApiError: 403 Forbidden (quota, terminating namespace), 404 (namespace), 409 AlreadyExists, 422
                Invalid.
        """
        ...

    def get(self, resource: str, name: str, namespace: str | None = None) -> Object:
        """Return an object.

        Args:
            resource: plural, with `.group` unless it is the core group.
            name: of the object.
            namespace: of the object; None: it has none.

        Raises:
            ApiError: 404: it is not there.
        """
        ...

    def list(
        self, resource: str, namespace: str | None = None, label_selector: str = "", field_selector: str = ""
    ) -> list[Object]:
        """Return the objects that are selected.

        Args:
            resource: plural, with `.group` unless it is the core group.
            namespace: of the objects; None: all.
            label_selector: as `kubectl -l` has it; "" for all.
            field_selector: as `kubectl --field-selector` has it; "" for all.

        Raises:
            ApiError: 400: a selector cannot be read.
        """
        ...

    def mutate(
        self,
        resource: str,
        name: str,
        namespace: str | None,
        change: Callable[[Object], None],
        subresource: str | None = None,
    ) -> Object:
        """Read, change in place, write (only if something changed).

        Args:
            resource: plural, with `.group` unless it is the core group.
            name: of the object.
            namespace: of the object; None: it has none.
            change: changes a copy in place.
            subresource: `status` keeps all but the status as it was; None: the object itself.

        Returns:
            The object as it is stored.

        Raises:
            ApiError: 404: it is not there. Another code: the write is refused.
        """
        ...

    def delete(
        self,
        resource: str,
        name: str,
        namespace: str | None = None,
        grace_period_seconds: int | None = None,
        uid: str | None = None,
    ) -> Object:
        """Delete an object, by DELETE's rules: a bound pod only gets a deletionTimestamp.

        It goes with a second delete with grace 0 (by its kubelet).

        Args:
            resource: plural, with `.group` unless it is the core group.
            name: of the object.
            namespace: of the object; None: it has none.
            grace_period_seconds: for a bound pod; None: as its spec says.
            uid: that it must have; None: any.

        Returns:
            The object's last state.

        Raises:
            ApiError: 404: it is not there; 409: it is another one.
        """
        ...

    def watch(self, resource: str, namespace: str | None = None) -> AsyncIterator[WatchEvent]:
        """Yield ADDED for all that exists (at the moment of the first `anext`), then every change, without
        gaps.

        Never ends by itself.

        Args:
            resource: plural, with `.group` unless it is the core group.
            namespace: of the objects; None: all.
        """
        ...

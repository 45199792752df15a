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

        Raise ApiError 409 AlreadyExists, 422 Invalid, 403 Forbidden (quota, terminating namespace),
        404 (namespace).
        """
        ...

    def get(self, resource: str, name: str, namespace: str | None = None) -> Object:
        """Raise ApiError 404."""
        ...

    def list(
        self, resource: str, namespace: str | None = None, label_selector: str = "", field_selector: str = ""
    ) -> list[Object]: ...

    def mutate(
        self,
        resource: str,
        name: str,
        namespace: str | None,
        change: Callable[[Object], None],
        subresource: str | None = None,
    ) -> Object:
        """Read, change in place, write (only if something changed).

        `subresource="status"` keeps all but status as it was.
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
        """
        ...

    def watch(self, resource: str, namespace: str | None = None) -> AsyncIterator[WatchEvent]:
        """ADDED for all that exists (at the moment of the first `anext`), then every change, without gaps.

        Never ends by itself.
        """
        ...

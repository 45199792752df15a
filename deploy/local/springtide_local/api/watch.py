"""Watches over HTTP: a stream of JSON lines, with selectors, bookmarks and a clear end.

Events that a watcher has not read yet cost next to nothing of their own: events wait as references to what
the store, its history or other watchers hold anyway, and the transport gets little at a time. A watcher that
falls too far behind is ended without a word, as on a cluster: it goes on from the last version it has read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from springtide_local.api import errors
from springtide_local.api.collection import (
    BACKLOG_BYTES,
    Change,
    ChangeType,
    Event,
    Stored,
    Subscription,
    encode,
)
from springtide_local.api.pages import Selection, resource_version, selection
from springtide_local.api.requests import Target, flag, number
from springtide_local.api.store import Store
from springtide_local.ports import ApiError

BOOKMARK_SECONDS = 60.0
CHUNK = 64 * 1024
_DEFAULT_SECONDS = 1800
Show = Callable[[Stored], bytes]


class Plan(NamedTuple):
    """Everything that a watch needs, taken in one moment, so that no change falls between start and
    stream.
    """

    subscription: Subscription
    chosen: Selection
    initial: deque[Event]
    deadline: float
    bookmarks: bool
    failure: ApiError | None


def visible(chosen: Selection, change: Change) -> ChangeType | None:
    """Return the type under which a watcher with a selection sees a change.

    Args:
        chosen: the selection.
        change: of an object.

    Returns:
        None when the watcher sees nothing of it.
    """
    if not chosen:
        return change.type
    was = change.old is not None and chosen.has(change.old)
    if change.type == "DELETED":
        return "DELETED" if was else None
    if chosen.has(change.new):
        return "MODIFIED" if was else "ADDED"
    return "DELETED" if was else None


def line(type_: str, body: bytes) -> bytes:
    """Return one event as a line of the stream.

    Args:
        type_: of the event, as ADDED.
        body: JSON of the object.
    """
    return b"".join(_pieces(type_, body))


def _pieces(type_: str, body: bytes) -> tuple[bytes, bytes, bytes]:
    return b'{"type":"' + type_.encode() + b'","object":', body, b"}\n"


def prepare(store: Store, target: Target, query: Mapping[str, str]) -> Plan:
    """Subscribe, and take what is due at once.

    Args:
        store: of all objects.
        target: of the request.
        query: parameters of the URL.

    Returns:
        The watch, for `stream`.

    Raises:
        ApiError: an option is not served, or a value is wrong.
    """
    if "sendInitialEvents" in query:
        text = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
        found = [errors.field_forbidden("sendInitialEvents", text)]
        raise errors.invalid("meta.k8s.io", "ListOptions", "", found)
    chosen = selection(target, query)
    version = resource_version(query.get("resourceVersion", ""))
    seconds = number(query, "timeoutSeconds") or _DEFAULT_SECONDS
    collection = store.collection(target.resource.storage)
    initial: deque[Event] = deque()
    failure: ApiError | None = None
    sees = partial(visible, chosen)
    if version == 0:
        for key in sorted(collection.items):
            stored = collection.items[key]
            inside = target.namespace is None or key[0] == target.namespace
            if inside and (not chosen or chosen.has(stored)):
                initial.append(Event("ADDED", stored))
    else:
        try:
            changes = collection.changes_since(version, store.version)
        except ApiError as problem:
            changes, failure = [], problem
        for change in changes:
            if target.namespace is None or change.key[0] == target.namespace:
                type_ = sees(change)
                if type_ is not None:
                    initial.append(Event(type_, change.new))
    subscription = collection.subscribe(target.namespace, sees, BACKLOG_BYTES)
    return Plan(
        subscription, chosen, initial, store.now() + seconds, flag(query, "allowWatchBookmarks"), failure
    )


async def stream(store: Store, target: Target, plan: Plan, show: Show) -> AsyncIterator[bytes | memoryview]:
    """Yield the lines of a watch until its time is over, the resource is gone, or the watcher fell too far
    behind.

    Args:
        store: of all objects.
        target: of the request.
        plan: made by `prepare`; its subscription is used up.
        show: makes the bytes of an event's object.

    Yields:
        Pieces of at most CHUNK bytes.
    """
    if plan.failure is not None:
        yield line("ERROR", encode(errors.status(plan.failure)))
        return
    subscription = plan.subscription
    while True:
        for chunk in _chunks(_due(plan, show)):
            yield chunk
        remaining = plan.deadline - store.now()
        if subscription.ended or remaining <= 0:
            break
        if not await subscription.wait(min(remaining, BOOKMARK_SECONDS)) and plan.bookmarks:
            yield bookmark(store, target)
    if plan.bookmarks and not subscription.due:  # else it would promise what has not been sent
        yield bookmark(store, target)


def _due(plan: Plan, show: Show) -> Iterator[bytes]:
    """Give the pieces of all lines that are due, as long as the watcher is not too far behind."""
    while not plan.subscription.overrun:
        event = plan.initial.popleft() if plan.initial else plan.subscription.next()
        if event is None:
            return
        yield from _pieces(event.type, show(event.stored))


def _chunks(pieces: Iterator[bytes]) -> Iterator[bytes | memoryview]:
    """Join small pieces, and cut large ones without copying them."""
    joined: list[bytes] = []
    size = 0
    for piece in pieces:
        if joined and size + len(piece) > CHUNK:
            yield b"".join(joined)
            joined, size = [], 0
        if len(piece) > CHUNK:
            whole = memoryview(piece)
            for at in range(0, len(piece), CHUNK):
                yield whole[at : at + CHUNK]
        else:
            joined.append(piece)
            size += len(piece)
    if joined:
        yield b"".join(joined)


def bookmark(store: Store, target: Target) -> bytes:
    """Return a line that says up to which version everything was sent.

    Args:
        store: whose version it is.
        target: of the request.
    """
    resource = target.resource
    body = {
        "kind": resource.kind,
        "apiVersion": resource.api_version,
        "metadata": {"resourceVersion": str(store.version), "creationTimestamp": None},
    }
    return line("BOOKMARK", encode(body))

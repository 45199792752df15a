"""Watches over HTTP: a stream of JSON lines, with selectors, bookmarks and a clear end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from springtide_local.api import errors
from springtide_local.api.collection import Change, Stored, Subscription, encode
from springtide_local.api.pages import Selection, resource_version, selection
from springtide_local.api.requests import Target, flag, number
from springtide_local.api.store import Store
from springtide_local.ports import ApiError

BOOKMARK_SECONDS = 60.0
_DEFAULT_SECONDS = 1800
Show = Callable[[Stored], bytes]


class Plan(NamedTuple):
    """Everything that a watch needs, taken in one moment, so that no change falls between start and
    stream.
    """

    subscription: Subscription
    chosen: Selection
    initial: list[bytes]
    deadline: float
    bookmarks: bool
    failure: ApiError | None


def visible(change: Change, chosen: Selection) -> str | None:
    """The type under which a watcher with a selection sees a change, or None when it sees nothing of it."""
    if not chosen:
        return change.type
    was = change.old is not None and chosen.has(change.old)
    if change.type == "DELETED":
        return "DELETED" if was else None
    if chosen.has(change.new):
        return "MODIFIED" if was else "ADDED"
    return "DELETED" if was else None


def line(type_: str, body: bytes) -> bytes:
    return b'{"type":"' + type_.encode() + b'","object":' + body + b"}\n"


def prepare(store: Store, target: Target, query: Mapping[str, str], show: Show) -> Plan:
    """Subscribe and take what is due at once. Raise ApiError for options that are not served."""
    if "sendInitialEvents" in query:
        text = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
        found = [errors.field_forbidden("sendInitialEvents", text)]
        raise errors.invalid("meta.k8s.io", "ListOptions", "", found)
    chosen = selection(target, query)
    version = resource_version(query.get("resourceVersion", ""))
    seconds = number(query, "timeoutSeconds") or _DEFAULT_SECONDS
    collection = store.collection(target.resource.storage)
    initial: list[bytes] = []
    failure: ApiError | None = None
    if version == 0:
        for key in sorted(collection.items):
            stored = collection.items[key]
            inside = target.namespace is None or key[0] == target.namespace
            if inside and (not chosen or chosen.has(stored)):
                initial.append(line("ADDED", show(stored)))
    else:
        try:
            changes = collection.changes_since(version, store.version)
        except ApiError as problem:
            changes, failure = [], problem
        for change in changes:
            if target.namespace is None or change.key[0] == target.namespace:
                initial.extend(_shown(change, chosen, show))
    subscription = store.subscribe(target.resource.storage, target.namespace)
    return Plan(
        subscription, chosen, initial, store.now() + seconds, flag(query, "allowWatchBookmarks"), failure
    )


def _shown(change: Change, chosen: Selection, show: Show) -> list[bytes]:
    type_ = visible(change, chosen)
    return [line(type_, show(change.new))] if type_ is not None else []


async def stream(store: Store, target: Target, plan: Plan, show: Show) -> AsyncIterator[bytes]:
    """The lines of a watch, until its time is over, the resource is gone, or the watcher fell too far
    behind.
    """
    if plan.failure is not None:
        yield line("ERROR", encode(errors.status(plan.failure)))
        return
    if plan.initial:
        yield b"".join(plan.initial)
    subscription = plan.subscription
    while not subscription.closed:
        remaining = plan.deadline - store.now()
        if remaining <= 0:
            break
        if not await subscription.wait(min(remaining, BOOKMARK_SECONDS)):
            if plan.bookmarks:
                yield bookmark(store, target)
            continue
        if subscription.overrun:
            problem = errors.expired("too old resource version: the watch fell too far behind")
            yield line("ERROR", encode(errors.status(problem)))
            return
        lines = [text for change in subscription.drain() for text in _shown(change, plan.chosen, show)]
        if lines:
            yield b"".join(lines)
    if plan.bookmarks and not subscription.closed:
        yield bookmark(store, target)


def bookmark(store: Store, target: Target) -> bytes:
    resource = target.resource
    body = {
        "kind": resource.kind,
        "apiVersion": resource.api_version,
        "metadata": {"resourceVersion": str(store.version), "creationTimestamp": None},
    }
    return line("BOOKMARK", encode(body))

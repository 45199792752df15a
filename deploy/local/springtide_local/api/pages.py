"""Lists: selection, order, limit and continue."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import NamedTuple

from springtide_local.api import errors
from springtide_local.api.collection import Key, Stored
from springtide_local.api.object_store import selected
from springtide_local.api.requests import Target, decimal, number
from springtide_local.api.selectors import (
    FieldSelector,
    LabelSelector,
    parse_field_selector,
    parse_label_selector,
)
from springtide_local.api.store import Store
from springtide_local.ports import ApiError


class Selection(NamedTuple):
    labels: LabelSelector
    fields: FieldSelector

    def __bool__(self) -> bool:
        return bool(self.labels) or bool(self.fields)

    def has(self, stored: Stored) -> bool:
        return selected(stored.object, self.labels, self.fields)


class Page(NamedTuple):
    items: list[Stored]
    version: int
    next: str
    remaining: int | None


def selection(target: Target, query: Mapping[str, str]) -> Selection:
    """Read the selectors of a request.

    Args:
        target: the resource and namespace that the request names.
        query: parameters of the URL.

    Raises:
        ApiError: 400: a selector cannot be read.
    """
    labels = parse_label_selector(query.get("labelSelector", ""))
    return Selection(
        labels, parse_field_selector(query.get("fieldSelector", ""), target.resource.field_getters)
    )


def page(store: Store, target: Target, query: Mapping[str, str]) -> Page:
    """Return the asked part of a list, ordered by namespace and name.

    A list in pieces is consistent: later pieces show the state of the first.

    Args:
        store: of all objects.
        target: the resource and namespace that the request names.
        query: parameters of the URL.

    Raises:
        ApiError: 400: a parameter is wrong; 410: that state is too long ago; 504: the resourceVersion is of
            the future.
    """
    chosen = selection(target, query)
    limit = number(query, "limit")
    collection = store.collection(target.resource.storage)
    after: Key | None = None
    version = store.version
    items = collection.items
    if query.get("continue"):
        version, after = _parse_continue(query["continue"])
        items = _snapshot(store, target, version)
    else:
        asked = _asked_version(query)
        if asked > version:
            raise errors.too_large_resource_version(asked, version)
        if query.get("resourceVersionMatch") == "Exact":
            version, items = asked, collection.at(asked, store.version)
    found = []
    only = chosen.fields.only("metadata.name")
    keys = sorted(items) if only is None else sorted(key for key in items if key[1] == only)
    for key in keys:
        inside = target.namespace is None or key[0] == target.namespace
        if inside and (after is None or key > after) and (not chosen or chosen.has(items[key])):
            found.append((key, items[key]))
    if not limit or limit < 0 or len(found) <= limit:
        return Page([stored for _, stored in found], version, "", None)
    kept = found[:limit]
    remaining = None if chosen else len(found) - limit
    return Page([stored for _, stored in kept], version, _continue(version, kept[-1][0]), remaining)


def _asked_version(query: Mapping[str, str]) -> int:
    text = query.get("resourceVersion", "")
    if query.get("resourceVersionMatch") and not text:
        raise errors.bad_request("resourceVersionMatch is forbidden unless resourceVersion is provided")
    return resource_version(text)


def resource_version(text: str) -> int:
    """Raise ApiError 400."""
    value = decimal(text or "0")
    if value is None or text[:1] in ("+", "-") or value >= 2**64:
        problem = "value out of range" if value is not None and value >= 2**64 else "invalid syntax"
        raise errors.bad_request(f'Invalid value: "{text}": strconv.ParseUint: parsing "{text}": {problem}')
    return value


def _snapshot(store: Store, target: Target, version: int) -> dict[Key, Stored]:
    try:
        return store.collection(target.resource.storage).at(version, store.version)
    except ApiError:
        raise errors.expired(
            "The provided continue parameter is too old to display a consistent list result. You can start "
            "a new list "
            "without the continue parameter."
        ) from None


def _continue(version: int, key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps({"rv": version, "start": key}).encode()).decode()


def _parse_continue(text: str) -> tuple[int, Key]:
    try:
        content = json.loads(base64.urlsafe_b64decode(text))
        namespace, name = content["start"]
        return int(content["rv"]), (str(namespace), str(name))
    except (binascii.Error, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise errors.bad_request(f"continue key is not valid: {text}") from None

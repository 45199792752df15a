"""Stored objects as answers: plain, as a Table, as bare metadata, in another version of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from springtide_local.api import tables
from springtide_local.api.collection import Stored, encode
from springtide_local.api.negotiation import Shape
from springtide_local.api.pages import Page
from springtide_local.api.requests import Target
from springtide_local.api.resources import ResourceType
from springtide_local.api.store import Store
from springtide_local.api.watch import Show
from springtide_local.ports import Object

SHAPES = ("Table", "PartialObjectMetadata", "PartialObjectMetadataList")
PARTIAL = "PartialObjectMetadata"
_TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


def shown(resource: ResourceType, stored: Stored) -> Object:
    """Return an object as a resource shows it.

    Args:
        resource: the type, in the version that is asked for.
        stored: the object.

    Returns:
        Possibly the stored object itself, which nobody may change.
    """
    obj = stored.object
    if resource.view is not None:
        return resource.view.show(obj)
    if obj["apiVersion"] != resource.api_version:
        return {**obj, "apiVersion": resource.api_version}
    return obj


def _bytes(resource: ResourceType, stored: Stored) -> bytes:
    obj = shown(resource, stored)
    if obj is stored.object:
        return stored.json
    return stored.form((resource.api_version, resource.kind), lambda _: obj)


def _response(body: bytes, content_type: str = "application/json") -> web.Response:
    return web.Response(body=body, headers={"Content-Type": content_type})


def one(store: Store, target: Target, stored: Stored, shape: Shape, query: Mapping[str, str]) -> web.Response:
    """Answer with one object.

    Args:
        store: of all objects.
        target: the request's.
        stored: the object.
        shape: that the client accepts.
        query: parameters of the URL.
    """
    if shape.kind == "Table":
        return _response(encode(_table_of(store, target, stored, query)), _TABLE)
    if shape.kind:
        return _response(encode(tables.partial(stored.object)))
    return _response(_bytes(target.resource, stored))


def many(store: Store, target: Target, page: Page, shape: Shape, query: Mapping[str, str]) -> web.Response:
    """Answer with a list.

    Args:
        store: of all objects.
        target: the request's.
        page: its part that was asked for.
        shape: that the client accepts.
        query: parameters of the URL.
    """
    meta: Object = {"resourceVersion": str(page.version)}
    if page.next:
        meta["continue"] = page.next
        if page.remaining is not None:
            meta["remainingItemCount"] = page.remaining
    if shape.kind == "Table":
        columns = tables.columns_of(target.resource)
        now, include = store.now(), query.get("includeObject", "Metadata")
        rows = [
            tables.row(columns, _row_object(target, stored, include), now, include) for stored in page.items
        ]
        return _response(encode(tables.table(columns, rows, str(page.version), meta)), _TABLE)
    if shape.kind:
        items = [tables.partial(stored.object) for stored in page.items]
        kind = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1"}
        return _response(encode({**kind, "metadata": meta, "items": items}))
    resource = target.resource
    head = encode({"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": meta})
    body = b",".join(_bytes(resource, stored) for stored in page.items)
    return _response(head[:-1] + b',"items":[' + body + b"]}")


def _row_object(target: Target, stored: Stored, include: str) -> Object:
    return (
        shown(target.resource, stored)
        if include == "Object" and target.resource.view is None
        else stored.object
    )


def _table_of(
    store: Store, target: Target, stored: Stored, query: Mapping[str, str], headers: bool = True
) -> Object:
    columns = tables.columns_of(target.resource)
    include = query.get("includeObject", "Metadata")
    rows = [tables.row(columns, _row_object(target, stored, include), store.now(), include)]
    return tables.table(columns, rows, stored.object["metadata"]["resourceVersion"], headers=headers)


def shower(store: Store, target: Target, shape: Shape, query: Mapping[str, str]) -> Show:
    """Return how a watch shows its objects. Of a watch's tables only the first one has headers.

    Args:
        store: of all objects.
        target: the request's.
        shape: that the client accepts.
        query: parameters of the URL.

    Returns:
        A function from a stored object to the bytes of one event's object.
    """
    if shape.kind == "Table":
        state: dict[str, Any] = {"headers": True}

        def show_table(stored: Stored) -> bytes:
            made = _table_of(store, target, stored, query, state["headers"])
            state["headers"] = False
            return encode(made)

        return show_table
    if shape.kind:
        return lambda stored: stored.form(PARTIAL, tables.partial)
    return lambda stored: _bytes(target.resource, stored)

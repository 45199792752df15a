"""PATCH requests: which kind of patch, onto what, and what is written."""

from __future__ import annotations

from typing import Any

from springtide_local.api import apply, errors, subresources, writes
from springtide_local.api.collection import Stored
from springtide_local.api.objects import clone
from springtide_local.api.patch import json_patch, merge_patch, strategic_merge
from springtide_local.api.requests import Target
from springtide_local.api.resources import ResourceType
from springtide_local.api.store import Store
from springtide_local.api.writes import Options
from springtide_local.ports import Object

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


def patch(
    store: Store, target: Target, kind: str, body: Any, options: Options, force: bool
) -> tuple[Stored, bool]:
    """Patch an object, or apply a configuration.

    Args:
        store: of all objects.
        target: the object, and the subresource, that the request names.
        kind: content type of the patch.
        body: the decoded patch.
        options: of the write.
        force: take fields from their owners (server-side apply).

    Returns:
        The object as it is stored now, and whether it was created, as server-side apply does.

    Raises:
        ApiError: the patch does not fit, or the write is refused.
    """
    resource = target.resource
    if target.subresource in ("log", "eviction", "binding", "token", "finalize"):
        raise errors.method_not_allowed()
    if kind == APPLY:
        if not isinstance(body, dict):
            raise errors.bad_request("error decoding YAML: the applied configuration is no object")
        return apply.apply(store, target, body, options, force)
    view = resource.view
    current = store.get_stored(resource, target.name, target.namespace).object
    shown = view.show(current) if view is not None else current
    if view is None and shown["apiVersion"] != resource.api_version:
        shown = {**shown, "apiVersion": resource.api_version}  # written in another version
    patched = patched_object(resource, shown, kind, body)
    if view is not None:
        patched = view.store(patched)
        resource = store.registry.stored(resource.storage)
    return writes.update(store, resource, target.name, target.namespace, patched, options), False


def patched_object(resource: ResourceType | None, current: Object, kind: str, body: Any) -> Object:
    """Return a patched object.

    Args:
        resource: its type; None (a Scale) has no strategic merge.
        current: the object; it stays as it is.
        kind: content type of the patch.
        body: the decoded patch.

    Raises:
        ApiError: 400: the patch is malformed; 415: its kind is not served; 422: it does not apply.
    """
    if kind == JSON_PATCH:
        return json_patch(current, body)
    if not isinstance(body, dict):
        raise errors.bad_request("error decoding patch: the patch is no JSON object")
    if kind == MERGE_PATCH:
        return clone(merge_patch(current, body))
    if kind == STRATEGIC and resource is not None and not resource.custom:
        return clone(strategic_merge(current, body, resource.node))
    accepted = [JSON_PATCH, MERGE_PATCH, APPLY]
    raise errors.unsupported_media_type(
        "the body of the request was in an unknown format - accepted media types include: "
        + ", ".join(accepted)
    )


def patch_scale(store: Store, target: Target, kind: str, body: Any, options: Options) -> Object:
    """Patch the scale of an object.

    Args:
        store: of all objects.
        target: the object, and the subresource, that the request names.
        kind: content type of the patch.
        body: the decoded patch.
        options: of the write.

    Returns:
        The Scale as it is now.

    Raises:
        ApiError: the patch does not fit, or the write is refused.
    """
    current = store.get_stored(target.resource, target.name, target.namespace).object
    scale = subresources.scale_of(target, current)
    made = patched_object(None, scale, MERGE_PATCH if kind == STRATEGIC else kind, body)
    return subresources.set_scale(store, target, made, options)

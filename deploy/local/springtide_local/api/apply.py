"""Server-side apply: merge an applied configuration into the live object by who owns which field."""

from __future__ import annotations

import json
from typing import Any

from springtide_local.api import builtin, errors, fieldsets, managed, schema, writes
from springtide_local.api.collection import Stored
from springtide_local.api.fieldsets import Trie
from springtide_local.api.managed import APPLY, UPDATE, Entry
from springtide_local.api.objects import clone, lookup, timestamp
from springtide_local.api.requests import Target
from springtide_local.api.resources import ResourceType
from springtide_local.api.store import Store
from springtide_local.api.writes import Options
from springtide_local.ports import ApiError, Object

_KUBECTL = "kubectl"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def apply(store: Store, target: Target, config: Object, options: Options, force: bool) -> tuple[Stored, bool]:
    """Apply a configuration server-side.

    Args:
        store: of all objects.
        target: the object that the request names.
        config: the applied configuration.
        options: of the write; `manager` is who applies.
        force: take fields from their owners.

    Returns:
        The object as it is stored now, and whether it was created.

    Raises:
        ApiError: 409 with one cause for each field that another manager owns with another value, unless
            `force`.
    """
    resource = target.resource
    _check(target, config)
    live = store.peek(resource.storage, target.name, target.namespace)
    if live is None:
        if target.subresource:
            raise resource.not_found(target.name)
        return _create(store, target, config, options), True
    node = resource.node
    mine = _strip(resource, fieldsets.fields_of(managed.owned_part(config), node), target.subresource)
    entries = managed.read(live)
    me = Entry(options.manager, APPLY, resource.api_version, target.subresource, timestamp(store.now()), mine)
    others = [entry for entry in entries if entry.identity != me.identity]
    previous = next((entry for entry in entries if entry.identity == me.identity), None)
    merged = fieldsets.merge(live, config, node)
    conflicts = _conflicts(others, mine, merged, live, resource)
    if conflicts and options.manager == _KUBECTL and _upgrades(conflicts, live, resource):
        force = True
    if conflicts and not force:
        raise _conflict(conflicts)
    for entry, fields in conflicts:
        entry.fields = fieldsets.difference(entry.fields, fields)
    if previous is not None:
        merged = _prune(merged, previous.fields, mine, others, resource)
        if previous.fields == mine:
            me.time = previous.time
    merged = clone(merged)
    merged["metadata"] = _metadata(live, merged["metadata"], config)
    options.subresource = target.subresource or None

    def prepared(obj: Object) -> None:
        _, removed = fieldsets.compare(managed.owned_part(live), managed.owned_part(obj), node)
        for entry in others:
            entry.fields = fieldsets.without_below(entry.fields, removed)
        managed.write(obj, [*others, me])

    return writes.update(store, resource, target.name, target.namespace, merged, options, prepared), False


def _upgrades(conflicts: list[tuple[Entry, Trie]], live: Object, resource: ResourceType) -> bool:
    """Whether all conflicts are with kubectl's own client-side applies, by its annotation."""
    try:
        last = json.loads(lookup(live, "metadata", "annotations", _LAST_APPLIED) or "")
    except ValueError:
        return False
    if not isinstance(last, dict) or not isinstance(last.get("metadata"), dict):
        return False
    fields = fieldsets.fields_of(managed.owned_part(last), resource.node)
    stale = fieldsets.differing(fields, last, live, resource.node)
    allowed = fieldsets.difference(fields, stale)
    return not any(fieldsets.difference(conflict, allowed) for _, conflict in conflicts)


def _check(target: Target, config: Object) -> None:
    resource = target.resource
    for name, expected in (("apiVersion", resource.api_version), ("kind", resource.kind)):
        if not config.get(name):
            raise errors.bad_request(f"error: the applied configuration has no {name}: {name} must be set")
        if config[name] != expected:
            raise errors.bad_request(
                f"the {name} in the data ({config[name]}) does not match the expected {name} ({expected})"
            )
    if config.get("metadata") is None:
        config["metadata"] = {}
    writes.check_decodable(resource, config)
    meta = config["metadata"]
    if meta.get("managedFields"):
        raise errors.bad_request("metadata.managedFields must be nil")
    given = meta.get("name")
    if given not in (None, "", target.name):
        raise errors.bad_request(
            f"the name of the object ({given}) does not match the name on the URL ({target.name})"
        )
    meta["name"] = target.name
    if resource.namespaced:
        meta.setdefault("namespace", target.namespace)
    unknown: list[str] = []
    schema.prune(builtin.node(builtin.OBJECT_META), clone(meta), "metadata", unknown)
    if resource.node is not None:
        schema.prune(resource.node, clone(config), "", unknown, root=True)
    if unknown:
        where = f"{target.namespace}/{target.name}" if target.namespace else f"/{target.name}"
        version = resource.api_version
        raise ApiError(
            500,
            "",
            f"failed to create typed patch object ({where}; {version}, Kind={resource.kind}): "
            + ", ".join(f".{path}: field not declared in schema" for path in unknown),
        )


def _create(store: Store, target: Target, config: Object, options: Options) -> Stored:
    resource = target.resource
    uid = config["metadata"].get("uid")
    if uid:
        why = f"uid mismatch: the provided object specified uid {uid}, and no existing object was found"
        raise errors.conflict(resource.group, resource.plural, target.name, why)
    # Nothing has that version: whoever applies it means the object, not one state of it.
    config["metadata"].pop("resourceVersion", None)
    mine = _strip(resource, fieldsets.fields_of(managed.owned_part(config), resource.node), "")
    entry = Entry(options.manager, APPLY, resource.api_version, "", timestamp(store.now()), mine)
    return writes.create(
        store, resource, clone(config), target.namespace, options, lambda obj: managed.write(obj, [entry])
    )


def _strip(resource: ResourceType, fields: Trie, subresource: str) -> Trie:
    """Fields that this write can own: the status only through its subresource, and nothing else through
    it.
    """
    if subresource == "status":
        return {key: below for key, below in fields.items() if key == "f:status"}
    if resource.has_status:
        return {key: below for key, below in fields.items() if key != "f:status"}
    return fields


def _conflicts(
    others: list[Entry], mine: Trie, merged: Object, live: Object, resource: ResourceType
) -> list[tuple[Entry, Trie]]:
    found = []
    for entry in others:
        shared = fieldsets.intersection(entry.fields, mine)
        fields = fieldsets.differing(shared, merged, live, resource.node) if shared else {}
        if fields:
            found.append((entry, fields))
    return found


def _conflict(conflicts: list[tuple[Entry, Trie]]) -> ApiError:
    causes: list[Object] = []
    parts: list[str] = []
    for entry, fields in conflicts:
        listed = list(fieldsets.paths(fields))
        who = _shown(entry)
        causes += [
            {"reason": "FieldManagerConflict", "message": f"conflict with {who}", "field": path}
            for path in listed
        ]
        if len(listed) == 1:
            parts.append(f"conflict with {who}: {listed[0]}")
        else:
            parts.append(f"conflicts with {who}:\n" + "\n".join(f"- {path}" for path in listed))
    word = "conflict" if len(causes) == 1 else "conflicts"
    message = f"Apply failed with {len(causes)} {word}: " + "\n".join(parts)
    return ApiError(409, "Conflict", message, {"causes": causes})


def _shown(entry: Entry) -> str:
    name = errors.shown(entry.manager)
    if entry.subresource:
        return f"{name} with subresource {errors.shown(entry.subresource)}"
    if entry.operation == UPDATE:
        return f"{name} using {entry.api_version}"
    return name


def _prune(merged: Object, before: Trie, mine: Trie, others: list[Entry], resource: ResourceType) -> Object:
    """Remove the fields that were applied once, are not any more, and belong to no other manager."""
    dropped = fieldsets.difference(before, mine)
    for entry in others:
        dropped = _unowned(dropped, entry.fields)
    result: Any = fieldsets.remove(merged, dropped, resource.node) if dropped else merged
    result.setdefault("metadata", merged["metadata"])
    return dict(result)


def _unowned(dropped: Trie, owned: Trie) -> Trie:
    """`dropped` without what is owned, and without the containers of what is owned."""
    made: Trie = {}
    for key, below in dropped.items():
        if key == ".":
            if not owned:
                made["."] = below
        elif key not in owned:
            made[key] = below
        else:
            rest = _unowned(below, owned[key])
            if rest:
                made[key] = rest
    return made


def _metadata(live: Object, merged: Object, config: Object) -> Object:
    """Merge the metadata that can be applied; a resourceVersion or uid in the configuration stays as a
    precondition.
    """
    meta = {
        name: value
        for name, value in live["metadata"].items()
        if name not in ("labels", "annotations", "finalizers", "ownerReferences")
    }
    for name in ("labels", "annotations", "finalizers", "ownerReferences"):
        if name in merged:
            meta[name] = merged[name]
    for name in ("resourceVersion", "uid"):
        if config["metadata"].get(name):
            meta[name] = config["metadata"][name]
    return meta

"""`metadata.managedFields`: who set which field, kept on every write."""

from __future__ import annotations

from dataclasses import dataclass

from springtide_local.api import fieldsets
from springtide_local.api.fieldsets import Trie
from springtide_local.api.objects import timestamp
from springtide_local.api.resources import ResourceType
from springtide_local.ports import Object

APPLY = "Apply"
UPDATE = "Update"
_META_KEPT = ("labels", "annotations", "finalizers", "ownerReferences", "generateName")
_MOST_UPDATERS = 10
_ANCIENT = "ancient-changes"


@dataclass(slots=True)
class Entry:
    """One manager's fields. Applies and updates of the same name are two managers, and so are
    subresources.
    """

    manager: str
    operation: str
    api_version: str
    subresource: str
    time: str
    fields: Trie

    @property
    def identity(self) -> tuple[str, str, str, str]:
        version = self.api_version if self.operation == UPDATE else ""
        return (self.manager, self.operation, version, self.subresource)


def read(obj: Object) -> list[Entry]:
    return [
        Entry(
            raw.get("manager", ""),
            raw.get("operation", UPDATE),
            raw.get("apiVersion", ""),
            raw.get("subresource", ""),
            raw.get("time", ""),
            fieldsets.load(raw.get("fieldsV1")),
        )
        for raw in obj["metadata"].get("managedFields") or ()
        if raw
    ]


def write(obj: Object, entries: list[Entry]) -> None:
    """Set the managed fields of an object; applies come first.

    Args:
        obj: is changed in place.
        entries: by manager; those without fields are dropped.
    """
    listed = []
    for entry in sorted(
        _capped(entries), key=lambda entry: (entry.operation != APPLY, entry.time, entry.manager)
    ):
        if not entry.fields:
            continue
        raw: Object = {
            "manager": entry.manager,
            "operation": entry.operation,
            "apiVersion": entry.api_version,
            "time": entry.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": fieldsets.dump(entry.fields),
        }
        if entry.subresource:
            raw["subresource"] = entry.subresource
        listed.append(raw)
    if listed:
        obj["metadata"]["managedFields"] = listed
    else:
        obj["metadata"].pop("managedFields", None)


def _capped(entries: list[Entry]) -> list[Entry]:
    """Many update managers are folded into one, oldest first, as the API server does."""
    updates = [entry for entry in entries if entry.operation == UPDATE]
    if len(updates) <= _MOST_UPDATERS:
        return entries
    updates.sort(key=lambda entry: entry.time)
    old = updates[: len(updates) - _MOST_UPDATERS + 1]
    fields: Trie = {}
    for entry in old:
        fields = fieldsets.union(fields, entry.fields)
    folded = Entry(_ANCIENT, UPDATE, old[-1].api_version, "", old[-1].time, fields)
    return [entry for entry in entries if entry not in old] + [folded]


def owned_part(obj: Object) -> Object:
    """The part of an object that can be managed: without its identity and what the system sets."""
    part = {name: value for name, value in obj.items() if name not in ("apiVersion", "kind", "metadata")}
    meta = {name: obj["metadata"][name] for name in _META_KEPT if name in obj["metadata"]}
    if meta:
        part["metadata"] = meta
    return part


def track(
    old: Object | None, obj: Object, resource: ResourceType, manager: str, subresource: str | None, now: float
) -> None:
    """Record an update: the writer owns what it changed, the others lose it.

    Args:
        old: the object as it is stored; None: it is new.
        obj: as it is to be stored; its managed fields are changed in place.
        resource: its type.
        manager: the writer.
        subresource: that was written to; None: the object itself.
        now: in unix seconds.
    """
    given = obj["metadata"].get("managedFields")
    if given is None and old is not None and "managedFields" in old["metadata"]:
        obj["metadata"]["managedFields"] = old["metadata"]["managedFields"]
    before = owned_part(old) if old is not None else {}
    changed, removed = fieldsets.compare(before, owned_part(obj), resource.node)
    if not changed and not removed:
        return
    entries = read(obj)
    mine = Entry(manager, UPDATE, obj["apiVersion"], subresource or "", timestamp(now), {})
    for entry in entries:
        if entry.identity == mine.identity:
            mine.fields = entry.fields
    others = [entry for entry in entries if entry.identity != mine.identity]
    lost = fieldsets.union(changed, removed)
    for entry in others:
        entry.fields = fieldsets.without_below(fieldsets.difference(entry.fields, lost), removed)
    mine.fields = fieldsets.without_below(fieldsets.union(mine.fields, changed), removed)
    write(obj, [*others, mine])

"""Parts of a job's status that are written, beside what other versions of the operator have written there.

The status is the operator's ledger, and more than one version may write it: after a rollback, or while two
versions take turns at the Lease. So a version leaves alone what it does not know, and notices when the API
server drops what it wrote, as an older CRD does without a word. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from springtide_operator.api.crd import custom_resource_definition

Object = dict[str, Any]
_KEYS = ("type", "name", "workers")
"""Fields by which items of a list are told apart, unless its schema says so."""


class OutdatedCrdError(RuntimeError):
    """The API server has dropped fields that were written: its CRD does not know them."""


@cache
def status_schema() -> Object:
    """Return the schema of a job's status as this version knows it."""
    [version] = custom_resource_definition()["spec"]["versions"]
    return cast(Object, version["schema"]["openAPIV3Schema"]["properties"]["status"])


def with_unknown(old: Object, new: Object, schema: Mapping[str, Any]) -> Object:
    """Return the new object with all fields of the old one that this version does not know.

    Args:
        old: as it was read.
        new: as this version wants it.
        schema: of both, as this version knows it.
    """
    properties: Mapping[str, Any] = schema.get("properties") or {}
    entries = schema.get("additionalProperties")
    if not properties and not isinstance(entries, Mapping):
        return new  # nothing is known of what is in it, so it is written as a whole
    result = dict(new)
    for key, before in old.items():
        known = properties.get(key, entries)
        if known is None:
            result.setdefault(key, before)
        elif key in new:
            result[key] = _value(before, new[key], known)
    return result


def _value(before: Any, now: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(before, dict) and isinstance(now, dict):
        return with_unknown(before, now, schema)
    items = schema.get("items") or {}
    if isinstance(before, list) and isinstance(now, list) and items.get("properties"):
        keys = schema.get("x-kubernetes-list-map-keys") or [k for k in _KEYS if k in items["properties"]][:1]
        earlier = {_identity(item, keys): item for item in before if isinstance(item, dict)}
        return [with_unknown(earlier.get(_identity(item, keys), {}), item, items) for item in now]
    return now


def _identity(item: Mapping[str, Any], keys: list[str]) -> tuple[Any, ...]:
    return tuple(item.get(key) for key in keys)


def missing(wanted: Any, found: Any, path: str = "status") -> list[str]:
    """Return the paths of fields that were written and are not there.

    Args:
        wanted: as it was written.
        found: as the API server has answered.
        path: of both.
    """
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return [path]
        return [
            lost
            for key, value in wanted.items()
            if value is not None
            for lost in (missing(value, found[key], f"{path}.{key}") if key in found else [f"{path}.{key}"])
        ]
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return [path]
        pairs = enumerate(zip(wanted, found, strict=True))
        return [lost for number, (one, other) in pairs for lost in missing(one, other, f"{path}[{number}]")]
    return []

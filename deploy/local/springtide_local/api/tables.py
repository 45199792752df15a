"""Server-side printing: objects as rows of a Table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from springtide_local.api import jsonpath
from springtide_local.api.columns import AGE, COLUMNS, NAME, Column
from springtide_local.api.durations import age
from springtide_local.api.resources import ResourceType
from springtide_local.ports import Object


def columns_of(resource: ResourceType) -> Sequence[Column]:
    """The columns of a kind: its own, those of its CRD after the name, or name and age."""
    if resource.custom and resource.columns:
        return (NAME, *(_custom(column) for column in resource.columns))
    return COLUMNS.get(resource.storage, (NAME, AGE))


def _custom(raw: Object) -> Column:
    path, kind = raw["jsonPath"], raw["type"]

    def cell(obj: Object, now: float) -> Any:
        found = jsonpath.find(obj, path)
        return _cell(found[0], kind, now) if found else None

    return Column(
        raw["name"], cell, kind, raw.get("priority", 0) > 0, raw.get("format", ""), raw.get("description", "")
    )


def _cell(value: Any, kind: str, now: float) -> Any:
    """A value as its column's type; None where it does not fit."""
    match kind:
        case "date":
            return age(value, now) if isinstance(value, str) else None
        case "integer":
            return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        case "number":
            return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        case "boolean":
            return value if isinstance(value, bool) else None
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return None if value is None else _text(value)


def _text(value: Any) -> str:
    """Go prints lists and maps without commas."""
    if isinstance(value, list):
        return "[" + ",".join(_quoted(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quoted(key)}:{_quoted(item)}" for key, item in value.items()) + "}"
    return str(value)


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else _text(value)


def definitions(columns: Sequence[Column]) -> list[Object]:
    return [
        {
            "name": column.name,
            "type": "string" if column.type == "date" else column.type,
            "format": column.format,
            "description": column.description,
            "priority": 1 if column.wide else 0,
        }
        for column in columns
    ]


def row(columns: Sequence[Column], obj: Object, now: float, include: str) -> Object:
    """Return one row of a table.

    Args:
        columns: of the table.
        obj: the object.
        now: in unix seconds, for ages.
        include: of the object: None, Metadata or Object.
    """
    made: Object = {"cells": [column.cell(obj, now) for column in columns]}
    if include == "Object":
        made["object"] = obj
    elif include != "None":
        made["object"] = partial(obj)
    return made


def partial(obj: Object) -> Object:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


def table(
    columns: Sequence[Column],
    rows: list[Object],
    version: str,
    meta: Object | None = None,
    headers: bool = True,
) -> Object:
    """Return a Table.

    Args:
        columns: of the table.
        rows: made by `row`.
        version: resource version of the list.
        meta: more of its metadata.
        headers: with the definitions of the columns.
    """
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version, **(meta or {})},
        "columnDefinitions": definitions(columns) if headers else None,
        "rows": rows,
    }

"""CEL types, and the types and sizes that a structural schema gives to `self`.

Sizes follow the API server: a string of maxLength n counts 4n bytes, an enum its longest value, what has no
limit counts as what fits into a request of 3 MiB, so the more the smaller its items can be written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from springtide_local.ports import Object

MAX_REQUEST_BYTES = 3 * 1024 * 1024
RESERVED = frozenset(
    [
        "true",
        "false",
        "null",
        "in",
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
        "loop",
        "package",
        "namespace",
        "return",
        "var",
        "void",
        "while",
    ]
)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True)
class Type:
    """A type; `parameters` are those of a list, a map, an optional value or a type."""

    kind: str
    parameters: tuple[Type, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        if self.kind in ("object", "parameter"):
            return self.name
        shown = {"null_type": "null", "timestamp": "timestamp", "error": "!error!"}.get(self.kind, self.kind)
        return shown + (f"({', '.join(map(str, self.parameters))})" if self.parameters else "")


BOOL, INT, UINT, DOUBLE = Type("bool"), Type("int"), Type("uint"), Type("double")
STRING, BYTES, NULL, DYN = Type("string"), Type("bytes"), Type("null_type"), Type("dyn")
TIMESTAMP, DURATION, ERROR = Type("timestamp"), Type("duration"), Type("error")


def list_of(element: Type) -> Type:
    """Return the type of a list."""
    return Type("list", (element,))


def map_of(key: Type, value: Type) -> Type:
    """Return the type of a map.

    Args:
        key: type of its keys.
        value: type of its values.
    """
    return Type("map", (key, value))


@dataclass(frozen=True)
class Declared:
    """Declaration of a value in a schema.

    Attributes:
        type: The CEL type.
        size: Largest number of items, properties or bytes; 0 for what has no size.
        least: Fewest bytes that a value takes when it is written as JSON.
        fields: Of an object, by CEL name.
        key: Of a map.
        element: Of a list or map.
    """

    type: Type
    size: int = 0
    least: int = 0
    fields: dict[str, Declared] = field(default_factory=dict)
    key: Declared | None = None
    element: Declared | None = None

    def member(self, name: str) -> Declared | None:
        """Return a field of an object; a reserved word also names one unescaped, as since Kubernetes 1.32."""
        found = self.fields.get(name)
        if found is None and name in RESERVED:
            return self.fields.get(f"__{name}__")
        return found


_STRING = Declared(STRING, MAX_REQUEST_BYTES - 2, 2)
_TIMES = {"duration": (DURATION, 32, 3), "date": (TIMESTAMP, 12, 12), "date-time": (TIMESTAMP, 32, 21)}


def escape(name: str) -> str | None:
    """Return the CEL identifier of a property, or None when the property cannot be reached from CEL."""
    if name in RESERVED:
        return f"__{name}__"
    escaped = name.replace("__", "__underscores__")
    for char, word in ((".", "__dot__"), ("-", "__dash__"), ("/", "__slash__")):
        escaped = escaped.replace(char, word)
    return escaped if _IDENTIFIER.match(escaped) else None


def declared(raw: Object, root: bool = False, name: str = "selfType") -> Declared | None:
    """Return what a schema declares for CEL.

    Args:
        raw: The structural schema.
        root: Whether it is that of a whole resource, where kind, apiVersion and the names are always known.
        name: Name of the object type, for error texts.

    Returns:
        Type and sizes; None where CEL sees nothing (an array without a type of its items, say).
    """
    if raw.get("x-kubernetes-int-or-string"):
        most = 4 * max(raw["maxLength"], 0) if "maxLength" in raw else MAX_REQUEST_BYTES - 2
        return Declared(DYN, most, 1)
    match raw.get("type"):
        case "array":
            return _array(raw, name)
        case "object":
            return _object(_with_metadata(raw) if root else raw, name)
        case "string":
            return _string(raw)
        case "boolean":
            return Declared(BOOL, 0, 4)
        case "number":
            return Declared(DOUBLE, 0, 1)
        case "integer":
            return Declared(INT, 0, 1)
        case _:
            return None


def _array(raw: Object, name: str) -> Declared | None:
    items = raw.get("items")
    if not isinstance(items, dict):
        return None
    element = declared(items, bool(items.get("x-kubernetes-embedded-resource")), f"{name}.@idx")
    if element is None:
        return None
    most = (MAX_REQUEST_BYTES - 2) // (element.least + 1)
    if "maxItems" in raw:
        most = max(raw["maxItems"], 0)
    return Declared(list_of(element.type), most, 2, element=element)


def _object(raw: Object, name: str) -> Declared | None:
    values = raw.get("additionalProperties")
    if isinstance(values, dict):
        element = declared(values, bool(values.get("x-kubernetes-embedded-resource")), f"{name}.@elem")
        if element is None:
            return None
        most = (MAX_REQUEST_BYTES - 2) // (element.least + 6)
        if "maxProperties" in raw:
            most = max(raw["maxProperties"], 0)
        key = replace(_STRING, size=0)  # keys have no limit of their own, and count as nothing
        return Declared(map_of(STRING, element.type), most, 2, key=key, element=element)
    fields, least = {}, 2
    for property_name, child in (raw.get("properties") or {}).items():
        cel_name = escape(property_name)
        below = declared(
            child, bool(child.get("x-kubernetes-embedded-resource")), f"{name}.{cel_name or property_name}"
        )
        if below is None:
            continue
        if cel_name is not None:
            fields[cel_name] = below
        if property_name in (raw.get("required") or ()) and child.get("default") is None:
            least += len(property_name) + below.least + 4
    return Declared(Type("object", name=name), 0, least, fields=fields)


def _string(raw: Object) -> Declared:
    given = raw.get("format", "")
    if given in _TIMES:
        return Declared(*_TIMES[given])
    most = MAX_REQUEST_BYTES - 2
    if "maxLength" in raw:
        most = max(raw["maxLength"], 0) * (1 if given == "byte" else 4)
    elif given != "byte" and raw.get("enum"):
        most = max((len(value.encode()) for value in raw["enum"] if isinstance(value, str)), default=0)
    return Declared(BYTES if given == "byte" else STRING, most, 2)


def _with_metadata(raw: Object) -> Object:
    """Return the schema of a resource with what every resource has.

    API servers before 1.37 look at a limit of metadata.name only where generateName is declared beside it.
    """
    plain: dict[str, Any] = {"type": "string"}
    given = raw.get("properties") or {}
    names = (given.get("metadata") or {}).get("properties") or {}
    known = all(names.get(name, {}).get("type") == "string" for name in ("name", "generateName"))
    typed = all(given.get(name, {}).get("type") == "string" for name in ("kind", "apiVersion"))
    if known and typed:
        return raw
    metadata = {"type": "object", "properties": {"name": plain, "generateName": plain}}
    return {**raw, "properties": {**given, "kind": plain, "apiVersion": plain, "metadata": metadata}}

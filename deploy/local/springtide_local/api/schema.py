"""Structural schemas, compiled once: pruning of unknown fields, defaults, value validation.

The same nodes serve custom resources (from a CRD's `openAPIV3Schema`) and built-in kinds (from the published
API schemas, see `builtin`). Semantics follow "Specifying a structural schema" in the Kubernetes documentation
of CRDs; the texts of value errors follow kube-openapi's validation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from springtide_local.api import errors, regex
from springtide_local.api.errors import FieldError
from springtide_local.api.formats import format_problem
from springtide_local.api.objects import canonical_quantity, clone_value, same
from springtide_local.ports import Object

MISSING = object()
_JSON_TYPES: dict[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}


class Node:
    """One schema, with its children compiled. `raw` is the JSON schema that it came from."""

    __slots__ = (
        "additional",
        "all_of",
        "any_of",
        "default",
        "embedded",
        "enum",
        "format",
        "has_rules",
        "int_or_string",
        "items",
        "list_keys",
        "list_type",
        "map_type",
        "merge_key",
        "nullable",
        "one_of",
        "patch_strategy",
        "pattern",
        "preserve",
        "properties",
        "quantity",
        "raw",
        "refused",
        "required",
        "rules",
        "type",
    )

    def __init__(self) -> None:
        self.raw: Object = {}
        self.type: str | None = None
        self.properties: dict[str, Node] = {}
        self.additional: Node | None = None
        self.items: Node | None = None
        self.required: tuple[str, ...] = ()
        self.enum: list[Any] | None = None
        self.pattern: Any = None
        self.format: str = ""
        self.default: Any = MISSING
        self.nullable = False
        self.preserve = False
        self.embedded = False
        self.int_or_string = False
        self.quantity = False
        self.list_type = "atomic"
        self.list_keys: tuple[str, ...] = ()
        self.map_type = "granular"
        self.merge_key = ""
        self.patch_strategy: tuple[str, ...] = ()
        self.all_of: list[Node] = []
        self.any_of: list[Node] = []
        self.one_of: list[Node] = []
        self.refused: Node | None = None
        self.rules: list[Object] = []
        self.has_rules = False


Resolve = Callable[[str], Node]


def compile_schema(raw: Object, resolve: Resolve | None = None, node: Node | None = None) -> Node:
    """Compile a JSON schema.

    Args:
        raw: as it was written.
        resolve: answers `$ref`; None: there must be none.
        node: is filled; None: a new one is.

    Returns:
        The compiled schema.

    Raises:
        KeyError: there is a `$ref` that nothing answers.
    """
    if "$ref" in raw:
        if resolve is None:
            raise KeyError(raw["$ref"])
        target = resolve(raw["$ref"])
        return target if len(raw) <= 2 and "default" not in raw else _annotated(target, raw)
    node = node or Node()
    node.raw = raw
    _compile_type(node, raw)
    node.properties = {
        name: compile_schema(child, resolve) for name, child in raw.get("properties", {}).items()
    }
    additional = raw.get("additionalProperties")
    if isinstance(additional, dict):
        node.additional = compile_schema(additional, resolve)
    elif additional is True:
        node.additional = _anything()
    if isinstance(raw.get("items"), dict):
        node.items = compile_schema(raw["items"], resolve)
    node.required = tuple(raw.get("required", ()))
    node.enum = raw.get("enum")
    node.pattern = regex.compiled(raw["pattern"]) if raw.get("pattern") else None
    node.format = raw.get("format", "")
    node.default = raw.get("default", MISSING)
    node.preserve = bool(raw.get("x-kubernetes-preserve-unknown-fields"))
    node.embedded = bool(raw.get("x-kubernetes-embedded-resource"))
    node.list_type = raw.get("x-kubernetes-list-type", "atomic")
    node.list_keys = tuple(raw.get("x-kubernetes-list-map-keys", ()))
    node.map_type = raw.get("x-kubernetes-map-type", "granular")
    _annotate(node, raw)
    node.all_of = [compile_schema(part, resolve) for part in raw.get("allOf", ())]
    if not node.int_or_string:
        node.any_of = [compile_schema(part, resolve) for part in raw.get("anyOf", ())]
        node.one_of = [compile_schema(part, resolve) for part in raw.get("oneOf", ())]
    node.refused = compile_schema(raw["not"], resolve) if isinstance(raw.get("not"), dict) else None
    node.rules = list(raw.get("x-kubernetes-validations", ()))
    below = [*node.properties.values(), *filter(None, (node.items, node.additional))]
    node.has_rules = bool(node.rules) or any(child.has_rules for child in below)
    return node


def _compile_type(node: Node, raw: Object) -> None:
    kind = raw.get("type")
    if isinstance(kind, list):
        node.nullable = "null" in kind
        kind = next((name for name in kind if name != "null"), None)
    node.type = kind
    node.nullable = node.nullable or bool(raw.get("nullable"))
    node.int_or_string = bool(raw.get("x-kubernetes-int-or-string")) or raw.get("format") == "int-or-string"


def _annotate(node: Node, raw: Object) -> None:
    node.merge_key = raw.get("x-kubernetes-patch-merge-key", node.merge_key)
    if "x-kubernetes-patch-strategy" in raw:
        node.patch_strategy = tuple(raw["x-kubernetes-patch-strategy"].split(","))
    node.map_type = raw.get("x-kubernetes-map-type", node.map_type)


def _annotated(target: Node, raw: Object) -> Node:
    """A reference with words of its own (a default, a patch strategy) beside it."""
    node = Node()
    for slot in Node.__slots__:
        setattr(node, slot, getattr(target, slot))
    if "default" in raw:
        node.default = raw["default"]
    _annotate(node, raw)
    return node


def _anything() -> Node:
    node = Node()
    node.preserve = True
    return node


def prune(
    node: Node, value: Any, path: str, unknown: list[str], *, drop_nulls: bool = False, root: bool = False
) -> None:
    """Drop, in place, the fields that the schema does not know.

    Args:
        node: the schema.
        value: decoded JSON.
        path: of the value; "" for the object itself.
        unknown: gets the paths of what was dropped.
        drop_nulls: null fields go too, as in the decoding of built-in kinds.
        root: it is a whole object: apiVersion, kind and metadata stay.
    """
    if isinstance(value, dict):
        for name in list(value):
            where = f"{path}.{name}" if path else name
            child = node.properties.get(name, node.additional)
            if drop_nulls and value[name] is None:
                del value[name]
            elif (root or node.embedded) and name in ("apiVersion", "kind", "metadata"):
                continue
            elif child is not None and child.quantity:
                value[name] = canonical_quantity(value[name])
            elif child is not None:
                prune(child, value[name], where, unknown, drop_nulls=drop_nulls)
            elif not node.preserve:
                unknown.append(where)
                del value[name]
    elif isinstance(value, list) and node.items is not None:
        for index, item in enumerate(value):
            if item is None and drop_nulls:
                # What Go makes of a null in a list: the zero value.
                value[index] = item = (
                    {} if node.items.properties else "" if node.items.type == "string" else None
                )
            prune(node.items, item, f"{path}[{index}]", unknown, drop_nulls=drop_nulls)


def apply_defaults(node: Node, value: Any) -> None:
    """Fill absent fields that have a default, in place; a null in a field that may not be null counts as
    absent.

    Args:
        node: the schema.
        value: decoded JSON.
    """
    if isinstance(value, dict):
        for name, child in node.properties.items():
            present = name in value
            if present and value[name] is None and not child.nullable and child.default is not MISSING:
                present = False
            if not present and child.default is not MISSING:
                value[name] = clone_value(child.default)
                present = True
            if present:
                apply_defaults(child, value[name])
        if node.additional is not None:
            for name, item in value.items():
                if name not in node.properties:
                    apply_defaults(node.additional, item)
    elif isinstance(value, list) and node.items is not None:
        for item in value:
            apply_defaults(node.items, item)


def validate(node: Node, value: Any, path: str, found: list[FieldError], accepted: Any = None) -> None:
    """Find what the schema has against a value.

    Args:
        node: the schema.
        value: decoded JSON.
        path: of the value, for errors.
        found: gets one error for each problem.
        accepted: an earlier form of the value in which the schema found nothing; parts that equal theirs in
            it are not looked at again.
    """
    if value is None:
        if not node.nullable and (node.type or node.int_or_string):
            expected = node.type or "integer,string"
            found.append(errors.FieldError(path, errors.TYPE_INVALID, _type_text(path, expected, "null")))
        return
    if not _validate_type(node, value, path, found):
        return
    if node.enum is not None and value not in node.enum:
        found.append(
            errors.field_unsupported(path, value, [choice for choice in node.enum if choice is not None])
        )
    if isinstance(value, str):
        _validate_string(node, value, path, found)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _validate_number(node.raw, value, path, found)
    elif isinstance(value, dict):
        _validate_object(node, value, path, found, accepted)
    elif isinstance(value, list):
        _validate_list(node, value, path, found)
    _validate_combined(node, value, path, found)


def json_type(value: Any) -> str:
    """The JSON type; whole numbers beyond 64 bits are numbers, as for Go's decoder."""
    found = _JSON_TYPES[type(value)]
    return "number" if found == "integer" and not -(2**63) <= value < 2**63 else found


def _type_text(path: str, expected: str, got: str) -> str:
    return f'Invalid value: "{got}": {path or "body"} in body must be of type {expected}: "{got}"'


def _validate_type(node: Node, value: Any, path: str, found: list[FieldError]) -> bool:
    got = json_type(value)
    if node.int_or_string:
        expected, fits = "integer,string", got in ("integer", "string")
    elif node.type is None:
        return True
    else:
        expected = node.type
        whole = node.type == "integer" and isinstance(value, float) and value.is_integer()
        fits = got == node.type or (node.type == "number" and got == "integer") or whole
    if not fits:
        found.append(errors.FieldError(path, errors.TYPE_INVALID, _type_text(path, expected, got)))
    return fits


def _validate_string(node: Node, value: str, path: str, found: list[FieldError]) -> None:
    raw = node.raw
    if "maxLength" in raw and len(value) > raw["maxLength"]:
        text = f"Too long: may not be more than {raw['maxLength']} bytes"
        found.append(errors.FieldError(path, errors.TOO_LONG, text))
    if "minLength" in raw and len(value) < raw["minLength"]:
        _in_body(path, value, f"should be at least {raw['minLength']} chars long", found)
    if node.pattern is not None and node.pattern.search(value) is None:
        _in_body(path, value, f"should match '{raw['pattern']}'", found)
    if node.format and not node.quantity:
        problem = format_problem(node.format, value)
        if problem:
            _in_body(path, value, f"must be of type {node.format}: {errors.shown(value)}", found)


def _in_body(path: str, value: Any, rule: str, found: list[FieldError]) -> None:
    found.append(errors.field_invalid(path, value, f"{path} in body {rule}"))


def _validate_number(raw: Object, value: float, path: str, found: list[FieldError]) -> None:
    if "minimum" in raw:
        low, strict = raw["minimum"], raw.get("exclusiveMinimum", False)
        if value < low or (strict and value == low):
            words = "greater than" if strict else "greater than or equal to"
            _in_body(path, value, f"should be {words} {errors.shown(low)}", found)
    if "maximum" in raw:
        high, strict = raw["maximum"], raw.get("exclusiveMaximum", False)
        if value > high or (strict and value == high):
            words = "less than" if strict else "less than or equal to"
            _in_body(path, value, f"should be {words} {errors.shown(high)}", found)
    if raw.get("multipleOf") and (value / raw["multipleOf"]) % 1:
        _in_body(path, value, f"should be a multiple of {errors.shown(raw['multipleOf'])}", found)
    bits = {"int32": 31, "int64": 63}.get(raw.get("format", ""))
    if bits and not -(2**bits) <= value < 2**bits:
        _in_body(path, value, f"must be of type {raw['format']}: {errors.shown(value)}", found)


def _validate_object(
    node: Node, value: Object, path: str, found: list[FieldError], accepted: Any = None
) -> None:
    known = accepted if isinstance(accepted, dict) else {}
    for name in node.required:
        if name not in value:
            found.append(errors.field_required(f"{path}.{name}" if path else name))
    for name, item in value.items():
        child = node.properties.get(name, node.additional)
        if child is not None:
            before = known.get(name)
            if before is None or not same(before, item):
                validate(child, item, f"{path}.{name}" if path else name, found, before)
    raw = node.raw
    if "maxProperties" in raw and len(value) > raw["maxProperties"]:
        _too_many(path, len(value), raw["maxProperties"], found)
    if "minProperties" in raw and len(value) < raw["minProperties"]:
        _in_body(path, len(value), f"should have at least {raw['minProperties']} properties", found)


def _validate_list(node: Node, value: list[Any], path: str, found: list[FieldError]) -> None:
    raw = node.raw
    if "maxItems" in raw and len(value) > raw["maxItems"]:
        _too_many(path, len(value), raw["maxItems"], found)
    if "minItems" in raw and len(value) < raw["minItems"]:
        _in_body(path, len(value), f"should have at least {raw['minItems']} items", found)
    if node.items is not None:
        for index, item in enumerate(value):
            validate(node.items, item, f"{path}[{index}]", found)
    seen: list[Any] = []
    for index, item in enumerate(value):
        key: Any = item
        if node.list_type == "map" and isinstance(item, dict):
            key = {name: item.get(name, _key_default(node, name)) for name in node.list_keys}
        elif node.list_type != "set":
            break
        if key in seen:
            found.append(errors.field_duplicate(f"{path}[{index}]", key))
        seen.append(key)


def _key_default(node: Node, name: str) -> Any:
    child = node.items.properties.get(name) if node.items is not None else None
    return None if child is None or child.default is MISSING else child.default


def _too_many(path: str, count: int, most: int, found: list[FieldError]) -> None:
    text = f"Too many: {count}: must have at most {most} items"
    found.append(errors.FieldError(path, errors.TOO_MANY, text))


def _validate_combined(node: Node, value: Any, path: str, found: list[FieldError]) -> None:
    for part in node.all_of:
        validate(part, value, path, found)
    if node.any_of and not any(_fits(part, value) for part in node.any_of):
        _combined(path, "must validate at least one schema (anyOf)", found)
    if node.one_of:
        count = sum(_fits(part, value) for part in node.one_of)
        if count != 1:
            fits = "none valid" if count == 0 else f"{count} valid alternatives"
            _combined(path, f"must validate one and only one schema (oneOf). Found {fits}", found)
    if node.refused is not None and _fits(node.refused, value):
        _combined(path, "must not validate the schema (not)", found)


def _combined(path: str, text: str, found: list[FieldError]) -> None:
    found.append(errors.FieldError(path, errors.INVALID, f'Invalid value: "": "{path}" {text}'))


def _fits(node: Node, value: Any) -> bool:
    found: list[FieldError] = []
    validate(node, value, "", found)
    return not found

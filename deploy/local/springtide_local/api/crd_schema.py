"""Checks of the schema in a CRD, as an API server makes them before it serves the resource.

Four things in this order: the schema is structural, its defaults fit it, what it uses of OpenAPI is allowed,
and its rules compile and are not too dear. The texts are those of the API server's validation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from springtide_local.api import errors, regex
from springtide_local.api.cel.budget import inspect_rules
from springtide_local.api.cel.evaluation import validate_rules
from springtide_local.api.errors import FieldError
from springtide_local.api.objects import clone_value
from springtide_local.api.schema import MISSING, compile_schema, prune, validate
from springtide_local.ports import Object

_TYPES = ("array", "boolean", "integer", "number", "object", "string")
_UNSUPPORTED = ("id", "additionalItems", "patternProperties", "definitions", "dependencies", "$ref")
_META = ("apiVersion", "kind", "metadata")
_REASONS = ("FieldValueDuplicate", "FieldValueForbidden", "FieldValueInvalid", "FieldValueRequired")
_EITHER = [{"type": "integer"}, {"type": "string"}]
# What may stand at the root where status is a subresource, because there status is taken out of the schema.
_AT_ROOT = """
    description type format title maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength
    pattern maxItems minItems uniqueItems multipleOf required items properties externalDocs example
    x-kubernetes-preserve-unknown-fields x-kubernetes-validations
"""
_NESTED_EMPTY = {
    "type": "must be empty to be structural",
    "title": "must be empty to be structural",
    "description": "must be empty to be structural",
    "default": "must be undefined to be structural",
    "additionalProperties": "must be undefined to be structural",
    "nullable": "must be false to be structural",
    "x-kubernetes-preserve-unknown-fields": "must be false to be structural",
    "x-kubernetes-embedded-resource": "must be false to be structural",
    "x-kubernetes-int-or-string": "must be false to be structural",
    "x-kubernetes-list-map-keys": "must be empty to be structural",
    "x-kubernetes-list-type": "must be undefined to be structural",
    "x-kubernetes-map-type": "must be undefined to be structural",
    "x-kubernetes-validations": "must be empty to be structural",
}
_PATH_PART = re.compile(r"\.([^.\[\]]+)|\['((?:[^'\\]|\\.)*)'\]")


def schema_problems(raw: Object, path: str, *, has_status: bool = False) -> list[FieldError]:
    """Find what an API server has against a schema.

    Args:
        raw: `openAPIV3Schema` of a version.
        path: Its path, for errors.
        has_status: Whether status is a subresource, which limits what may stand at the root.

    Returns:
        All problems; rules are looked at only where the schema itself has none.
    """
    found: list[FieldError] = []
    if has_status:
        found += _root_problems(raw, path)
    if raw.get("nullable"):
        found.append(errors.field_forbidden(f"{path}.nullable", "nullable cannot be true at the root"))
    wrong: list[FieldError] = []
    if not _has_unsupported(raw):  # what is said of those words is enough
        _check_structure(raw, path, "root", wrong)
        _check_complete(raw, raw, path, path, wrong)
        wrong.sort(key=str)
    if not wrong:
        _check_defaults(raw, path, wrong, root=True)
    _check_openapi(raw, _Inside(path), wrong)
    found += wrong
    if not found:
        found += inspect_rules(raw, path).errors
    return found


def field_path_problem(raw: Object, field_path: str) -> str | None:
    """Say why a rule's fieldPath does not lead to a field below the rule's schema.

    Args:
        raw: the schema that the rule stands in, as it was written.
        field_path: as it was written.

    Returns:
        None where it does.
    """
    at: Any = raw
    position = 0
    while position < len(field_path):
        part = _PATH_PART.match(field_path, position)
        if part is None:
            return "must be a valid path"
        name = part[1] if part[1] is not None else re.sub(r"\\(.)", r"\1", part[2])
        if at.get("properties"):
            at = at["properties"].get(name)
        else:
            additional = at.get("additionalProperties")
            at = additional if isinstance(additional, dict) else None
        if at is None:
            return "must be a valid path"
        position = part.end()
    return None


def _root_problems(raw: Object, path: str) -> list[FieldError]:
    found = []
    if raw.get("type") != "object":
        text = (
            'only "object" is allowed as the type at the root of the schema if the status subresource is'
            " enabled"
        )
        found.append(errors.field_invalid(f"{path}.type", raw.get("type", ""), text))
    for name in sorted(set(raw) - set(_AT_ROOT.split())):
        text = (
            f"only [{' '.join(_AT_ROOT.split())}] fields are allowed at the root of the schema if the status"
            " subresource is enabled"
        )
        found.append(errors.field_invalid(path, name, text))
    return found


def _has_unsupported(raw: Any) -> bool:
    """Tell whether a word that Kubernetes has not, as `$ref`, stands anywhere in a schema."""
    if isinstance(raw.get("items"), list) or any(raw.get(word) for word in _UNSUPPORTED):
        return True
    below = [*(raw.get("properties") or {}).values()]
    for word in ("items", "additionalProperties", "not"):
        below += [raw[word]] if isinstance(raw.get(word), dict) else []
    for word in ("allOf", "anyOf", "oneOf"):
        below += raw.get(word) or []
    return any(_has_unsupported(child) for child in below)


def _check_structure(raw: Object, path: str, level: str, found: list[FieldError]) -> None:
    """Check that a schema says of each value what it is. `level` is root, item or field."""
    kind = raw.get("type") or ""
    embedded = bool(raw.get("x-kubernetes-embedded-resource"))
    preserves = bool(raw.get("x-kubernetes-preserve-unknown-fields"))
    either = bool(raw.get("x-kubernetes-int-or-string"))
    additional = raw.get("additionalProperties")
    if kind == "array" and not raw.get("items"):
        found.append(errors.field_required(f"{path}.items", "must be specified"))
    if isinstance(raw.get("items"), dict):
        _check_structure(raw["items"], f"{path}.items", "item", found)
    for name, child in (raw.get("properties") or {}).items():
        _check_structure(child, f"{path}.properties[{name}]", "field", found)
    if additional is not None and level == "root":
        found.append(errors.field_forbidden(f"{path}.additionalProperties", "must not be used at the root"))
    if isinstance(additional, dict):
        _check_structure(additional, f"{path}.additionalProperties", "field", found)
    for name, on in (("preserve-unknown-fields", preserves), ("embedded-resource", embedded)):
        if either and on:
            text = "must be false if x-kubernetes-int-or-string is true"
            found.append(errors.field_invalid(f"{path}.x-kubernetes-{name}", True, text))
    _check_junctors(raw, path, found)
    if embedded and kind != "object":
        text = "must be object if x-kubernetes-embedded-resource is true"
        found.append(_wrong_type(f"{path}.type", kind, text))
    elif not kind and not either and not preserves:
        place = {"root": "at the root", "item": "for specified array items"}
        text = f"must not be empty {place.get(level, 'for specified object fields')}"
        found.append(errors.field_required(f"{path}.type", text))
    if embedded and additional is not None:
        text = "must not be used if x-kubernetes-embedded-resource is set"
        found.append(errors.field_forbidden(f"{path}.additionalProperties", text))
    if level == "root" and kind and kind != "object":
        found.append(errors.field_invalid(f"{path}.type", kind, "must be object at the root"))
    _check_metadata(raw, path, level, found)
    if embedded and not preserves and not raw.get("properties"):
        text = (
            "must not be empty if x-kubernetes-embedded-resource is true without"
            " x-kubernetes-preserve-unknown-fields"
        )
        found.append(errors.field_required(f"{path}.properties", text))


def _wrong_type(path: str, kind: str, text: str) -> FieldError:
    return errors.field_invalid(path, kind, text) if kind else errors.field_required(path, text)


def _check_metadata(raw: Object, path: str, level: str, found: list[FieldError]) -> None:
    """Check that the root limits nothing of metadata but the names: the rest belongs to Kubernetes."""
    properties = raw.get("properties") or {}
    if level != "root" and not raw.get("x-kubernetes-embedded-resource"):
        return
    for name, wanted in (("kind", "string"), ("apiVersion", "string"), ("metadata", "object")):
        if name in properties and properties[name].get("type") != wanted:
            where = f"{path}.properties[{name}].type"
            found.append(errors.field_invalid(where, properties[name].get("type", ""), f"must be {wanted}"))
    metadata = properties.get("metadata")
    if level != "root" or metadata is None:
        return
    rest = {key: value for key, value in metadata.items() if key not in ("type", "default") and value}
    if set(rest.get("properties") or ()) <= {"name", "generateName"}:
        rest.pop("properties", None)
    if rest:
        text = (
            "must not specify anything other than name and generateName, but metadata is implicitly specified"
        )
        found.append(errors.field_forbidden(f"{path}.properties[metadata]", text))


def _check_junctors(raw: Object, path: str, found: list[FieldError]) -> None:
    """Check a schema's own limits, and what stands below anyOf, allOf, oneOf and not."""
    wrong = regex.problem(raw["pattern"]) if raw.get("pattern") else None
    if wrong is not None:
        text = f"must be a valid regular expression, but isn't: {wrong}"
        found.append(errors.field_invalid(f"{path}.pattern", raw["pattern"], text))
    for word in ("anyOf", "allOf", "oneOf"):
        for index, part in enumerate(raw.get(word) or ()):
            if word == "anyOf" and raw["anyOf"] == _EITHER:
                continue
            first = word == "allOf" and index == 0 and part.get("anyOf") == _EITHER
            inner = {key: value for key, value in part.items() if not (first and key == "anyOf")}
            _check_nested(inner, f"{path}.{word}[{index}]", found)
    if isinstance(raw.get("not"), dict):
        _check_nested(raw["not"], f"{path}.not", found)


def _check_nested(raw: Object, path: str, found: list[FieldError]) -> None:
    _check_junctors(raw, path, found)
    if isinstance(raw.get("items"), dict):
        _check_nested(raw["items"], f"{path}.items", found)
    for name, child in (raw.get("properties") or {}).items():
        _check_nested(child, f"{path}.properties[{name}]", found)
    for name, text in _NESTED_EMPTY.items():
        if raw.get(name) not in (None, "", False, []):
            found.append(errors.field_forbidden(f"{path}.{name}", text))
    if "metadata" in (raw.get("properties") or {}):
        text = "must not be specified in a nested context"
        found.append(errors.field_forbidden(f"{path}.properties[metadata]", text))


def _check_complete(raw: Object, by: Object, path: str, named: str, found: list[FieldError]) -> None:
    """Check that what anyOf, allOf, oneOf or not name is specified outside of them, too."""
    for word in ("not", "allOf", "anyOf", "oneOf"):
        parts = by.get(word)
        if isinstance(parts, dict):
            _check_named(raw, parts, path, f"{named}.{word}", found)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            _check_named(raw, part, path, f"{named}.{word}[{index}]", found)


def _check_named(raw: Object | None, by: Object, path: str, named: str, found: list[FieldError]) -> None:
    if raw is None:
        found.append(errors.field_required(path, f"because it is defined in {named}"))
        return
    _check_complete(raw, by, path, named, found)
    if isinstance(by.get("items"), dict):
        _check_named(raw.get("items"), by["items"], f"{path}.items", f"{named}.items", found)
    for name, child in (by.get("properties") or {}).items():
        below = f"properties[{name}]"
        known = (raw.get("properties") or {}).get(name)
        _check_named(known, child, f"{path}.{below}", f"{named}.{below}", found)


def _check_defaults(raw: Object, path: str, found: list[FieldError], root: bool = False) -> None:
    """Check that defaults are valid as they stand: neither are they defaulted themselves, nor pruned."""
    if raw.get("default") is not None:
        node, where = compile_schema(raw), f"{path}.default"
        pruned, unknown = clone_value(raw["default"]), list[str]()
        prune(node, pruned, where, unknown)
        if unknown:
            found.append(errors.field_invalid(where, raw["default"], "must not have unknown fields"))
        wrong: list[FieldError] = []
        validate(node, raw["default"], "", wrong)
        wrong = [replace(each, path=_below(where, each.path)) for each in wrong]
        if not wrong and not _has_broken_rule(raw):
            validate_rules(node, raw["default"], MISSING, where, wrong)
        found += wrong
    if isinstance(raw.get("items"), dict):
        _check_defaults(raw["items"], f"{path}.items", found)
    for name, child in (raw.get("properties") or {}).items():
        if not (root and name in _META):
            _check_defaults(child, f"{path}.properties[{name}]", found)


def _below(path: str, part: str) -> str:
    return f"{path}{'' if part.startswith('[') or not part else '.'}{part}"


def _has_broken_rule(raw: Object) -> bool:
    """Tell whether a rule of a schema does not compile: that is said where the rule stands, once."""
    return bool(inspect_rules(raw, "").errors)


@dataclass(frozen=True)
class _Inside:
    """Position of a part in a schema."""

    path: str
    root: bool = True
    meta: bool = False
    no_default: str | None = None


def _check_openapi(raw: Object, inside: _Inside, found: list[FieldError]) -> None:
    """Check what a schema uses of OpenAPI and of Kubernetes' extensions, and the form of its rules."""
    path = inside.path
    _check_words(raw, inside, found)
    additional, properties = raw.get("additionalProperties"), raw.get("properties") or {}
    if additional is not None and properties and additional is not True:
        text = "additionalProperties and properties are mutual exclusive"
        found.append(errors.field_forbidden(f"{path}.additionalProperties", text))
    if isinstance(additional, dict):
        reason = "inside additionalProperties applying to object metadata" if inside.meta else None
        below = replace(inside, path=f"{path}.additionalProperties", root=False)
        _check_openapi(additional, replace(below, no_default=reason or inside.no_default), found)
    for name, child in properties.items():
        below = replace(inside, path=f"{path}.properties[{name}]", root=False)
        if name in _META and (inside.root or raw.get("x-kubernetes-embedded-resource")):
            reason = f"in top-level {name}" if inside.root else inside.no_default
            below = replace(below, meta=True, no_default=reason)
        _check_openapi(child, below, found)
    for word in ("allOf", "oneOf", "anyOf"):
        for index, part in enumerate(raw.get(word) or ()):
            _check_openapi(part, replace(inside, path=f"{path}.{word}[{index}]", root=False), found)
    for word in ("not", "items"):
        if isinstance(raw.get(word), dict):
            _check_openapi(raw[word], replace(inside, path=f"{path}.{word}", root=False), found)
    if raw.get("x-kubernetes-preserve-unknown-fields") is False:
        where = f"{path}.x-kubernetes-preserve-unknown-fields"
        found.append(errors.field_invalid(where, False, "must be true or undefined"))
    _check_collections(raw, path, found)
    for index, rule in enumerate(raw.get("x-kubernetes-validations") or ()):
        _check_rule(raw, rule, f"{path}.x-kubernetes-validations[{index}]", found)


def _check_words(raw: Object, inside: _Inside, found: list[FieldError]) -> None:
    path, kind = inside.path, raw.get("type")
    if kind and kind not in _TYPES:
        found.append(errors.field_unsupported(f"{path}.type", kind, _TYPES))
    if kind == "null":
        text = "type cannot be set to null, use nullable as an alternative"
        found.append(errors.field_forbidden(f"{path}.type", text))
    if raw.get("default") is not None and inside.no_default is not None:
        found.append(errors.field_forbidden(f"{path}.default", f"must not be set {inside.no_default}"))
    for word in _UNSUPPORTED:
        if raw.get(word):
            found.append(errors.field_forbidden(f"{path}.{word}", f"{word} is not supported"))
    if isinstance(raw.get("items"), list):
        text = "items must be a schema object and not an array"
        found.append(errors.field_forbidden(f"{path}.items", text))
    if inside.meta and raw.get("x-kubernetes-embedded-resource"):
        text = "must not be used inside of resource meta"
        found.append(errors.field_forbidden(f"{path}.x-kubernetes-embedded-resource", text))
    if raw.get("uniqueItems"):
        text = "uniqueItems cannot be set to true since the runtime complexity becomes quadratic"
        found.append(errors.field_forbidden(f"{path}.uniqueItems", text))


def _check_collections(raw: Object, path: str, found: list[FieldError]) -> None:
    kind, items = raw.get("type") or "", raw.get("items")
    map_type, list_type = raw.get("x-kubernetes-map-type"), raw.get("x-kubernetes-list-type")
    keys = raw.get("x-kubernetes-list-map-keys") or []
    if map_type is not None and kind != "object":
        text = "must be object if x-kubernetes-map-type is specified"
        found.append(_wrong_type(f"{path}.type", kind, text))
    if map_type not in (None, "atomic", "granular"):
        where = f"{path}.x-kubernetes-map-type"
        found.append(errors.field_unsupported(where, map_type, ("atomic", "granular")))
    if list_type is not None and kind != "array":
        text = "must be array if x-kubernetes-list-type is specified"
        found.append(_wrong_type(f"{path}.type", kind, text))
    elif list_type == "set" and isinstance(items, dict):
        which = {"array": "list", "object": "map"}.get(items.get("type", ""))
        given = items.get(f"x-kubernetes-{which}-type")
        if which is not None and given != "atomic" and not (which == "list" and given is None):
            text = "must be atomic as item of a list with x-kubernetes-list-type=set"
            where = f"{path}.items.x-kubernetes-{which}-type"
            found.append(errors.field_invalid(where, items.get("x-kubernetes-list-type"), text))
    if list_type not in (None, "atomic", "set", "map"):
        where = f"{path}.x-kubernetes-list-type"
        found.append(errors.field_unsupported(where, list_type, ("atomic", "set", "map")))
    if keys and list_type != "map":
        text = "must be map if x-kubernetes-list-map-keys is non-empty"
        found.append(_wrong_type(f"{path}.x-kubernetes-list-type", list_type or "", text))
    if list_type == "map":
        _check_map_list(raw, path, keys, found)
    if list_type in ("set", "map") and isinstance(items, dict) and items.get("nullable"):
        text = f"cannot be nullable when x-kubernetes-list-type is {list_type}"
        found.append(errors.field_forbidden(f"{path}.items.nullable", text))


def _check_map_list(raw: Object, path: str, keys: list[str], found: list[FieldError]) -> None:
    where, items = f"{path}.x-kubernetes-list-map-keys", raw.get("items")
    if not keys:
        found.append(errors.field_required(where, "must not be empty if x-kubernetes-list-type is map"))
    if not isinstance(items, dict):
        text = "must have a schema if x-kubernetes-list-type is map"
        found.append(errors.field_required(f"{path}.items", text))
        return
    if items.get("type") != "object":
        text = "must be object if parent array's x-kubernetes-list-type is map"
        found.append(errors.field_invalid(f"{path}.items.type", items.get("type", ""), text))
        return
    properties = items.get("properties") or {}
    for index, key in enumerate(keys):
        child, below = properties.get(key), f"{path}.items.properties[{key}]"
        if key in keys[:index]:
            found.append(errors.field_invalid(where, keys, "must not contain duplicate entries"))
        if child is None:
            found.append(errors.field_invalid(where, keys, "entries must all be names of item properties"))
            continue
        if child.get("type") in ("array", "object"):
            text = "must be a scalar type if parent array's x-kubernetes-list-type is map"
            found.append(errors.field_invalid(f"{below}.type", items["type"], text))
        if key not in (items.get("required") or ()) and child.get("default") is None:
            text = (
                "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required"
                " property"
            )
            found.append(errors.field_required(f"{below}.default", text))
        if child.get("nullable"):
            text = "this property is in x-kubernetes-list-map-keys, so it cannot be nullable"
            found.append(errors.field_forbidden(f"{below}.nullable", text))


def _check_rule(raw: Object, rule: Object, where: str, found: list[FieldError]) -> None:
    """Check the form of one rule; whether it compiles is looked at when the whole schema is in order."""
    text, message = rule.get("rule") or "", rule.get("message") or ""
    if not text.strip():
        found.append(errors.field_required(f"{where}.rule", "rule is not specified"))
    elif message and not message.strip():
        found.append(errors.field_invalid(f"{where}.message", message, "must be non-empty if specified"))
    elif _has_newline(message.strip()):
        found.append(errors.field_invalid(f"{where}.message", message, "must not contain line breaks"))
    elif _has_newline(text.strip()) and not message.strip():
        detail = "message must be specified if rule contains line breaks"
        found.append(errors.field_required(f"{where}.message", detail))
    expression = rule.get("messageExpression") or ""
    if expression and not expression.strip():
        detail = "messageExpression must be non-empty if specified"
        found.append(errors.field_required(f"{where}.messageExpression", detail))
    if rule.get("reason") is not None and rule["reason"] not in _REASONS:
        found.append(errors.field_unsupported(f"{where}.reason", rule["reason"], _REASONS))
    field_path = rule.get("fieldPath") or ""
    if field_path and not field_path.strip():
        detail = "must be non-empty if specified"
        found.append(errors.field_invalid(f"{where}.fieldPath", field_path, detail))
    if _has_newline(field_path):
        detail = "must not contain line breaks"
        found.append(errors.field_invalid(f"{where}.fieldPath", field_path, detail))
    wrong = field_path_problem(raw, field_path)
    if wrong is not None:
        found.append(errors.field_invalid(f"{where}.fieldPath", field_path, wrong))


def _has_newline(text: str) -> bool:
    return "\n" in text or "\r" in text

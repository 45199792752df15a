"""CustomResourceDefinitions: defaults, checks, and the resource types that they bring into being."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from springtide_local.api import cel, errors
from springtide_local.api.errors import FieldError
from springtide_local.api.kinds.base import Kind, Reader
from springtide_local.api.objects import clone_value, label_1035_problem, timestamp
from springtide_local.api.resources import ResourceType, ScalePaths
from springtide_local.api.schema import Node, apply_defaults, compile_schema, prune, validate
from springtide_local.api.selectors import FieldGetter, field
from springtide_local.ports import Object

_TYPES = ("object", "array", "string", "integer", "number", "boolean")


class Definitions(Kind):
    def default(self, obj: Object) -> None:
        spec = obj.setdefault("spec", {})
        names = spec.setdefault("names", {})
        if names.get("kind"):
            names.setdefault("singular", names["kind"].lower())
            names.setdefault("listKind", f"{names['kind']}List")
        spec.setdefault("conversion", {"strategy": "None"})

    def prepare_create(self, store: Reader, obj: Object) -> None:
        now = timestamp(store.now())
        obj["status"] = {
            "acceptedNames": dict(obj["spec"].get("names") or {}),
            "conditions": [
                _condition("NamesAccepted", "NoConflicts", "no conflicts found", now),
                _condition(
                    "Established", "InitialNamesAccepted", "the initial names have been accepted", now
                ),
            ],
            "storedVersions": [v["name"] for v in obj["spec"].get("versions") or () if v.get("storage")],
        }

    def check(self, obj: Object) -> list[FieldError]:
        spec = obj["spec"]
        found: list[FieldError] = []
        names, group = spec.get("names") or {}, spec.get("group")
        if not group:
            found.append(errors.field_required("spec.group"))
        for name in ("plural", "kind"):
            if not names.get(name):
                found.append(errors.field_required(f"spec.names.{name}"))
        expected = f"{names.get('plural')}.{group}"
        if obj["metadata"].get("name") != expected:
            text = 'must be spec.names.plural+"."+spec.group'
            found.append(errors.field_invalid("metadata.name", obj["metadata"].get("name"), text))
        problem = label_1035_problem(names.get("plural") or "x")
        if problem:
            found.append(errors.field_invalid("spec.names.plural", names["plural"], problem))
        if spec.get("scope") not in ("Namespaced", "Cluster"):
            found.append(errors.field_unsupported("spec.scope", spec.get("scope"), ("Cluster", "Namespaced")))
        if (spec.get("conversion") or {}).get("strategy") != "None":
            text = "this API server converts by strategy None only (no webhooks)"
            found.append(
                errors.field_invalid("spec.conversion.strategy", spec["conversion"].get("strategy"), text)
            )
        found += _check_versions(spec.get("versions") or [])
        return found

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        found = []
        for path in (("group",), ("scope",), ("names", "plural"), ("names", "kind")):
            now, before = _get(obj["spec"], path), _get(old["spec"], path)
            if now != before:
                found.append(errors.field_invalid("spec." + ".".join(path), now, "field is immutable"))
        return found


def _condition(kind: str, reason: str, message: str, now: str) -> Object:
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now}


def _get(obj: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        obj = (obj or {}).get(step)
    return obj


def _check_versions(versions: list[Object]) -> list[FieldError]:
    found: list[FieldError] = []
    stored = [version["name"] for version in versions if version.get("storage")]
    if len(stored) != 1:
        text = "must have exactly one version marked as storage version"
        found.append(errors.field_invalid("spec.versions", [v.get("name") for v in versions], text))
    for index, version in enumerate(versions):
        path = f"spec.versions[{index}]"
        raw = (version.get("schema") or {}).get("openAPIV3Schema")
        if raw is None:
            found.append(errors.field_required(f"{path}.schema.openAPIV3Schema", "schemas are required"))
            continue
        where = f"{path}.schema.openAPIV3Schema"
        if raw.get("type") != "object":
            text = "must be object at the root"
            found.append(errors.field_invalid(f"{where}.type", raw.get("type", ""), text))
        _check_structure(raw, where, found, root=True)
        if not found:
            found += cel.check_rules(raw, where)
        scale = (version.get("subresources") or {}).get("scale")
        if scale:
            for name in ("specReplicasPath", "statusReplicasPath"):
                start = ".spec." if name.startswith("spec") else ".status."
                if not str(scale.get(name, "")).startswith(start):
                    text = f"should be a json path under {start[:-1]}"
                    found.append(
                        errors.field_invalid(f"{path}.subresources.scale.{name}", scale.get(name, ""), text)
                    )
        for number, column in enumerate(version.get("additionalPrinterColumns") or ()):
            for name in ("name", "type", "jsonPath"):
                if not column.get(name):
                    found.append(errors.field_required(f"{path}.additionalPrinterColumns[{number}].{name}"))
    return found


def _check_structure(raw: Object, path: str, found: list[FieldError], root: bool = False) -> None:
    """The rules of structural schemas that catch real mistakes: a type everywhere, no `$ref`, defaults
    that fit.
    """
    if "$ref" in raw:
        found.append(errors.field_forbidden(f"{path}.$ref", "$ref is not supported"))
        return
    free = raw.get("x-kubernetes-int-or-string") or raw.get("x-kubernetes-preserve-unknown-fields")
    if not raw.get("type") and not free:
        found.append(errors.field_required(f"{path}.type", "must not be empty for specified object fields"))
    elif raw.get("type") and raw["type"] not in _TYPES:
        found.append(errors.field_unsupported(f"{path}.type", raw["type"], _TYPES))
    if raw.get("properties") and raw.get("additionalProperties"):
        text = "additionalProperties and properties are mutual exclusive"
        found.append(errors.field_forbidden(f"{path}.additionalProperties", text))
    if raw.get("type") == "array" and not isinstance(raw.get("items"), dict):
        found.append(errors.field_required(f"{path}.items", "must be specified"))
    if raw.get("x-kubernetes-list-type") == "map" and not raw.get("x-kubernetes-list-map-keys"):
        text = "must not be empty if x-kubernetes-list-type is map"
        found.append(errors.field_required(f"{path}.x-kubernetes-list-map-keys", text))
    if raw.get("pattern"):
        try:
            re.compile(raw["pattern"])
        except re.error as problem:
            text = f"must be a valid regular expression, but isn't: {problem}"
            found.append(errors.field_invalid(f"{path}.pattern", raw["pattern"], text))
            return
    for name, child in (raw.get("properties") or {}).items():
        if root and name in ("apiVersion", "kind", "metadata"):
            continue
        _check_structure(child, f"{path}.properties[{name}]", found)
    for name in ("items", "additionalProperties"):
        if isinstance(raw.get(name), dict):
            _check_structure(raw[name], f"{path}.{name}", found)
    if "default" in raw and not found:
        _check_default(raw, path, found)


def _check_default(raw: Object, path: str, found: list[FieldError]) -> None:
    node = compile_schema(raw)
    value = {"v": clone_value(raw["default"])}
    apply_defaults(node, value["v"])
    wrong: list[FieldError] = []
    unknown: list[str] = []
    validate(node, value["v"], f"{path}.default", wrong)
    prune(node, value["v"], f"{path}.default", unknown)
    found += wrong
    for name in unknown:
        found.append(
            errors.field_invalid(f"{path}.default", raw["default"], f"must not have unknown field {name}")
        )


def resources_of(definition: Object) -> list[tuple[ResourceType, bool]]:
    """The resource types of a CRD: one for each served version, and whether it is the one for storage."""
    spec = definition["spec"]
    names = spec["names"]
    made = []
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        raw = version["schema"]["openAPIV3Schema"]
        sub = version.get("subresources") or {}
        getters: dict[str, FieldGetter] = {}
        for selectable in version.get("selectableFields") or ():
            path = _steps(selectable["jsonPath"])
            getters[".".join(path)] = field(*path)
        resource = ResourceType(
            group=spec["group"],
            version=version["name"],
            plural=names["plural"],
            kind=names["kind"],
            singular=names.get("singular", ""),
            namespaced=spec["scope"] == "Namespaced",
            short_names=tuple(names.get("shortNames") or ()),
            categories=tuple(names.get("categories") or ()),
            subresources=frozenset(name for name in ("status", "scale") if sub.get(name) is not None),
            make_node=_compiler(raw),
            custom=True,
            generation=True,
            scale=_scale(sub.get("scale")),
            field_getters=getters,
            unconditional_update=False,
            columns=list(version.get("additionalPrinterColumns") or ()),
            schema=raw,
        )
        made.append((resource, bool(version.get("storage"))))
    return made


def _compiler(raw: Object) -> Callable[[], Node]:
    return lambda: compile_schema(raw)


def _steps(path: str) -> tuple[str, ...]:
    return tuple(step for step in path.split(".") if step)


def _scale(raw: Object | None) -> ScalePaths | None:
    if raw is None:
        return None
    selector = raw.get("labelSelectorPath")
    return ScalePaths(
        _steps(raw["specReplicasPath"]),
        _steps(raw["statusReplicasPath"]),
        _steps(selector) if selector else None,
    )

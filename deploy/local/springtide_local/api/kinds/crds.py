"""CustomResourceDefinitions: defaults, checks, and the resource types that they bring into being."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from springtide_local.api import errors
from springtide_local.api.crd_schema import field_path_problem, schema_problems
from springtide_local.api.errors import FieldError
from springtide_local.api.kinds.base import Kind, Reader
from springtide_local.api.objects import label_1035_problem, timestamp
from springtide_local.api.resources import ResourceType, ScalePaths
from springtide_local.api.schema import Node, compile_schema
from springtide_local.api.selectors import FieldGetter, field
from springtide_local.ports import Object

_COLUMN_TYPES = ("boolean", "date", "integer", "number", "string")
_COLUMN_FORMATS = ("byte", "date", "date-time", "double", "float", "int32", "int64", "password")
_MAX_SELECTABLE = 8


class Definitions(Kind):
    def default(self, obj: Object) -> None:
        spec = obj.setdefault("spec", {})
        names = spec.setdefault("names", {})
        if names.get("kind"):
            names.setdefault("singular", names["kind"].lower())
            names.setdefault("listKind", f"{names['kind']}List")
        spec.setdefault("conversion", {"strategy": "None"})

    def prepare_create(self, store: Reader, obj: Object) -> None:
        """Accept the names, and begin as established.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
        """
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
        elif "." not in group:
            text = "should be a domain with at least one dot"
            found.append(errors.field_invalid("spec.group", group, text))
        for name in ("plural", "singular", "kind", "listKind"):
            if not names.get(name):
                found.append(errors.field_required(f"spec.names.{name}"))
        found += _name_problems(names)
        expected = f"{names.get('plural')}.{group}"
        if obj["metadata"].get("name") != expected:
            text = 'must be spec.names.plural+"."+spec.group'
            found.append(errors.field_invalid("metadata.name", obj["metadata"].get("name"), text))
        if spec.get("scope") not in ("Namespaced", "Cluster"):
            found.append(errors.field_unsupported("spec.scope", spec.get("scope"), ("Cluster", "Namespaced")))
        if (spec.get("conversion") or {}).get("strategy") != "None":
            text = "this API server converts by strategy None only (no webhooks)"
            found.append(
                errors.field_invalid("spec.conversion.strategy", spec["conversion"].get("strategy"), text)
            )
        if spec.get("preserveUnknownFields"):
            text = (
                "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in"
                " spec.versions[*].schema instead"
            )
            found.append(errors.field_invalid("spec.preserveUnknownFields", True, text))
        found += _check_versions(spec)
        return found

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        """Return an error for each of group, scope and names that is changed, which may not be.

        Args:
            obj: the object as it is to be stored.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        found = []
        for path in (("group",), ("scope",), ("names", "plural"), ("names", "kind")):
            now, before = _get(obj["spec"], path), _get(old["spec"], path)
            if now != before:
                found.append(errors.field_invalid("spec." + ".".join(path), now, "field is immutable"))
        return found


def _name_problems(names: Object) -> list[FieldError]:
    """Check that all names of a kind can stand in a path."""
    found = []
    for name in ("plural", "singular", "kind", "listKind"):
        given = names.get(name) or ""
        problem = label_1035_problem(given.lower() if name in ("kind", "listKind") else given or "x")
        if given and problem:
            lead = "may have mixed case, but should otherwise match: " if name in ("kind", "listKind") else ""
            found.append(errors.field_invalid(f"spec.names.{name}", given, lead + problem))
    for name in ("shortNames", "categories"):
        for index, given in enumerate(names.get(name) or ()):
            problem = label_1035_problem(given)
            if problem:
                found.append(errors.field_invalid(f"spec.names.{name}[{index}]", given, problem))
    if names.get("kind") and names.get("kind") == names.get("listKind"):
        text = "kind and listKind may not be the same"
        found.append(errors.field_invalid("spec.names.listKind", names["listKind"], text))
    return found


def _condition(kind: str, reason: str, message: str, now: str) -> Object:
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now}


def _get(obj: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        obj = (obj or {}).get(step)
    return obj


def _check_versions(spec: Object) -> list[FieldError]:
    """Check all versions. Where they are alike, or only one, errors name the old place for all of them."""
    versions = spec.get("versions") or []
    found: list[FieldError] = []
    names = [version["name"] for version in versions]
    if len(set(names)) != len(names):
        found.append(errors.field_invalid("spec.versions", names, "must contain unique version names"))
    if sum(bool(version.get("storage")) for version in versions) != 1:
        text = "must have exactly one version marked as storage version"
        found.append(errors.field_invalid("spec.versions", names, text))
    places = {
        "schema": _places(versions, "schema", "spec.validation"),
        "subresources": _places(versions, "subresources", "spec.subresources"),
        **{
            name: _places(versions, name, f"spec.{name}")
            for name in ("additionalPrinterColumns", "selectableFields")
        },
    }
    for index, version in enumerate(versions):
        name, path = version["name"], f"spec.versions[{index}]"
        problem = label_1035_problem(name)
        if problem:
            found.append(errors.field_invalid(f"{path}.name", name, problem))
        if version.get("deprecationWarning") is not None:
            found += _deprecation_problems(version, f"{path}.deprecationWarning")
        raw = (version.get("schema") or {}).get("openAPIV3Schema")
        if raw is None:
            found.append(errors.field_required(f"{path}.schema.openAPIV3Schema"))
            continue
        sub = version.get("subresources") or {}
        found += schema_problems(
            raw,
            f"{places['schema'][index]}.openAPIV3Schema",
            has_status=sub.get("status") is not None,
        )
        found += _scale_problems(sub.get("scale"), f"{places['subresources'][index]}.scale")
        for number, column in enumerate(version.get("additionalPrinterColumns") or ()):
            found += _column_problems(column, f"{places['additionalPrinterColumns'][index]}[{number}]")
        fields = version.get("selectableFields") or []
        found += _selectable_problems(fields, raw, places["selectableFields"][index])
    return list(dict.fromkeys(found))


def _places(versions: list[Object], name: str, common: str) -> list[str]:
    """Return the path of a part of each version: a common one where all of them are equal."""
    first = versions[0].get(name) if versions else None
    if all(version.get(name) == first for version in versions):
        return [common] * len(versions)
    return [f"spec.versions[{index}].{name}" for index in range(len(versions))]


def _deprecation_problems(version: Object, path: str) -> list[FieldError]:
    text = version["deprecationWarning"]
    if not version.get("deprecated"):
        return [errors.field_invalid(path, text, "can only be set for deprecated versions")]
    if not text:
        return [errors.field_invalid(path, text, "must not be an empty string")]
    if len(text.encode()) > 256:
        return [errors.field_invalid(path, text, "must be <= 256 characters long")]
    return []


def _scale_problems(scale: Object | None, path: str) -> list[FieldError]:
    if scale is None:
        return []
    found = []
    for name, starts in (
        ("specReplicasPath", (".spec.",)),
        ("statusReplicasPath", (".status.",)),
        ("labelSelectorPath", (".spec.", ".status.")),
    ):
        given, where = scale.get(name) or "", f"{path}.{name}"
        if not given:
            if name != "labelSelectorPath":
                found.append(errors.field_required(where))
        elif not given.startswith("."):
            found.append(errors.field_invalid(where, given, "must be a simple json path starting with ."))
        elif not given.startswith(starts):
            under = " or ".join(start[:-1] for start in starts)
            text = f"should be a json path under {'either ' if len(starts) > 1 else ''}{under}"
            found.append(errors.field_invalid(where, given, text))
    return found


def _column_problems(column: Object, path: str) -> list[FieldError]:
    found = []
    listed = ",".join(_COLUMN_TYPES)
    if not column.get("name"):
        found.append(errors.field_required(f"{path}.name"))
    if not column.get("type"):
        found.append(errors.field_required(f"{path}.type", f"must be one of {listed}"))
    elif column["type"] not in _COLUMN_TYPES:
        found.append(errors.field_invalid(f"{path}.type", column["type"], f"must be one of {listed}"))
    if column.get("format") and column["format"] not in _COLUMN_FORMATS:
        text = f"must be one of {','.join(_COLUMN_FORMATS)}"
        found.append(errors.field_invalid(f"{path}.format", column["format"], text))
    if not column.get("jsonPath"):
        found.append(errors.field_required(f"{path}.JSONPath"))
    elif not column["jsonPath"].startswith("."):
        text = "must be a simple json path starting with ."
        found.append(errors.field_invalid(f"{path}.JSONPath", column["jsonPath"], text))
    return found


def _selectable_problems(fields: list[Object], raw: Object, path: str) -> list[FieldError]:
    found = []
    for index, entry in enumerate(fields):
        given, where = entry.get("jsonPath") or "", f"{path}[{index}].jsonPath"
        if not given:
            found.append(errors.field_required(where))
        elif "[" in given or field_path_problem(raw, given) is not None:
            text = "is an invalid path: does not refer to a valid field"
            found.append(errors.field_invalid(where, given, text))
    if len(fields) > _MAX_SELECTABLE:
        text = f"Too many: {len(fields)}: must have at most {_MAX_SELECTABLE} items"
        found.append(FieldError(path, errors.TOO_MANY, text))
    return found


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

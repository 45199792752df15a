"""The published API schemas of the built-in kinds, compiled on first use.

They come with the package `kubernetes-validate` (generated from Kubernetes' own OpenAPI document, with the
merge keys and list types that strategic merge and server-side apply need).
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any, cast

from springtide_local.api.schema import Node, compile_schema
from springtide_local.ports import Object

VERSION = "1.32"
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
_INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"

# Fields that are younger than these schemas and that somebody here writes, with the version they came in.
_YOUNGER: dict[str, Object] = {
    "io.k8s.api.core.v1.PodSpec": {  # 1.36
        "schedulingGroup": {"type": "object", "properties": {"podGroupName": {"type": "string"}}},
    },
}


@functools.cache
def definitions() -> Object:
    """All definitions by name. Raise RuntimeError when the schemas are not installed."""
    spec = importlib.util.find_spec("kubernetes_validate")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "the API's schemas are missing: install the package kubernetes-validate (extra 'local')"
        )
    folder = Path(spec.origin).parent / "kubernetes-json-schema"
    wanted = folder / f"v{VERSION}.0-local" / "_definitions.json"
    if not wanted.exists():
        others = sorted(folder.glob("v1.*-local/_definitions.json"))
        if not others:
            raise RuntimeError(f"no API schemas below {folder}: reinstall the package kubernetes-validate")
        wanted = others[0]
    found = cast(Object, json.loads(wanted.read_text(encoding="utf-8"))["$defs"])
    for name, fields in _YOUNGER.items():
        found[name]["properties"] = fields | found[name]["properties"]
    return found


@functools.cache
def _names_by_kind() -> dict[tuple[str, str, str], str]:
    names: dict[tuple[str, str, str], str] = {}
    for name, definition in definitions().items():
        gvks = definition.get("x-kubernetes-group-version-kind", ())
        if len(gvks) == 1:
            names[gvks[0].get("group", ""), gvks[0]["version"], gvks[0]["kind"]] = name
    return names


def definition_name(group: str, version: str, kind: str) -> str:
    """Return the name of a kind's published schema.

    Args:
        group: of the API; "" for core.
        version: of the API.
        kind: as manifests spell it.

    Raises:
        KeyError: the kind has none.
    """
    return _names_by_kind()[group, version, kind]


def ref_name(ref: str) -> str:
    return ref.rpartition("/")[2]


@functools.cache
def node(name: str) -> Node:
    """The compiled definition `name` (`io.k8s.api.core.v1.Pod`)."""
    return _Compiler.shared().resolve(name)


def kind_node(group: str, version: str, kind: str) -> Node:
    """Return a kind's published schema, compiled.

    Args:
        group: of the API; "" for core.
        version: of the API.
        kind: as manifests spell it.

    Raises:
        KeyError: the kind has none.
    """
    return node(definition_name(group, version, kind))


class _Compiler:
    """Definitions refer to each other, also in circles: a node is handed out before it is filled."""

    _instance: _Compiler | None = None

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}

    @classmethod
    def shared(cls) -> _Compiler:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def resolve(self, ref: str) -> Node:
        name = ref_name(ref)
        found = self._nodes.get(name)
        if found is not None:
            return found
        made = self._nodes[name] = Node()
        if name == _QUANTITY:
            made.raw, made.quantity = {"type": "string"}, True
        elif name == _INT_OR_STRING:
            made.raw, made.int_or_string = {"x-kubernetes-int-or-string": True}, True
        else:
            compile_schema(_loose(definitions()[name]), self.resolve, made)
        return made


def _loose(raw: Any) -> Object:
    """Objects without any declared field (raw extensions, field sets) hold anything."""
    definition = cast(Object, raw)
    if not definition.get("properties") and not definition.get("additionalProperties"):
        return {**definition, "x-kubernetes-preserve-unknown-fields": True}
    return definition

"""OpenAPI v3: an index, and a document for each group version, made when asked for.

Documents hold what kubectl needs: for `explain` the schemas, for `apply` and field validation the PATCH
operations with their parameters. OpenAPI v2 is cut: JSON is refused; clients that ask for protobuf (old
kubectl, helm) get the empty document, with which they skip validation on their side.
"""

from __future__ import annotations

import hashlib
from typing import Any

from aiohttp import web

from springtide_local.api import builtin, discovery, errors
from springtide_local.api.collection import encode
from springtide_local.api.resources import Registry, ResourceType
from springtide_local.ports import Object

_V2_PROTOBUF = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"
# Named without "@", which Go's parser of media types (in helm) refuses.
_V2_PROTOBUF_ANSWER = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
_CUSTOM_PATCHES = (
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/apply-patch+yaml",
)
_PATCHES = (*_CUSTOM_PATCHES, "application/strategic-merge-patch+json")
_META = builtin.OBJECT_META


class Documents:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._cache: dict[str, tuple[int, bytes]] = {}

    def answer(self, path: str, accept: str, asked_hash: str) -> web.Response:
        """Return the index or a document.

        Args:
            path: of the URL, from `/openapi` on.
            accept: the header's value.
            asked_hash: from the URL's parameters; with one the answer may be kept by the client. "" for none.

        Raises:
            ApiError: 404: there is no such document; 406: its form is not served.
        """
        if path == "/openapi/v2":
            return _version_2(accept)
        if path == "/openapi/v3":
            return web.Response(body=encode(self._index()), content_type="application/json")
        group, version = _group_version(path.removeprefix("/openapi/v3/"))
        if version not in discovery.group_versions(self._registry).get(group, ()):
            raise errors.no_such_path()
        response = web.Response(body=self._document(group, version), content_type="application/json")
        if asked_hash:
            response.headers["Cache-Control"] = "public, max-age=31536000"
        return response

    def _index(self) -> Object:
        paths: Object = {}
        for group, versions in discovery.group_versions(self._registry).items():
            for version in versions:
                name = f"apis/{group}/{version}" if group else f"api/{version}"
                digest = self._digest(group, version)
                paths[name] = {"serverRelativeURL": f"/openapi/v3/{name}?hash={digest}"}
        return {"paths": paths}

    def _digest(self, group: str, version: str) -> str:
        """Changes when the document would: with the schemas of the group's custom resources."""
        listed = discovery.resources(self._registry, group, version)
        custom = [r.schema for r in self._registry if r.custom and (r.group, r.version) == (group, version)]
        return hashlib.sha256(encode([listed, custom, builtin.VERSION])).hexdigest()[:32].upper()

    def _document(self, group: str, version: str) -> bytes:
        key = f"{group}/{version}"
        cached = self._cache.get(key)
        if cached is not None and cached[0] == self._registry.changed:
            return cached[1]
        schemas: Object = {}
        paths: Object = {}
        for resource in self._registry:
            if (resource.group, resource.version) == (group, version):
                _add(resource, paths, schemas)
        document = {
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": discovery.VERSION["gitVersion"]},
            "paths": paths,
            "components": {"schemas": schemas},
        }
        body = encode(document)
        self._cache[key] = (self._registry.changed, body)
        return body


def _version_2(accept: str) -> web.Response:
    if _V2_PROTOBUF in accept:
        return web.Response(body=b"", headers={"Content-Type": _V2_PROTOBUF_ANSWER})
    raise errors.not_acceptable("OpenAPI v2 is not served by the embedded cluster; use /openapi/v3")


def _group_version(name: str) -> tuple[str, str]:
    parts = name.strip("/").split("/")
    if len(parts) == 2 and parts[0] == "api":
        return "", parts[1]
    if len(parts) == 3 and parts[0] == "apis":
        return parts[1], parts[2]
    raise errors.no_such_path()


def _add(resource: ResourceType, paths: Object, schemas: Object) -> None:
    name = _schema_name(resource)
    if resource.custom:
        schemas[name] = _custom_schema(resource)
        _collect(_META, schemas)
    else:
        _collect(name, schemas)
    gvk = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    root = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
    base = (
        f"{root}/namespaces/{{namespace}}/{resource.plural}"
        if resource.namespaced
        else f"{root}/{resource.plural}"
    )
    answer = {
        "description": "OK",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }

    def operation(action: str, content: tuple[str, ...] = ()) -> Object:
        made: Object = {
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": gvk,
            "parameters": [_parameter("dryRun"), _parameter("fieldManager"), _parameter("fieldValidation")],
            "responses": {"200": answer},
        }
        if content:
            made["requestBody"] = {"content": {kind: {"schema": {"type": "object"}} for kind in content}}
        return made

    paths[base] = {"get": operation("list"), "post": operation("post", ("application/json",))}
    paths[f"{base}/{{name}}"] = {
        "get": operation("get"),
        "put": operation("put", ("application/json",)),
        # kubectl apply takes the kind of its patch from here.
        "patch": operation("patch", _CUSTOM_PATCHES if resource.custom else _PATCHES),
        "delete": operation("delete"),
    }


def _parameter(name: str) -> Object:
    return {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}


def _schema_name(resource: ResourceType) -> str:
    if resource.custom:
        return f"{'.'.join(reversed(resource.group.split('.')))}.{resource.version}.{resource.kind}"
    if resource.view is not None:
        return builtin.definition_name("", "v1", "Event")
    return builtin.definition_name(resource.group, resource.version, resource.kind)


def _custom_schema(resource: ResourceType) -> Object:
    raw: Object = _published(resource.schema or {})
    text = {"type": "string"}
    kept = {name: value for name, value in raw.get("properties", {}).items() if name != "metadata"}
    raw["properties"] = {
        "apiVersion": {
            **text,
            "description": "APIVersion defines the versioned schema of this representation.",
        },
        "kind": {**text, "description": "Kind is a string value representing the REST resource."},
        "metadata": {
            "allOf": [{"$ref": f"#/components/schemas/{_META}"}],
            "default": {},
            "description": "Standard object's metadata.",
        },
        **kept,
    }
    raw["x-kubernetes-group-version-kind"] = [
        {"group": resource.group, "version": resource.version, "kind": resource.kind}
    ]
    return raw


def _published(raw: Any) -> Any:
    """A copy of a schema in OpenAPI v3: `$ref` into the document, no list of types."""
    if isinstance(raw, list):
        return [_published(item) for item in raw]
    if not isinstance(raw, dict):
        return raw
    made = {name: _published(value) for name, value in raw.items() if name != "$ref"}
    kind = raw.get("type")
    if isinstance(kind, list) and all(isinstance(name, str) for name in kind):
        made["type"] = next(name for name in kind if name != "null")
    if isinstance(raw.get("$ref"), str):
        reference = {"$ref": "#/components/schemas/" + builtin.ref_name(raw["$ref"])}
        if not made:
            return reference
        made["allOf"] = [reference]
        made.setdefault("default", {})
    return made


def _collect(name: str, schemas: Object) -> None:
    """The definition `name` and all that it refers to."""
    todo = [name]
    while todo:
        current = todo.pop()
        if current in schemas:
            continue
        raw = builtin.definitions()[current]
        schemas[current] = _published(raw)
        todo.extend(_references(raw))


def _references(raw: Any) -> list[str]:
    if isinstance(raw, list):
        return [name for item in raw for name in _references(item)]
    if not isinstance(raw, dict):
        return []
    found = [builtin.ref_name(raw["$ref"])] if isinstance(raw.get("$ref"), str) else []
    return found + [name for value in raw.values() for name in _references(value)]

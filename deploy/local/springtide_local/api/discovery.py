"""Discovery: which groups, versions and resources are served, in the plain and in the aggregated form."""

from __future__ import annotations

from typing import Any

from springtide_local.api.resources import ALL_VERBS, Registry, ResourceType
from springtide_local.ports import Object

VERSION = {
    "major": "1",
    "minor": "32",
    "gitVersion": "v1.32.0+springtide",
    "gitCommit": "0000000000000000000000000000000000000000",
    "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "cpython",
    "platform": "linux/amd64",
}
_SUB_VERBS = {
    "status": ("get", "patch", "update"),
    "scale": ("get", "patch", "update"),
    "finalize": ("update",),
    "log": ("get",),
    "eviction": ("create",),
    "binding": ("create",),
    "token": ("create",),
}
_SUB_KINDS = {
    "scale": ("autoscaling", "v1", "Scale"),
    "eviction": ("policy", "v1", "Eviction"),
    "binding": ("", "v1", "Binding"),
    "token": ("authentication.k8s.io", "v1", "TokenRequest"),
}
REVIEWS = {
    ("authorization.k8s.io", "v1", "selfsubjectaccessreviews"): "SelfSubjectAccessReview",
    ("authorization.k8s.io", "v1", "selfsubjectrulesreviews"): "SelfSubjectRulesReview",
    ("authorization.k8s.io", "v1", "subjectaccessreviews"): "SubjectAccessReview",
    ("authorization.k8s.io", "v1", "localsubjectaccessreviews"): "LocalSubjectAccessReview",
    ("authentication.k8s.io", "v1", "tokenreviews"): "TokenReview",
    ("authentication.k8s.io", "v1", "selfsubjectreviews"): "SelfSubjectReview",
}


def group_versions(registry: Registry) -> dict[str, list[str]]:
    found = registry.group_versions()
    for group, version, _ in REVIEWS:
        found.setdefault(group, [version])
    return found


def api_versions() -> Object:
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}


def group(registry: Registry, name: str) -> Object | None:
    """Return the APIGroup of a group; None when it is not served.

    Args:
        registry: the resources that are served.
        name: of the group; the core group is not listed here.
    """
    versions = group_versions(registry).get(name) if name else None
    return None if versions is None else {"kind": "APIGroup", "apiVersion": "v1", **_group(name, versions)}


def groups(registry: Registry) -> Object:
    listed = [_group(name, versions) for name, versions in group_versions(registry).items() if name]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}


def _group(name: str, versions: list[str]) -> Object:
    entries = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": entries, "preferredVersion": entries[0]}


def resources(registry: Registry, group_name: str, version: str) -> Object | None:
    """Return the APIResourceList of a group version; None when it is not served.

    Args:
        registry: the resources that are served.
        group_name: "" for core.
        version: of the group.
    """
    if version not in group_versions(registry).get(group_name, ()):
        return None
    listed: list[Object] = []
    for resource in _of(registry, group_name, version):
        listed.append(_resource(resource))
        for name in sorted(resource.subresources):
            kind: Object = {"kind": resource.kind}
            if name in _SUB_KINDS:
                sub_group, sub_version, sub_kind = _SUB_KINDS[name]
                kind = {"group": sub_group, "version": sub_version, "kind": sub_kind}
            listed.append(
                {
                    "name": f"{resource.plural}/{name}",
                    "singularName": "",
                    "namespaced": resource.namespaced,
                    **kind,
                    "verbs": list(_SUB_VERBS[name]),
                }
            )
    for (review_group, review_version, plural), kind_name in REVIEWS.items():
        if (review_group, review_version) == (group_name, version):
            listed.append(
                {
                    "name": plural,
                    "singularName": kind_name.lower(),
                    "namespaced": kind_name == "LocalSubjectAccessReview",
                    "kind": kind_name,
                    "verbs": ["create"],
                }
            )
    full = f"{group_name}/{version}" if group_name else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": full, "resources": listed}


def _of(registry: Registry, group_name: str, version: str) -> list[ResourceType]:
    found = [resource for resource in registry if (resource.group, resource.version) == (group_name, version)]
    return sorted(found, key=lambda resource: resource.plural)


def _resource(resource: ResourceType) -> Object:
    entry: Object = {
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(ALL_VERBS),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    return entry


def aggregated(registry: Registry, core: bool, version: str) -> Object:
    """Return all groups with their resources in one document.

    Args:
        registry: the resources that are served.
        core: the core group alone; False: all others.
        version: of the discovery API, v2 or v2beta1.
    """
    items = []
    for name, versions in group_versions(registry).items():
        if bool(name) == core:
            continue
        meta: dict[str, Any] = {"creationTimestamp": None}
        if name:
            meta["name"] = name
        entries = []
        for served in versions:
            listed = resources(registry, name, served) or {"resources": []}
            entries.append(
                {
                    "version": served,
                    "resources": _aggregate(listed["resources"], name, served),
                    "freshness": "Current",
                }
            )
        items.append({"metadata": meta, "versions": entries})
    api_version = f"apidiscovery.k8s.io/{version}"
    return {"kind": "APIGroupDiscoveryList", "apiVersion": api_version, "metadata": {}, "items": items}


def _aggregate(listed: list[Object], group_name: str, version: str) -> list[Object]:
    made: dict[str, Object] = {}
    for entry in listed:
        kind = {
            "group": entry.get("group", group_name),
            "version": entry.get("version", version),
            "kind": entry["kind"],
        }
        plural, _, sub = entry["name"].partition("/")
        if sub:
            part = {"subresource": sub, "responseKind": kind, "verbs": entry["verbs"]}
            made[plural].setdefault("subresources", []).append(part)
            continue
        shown = {
            "resource": plural,
            "responseKind": kind,
            "verbs": entry["verbs"],
            "scope": "Namespaced" if entry["namespaced"] else "Cluster",
            "singularResource": entry["singularName"],
        }
        for name in ("shortNames", "categories"):
            if name in entry:
                shown[name] = entry[name]
        made[plural] = shown
    return list(made.values())

"""Rights that roles grant, and rights that somebody used, in one form that can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Object = dict[str, Any]
APPLIED = (
    ("", "services"),
    ("networking.k8s.io", "networkpolicies"),
    ("policy", "poddisruptionbudgets"),
    ("scheduling.volcano.sh", "podgroups"),
    ("scheduling.x-k8s.io", "podgroups"),
    ("scheduling.k8s.io", "podgroups"),
)
Right = tuple[
    str, str, str
]  # verb, API group, resource with subresource: ("patch", "springtide.dev", "trainingjobs/status")


def granted(objects: Iterable[Object], account: str) -> set[Right]:
    """Rights of a service account by the rendered roles and bindings, wherever they hold."""
    objects = list(objects)
    result: set[Right] = set()
    for binding in objects:
        if binding["kind"] not in {"RoleBinding", "ClusterRoleBinding"}:
            continue
        if not any(subject["name"] == account for subject in binding["subjects"]):
            continue
        for role in objects:
            same_place = role["metadata"].get("namespace") == binding["metadata"].get("namespace")
            wanted = (binding["roleRef"]["kind"], binding["roleRef"]["name"])
            if (role["kind"], role["metadata"]["name"]) == wanted and same_place:
                result |= {
                    (verb, group, resource)
                    for rule in role["rules"]
                    for verb in rule["verbs"]
                    for group in rule["apiGroups"]
                    for resource in rule["resources"]
                }
    return result


def used(requests: Iterable[Object], user: str) -> set[Right]:
    """Rights that a user's requests needed, from the embedded API server's count of requests.

    A server-side apply that makes its object needs `create` beside `patch`: so the operator makes
    Services, NetworkPolicies, disruption budgets and PodGroups.
    """
    result: set[Right] = set()
    for request in requests:
        if request["user"] != user or not request["resource"]:
            continue
        resource = request["resource"] + (f"/{request['subresource']}" if request["subresource"] else "")
        result.add((request["verb"], request["group"], resource))
    for group, resource in APPLIED:
        if ("patch", group, resource) in result:
            result.add(("create", group, resource))
    return result

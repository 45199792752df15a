"""Admission: what is filled in from other objects, and what is refused because of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from springtide_local.api.resources import ResourceType
from springtide_local.ports import Object

if TYPE_CHECKING:
    from springtide_local.api.store import Store

_SECONDS = 300
_DEFAULT_TOLERATIONS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def mutate(store: Store, resource: ResourceType, obj: Object, warnings: list[str]) -> None:
    """Fill a new pod from its namespace and its priority class, in place. Raise ApiError 403."""
    if resource.storage == "pods":
        _service_account(store, resource, obj)
        _priority(store, resource, obj)
        _tolerations(obj["spec"])


def admit(store: Store, resource: ResourceType, obj: Object, old: Object | None, warnings: list[str]) -> None:
    """Raise ApiError 403 when a policy of the namespace forbids the object."""


def _service_account(store: Store, resource: ResourceType, obj: Object) -> None:
    spec, namespace = obj["spec"], obj["metadata"]["namespace"]
    name = spec.get("serviceAccountName") or "default"
    if store.peek("serviceaccounts", name, namespace) is None:
        text = f'error looking up service account {namespace}/{name}: serviceaccount "{name}" not found'
        raise resource.forbidden(obj["metadata"]["name"], text)
    spec["serviceAccountName"] = spec["serviceAccount"] = name


def _priority(store: Store, resource: ResourceType, obj: Object) -> None:
    spec = obj["spec"]
    name = spec.get("priorityClassName")
    found: Object | None
    if name:
        found = store.peek("priorityclasses.scheduling.k8s.io", name)
        if found is None:
            text = f"no PriorityClass with name {name} was found"
            raise resource.forbidden(obj["metadata"]["name"], text)
    else:
        classes = store.scan("priorityclasses.scheduling.k8s.io")
        found = next((item for item in classes if item.get("globalDefault")), None)
        if found is not None:
            spec["priorityClassName"] = found["metadata"]["name"]
    spec["priority"] = found["value"] if found is not None else 0
    policy = found.get("preemptionPolicy") if found is not None else None
    spec.setdefault("preemptionPolicy", policy or "PreemptLowerPriority")


def _tolerations(spec: Object) -> None:
    given = spec.setdefault("tolerations", [])
    for key in _DEFAULT_TOLERATIONS:
        covered = any(
            toleration.get("key") in (key, None, "") and toleration.get("effect") in ("NoExecute", None, "")
            for toleration in given
        )
        if not covered:
            given.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _SECONDS}
            )

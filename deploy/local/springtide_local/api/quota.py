"""Resource quotas and limit ranges: pure sums over a namespace's objects, and what they say to one more.

Quotas with scopes are stored but not enforced.
"""

from __future__ import annotations

from decimal import Decimal
from typing import NamedTuple

from springtide_local.api.objects import format_quantity, lookup, quantity
from springtide_local.ports import Object

_DONE = ("Succeeded", "Failed")
_COMPUTE = ("requests.cpu", "requests.memory", "limits.cpu", "limits.memory")
_ALIASES = {"cpu": "requests.cpu", "memory": "requests.memory"}
_COUNTED = (
    "pods",
    "services",
    "secrets",
    "configmaps",
    "persistentvolumeclaims",
    "resourcequotas",
    "replicationcontrollers",
)


class Refusal(NamedTuple):
    """Why an object does not fit, in Kubernetes' words."""

    message: str


def usage(storage: str, obj: Object) -> dict[str, Decimal]:
    """Return the usage of one object, by the names that quotas have for it.

    Args:
        storage: the resource, with its group where it has one.
        obj: the object.
    """
    used = {f"count/{storage}": Decimal(1)}
    if storage in _COUNTED:
        used[storage] = Decimal(1)
    if storage != "pods":
        return used
    if (obj.get("status") or {}).get("phase") in _DONE:
        del used["pods"]
        return used
    for container in obj["spec"].get("containers") or ():
        for part in ("requests", "limits"):
            for name, amount in (lookup(container, "resources", part) or {}).items():
                key = f"{part}.{name}"
                used[key] = used.get(key, Decimal(0)) + quantity(amount)
    return used


def total(storage_objects: dict[str, list[Object]], names: list[str]) -> dict[str, Decimal]:
    """Return the use of all objects.

    Args:
        storage_objects: of a namespace, by the name of their storage (`pods`).
        names: of the quota's resources, as `requests.cpu`.

    Returns:
        In the units of each (cores, bytes, objects), for each of `names`.
    """
    sums: dict[str, Decimal] = {}
    for storage, objects in storage_objects.items():
        for obj in objects:
            for key, amount in usage(storage, obj).items():
                sums[key] = sums.get(key, Decimal(0)) + amount
    return {name: sums.get(_ALIASES.get(name, name), Decimal(0)) for name in names}


def storages(names: list[str]) -> set[str]:
    """The collections that a quota's names count."""
    found = set()
    for name in names:
        if name.startswith("count/"):
            found.add(name.removeprefix("count/"))
        elif name in _COUNTED:
            found.add(name)
        elif _ALIASES.get(name, name).startswith(("requests.", "limits.")):
            found.add("pods")
    return found


def check(quota: Object, storage: str, obj: Object, used: dict[str, Decimal]) -> Refusal | None:
    """Return why a quota has no room for one more object; None where it has.

    Args:
        quota: the ResourceQuota; one with scopes is not enforced.
        storage: name of the object's storage, as `pods`.
        obj: the new object.
        used: the namespace's use, by the quota's names.
    """
    if lookup(quota, "spec", "scopes") or lookup(quota, "spec", "scopeSelector"):
        return None
    hard = lookup(quota, "spec", "hard") or {}
    name = quota["metadata"]["name"]
    wanted = usage(storage, obj)
    if storage == "pods":
        missing = _missing(obj, list(hard))
        if missing:
            return Refusal(f"failed quota: {name}: must specify {missing}")
    over = [
        key
        for key, limit in sorted(hard.items())
        if (more := wanted.get(_ALIASES.get(key, key))) and used.get(key, Decimal(0)) + more > quantity(limit)
    ]
    if not over:
        return None
    requested = ",".join(f"{key}={format_quantity(wanted[_ALIASES.get(key, key)])}" for key in over)
    taken = ",".join(f"{key}={format_quantity(used.get(key, Decimal(0)))}" for key in over)
    limited = ",".join(f"{key}={hard[key]}" for key in over)
    return Refusal(f"exceeded quota: {name}, requested: {requested}, used: {taken}, limited: {limited}")


def _missing(pod: Object, names: list[str]) -> str:
    """Containers that lack an amount that the quota counts, as `limits.cpu for: a,b; limits.memory for:
    a`.
    """
    found = []
    for key in sorted(_ALIASES.get(name, name) for name in names):
        if key not in _COMPUTE:
            continue
        part, _, resource = key.partition(".")
        lacking = [
            container["name"]
            for container in pod["spec"].get("containers") or ()
            if resource not in (lookup(container, "resources", part) or {})
        ]
        if lacking:
            found.append(f"{key} for: {','.join(lacking)}")
    return "; ".join(found)


def apply_limit_range(limit_range: Object, spec: Object) -> None:
    """Fill the requests and limits that containers lack, in place.

    Args:
        limit_range: the LimitRange.
        spec: of a pod.
    """
    for item in lookup(limit_range, "spec", "limits") or ():
        if item.get("type") != "Container":
            continue
        for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
            resources = container.setdefault("resources", {})
            # As Kubernetes: what has a maximum is limited to it, and what has a limit requests it.
            limits = {**(item.get("max") or {}), **(item.get("default") or {})}
            requests = {**(item.get("min") or {}), **limits, **(item.get("defaultRequest") or {})}
            for part, amounts in (("limits", limits), ("requests", requests)):
                for name, amount in amounts.items():
                    resources.setdefault(part, {}).setdefault(name, str(amount))


def limit_range_problems(limit_range: Object, spec: Object) -> list[str]:
    """Return the objections of a limit range to a pod's containers.

    Args:
        limit_range: the LimitRange.
        spec: of the pod.
    """
    found = []
    for item in lookup(limit_range, "spec", "limits") or ():
        if item.get("type") != "Container":
            continue
        for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
            found += _against(item, container.get("resources") or {})
    return found


def _against(item: Object, resources: Object) -> list[str]:
    found = []
    for bound, part in (("max", "limits"), ("min", "requests")):
        for name, limit in (item.get(bound) or {}).items():
            given = (resources.get(part) or {}).get(name)
            word = "maximum" if bound == "max" else "minimum"
            start = f"{word} {name} usage per Container is {limit}"
            if given is None:
                found.append(f"{start}.  No {part[:-1]} is specified")
            elif (quantity(given) > quantity(limit)) == (bound == "max") and quantity(given) != quantity(
                limit
            ):
                found.append(f"{start}, but {part[:-1]} is {given}")
    return found

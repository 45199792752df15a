"""Merge what a job says of its spec into what its template says. PURE.

The job's own fields win, always: its absent fields are known from those that it wrote, since the CRD fills
none in (`springtide_operator.api.crd`). The rules are those of Kubernetes' strategic merge for a pod, as far
as it merges lists; where it leaves a pod that no API server takes, the job's item is taken as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from springtide_operator.api.pod_template import without_nulls

Object = dict[str, Any]
Identity = Callable[[Object], object]


def _by(*keys: str) -> Identity:
    """Return what tells items of a list apart: their values under these keys; None for one without."""

    def identity(item: Object) -> object:
        found = tuple(item.get(key) for key in keys)
        return found if found[0] is not None else None

    return identity


def _port(item: Object) -> object:
    """Return what a port is told apart by: its number and protocol, as the API server does."""
    number = item.get("containerPort")
    return None if number is None else (number, item.get("protocol") or "TCP")


_MERGED: dict[str, Identity] = {
    "containers": _by("name"),
    "initContainers": _by("name"),
    "volumeMounts": _by("mountPath"),
    "imagePullSecrets": _by("name"),
    "topologySpreadConstraints": _by("topologyKey", "whenUnsatisfiable"),
}
"""Lists of a pod whose items are merged field by field with the one of the same identity."""

_REPLACED: dict[str, Identity] = {
    # value and valueFrom exclude each other, and so do the kinds of a volume.
    "env": _by("name"),
    "volumes": _by("name"),
    "volumeDevices": _by("devicePath"),
    "resourceClaims": _by("name"),
    "hostAliases": _by("ip"),
    "ports": _port,
}
"""Lists of a pod in which the job's item takes the place of the template's of the same identity."""

# A probe has one handler of several kinds, and so have both hooks of a container.
_WHOLE = ("livenessProbe", "readinessProbe", "startupProbe", "postStart", "preStop")
_PODS = (("workers", "template", "spec"), ("parameterServers", "template", "spec"))
_MAIN = {"workers": "worker", "parameterServers": "server"}


def merge(template: Object, own: Object) -> Object:
    """Return the spec that a job has: its own fields, and the template's where it has none.

    A null says nothing, as in a pod: many tools write some, and none may take away what the platform gave.

    Args:
        template: fields of a job's spec.
        own: the job's spec; it wins.
    """
    given, said = without_nulls(template), without_nulls(own)
    return _objects(_with_names(given, {}), _with_names(said, given), ())


def main_container(spec: Object, role: str) -> str:
    """Return the name of the container that runs the script, or the server; "" where there is none.

    Args:
        spec: fields of a job's spec.
        role: `workers` or `parameterServers`.
    """
    containers = _containers(spec, role)
    if not containers:
        return ""
    names = [one.get("name") for one in containers]
    default = _MAIN[role]
    return default if default in names else str(names[0] or default)


def _containers(spec: Object, role: str) -> list[Object]:
    found: Any = spec
    for key in (role, "template", "spec", "containers"):
        found = found.get(key) if isinstance(found, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _objects(template: Object, own: Object, path: tuple[str, ...]) -> Object:
    result = dict(template)
    for key, value in own.items():
        result[key] = _value(result[key], value, (*path, key)) if key in result else value
    return result


def _value(template: Any, own: Any, path: tuple[str, ...]) -> Any:
    key = path[-1]
    in_pod = any(path[: len(pod)] == pod for pod in _PODS)
    if isinstance(template, dict) and isinstance(own, dict):
        return own if in_pod and key in _WHOLE else _objects(template, own, path)
    if isinstance(template, list) and isinstance(own, list) and in_pod:
        if key in _MERGED:
            return _lists(template, own, _MERGED[key], path)
        if key in _REPLACED:
            return _lists(template, own, _REPLACED[key], None)
    return own


def _lists(
    template: list[Any], own: list[Any], identity: Identity, path: tuple[str, ...] | None
) -> list[Any]:
    """Return the template's items with the job's in them, then those that the job adds, each in its order.

    Args:
        template: items.
        own: items of the job.
        identity: tells items apart.
        path: of the list, where items are merged; None where they are replaced.
    """
    found: dict[object, int] = {}
    result: list[Any] = []
    for item in (*template, *own):
        key = identity(item) if isinstance(item, dict) else None
        if key is None or key not in found:
            if key is None and item in result:
                continue  # nothing tells the two apart: it is the same one
            if key is not None:
                found[key] = len(result)
            result.append(item)
        elif path is None:
            result[found[key]] = item
        else:
            result[found[key]] = _objects(result[found[key]], item, path)
    return result


def _with_names(spec: Object, template: Object) -> Object:
    """Return the spec in which the first container has a name: an unnamed one runs the script, so it is the
    one that does so in the template.
    """
    result = spec
    for role, default in _MAIN.items():
        containers = _containers(result, role)
        if not containers or containers[0].get("name"):
            continue
        name = main_container(template, role) or default
        holder = result[role]
        pod_template = holder["template"]
        pod = {**pod_template["spec"], "containers": [{**containers[0], "name": name}, *containers[1:]]}
        result = {**result, role: {**holder, "template": {**pod_template, "spec": pod}}}
    return result

"""The limits of a template, against a job that names it. PURE."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

from springtide_operator.api import names
from springtide_operator.api.quantities import quantity
from springtide_operator.api.training_template import TemplateLimits

Object = Mapping[str, Any]

_MOST_SHOWN = 200  # characters of a value, or of a list, in a message


def beyond(limits: TemplateLimits, template: Object, merged: Object, labels: Mapping[str, str]) -> list[str]:
    """Return in which ways a job goes beyond the limits of its template, each with the field and the limit.

    Args:
        limits: of the template.
        template: the template's fields of a job's spec.
        merged: spec of the job, the template's fields included.
        labels: of the job.
    """
    found = [
        *_numbers(limits, merged),
        *_queue(limits, labels),
        *_fixed(limits, template, merged),
    ]
    for where, pod in _pods(merged):
        found += _names(limits, where, pod)
        found += _images(limits, where, pod)
        found += _resources(limits, where, pod)
    return found


def _numbers(limits: TemplateLimits, merged: Object) -> Iterator[str]:
    for path, most in (
        ("workers.maxReplicas", limits.max_replicas),
        ("workers.replicas", limits.max_replicas),
        ("workers.minReplicas", limits.max_replicas),
        ("workers.standby", limits.max_standby),
        ("parameterServers.replicas", limits.max_servers),
    ):
        number = at(merged, path)
        if most is not None and isinstance(number, int) and number > most:
            yield f"spec.{path} is {number}, and at most {most} are allowed"


def _queue(limits: TemplateLimits, labels: Mapping[str, str]) -> Iterator[str]:
    if limits.queue_names is None:
        return
    said = labels.get(names.LABEL_QUEUE)
    if said not in limits.queue_names:
        what = f"names the queue {said}" if said else "is missing"
        yield f"the label {names.LABEL_QUEUE} {what}, and has to name {_one_of(limits.queue_names)}"


def _fixed(limits: TemplateLimits, template: Object, merged: Object) -> Iterator[str]:
    for path in limits.fixed_fields or ():
        fixed, said = at(template, path), at(merged, path)
        if _without_empty(fixed) == _without_empty(said):
            continue
        shown = _shown(fixed) if fixed is not None else "left out"
        yield f"spec.{path} is {_shown(said)}, and is fixed: {shown}"


def _pods(merged: Object) -> Iterator[tuple[str, Object]]:
    """Yield the spec of each kind of pod of the job, as far as the manifest says it, and where it does."""
    for role in ("workers", "parameterServers"):
        pod = at(merged, f"{role}.template.spec")
        if isinstance(pod, Mapping):
            yield f"spec.{role}.template.spec", pod
    coordinator = merged.get("coordinator")
    if isinstance(coordinator, Mapping):
        container = {key: coordinator[key] for key in ("image", "resources") if coordinator.get(key)}
        pod = {key: value for key, value in coordinator.items() if key == "priorityClassName"}
        yield "spec.coordinator", {**pod, "containers": [container]}


def _names(limits: TemplateLimits, where: str, pod: Object) -> Iterator[str]:
    for field, allowed in (
        ("serviceAccountName", limits.service_account_names),
        ("serviceAccount", limits.service_account_names),
        ("priorityClassName", limits.priority_class_names),
    ):
        said = pod.get(field)
        if allowed is not None and said and said not in allowed:
            yield f"{where}.{field} is {_shown(said)}, and may be {_one_of(allowed)}"


def _images(limits: TemplateLimits, where: str, pod: Object) -> Iterator[str]:
    if limits.images is None:
        return
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(_list(pod, kind)):
            image = container.get("image")
            if image and not any(fnmatchcase(str(image), pattern) for pattern in limits.images):
                place = f"{where}.image" if where == "spec.coordinator" else f"{where}.{kind}[{index}].image"
                yield f"{place} is {_shown(image)}, and may be {_one_of(limits.images)}"


def _resources(limits: TemplateLimits, where: str, pod: Object) -> Iterator[str]:
    for name, most in (limits.max_resources or {}).items():
        try:
            together = sum((_asked(one, name) for one in _list(pod, "containers")), Decimal(0))
            first = max((_asked(one, name) for one in _list(pod, "initContainers")), default=Decimal(0))
            beyond_it = max(together, first) > quantity(most)
        except ValueError as error:
            yield f"{where}: {name}: {error}"
            continue
        if beyond_it:
            yield (
                f"{where}: its containers ask for {max(together, first).normalize():f} of {name}, and at most"
                f" {most} is allowed in a pod"
            )


def _asked(container: Object, name: str) -> Decimal:
    """Return how much of a resource a container may use: its limit, its request where it has none."""
    resources = container.get("resources")
    given = resources if isinstance(resources, Mapping) else {}
    values = [
        quantity(part[name])
        for part in (given.get("limits"), given.get("requests"))
        if isinstance(part, Mapping) and part.get(name) is not None
    ]
    return max(values, default=Decimal(0))


def _list(pod: Object, key: str) -> list[Object]:
    found = pod.get(key)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def at(value: Any, path: str) -> Any:
    """Return the value of a field; None where it, or an object above it, is absent.

    Args:
        value: an object.
        path: names of fields, with dots between them.
    """
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _without_empty(value: Any) -> Any:
    """Return a value without objects that say nothing, some of which the API server puts into each job."""
    if not isinstance(value, Mapping):
        return value
    inner = {key: _without_empty(one) for key, one in value.items()}
    return {key: one for key, one in inner.items() if one is not None} or None


def _one_of(allowed: list[str]) -> str:
    if not allowed:
        return "none at all"
    return allowed[0] if len(allowed) == 1 else f"one of {_shortened(', '.join(allowed))}"


def _shown(value: Any) -> str:
    if value is None:
        return "left out"
    return _shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."

"""Sums of pods' resource requests, as a Kubernetes scheduler counts them."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_CEILING, Decimal
from typing import Any

from springtide_operator.api.quantities import quantity

Object = dict[str, Any]


def written(value: Decimal) -> str:
    """Write a quantity as Kubernetes reads it: whole, or in thousandths, rounded up."""
    if value == value.to_integral_value():
        return str(int(value))
    return f"{int((value * 1000).to_integral_value(ROUND_CEILING))}m"


def pod_requests(pod: Object) -> dict[str, Decimal]:
    """Requests of one pod: its containers and restartable init containers together, or its largest other init
    container. A limit stands for a missing request. Raises ValueError for a quantity that cannot be read.
    """
    spec = pod.get("spec") or {}
    total: dict[str, Decimal] = {}
    for container in spec.get("containers") or []:
        _add(total, _requests(container))
    largest: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or []:
        asked = _requests(container)
        if container.get("restartPolicy") == "Always":
            _add(total, asked)
        for name, value in asked.items():
            largest[name] = max(value, largest.get(name, Decimal(0)))
    for name, value in largest.items():
        total[name] = max(value, total.get(name, Decimal(0)))
    return total


def sum_of_requests(pods: Iterable[tuple[Object, int]]) -> dict[str, str]:
    """Return the sum of the requests of so many of each pod; empty where a quantity cannot be read (the API
    server says so when it refuses that pod).
    """
    total: dict[str, Decimal] = {}
    try:
        for pod, count in pods:
            _add(total, {name: value * count for name, value in pod_requests(pod).items()})
    except ValueError:
        return {}
    return {name: written(total[name]) for name in sorted(total)}


def _requests(container: Object) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity(value) for name, value in asked.items()}


def _add(total: dict[str, Decimal], more: dict[str, Decimal]) -> None:
    for name, value in more.items():
        total[name] = total.get(name, Decimal(0)) + value

"""Sums of pods' resource requests, as a Kubernetes scheduler counts them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import Any

from springtide_operator.api import limits

Object = dict[str, Any]

_QUANTITY = re.compile(r"^([+-]?[0-9.]+)([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$")
_POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def quantity(text: object) -> Decimal:
    """A resource quantity in its base unit. Raises ValueError for what is none, and for what no machine has:
    `1e999999` would be a number of a million digits.
    """
    written_as = str(text).strip() if isinstance(text, str | int | float) else ""
    found = _QUANTITY.match(written_as) if len(written_as) <= limits.MAX_QUANTITY_LENGTH else None
    if found is None:
        raise ValueError(f"{str(text)[:80]!r} is no quantity")
    suffix = found[2] or ""
    scientific = suffix[:1] in ("e", "E") and len(suffix) > 1 and suffix not in _BINARY
    if scientific and abs(int(suffix[1:])) > limits.MAX_QUANTITY_EXPONENT:
        raise ValueError(
            f"{text!r} is no quantity that any machine has: exponents go from"
            f" -{limits.MAX_QUANTITY_EXPONENT} to {limits.MAX_QUANTITY_EXPONENT}"
        )
    try:
        number = Decimal(found[1])
    except InvalidOperation as error:
        raise ValueError(f"{text!r} is no quantity") from error
    if suffix in _BINARY:
        return number * Decimal(1024) ** _BINARY[suffix]
    if scientific:
        return number * Decimal(10) ** int(suffix[1:])
    return number * Decimal(10) ** _POWERS.get(suffix, 0)


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

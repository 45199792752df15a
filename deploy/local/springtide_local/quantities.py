"""Kubernetes quantities (`500m`, `1Gi`, `2e3`) and what a pod asks for, in the integer units that the
scheduler adds up.

Units: `cpu` in thousandths of a core, everything else in whole units (bytes, devices, pods); fractions are
rounded up, as Kubernetes does.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

Object = dict[str, Any]

_SUFFIXES: dict[str, Fraction] = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    **{
        suffix: Fraction(10) ** (3 * power)
        for power, suffix in enumerate(["k", "M", "G", "T", "P", "E"], start=1)
    },
    **{
        suffix: Fraction(2) ** (10 * power)
        for power, suffix in enumerate(["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"], start=1)
    },
}
_QUANTITY = re.compile(
    r"^(?=.{1,64}$)([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,2})|(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)?)$"
)

# What the scheduler assumes of a container that asks for nothing, so that such pods spread too (kube-
# scheduler's defaults).
ASSUMED_CPU = 100
ASSUMED_MEMORY = 200 * 2**20


def parse_quantity(value: str | int | float) -> Fraction:
    """The exact number. Raise ValueError when it is no quantity."""
    match = _QUANTITY.match(str(value).strip())
    if match is None:
        raise ValueError(
            f"{value!r} is no quantity: write a number with an optional suffix, such as 500m, 2, 1.5Gi or 1e3"
        )
    number, exponent, suffix = match.groups()
    scale = Fraction(10) ** int(exponent) if exponent else _SUFFIXES[suffix or ""]
    return Fraction(number) * scale


def units(resource: str, value: str | int | float) -> int:
    """Return a quantity in the integer unit of its resource, rounded up: thousandths of a core for `cpu`,
    else whole units.

    Args:
        resource: its name.
        value: as manifests spell it.

    Raises:
        ValueError: it is no quantity.
    """
    return _whole(resource == "cpu", str(value))


@functools.lru_cache(maxsize=4096)  # a cluster's pods spell a few quantities, thousands of times
def _whole(thousandths: bool, value: str) -> int:
    number = parse_quantity(value)
    return math.ceil(number * 1000) if thousandths else math.ceil(number)


def format_units(resource: str, amount: int) -> str:
    """Return an amount in the form that Kubernetes prints, the inverse of `units`.

    Args:
        resource: its name.
        amount: in the integer unit of the resource.
    """
    if resource == "cpu":
        return str(amount // 1000) if amount % 1000 == 0 else f"{amount}m"
    if resource in ("memory", "ephemeral-storage") and amount:
        for suffix, scale in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
            if amount % scale == 0:
                return f"{amount // scale}{suffix}"
    return str(amount)


def container_requests(container: Mapping[str, Any]) -> dict[str, int]:
    """Requests of one container; a limit without a request counts as the request."""
    resources = container.get("resources") or {}
    merged = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: units(name, value) for name, value in merged.items()}


def pod_requests(pod: Object) -> dict[str, int]:
    """Return a pod's requests: the sum of its containers, or the largest init container where that is more,
    and one of `pods`.
    """
    spec = pod["spec"]
    total = _sum(container_requests(container) for container in spec["containers"])
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or []:
        wanted = _sum([container_requests(container), sidecars])
        if container.get("restartPolicy") == "Always":
            sidecars = wanted
        for name, amount in wanted.items():
            peak[name] = max(peak.get(name, 0), amount)
    total = _sum([total, sidecars])
    for name, amount in peak.items():
        total[name] = max(total.get(name, 0), amount)
    for name, value in (spec.get("overhead") or {}).items():
        total[name] = total.get(name, 0) + units(name, value)
    total["pods"] = 1
    return total


def assumed_requests(pod: Object) -> dict[str, int]:
    """Requests for spreading: as `pod_requests`, with an assumed amount for each container that asks for no
    cpu or memory.
    """
    total = dict(pod_requests(pod))
    for container in pod["spec"]["containers"]:
        wanted = container_requests(container)
        if "cpu" not in wanted:
            total["cpu"] = total.get("cpu", 0) + ASSUMED_CPU
        if "memory" not in wanted:
            total["memory"] = total.get("memory", 0) + ASSUMED_MEMORY
    return total


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    return total

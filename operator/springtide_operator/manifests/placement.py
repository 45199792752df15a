"""Placement of the coordinator and parameter servers: on nodes that workers may use."""

from __future__ import annotations

import copy
from typing import Any

Object = dict[str, Any]

# Taken from the worker template, so that the others may be pulled and scheduled where workers are.
TAKEN_FROM_WORKERS = ("imagePullSecrets", "nodeSelector", "priorityClassName", "schedulerName", "tolerations")

# A lost node is given up after 20 s instead of 300 s: workers train on meanwhile, but nobody can join.
LOST_NODE = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 20}
    for key in ("not-ready", "unreachable")
]


def follow_workers(workers: Object, spec: Object) -> None:
    """Fill in from the worker template's spec what another pod's spec is silent about.

    Clouds put a taint named like the device on nodes with devices, and let pods that ask for one pass. Where
    the workers' node selector leads the others there, too, these ask for none, and need the toleration.

    Args:
        workers: the template's spec.
        spec: of the other pod; it is changed in place.
    """
    led = bool(workers.get("nodeSelector")) and not {"nodeSelector", "tolerations"} & spec.keys()
    for key in TAKEN_FROM_WORKERS:
        if workers.get(key) and key not in spec:
            spec[key] = copy.deepcopy(workers[key])
    tolerations = spec.setdefault("tolerations", [])
    if not isinstance(tolerations, list):
        return  # the API server says so with the first pod
    for toleration in [*(_devices(workers) if led else []), *LOST_NODE]:
        keys = [item.get("key") for item in tolerations if isinstance(item, dict)]
        if toleration["key"] not in keys:
            tolerations.append(toleration)


def _devices(workers: Object) -> list[Object]:
    """Tolerations of the taints of nodes that have the extended resources that workers ask for."""
    asked: set[str] = set()
    containers = workers.get("containers")
    for container in containers if isinstance(containers, list) else []:
        resources = container.get("resources") if isinstance(container, dict) else None
        for part in ("requests", "limits"):
            found = resources.get(part) if isinstance(resources, dict) else None
            asked |= {str(name) for name in found} if isinstance(found, dict) else set()
    names = sorted(name for name in asked if "/" in name and "kubernetes.io/" not in name)
    return [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in names]

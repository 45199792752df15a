"""Jobs in a queue of Kueue, in the operator's world: waiting, admitted, evicted."""

from __future__ import annotations

from typing import Any

import kueue_standin as kueue
from operator_world import World, job_object

from springtide_operator.api import names

Object = dict[str, Any]
FLAVOR = {
    "metadata": {"name": "spot"},
    "spec": {
        "nodeLabels": {"pool": "spot"},
        "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
    },
}


def queued_world(replicas: int = 4, served: bool | None = True, **workers: Any) -> World:
    world = World(job=job_object(replicas, **{"minReplicas": 2, **workers}))
    world.job["metadata"]["labels"] = {names.LABEL_QUEUE: "team-a"}
    world.flavors = {"spot": FLAVOR}
    if served is not None:
        world.apis = dict.fromkeys(names.KUEUE_APIS, served)
    return world


def waiting_world(**workers: Any) -> World:
    """The Workload is there, and not admitted."""
    world = queued_world(**workers)
    world.settle()
    return world


def running_world(workers: int | None = None, flavor: str | None = None) -> World:
    world = waiting_world()
    admit(world, workers, flavor)
    world.settle()
    world.reports()
    world.round()
    world.round()
    return world


def admit(world: World, workers: int | None = None, flavor: str | None = None) -> None:
    assert world.workload is not None
    world.workload = kueue.admitted(world.workload, workers, flavor)


def evict(world: World, reason: str = "Preempted") -> None:
    assert world.workload is not None
    world.workload = kueue.evicted(world.workload, reason)

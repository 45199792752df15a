"""An operator's plan for a job in a cluster in memory, of the release on PYTHONPATH. argv: make, or take.

make: prints a job that trains, with its status and its pods, as that release leaves them. take: goes on with
such a job as a new process of an operator; prints what it did to the pods, first while nothing happens, then
when a worker has failed, and the reasons of Degraded.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from operator_world import World, job_object


def make() -> dict[str, Any]:
    """Return a job whose workers train."""
    world = World(job=job_object(2))
    world.settle()
    world.reports()
    world.round()
    return {"job": world.job, "pods": world.pods, "now": world.now}


def take(found: dict[str, Any]) -> dict[str, Any]:
    """Go on with a job.

    Args:
        found: of `make`.
    """
    world = World(job=found["job"], now=found["now"], pods=found["pods"], counter=1000)
    before = set(world.pods)
    world.incarnations_made = [world.status["coordinator"]["incarnation"]]
    for _ in range(5):
        world.reports()
        world.round()
        world.kubelet()
        world.now += 5
    calm = sorted(before ^ set(world.pods))
    world.fail(world.workers()[0])
    for _ in range(10):
        world.round()
        world.kubelet()
        world.reports()
        world.now += 30
    degraded = [c["reason"] for c in world.status["conditions"] if c["type"] == "Degraded"]
    return {
        "changed": calm,
        "workers": sorted(pod["metadata"]["name"] for pod in world.workers()),
        "coordinators": len(world.coordinators()),
        "failures": world.status["restarts"]["failures"],
        "degraded": degraded,
    }


if __name__ == "__main__":
    print(json.dumps(make() if sys.argv[1] == "make" else take(json.load(sys.stdin))))

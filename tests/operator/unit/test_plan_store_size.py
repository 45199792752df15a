"""A manifest that lets a job grow beyond the coordinator's store is doubted, once, and refused nothing."""

from __future__ import annotations

from typing import Any

import pytest
from operator_world import World, job_object

from springtide_coordinator.rendezvous import Rendezvous, TooMuchError
from springtide_operator.api import reasons
from springtide_operator.plan import store_size
from springtide_operator.plan.actions import CreateWorker


def fill(processes: int) -> int:
    """Put what each of so many processes puts; return the bytes that are there then."""
    store = Rendezvous(members=processes)
    for rank in range(processes):
        store.put(f"springtide/0/gloo/{rank}", bytes(154 + 8 * processes), "m", 0.0)
    return store.size


def test_the_named_number_of_processes_fits_and_more_do_not() -> None:
    most = store_size.most_processes()
    assert 2700 < most < 2900
    assert fill(most) <= store_size.store_bytes(most)
    with pytest.raises(TooMuchError, match="is full"):
        fill(most + 40)


@pytest.mark.parametrize(
    ("replicas", "workers", "strategy", "told"),
    [
        (2, {"maxReplicas": 400, "processesPerPod": 8}, "AllReduce", 1),
        (2, {"maxReplicas": 300, "processesPerPod": 8}, "AllReduce", 0),
        (2, {"maxReplicas": 400, "processesPerPod": 8}, "ParameterServer", 0),
        (2, {"processesPerPod": 8}, "AllReduce", 0),
    ],
)
def test_sizes_beyond_the_store_are_told_once(
    replicas: int, workers: dict[str, Any], strategy: str, told: int
) -> None:
    world = World(job=job_object(replicas, **workers))
    world.job["spec"]["strategy"] = {"type": strategy}
    plans = [world.round() for _ in range(4)]
    kinds = [event.reason for decided in plans for event in decided.events]
    assert kinds.count(reasons.EVENT_TOO_MANY_PROCESSES) == told
    world.kubelet()
    plans += [world.round() for _ in range(2)]
    assert any(isinstance(action, CreateWorker) for decided in plans for action in decided.actions)

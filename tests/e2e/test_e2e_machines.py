"""Faults of the machines under a cluster: one dies, DNS stops. Done only where the owner lets us."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from e2e_cluster import (
    OPERATOR_LABELS,
    OPERATOR_NAMESPACE,
    E2ECluster,
    schedulable_nodes,
    until_operator_is_ready,
)
from e2e_jobs import RunningJob

from springtide_kube.errors import ApiError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Start = Callable[..., RunningJob]

# Each worker on a node of its own.
APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": {"springtide.dev/role": "worker"}},
            }
        ]
    }
}
COORDINATOR_SECONDS, WORKER_SECONDS = 20.0, 5.0
PACE = 0.5  # a step takes at least this long, and is said


def seconds_without_step(running: RunningJob, survivor: str, within: float) -> float:
    """Wait until a worker says its next step; return how long that took."""
    began, before = time.monotonic(), running.steps_said(survivor)
    while True:
        try:
            if running.steps_said(survivor) > before:
                return time.monotonic() - began
        except ApiError:
            pass  # a node that has just died may take the API's own connections with it
        took = time.monotonic() - began
        assert took <= within, f"no step for {took:.0f} s\n{running.describe()}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["coordinator", "worker"])
def test_a_node_that_dies_costs_its_seconds_and_no_sample(e2e: E2ECluster, start: Start, of: str) -> None:
    crash, restore = e2e.hands.to_crash_nodes()
    if len(schedulable_nodes(e2e)) < 2:
        pytest.skip("the cluster has fewer than two nodes that take our pods")
    running = start("dies", workers=2, epochs=120, pace=str(PACE), affinity=APART)
    running.until_trains(2)
    running.until_goes_on()
    workers = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in running.pods()}
    (coordinator,) = running.pods("coordinator")
    home = coordinator["spec"]["nodeName"]
    node = home if of == "coordinator" else next(name for name in workers if name != home)
    limit = COORDINATOR_SECONDS if of == "coordinator" else WORKER_SECONDS
    survivor = next(name for where, name in workers.items() if where != node)
    kept = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in running.pods()}[survivor]
    crash(node)
    try:
        seconds_without_step(running, survivor, (limit + PACE) * (e2e.slow if e2e.ours else 1.0))
        running.set_pace(0)
        running.until_condition("Succeeded", 300)
    finally:
        restore(node)
        e2e.until(180, f"node {node} to be Ready", lambda: node in schedulable_nodes(e2e))
        until_operator_is_ready(e2e)
    assert kept in {pod["metadata"]["uid"] for pod in running.pods()}
    status = running.status()
    assert (status["data"]["repeated"], status["data"]["lost"]) == (0, 0)
    assert status["data"]["totalSeen"] == 120 * 64
    assert status.get("statesLost", 0) == 0
    assert status["restarts"]["failures"] == 0


def test_operator_started_without_dns_becomes_ready_and_acts(e2e: E2ECluster, start: Start) -> None:
    stop, begin = e2e.hands.to_stop_dns()
    running = start("nameless", workers=1, epochs=100_000)
    running.until_trains(1)
    stop()
    try:
        old = {pod["metadata"]["name"] for pod in e2e.pods(OPERATOR_NAMESPACE, OPERATOR_LABELS)}
        e2e.kubectl("delete", "pod", *sorted(old), "-n", OPERATOR_NAMESPACE, "--force", "--grace-period=0")
        e2e.until(120, "other operator pods to be ready", lambda: until_operator_is_ready(e2e) not in old)
        running.scale(2)
        running.until_trains(2)
    finally:
        begin()

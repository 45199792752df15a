"""The same script on parameter servers, one of which is killed; servers and coordinator speak TLS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e_jobs import RunningJob

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_killed_server_costs_no_step_where_each_part_has_two_copies(
    start: Callable[..., RunningJob],
) -> None:
    running = start(
        "on-servers",
        workers=2,
        epochs=160,
        pace="0.1",
        strategy={"type": "ParameterServer", "parameterServer": {"replication": 2}},
        parameterServers={"replicas": 2},
        security={"tls": True},
    )
    running.until_trains(2)
    running.until_goes_on()
    workers = {pod["metadata"]["uid"] for pod in running.pods()}
    lost, kept = running.pods("parameter-server")
    running.delete_pod(lost["metadata"]["name"], "--force", "--grace-period=0")
    running.until_goes_on()
    expected = {"on-servers-ps-0-1", kept["metadata"]["name"]}
    running.cluster.until(
        120,
        f"the servers {sorted(expected)}",
        lambda: {pod["metadata"]["name"] for pod in running.pods("parameter-server")} == expected,
    )
    running.set_pace(0)
    running.until_condition("Succeeded")
    status = running.status()
    assert {pod["metadata"]["uid"] for pod in running.pods()} == workers
    assert (status["data"]["repeated"], status["data"]["lost"]) == (0, 0)
    assert status["data"]["totalSeen"] == 160 * 64
    assert status.get("statesLost", 0) == 0
    assert status["restarts"]["total"] == 0
    assert float(status["values"]["slope"]) == pytest.approx(3.0, abs=0.3)

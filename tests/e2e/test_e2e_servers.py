"""The same script on parameter servers, one of which is killed; servers and coordinator speak TLS."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from e2e_jobs import RunningJob

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.slow
def test_killed_server_costs_no_step_where_shards_have_copies(
    start: Callable[..., RunningJob],
) -> None:
    running = start(
        "on-servers",
        workers=2,
        epochs=80,
        pace="2",  # 640 s at least: it lasts until the server is replaced, or given up
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
    assert status["data"]["totalSeen"] == 80 * 64
    assert status.get("statesLost", 0) == 0
    assert status["restarts"]["total"] == 0
    assert float(status["values"]["slope"]) == pytest.approx(3.0, abs=0.3)


@pytest.mark.slow
def test_edit_of_consistency_takes_effect_without_pod_restarts(
    start: Callable[..., RunningJob],
) -> None:
    kept = {"consistency": "BoundedStaleness", "staleness": 3}
    running = start(
        "by-turns",
        workers=2,
        epochs=100,
        pace="3",  # 600 s at least: it lasts until all edits are in force, or given up
        strategy={"type": "ParameterServer", "parameterServer": kept},
    )
    running.until_trains(2)
    pods = {pod["metadata"]["uid"] for pod in running.pods() + running.pods("parameter-server")}
    assert in_force(running) == kept
    edits = [{"consistency": "Asynchronous"}, {"consistency": "Synchronous"}, kept]
    for wanted in edits:
        edit(running, **wanted)
        running.cluster.until(
            120, f"{wanted} to be in force", lambda wanted=wanted: in_force(running) == wanted
        )
    running.set_pace(0)
    running.until_condition("Succeeded")
    status = running.status()
    assert {pod["metadata"]["uid"] for pod in running.pods()} < pods
    assert (status["data"]["repeated"], status["data"]["lost"]) == (0, 0)
    assert (status["data"]["totalSeen"], status["restarts"]["total"]) == (100 * 64, 0)
    said = running.cluster.kubectl("get", "events", "-n", running.namespace, "-o", "wide")
    shown = ["BoundedStaleness (3 steps)", "Asynchronous", "Synchronous", "BoundedStaleness (3 steps)"]
    for before, after in itertools.pairwise(shown):
        assert f"from {before} to {after}" in said


def in_force(running: RunningJob) -> dict[str, object]:
    shown = running.status().get("parameterServers") or {}
    return {key: shown[key] for key in ("consistency", "staleness") if key in shown}


def edit(running: RunningJob, **changes: object) -> None:
    patch = json.dumps({"spec": {"strategy": {"parameterServer": changes}}})
    running.cluster.kubectl(
        "patch", f"stj/{running.name}", "-n", running.namespace, "--type=merge", "-p", patch
    )

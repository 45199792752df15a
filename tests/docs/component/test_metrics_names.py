"""Names, units and help texts of the metrics of each process, by Prometheus' own check."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from springtide.coordination.metrics import Metrics as WorkerMetrics
from springtide_coordinator.hub import Hub
from springtide_coordinator.metrics import JobCollector
from springtide_coordinator.settings import Options
from springtide_operator.metrics import Metrics as OperatorMetrics
from springtide_operator.plan.observation import Node, Observation
from springtide_protocol.names import Incarnation

STATUS = {
    "state": "Running",
    "workers": {"desired": 3, "replicas": 3, "ready": 3, "active": 3},
    "generation": 2,
    "step": 7,
    "samplesPerSecond": "12",
    "goodput": "0.97",
    "lastRecoverySeconds": "0.3",
    "lostSeconds": {"failure": "1.5"},
    "data": {"totalSeen": 64},
    "restarts": {"failures": 1, "preemptions": 2},
    "recoveries": 3,
}


def operator(_: Path) -> CollectorRegistry:
    metrics = OperatorMetrics(lambda: [("namespace", "job", STATUS)], lambda: True)
    metrics.reconciled("success", 0.1)
    metrics.reconciled("error", 0.1)
    metrics.api_error(409)
    metrics.acted("create_worker")
    metrics.nodes_readable(True)
    metrics.watch_nodes(lambda: Observation(nodes={"n0": Node("n0")}))
    return metrics.registry


def coordinator(folder: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(
        JobCollector(Hub(Options(token="t" * 16, number=1, state_dir=folder), Incarnation(1, 0)))
    )
    return registry


def worker(_: Path) -> CollectorRegistry:
    metrics = WorkerMetrics("job", "namespace")
    metrics.step.observe(0.1)
    metrics.communicated(0.2, 0.1, 1000)
    return metrics.registry


def check(promtool: str, page: bytes) -> tuple[int, bytes]:
    done = subprocess.run(
        [promtool, "check", "metrics"], input=page, capture_output=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("process", [operator, coordinator, worker])
def test_a_scrape_passes_promtool(
    process: Callable[[Path], CollectorRegistry], tmp_path: Path, require_tool: Callable[[str], str]
) -> None:
    page = generate_latest(process(tmp_path))
    assert b"springtide_" in page
    assert check(require_tool("promtool"), page) == (0, b"")


def test_a_page_that_is_wrong_does_not_pass(require_tool: Callable[[str], str]) -> None:
    page = b"# TYPE springtide_milliseconds counter\nspringtide_milliseconds 1\n"
    assert check(require_tool("promtool"), page)[0] != 0

"""A killed worker is missed at once, also where nothing else tells of its death."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_checks import check
from worker_cluster import WorkerCluster
from worker_reference import Reference

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 7, "pace": 0.02}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cluster(new_cluster: Callable[..., WorkerCluster]) -> WorkerCluster:
    made = new_cluster(OPTIONS)
    # Neither the transport nor heartbeats notice anything during this test.
    made.everywhere["SPRINGTIDE_KEEPALIVE_SECONDS"] = "300"
    return made


@pytest.fixture
def child_of(cluster: WorkerCluster) -> Iterator[Path]:
    """Return the file that names a worker's child, which is killed in the end."""
    path = cluster.folder / "child"
    yield path
    if path.exists():
        os.kill(int(path.read_text()), signal.SIGKILL)


def test_killed_while_a_child_has_its_connections(
    cluster: WorkerCluster, child_of: Path, reference: Reference
) -> None:
    first, second, victim = cluster.start(3, options={"forks": [5, 2]})
    cluster.until(child_of.exists, "the child")
    victim.kill()
    cluster.until(lambda: "worker-2: its process ended" in cluster.coordinator_log(), "the loss")
    cluster.until_done()
    check(cluster, reference, [first, second])
    assert "its stream broke" not in cluster.coordinator_log()


def test_a_new_coordinator_has_lifelines_too(cluster: WorkerCluster, reference: Reference) -> None:
    first, second, victim = cluster.start(3)
    cluster.until_step(4)
    cluster.kill_coordinator()
    cluster.start_coordinator(same_pod=True)
    cluster.until(lambda: "trains with 3 processes" in cluster.coordinator_log(), "the coordinator")
    cluster.until_settled()
    victim.kill()
    cluster.until(lambda: "worker-2: its process ended" in cluster.coordinator_log(), "the loss")
    cluster.until_done()
    check(cluster, reference, [first, second])

"""A killed worker is missed at once, also where nothing else tells of its death."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_checks import check
from worker_cluster import Worker, WorkerCluster
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


def missed_by_its_lifeline(cluster: WorkerCluster, victim: Worker) -> None:
    """Kill a worker, and wait until it is missed; nobody says what became of its pod."""
    cluster.sees_ends = False
    victim.kill()
    said = f"{victim.name}: its process ended"
    cluster.until(lambda: said in cluster.coordinator_log(), "the loss")
    cluster.sees_ends = True


def test_killed_while_a_child_has_its_connections(
    cluster: WorkerCluster, child_of: Path, reference: Reference
) -> None:
    first, second, victim = cluster.start(3, options={"forks": [5, 2]})
    cluster.until(child_of.exists, "the child")
    missed_by_its_lifeline(cluster, victim)
    cluster.until_done()
    check(cluster, reference, [first, second])
    assert "its stream broke" not in cluster.coordinator_log()


@pytest.mark.slow
def test_a_new_coordinator_has_lifelines_too(
    cluster: WorkerCluster, child_of: Path, reference: Reference
) -> None:
    """The victim's stream breaks, its connections to the others do not: neither is enough by itself."""
    first, second, victim = cluster.start(3, options={"forks": [5, 2]})
    cluster.until(child_of.exists, "the child")
    cluster.kill_coordinator()
    cluster.start_coordinator(same_pod=True)
    found = "goes on as it was found with 3 processes"
    cluster.until(lambda: found in cluster.coordinator_log(), "the new coordinator's members")
    cluster.until_step(len(first.commits()) + 15)  # the lifelines are there some moments later
    missed_by_its_lifeline(cluster, victim)
    cluster.until_done()
    check(cluster, reference, [first, second])

"""Jobs whose processes are of neighbouring releases train as those of one release do.

`make skew` has all pairs; a run of the whole suite has the first ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from releases import Tree
from worker_checks import check
from worker_cluster import TOKEN, WorkerCluster, Zygote
from worker_reference import Reference

from springtide_protocol.versions import OWN

ALL = os.environ.get("SPRINGTIDE_SKEW") == "all"
PAIRS = [
    # workers, the first coordinator, its successor
    ("last", "today", "today"),
    ("today", "last", "today"),
    ("today", "next", "today"),
    ("next", "today", "next"),
    ("last", "last", "today"),
    ("today", "today", "last"),
    ("today", "today", "next"),
]
SERVERS = [
    # workers, coordinator, servers
    ("last", "today", "today"),
    ("today", "today", "last"),
    ("today", "last", "today"),
    ("last", "today", "last"),
    ("today", "today", "next"),
    ("next", "today", "today"),
    ("today", "next", "today"),
]

OPERATORS = [
    # operator, coordinator and workers
    ("today", "last"),
    ("last", "today"),
    ("today", "next"),
    ("next", "today"),
]
CALLER = Path(__file__).parents[1] / "support" / "skew_operator.py"

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "first", "successor"), PAIRS if ALL else PAIRS[:4])
def test_workers_and_coordinators_of_two_releases_train(
    job_of: Callable[..., WorkerCluster],
    zygote_of: Callable[[str], Zygote],
    reference: Reference,
    workers: str,
    first: str,
    successor: str,
) -> None:
    """A worker dies, the coordinator dies, and a worker joins, whatever releases they are of."""
    cluster = job_of(workers=workers, coordinator=first)
    steady, victim = cluster.start(2, faults={1: "reduced:4:kill"})
    cluster.until(lambda: not victim.running, "a worker's death")
    cluster.until_step(6, steady)
    cluster.kill_coordinator()
    cluster.coordinator_zygote = zygote_of(successor)
    cluster.start_coordinator()
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference, [steady, joiner])
    if "next" in (workers, first) and "today" in (workers, first):
        # What only the next release says was said, and ignored.
        ignored = "of a later release"
        assert (ignored in steady.log()) is (workers == "today")
        assert (ignored in cluster.coordinator_log()) is (workers == "next")


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "coordinator", "servers"), SERVERS if ALL else SERVERS[:2])
def test_servers_of_another_release_serve(
    job_of: Callable[..., WorkerCluster], reference: Reference, workers: str, coordinator: str, servers: str
) -> None:
    """A server dies, and one of the other release takes its place."""
    cluster = job_of(workers=workers, coordinator=coordinator, servers=servers)
    members = cluster.start(2)
    cluster.until_step(4)
    cluster.until_settled()
    cluster.servers[1].kill()
    cluster.until(lambda: not cluster.servers[1].running, "a server's death")
    cluster.add_server(1)
    cluster.until_done()
    check(cluster, reference, members)


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "job"), OPERATORS if ALL else OPERATORS[:2])
def test_operator_of_another_release_hears_the_job(
    job_of: Callable[..., WorkerCluster], tree_of: Callable[[str], Tree], operator: str, job: str
) -> None:
    cluster = job_of(workers=job, coordinator=job)
    members = cluster.start(2)
    cluster.until_step(3)
    command = [sys.executable, str(CALLER), f"{cluster.net}.1", TOKEN, *(worker.name for worker in members)]
    environment = os.environ | {"PYTHONPATH": tree_of(operator).python_path}
    called = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    told = json.loads(called.stdout)
    assert told["connected"] == [worker.uid for worker in members], told
    assert told["phase"] == "RUNNING"
    assert told["step"] >= 2
    cluster.until_done()
    assert cluster.finished() == members


@pytest.mark.slow
def test_release_too_far_away_is_told_which_side_to_upgrade(
    job_of: Callable[..., WorkerCluster], zygote_of: Callable[[str], Zygote]
) -> None:
    """Two releases apart: the worker ends with one sentence."""
    cluster = job_of(workers="last", coordinator="next")
    cluster.start_coordinator()
    worker = cluster.add()
    cluster.until(lambda: not worker.running, "the worker's end")
    assert worker.code != 0
    assert f"the coordinator protocol versions {OWN.newest} to {OWN.newest + 1}" in worker.log()
    assert "upgrade springtide in the workers' image" in worker.log()

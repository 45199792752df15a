"""Processes that benchmarks start, with addresses of their own, come up and do their work at the smallest
sizes: what they measure is no matter here.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from forked_start import forked

from benchmarks import operator_scale, ps_consistency, ps_overlap, recovery
from springtide_local.cluster import Cluster
from springtide_local.settings import Settings
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def host() -> str:
    """An address of this process alone."""
    return f"127.{30 + os.getpid() % 200}.251.{1 + os.getppid() % 250}"


@pytest.fixture(scope="module")
def begun() -> None:
    """Begin the fork server before a test that must leave no child behind."""
    with forked():
        return


@pytest.fixture(autouse=True)
def modules_of_the_checkout(monkeypatch: pytest.MonkeyPatch, begun: None) -> Iterator[None]:
    """Have benchmarks import modules below the repository's root, which `make bench` does, too."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with forked():
        yield


@pytest.mark.slow
def test_coordinator_stand_in_reports_all_running_as_training(host: str) -> None:
    with operator_scale.coordinators(f"{host}:7071"), grpc.insecure_channel(f"{host}:7071") as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        living = [pb.Pod(uid=f"uid-{number}", name=f"w-{number}", started=True) for number in range(2)]
        request = pb.SyncRequest(minimum=2, target=2, maximum=2, incarnation_number=4, living=living)
        reply = stub.Sync(request, timeout=60, wait_for_ready=True)
        assert (reply.phase, reply.incarnation.number) == (pb.RUNNING, 4)
        assert [member.member.pod_uid for member in reply.members] == ["uid-0", "uid-1"]
        del request.living[1]
        assert stub.Sync(request, timeout=60).phase == pb.WAITING


@pytest.mark.slow
def test_what_ends_the_stand_in_is_said_in_its_own_words(host: str) -> None:
    with (
        socket.create_server((host, 7072)),
        pytest.raises(RuntimeError, match=rf"on {host}:7072 ended with 1") as failure,
        operator_scale.coordinators(f"{host}:7072"),
    ):
        raise AssertionError("two listen on one port")
    assert "bind" in str(failure.value)


MEASURE = """
import asyncio, json, sys
from pathlib import Path
from benchmarks import operator_scale
operator_scale.WORKERS = 1
print(json.dumps(asyncio.run(operator_scale.measure(1, 0.1, Path(sys.argv[1]), 2, 0.1, takeover=False))))
"""


@pytest.mark.slow
def test_operator_runs_jobs_of_pods_only_reported_to_run(host: str, tmp_path: Path) -> None:
    """Run the benchmark in a process of its own, since its connections end with it."""
    shape = Settings(nodes=1, cpus="1000", memory="4Ti", pods=2000, pretend=host)
    with operator_scale.coordinators(f"{host}:7070"), Cluster.start(tmp_path / "cluster", shape):
        command = [sys.executable, "-c", MEASURE, str(tmp_path)]
        done = subprocess.run(
            command, cwd=operator_scale.ROOT, capture_output=True, text=True, timeout=250, check=False
        )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["jobs"], figures["pods"]) == (1, 2)
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures.values())


def test_operator_lists_a_large_cluster_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_scale, "KEPT_JOBS", 20)
    now, most = operator_scale.memory_with(tmp_path, 30, 5, 1, settle=0.0)
    assert 0 < now <= most


def test_job_of_forked_workers_trains_and_loses_coordinator(tmp_path: Path) -> None:
    job = recovery.Job(tmp_path, 1)
    try:
        job.until(lambda: len(job.history.active()) == 1, "a commit", 120)
        job.kill_coordinator()
        job.until(lambda: job.reply is not None, "the coordinator's answer", 120)
        assert job.tally() == (0, 0, 0)
    finally:
        job.close()


def test_a_job_with_servers_and_a_slow_worker_trains() -> None:
    found = ps_consistency.run("Asynchronous", "steady", 1.0)
    assert found["updates_per_second"] > 0
    assert found["curve"]


def test_a_paced_server_and_its_worker() -> None:
    blocks = ps_overlap.run(0, 3 * ps_overlap.BLOCK + 3, width=16)
    assert blocks
    assert all(second > 0 for block in blocks for second in block["steps"])

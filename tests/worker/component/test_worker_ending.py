"""How worker processes end: what they leave for the operator to read, and what the others do."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from first_process import UNSHARE
from worker_cluster import Worker, WorkerCluster, Zygote

from springtide.coordination import outcome
from springtide_local.strays import children_of
from springtide_protocol import coordinator_pb2 as pb

OPTIONS: dict[str, Any] = {"samples": 160, "batch": 32, "epochs": 8, "pace": 0.03}
STEPS = 40
FIRST_PROCESS = Path(__file__).parents[2] / "support" / "first_process.py"
BLOCKS = Path(__file__).parents[2] / "support" / "block_script.py"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cluster(zygote: Zygote, tmp_path: Path) -> Iterator[WorkerCluster]:
    cluster = WorkerCluster(zygote, tmp_path, OPTIONS)
    yield cluster
    cluster.close()


def test_script_that_raises_and_a_model_that_differs(cluster: WorkerCluster) -> None:
    first, second = cluster.start(2, faults={1: "gradients:6:raise"}, options={"epochs": 40})
    cluster.until(lambda: not second.running, "the end of the worker that raises")
    assert second.code == 1
    failed = second.outcome()
    assert isinstance(failed, outcome.Failed)
    assert failed.exception == "RuntimeError"
    assert failed.message == "fault at gradients of step 6"
    assert failed.frame.startswith("worker_script.py:")
    assert failed.frame.endswith("in main")
    # Another script's worker is sent away with the reason; the job does not notice.
    stranger = cluster.add(model="norm")
    cluster.until(lambda: not stranger.running, "the end of the worker with another model")
    refused = stranger.outcome()
    assert isinstance(refused, outcome.Failed)
    assert "names, shapes, dtypes" in refused.message
    cluster.until_step(len(first.commits()) + 2)
    first.kill()


def test_joiner_with_a_learning_rate_of_its_own_ends_alone(cluster: WorkerCluster) -> None:
    """A joiner with another learning rate than the others fails with a clear error, and the others go on.

    Without the check its parameters would drift away from theirs unnoticed.
    """
    first, second = cluster.start(2, options={"rate_by_count": 0.1})
    cluster.until_step(3)
    joiner = cluster.add(rate_by_count=0.1)
    cluster.until(lambda: not joiner.running, "the end of the one that joined")
    said = joiner.outcome()
    assert isinstance(said, outcome.Failed)
    assert said.exception == "springtide.errors.UsageError"
    assert "other options than the other workers' (group 0: lr=0.1, momentum=" in said.message
    cluster.until_done()
    assert (first.code, second.code) == (0, 0)
    assert [worker.commits()[-1]["step"] for worker in (first, second)] == [STEPS] * 2
    assert first.result()["parameters"] == second.result()["parameters"]


def test_sigterm_asks_to_leave_at_a_boundary(cluster: WorkerCluster) -> None:
    first, second, third = cluster.start(3)
    cluster.until_step(3)
    second.terminate()
    third.terminate()
    cluster.until_done()
    assert [worker.outcome() for worker in (second, third)] == [outcome.Left("SIGTERM")] * 2
    assert (second.code, third.code) == (0, 0)
    assert second.result() is None
    assert isinstance(first.outcome(), outcome.Finished)
    assert [commit["step"] for commit in first.commits()] == list(range(1, STEPS + 1))
    assert "is dropped" not in first.log()


def test_sigterm_without_a_coordinator(cluster: WorkerCluster) -> None:
    first, second = cluster.start(2, options={"epochs": 80})
    cluster.until_step(3)
    cluster.kill_coordinator()
    newcomer = cluster.add()
    first.terminate()
    began = time.monotonic()
    cluster.until(lambda: "springtide INFO metrics" in newcomer.log(), "the newcomer's init")
    newcomer.terminate()
    cluster.until(lambda: not newcomer.running, "the end of the newcomer, which is no member yet")
    assert newcomer.outcome() == outcome.Left("SIGTERM before it joined")
    assert newcomer.code == 0
    cluster.until(lambda: not first.running, "the end of the first, which nobody hears")
    assert first.code == 143
    assert time.monotonic() - began > 2
    assert first.outcome() is None
    assert first.log().count("no coordinator") == 1
    # The second signal does not wait at all.
    second.terminate()
    cluster.until(lambda: "SIGTERM: leaving" in second.log(), "the first signal")
    second.terminate()
    began = time.monotonic()
    cluster.until(lambda: not second.running, "the end of the second")
    assert second.code == 143
    assert time.monotonic() - began < 20
    assert "no coordinator" not in second.log()


def test_sigterm_amid_a_step_nobody_ends_ends_the_process(cluster: WorkerCluster) -> None:
    """The script's thread does not come to a place between two: the step is dropped with the process."""
    (worker,) = cluster.start(1, faults={0: "gradients:5:sleep=600"}, options={"epochs": 80})
    cluster.until_step(4)
    cluster.kill_coordinator()
    worker.terminate()
    began = time.monotonic()
    cluster.until(lambda: not worker.running, "the end of the worker")
    assert worker.code == 143
    print(f"ended {time.monotonic() - began:.1f} s after SIGTERM")
    assert time.monotonic() - began < 30
    assert worker.commits()[-1]["step"] == 4
    assert worker.log().count("no coordinator") == 1


@pytest.fixture
def first_process_cluster(zygote: Zygote, tmp_path: Path) -> Iterator[WorkerCluster]:
    """Yield a cluster whose workers are each process 1 of a PID namespace."""
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no PID namespace can be made here: {tried.stderr.strip()}")
    cluster = WorkerCluster(zygote, tmp_path, OPTIONS, script=FIRST_PROCESS)
    yield cluster
    cluster.close()


@pytest.mark.slow
def test_process_1_ends_when_nobody_hears_its_leave(first_process_cluster: WorkerCluster) -> None:
    """Process 1 ends by SIGTERM when nobody hears its Leave.

    The kernel drops a signal that process 1 sends to itself when the signal's disposition is the default.
    """
    cluster = first_process_cluster
    (worker,) = cluster.start(1, options={"epochs": 800})
    cluster.until_step(3)
    cluster.stands_still = False
    cluster.kill_coordinator()
    began = time.monotonic()
    (inside,) = children_of(worker.pid)
    os.kill(inside, signal.SIGTERM)
    cluster.until(lambda: not worker.running, "the end of the worker")
    print(f"gone {time.monotonic() - began:.1f} s after SIGTERM")
    assert time.monotonic() - began < 30
    assert worker.code == 143
    assert worker.log().count("SIGTERM, and no coordinator") == 1


@pytest.mark.slow
def test_process_1_ends_of_a_second_sigterm(first_process_cluster: WorkerCluster) -> None:
    cluster = first_process_cluster
    (worker,) = cluster.start(1, faults={0: "gradients:5:sleep=600"})
    cluster.until_step(4)
    (inside,) = children_of(worker.pid)
    os.kill(inside, signal.SIGTERM)
    cluster.until(lambda: "SIGTERM: leaving" in worker.log(), "the first signal")
    os.kill(inside, signal.SIGTERM)
    cluster.until(lambda: not worker.running, "the end of the worker")
    assert worker.code == 143


def test_script_that_leaves_its_loop(cluster: WorkerCluster) -> None:
    """`break` would leave the others waiting for ever, and the weights unfinished: it is no success."""
    (first,) = cluster.start(1, options={"stop_at": 5})
    cluster.until_done()
    failed = first.outcome()
    assert isinstance(failed, outcome.Failed)
    assert "before its training loop did" in failed.message
    assert "`break`" in failed.message


def blocks(worker: Worker) -> list[str]:
    """Each run of a block of the script's own collectives: where, among how many."""
    path = worker.folder / f"{worker.name}.blocks"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_own_collectives_run_again_among_those_that_are_left(zygote: Zygote, tmp_path: Path) -> None:
    """A script's own collectives run again among the members that are left.

    The blocks run between steps, with a member that joins meanwhile, and after the loop.
    """
    cluster = WorkerCluster(zygote, tmp_path, {"waits": ["step10", "end"]}, script=BLOCKS)
    try:
        first, second, third, fourth = everybody = cluster.start(4)
        cluster.until(lambda: all("step10 4" in blocks(worker) for worker in everybody), "all in the block")
        late = cluster.add()
        cluster.until(
            lambda: (
                cluster.reply is not None
                and any(
                    member.member.pod_name == late.name and member.standing == pb.PARKED
                    for member in cluster.reply.members
                )
            ),
            "the one that joins",
        )
        fourth.kill()
        (tmp_path / "go-step10").touch()
        members = [first, second, third, late]
        cluster.until(lambda: all("end 4" in blocks(worker) for worker in members), "all after the loop")
        between = ["step20 4", "step30 4", "end 4"]
        for worker in members[:3]:
            assert blocks(worker) == ["step10 4", "step10 3", *between], cluster.logs()
        assert blocks(late) == between
        third.kill()
        (tmp_path / "go-end").touch()
        cluster.until_done(first, second, late)
        total = sum(range(96)) / 96
        for worker, count in ((first, 4), (second, 4), (late, 3)):
            assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
            assert worker.result() == pytest.approx([total] * count)
            assert blocks(worker)[-1] == "end 3"
    finally:
        cluster.close()

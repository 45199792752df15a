"""Jobs with embedding tables whose workers do not step together: each range is once in every slice, whoever
dies, and the model is as good as that of common steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_cluster import Worker, WorkerCluster, Zygote
from worker_reference import Reference, train_alone
from worker_results import check_equal, commits, reply
from worker_switches import ENDS, FREE, TOGETHER

OPTIONS: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 5,
    "pace": 0.01,
    "clip_norm": 0.5,
    "model": "tables",
    "momentum": 0.0,
}
PER_EPOCH = 8
STEPS = 40

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_cluster(new_server_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    def make(consistency: str, replication: int = 1, **options: Any) -> WorkerCluster:
        environment = {"SPRINGTIDE_CONSISTENCY": consistency} | options.pop("environment", {})
        return new_server_cluster(OPTIONS | options, 2, replication, environment=environment)

    return make


def check(
    cluster: WorkerCluster, members: list[Worker], reference: Reference, skips: bool = False
) -> list[dict[str, Any]]:
    """Check that the members finished with one model, in which every batch is exactly once.

    The model includes all rows of all tables. The losses of the last epoch are about those of a single
    process, which has learnt something.

    Args:
        skips: some batches changed nothing.

    Returns:
        the members' results.
    """
    results = check_equal(cluster, members, OPTIONS)
    if not skips:
        assert len(results[0]["values"]) == len(reference.values)  # the same rows
    losses = {
        commit["step"]: commit["values"]["loss"] for worker in cluster.workers for commit in worker.commits()
    }
    ours = mean_of(losses, STEPS - PER_EPOCH)
    first, theirs = mean_of(reference.losses, 0), mean_of(reference.losses, STEPS - PER_EPOCH)
    assert theirs < first - 0.05
    assert ours < theirs + 0.4 * (first - theirs), (ours, theirs, first)
    return results


def mean_of(losses: dict[int, float], first: int) -> float:
    """Over an epoch's steps; one that was killed before it noted its range is not in it."""
    found = [losses[step] for step in range(first + 1, first + PER_EPOCH + 1) if step in losses]
    return sum(found) / len(found)


def hold(path: Path, point: str) -> str:
    """A fault: whoever comes to this point waits there as long as the file exists."""
    path.write_text("120")  # seconds at most
    return f"{point}:hold={path}"


@pytest.mark.slow
def test_workers_are_killed_at_every_point_of_a_step(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    points = ["backward", "gradients", "stepping", "pushing", "committed"]
    cluster = make_cluster(
        "BoundedStaleness", environment={"SPRINGTIDE_COMPRESSION": "BF16"}, scaler=True, infinite=77
    )
    # The bound keeps the steady one from getting to the end before all of them are gone.
    faults = {number: f"{point}:*:kill" for number, point in enumerate(points, start=1)}
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    cluster.until_done()
    assert [worker.code for worker in victims] == [-9] * len(points)
    [result] = check(cluster, [steady], reference, skips=True)
    # Whoever had it, and whoever took it over.
    assert result["audit"]["skipped"] == 2


@pytest.mark.slow
def test_workers_are_killed_between_two_steps_of_a_body(
    make_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path: Path
) -> None:
    """The tables' step is pushed before the layers' gradients are computed, by what it has made."""
    (tmp_path / "alone").mkdir()
    two: dict[str, Any] = {"two": True, "rounds": True}
    reference = train_alone(zygote, tmp_path / "alone", OPTIONS | two)
    points = ["seen", "round-gradients", "round-reduced", "pushing"]
    cluster = make_cluster("BoundedStaleness", replication=2, **two)
    # The bound keeps the steady one from getting to the end before all of them are gone.
    faults = {number: f"{point}:*:kill" for number, point in enumerate(points, start=1)}
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    cluster.until_done()
    assert [worker.code for worker in victims] == [-9] * len(points), cluster.logs()
    check(cluster, [steady], reference)


@pytest.mark.slow
def test_server_with_copies_killed_between_offer_and_push(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    gate, inside = tmp_path / "gate", tmp_path / "inside"
    cluster = make_cluster("Asynchronous", replication=2)
    waits = f"stepping:12:mark={inside};{hold(gate, 'stepping:12')}"
    workers = cluster.start(2, faults={0: waits, 1: waits})
    cluster.until(inside.exists, "somebody before the push of range 12", slowly=False)
    cluster.servers[0].kill()
    cluster.add_server(0)
    cluster.until(lambda: not cluster.servers[0].running, "the server's death", slowly=False)
    gate.unlink()
    cluster.until_done()
    check(cluster, workers, reference)
    assert set(commits(cluster).values()) == {1}


@pytest.mark.slow
def test_rows_lost_without_copy_send_job_to_last_epoch_end(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """No worker has what a killed server held: dense parameters alone are not made again."""
    (tmp_path / "volume").mkdir()
    place = {"SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "volume"), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.001"}
    cluster = make_cluster("Asynchronous", environment=place)
    gate, inside = tmp_path / "gate", tmp_path / "inside"
    waits = f"body:{2 * PER_EPOCH + 4}:mark={inside};{hold(gate, f'body:{2 * PER_EPOCH + 4}')}"
    workers = cluster.start(2, faults={0: waits, 1: waits})
    cluster.until(inside.exists, "somebody in the third epoch", slowly=False)
    cluster.until(lambda: bool([*(tmp_path / "volume").rglob("manifest.json")]), "a checkpoint")
    cluster.servers[0].kill()
    cluster.add_server(0)
    cluster.until(lambda: not cluster.servers[0].running, "the server's death", slowly=False)
    gate.unlink()
    cluster.until_done()
    assert [worker.code for worker in workers] == [0, 0]
    check(cluster, workers, reference)
    assert any("StateLost" in worker.log() for worker in workers), cluster.logs()


@pytest.mark.slow
def test_a_running_job_goes_over_and_back(
    make_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path: Path
) -> None:
    """A running job goes over to another consistency and back.

    Each of its bodies has two backward passes and a step of each optimizer.
    """
    (tmp_path / "alone").mkdir()
    two: dict[str, Any] = {"two": True, "rounds": True}
    reference = train_alone(zygote, tmp_path / "alone", OPTIONS | two)
    gates = {step: tmp_path / f"gate-{step}" for step in (6, 12)}
    held = ";".join(hold(path, f"body:{step}") for step, path in gates.items())
    cluster = make_cluster("Synchronous", replication=2, **two)
    workers = cluster.start(2, faults={0: held, 1: held})
    cluster.until_step(5)
    cluster.consistency = FREE
    cluster.until(lambda: "asked to stop after the step" in workers[0].log(), "the boundary")
    gates[6].unlink()
    cluster.until(lambda: commits(cluster)[11] == 1, "ranges", slowly=False)
    assert reply(cluster).consistency_refused == ""
    cluster.consistency = TOGETHER
    cluster.until(lambda: all(ENDS in worker.log() for worker in workers), "the word")
    gates[12].unlink()
    cluster.until_done()
    check(cluster, workers, reference)
    once = range(7, 2 * PER_EPOCH + 1)
    assert commits(cluster) == Counter({step: 2 - (step in once) for step in range(1, STEPS + 1)})
    assert reply(cluster).consistency == TOGETHER

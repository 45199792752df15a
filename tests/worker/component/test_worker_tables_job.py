"""Jobs with embedding tables on servers: real processes, and the numbers of a run in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_checks import check
from worker_cluster import WorkerCluster, Zygote
from worker_reference import Reference, train_alone

from springtide.coordination import outcome

OPTIONS: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 5,
    "pace": 0.02,
    "clip_norm": 0.5,
    "model": "tables",
    "momentum": 0.0,
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_cluster(new_server_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    def make(strategy: str, servers: int, replication: int = 1, **options: Any) -> WorkerCluster:
        environment = options.pop("environment", {})
        return new_server_cluster(OPTIONS | options, servers, replication, strategy, environment=environment)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["Hybrid", "ParameterServer"])
def test_workers_are_killed_and_come_at_every_point_of_a_step(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, strategy: str
) -> None:
    points = ["backward", "pushed", "prepared", "reduced", "stepping"]
    points = points if strategy == "Hybrid" else points[2:4]
    cluster = make_cluster(strategy, 2, pace=0.03)
    steady, victim = cluster.start(2, faults={1: f"{points[0]}:4:kill"})
    for point in points[1:]:
        cluster.until(lambda dying=victim: not dying.running, f"the death before {point}")
        victim = cluster.add(fault=f"{point}:*:kill")
    cluster.until_done()
    assert [worker.code for worker in cluster.workers] == [0] + [-9] * len(points)
    check(cluster, reference, [steady])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["Hybrid", "ParameterServer"])
def test_optimizers_and_tables_make_one_step_through_kills(
    make_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    """One has the tables, whose rows are looked up again before the other one steps, which has the layers."""
    (tmp_path / "alone").mkdir()
    two: dict[str, Any] = {"two": True, "rounds": True, "epochs": 2}
    reference = train_alone(zygote, tmp_path / "alone", OPTIONS | two)
    cluster = make_cluster(strategy, 2, replication=2, **two)
    points = ["stepped", "round-prepared", "stepping"]
    faults = {number: f"{point}:{3 * number}:kill" for number, point in enumerate(points, start=1)}
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    cluster.until_done(seconds=90.0)
    assert [worker.code for worker in victims] == [-9] * len(points), cluster.logs()
    check(cluster, reference, [steady])


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [False, True])
def test_compressed_gradients_train_on_while_workers_die(
    make_cluster: Callable[..., WorkerCluster],
    reference: Reference,
    zygote: Zygote,
    tmp_path: Path,
    rounds: bool,
) -> None:
    """The numbers are equal on all workers, and about those without compression.

    rounds: with two optimizers, and a second backward through what the first one's step has made.
    """
    how = {"SPRINGTIDE_COMPRESSION": "PowerSGD", "SPRINGTIDE_ROWS_COMPRESSION": "BF16"}
    game: dict[str, Any] = {"two": True, "rounds": True} if rounds else {}
    if rounds:
        (tmp_path / "alone").mkdir()
        reference = train_alone(zygote, tmp_path / "alone", OPTIONS | game | {"epochs": 2})
    cluster = make_cluster("Hybrid", 2, replication=2, pace=0.02, epochs=2, environment=how, **game)
    faults = {2: "prepared:3:kill", 3: "reduced:6:kill", 4: "stepping:9:kill"}
    if rounds:
        faults = {2: "stepped:3:kill", 3: "round-reduced:6:kill", 4: "stepping:9:kill"}
    *steady, _, _, _ = cluster.start(5, faults=faults)
    cluster.until_done()
    assert [worker.code for worker in cluster.workers] == [0, 0, -9, -9, -9], cluster.logs()
    results = [worker.result() for worker in steady]
    ends = [worker.outcome() for worker in steady]
    for result, end in zip(results, ends, strict=True):
        assert isinstance(end, outcome.Finished), cluster.logs()
        assert (end.data["repeated"], end.data["lost"], end.data["totalSeen"]) == (0, 0, 2 * 230)
        assert result is not None
        assert result["parameters"] == results[0]["parameters"]
    for commit in steady[0].commits():
        # Steps are small and clipped, so what is rounded off shows in the losses of later ones only a little.
        assert commit["values"]["loss"] == pytest.approx(reference.losses[commit["step"]], abs=0.05)


@pytest.mark.slow
def test_a_server_with_copies_is_killed_and_another_one_comes(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster("Hybrid", 2, replication=2, pace=0.04)
    workers = cluster.start(2)
    for slot, step in ((0, 4), (1, 16)):
        cluster.until_step(step)
        # A copy on another server is needed before the next one goes.
        cluster.until_settled()
        victim = next(s for s in cluster.servers if s.slot == slot and s.running)
        victim.kill()
        cluster.add_server(slot)
        cluster.until(lambda gone=victim: not gone.running, "the server's death")
    cluster.until_done()
    check(cluster, reference, workers)

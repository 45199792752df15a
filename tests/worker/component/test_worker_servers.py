"""Jobs with parameters on servers: real processes, and the numbers of an undisturbed run without servers."""

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
    "epochs": 7,
    "pace": 0.015,
    "clip_norm": 0.5,
}
STEPS = 56

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_cluster(new_server_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    def make(servers: int, replication: int = 1, **options: Any) -> WorkerCluster:
        environment = options.pop("environment", {})
        return new_server_cluster(OPTIONS | options, servers, replication, environment=environment)

    return make


def generation(cluster: WorkerCluster) -> int:
    return 0 if cluster.reply is None else cluster.reply.generation.number


def saved(cluster: WorkerCluster) -> int:
    """The step of the newest checkpoint that the coordinator knows of."""
    return 0 if cluster.reply is None else cluster.reply.checkpoint.state.step


def settled(cluster: WorkerCluster) -> bool:
    return cluster.reply is not None and cluster.reply.servers_settled


def test_workers_are_killed_and_come_at_every_point_of_a_step(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    points = ["body", "backward", "gradients", "pushed", "prepared", "reduced", "stepping", "stepped"]
    cluster = make_cluster(2, pace=0.03, scaler=True)
    steady, victim = cluster.start(2, faults={1: f"{points[0]}:4:kill"})
    for point in points[1:]:
        cluster.until(lambda dying=victim: not dying.running, f"the death before {point}")
        victim = cluster.add(fault=f"{point}:*:kill")
    cluster.until_done()
    assert [worker.code for worker in cluster.workers] == [0] + [-9] * len(points), cluster.logs()
    check(cluster, reference, [steady])


@pytest.mark.slow
def test_average_of_weights_survives_kills_at_every_point(
    make_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path: Path
) -> None:
    """An average of the weights survives kills at every point of a step.

    The average reads new values in the body, at a time when a worker that has not committed the step may be
    dead.
    """
    (tmp_path / "alone").mkdir()
    averaged: dict[str, Any] = {"average": True, "optimizer": "adam", "lr": 0.01}
    reference = train_alone(zygote, tmp_path / "alone", OPTIONS | averaged)
    cluster = make_cluster(2, replication=2, pace=0.02, **averaged)
    points = ["prepared", "reduced", "stepping", "stepped"]
    faults = {number: f"{point}:{3 * number}:kill" for number, point in enumerate(points, start=1)}
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    cluster.until(lambda: not any(victim.running for victim in victims), "the last death")
    cluster.until_settled()
    cluster.servers[0].kill()
    cluster.add_server(0)
    cluster.until_done()
    assert [worker.code for worker in victims] == [-9] * 4, cluster.logs()
    check(cluster, reference, [steady])


@pytest.mark.slow
def test_two_optimizers_make_one_step_through_kills(
    make_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    two: dict[str, Any] = {"two": True, "epochs": 3}
    reference = train_alone(zygote, tmp_path / "alone", OPTIONS | two)
    cluster = make_cluster(2, replication=2, pace=0.02, **two)
    points = ["gradients", "prepared", "stepped", "stepping"]
    faults = {number: f"{point}:{2 * number}:kill" for number, point in enumerate(points, start=1)}
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    cluster.until(lambda: not any(victim.running for victim in victims), "the last death")
    cluster.until_settled()
    cluster.servers[0].kill()
    cluster.add_server(0)
    cluster.until_done()
    assert [worker.code for worker in victims] == [-9] * len(points), cluster.logs()
    check(cluster, reference, [steady])


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [1, 2])
def test_two_backwards_and_two_steps_are_one_through_kills(
    make_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path: Path, group_size: int
) -> None:
    """The second backward is through what the first step has made, and an average reads it meanwhile."""
    (tmp_path / "alone").mkdir()
    game: dict[str, Any] = {"two": True, "rounds": True, "average": True, "epochs": 3}
    reference = train_alone(zygote, tmp_path / "alone", OPTIONS | game)
    groups = {"SPRINGTIDE_GROUP_SIZE": str(group_size)}
    cluster = make_cluster(2, replication=2, environment=groups, pace=0.02, **game)
    points = ["stepped", "seen", "round-prepared", "round-reduced", "round-stepped"]
    faults = {number: f"{point}:{2 * number}:kill" for number, point in enumerate(points, start=1)}
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    cluster.until(lambda: not any(victim.running for victim in victims), "the last death", 90.0)
    cluster.until_settled()
    cluster.servers[0].kill()
    cluster.add_server(0)
    cluster.until_done(seconds=90.0)
    assert [worker.code for worker in victims] == [-9] * len(points), cluster.logs()
    check(cluster, reference, [steady])


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [False, True])
def test_compressed_gradients_train_on_at_deaths_and_leaves(
    make_cluster: Callable[..., WorkerCluster],
    reference: Reference,
    zygote: Zygote,
    tmp_path: Path,
    rounds: bool,
) -> None:
    """The numbers are others than those of one process, but equal on all workers, and they train as well.

    rounds: with two optimizers, and a second backward through what the first one's step has made.
    """
    topk = {"SPRINGTIDE_COMPRESSION": "TopK", "SPRINGTIDE_TOP_K_RATIO": "0.3"}
    game: dict[str, Any] = {"two": True, "rounds": True} if rounds else {}
    if rounds:
        (tmp_path / "alone").mkdir()
        reference = train_alone(zygote, tmp_path / "alone", OPTIONS | game)
    cluster = make_cluster(2, pace=0.03, environment=topk, **game)
    faults = {1: "pushed:3:kill", 2: "reduced:6:kill", 3: "stepping:9:kill"}
    if rounds:
        faults = {1: "seen:3:kill", 2: "round-reduced:6:kill", 3: "round-stepped:9:kill"}
    steady, *victims, leaver = cluster.start(5, faults=faults)
    cluster.until_step(12)
    leaver.terminate()
    cluster.until_done()
    assert [worker.code for worker in victims] == [-9] * 3, cluster.logs()
    end, left, result = steady.outcome(), leaver.outcome(), steady.result()
    assert isinstance(end, outcome.Finished), cluster.logs()
    assert isinstance(left, outcome.Left), cluster.logs()
    assert (end.data["repeated"], end.data["lost"], end.data["totalSeen"]) == (0, 0, 7 * 230)
    losses = [commit["values"]["loss"] for commit in steady.commits()]
    expected = [reference.losses[step] for step in range(STEPS - 7, STEPS + 1)]
    assert abs(sum(losses[-8:]) - sum(expected)) / 8 < 0.1
    assert result is not None
    assert max(abs(a - b) for a, b in zip(result["values"], reference.values, strict=True)) > 1e-3


@pytest.mark.slow
def test_a_server_with_copies_is_killed_again_and_again(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster(2, replication=2, pace=0.03)
    workers = cluster.start(2)
    for slot, step in ((0, 5), (1, 20), (0, 35)):
        cluster.until_step(step)
        # A copy on another server is needed before the next one goes.
        cluster.until_settled()
        victim = next(s for s in cluster.servers if s.slot == slot and s.running)
        victim.kill()
        # Nobody waits for its successor.
        at = workers[0].commits()[-1]["step"]
        cluster.until_step(min(at + 3, STEPS))
        cluster.add_server(slot)
        cluster.until(lambda gone=victim: not gone.running, "the server's death")
    cluster.until_done()
    check(cluster, reference, workers)


@pytest.mark.slow
def test_a_team_that_lost_a_member_goes_on(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster(2, replication=2, pace=0.03, environment={"SPRINGTIDE_GROUP_SIZE": "2"})
    faults = {3: "gradients:4:kill", 4: "pushed:8:kill", 5: "prepared:12:kill"}
    *steady, _, _, _ = cluster.start(6, faults=faults)
    cluster.until_step(15)
    cluster.until_settled()
    cluster.servers[0].kill()
    cluster.add_server(0)
    cluster.until_done()
    assert [worker.code for worker in cluster.workers] == [0, 0, 0, -9, -9, -9], cluster.logs()
    check(cluster, reference, steady)


@pytest.mark.slow
def test_servers_come_and_go_while_training(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster(1, pace=0.04)
    spare = [cluster.add_server(slot) for slot in (1, 2)]
    workers = cluster.start(2)
    cluster.until(lambda: all("knows this server" in s.log() for s in spare), "the spare servers")
    for wanted in (3, 1):
        before = generation(cluster)
        cluster.servers_wanted = wanted
        cluster.until(lambda old=before: generation(cluster) > old and settled(cluster), f"{wanted} servers")
    for server in spare:
        server.kill()
    cluster.until_done()
    check(cluster, reference, workers)


def test_a_server_without_copies_takes_the_state_along(make_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = make_cluster(2)
    workers = cluster.start(2)
    cluster.until_step(5)
    cluster.servers[1].kill()
    cluster.add_server(1)
    cluster.until_done()
    for worker in workers:
        end = worker.outcome()
        assert isinstance(end, outcome.Left)
        assert "StateLost" in end.reason
        assert cluster.servers[1].name in end.reason


@pytest.mark.slow
@pytest.mark.parametrize(("copies", "losses"), [(1, [(1,), (1,)]), (2, [(0, 1)])])
def test_lost_servers_send_the_same_workers_to_a_checkpoint(
    make_cluster: Callable[..., WorkerCluster],
    zygote: Zygote,
    tmp_path: Path,
    copies: int,
    losses: list[tuple[int, ...]],
) -> None:
    """Lost servers send all workers back to the same checkpoint: parameters, optimizer state and cursor.

    Either a server without copies is lost, or two servers at once with copies.
    """
    (tmp_path / "alone").mkdir()
    (tmp_path / "volume").mkdir()
    adam: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "epochs": 5}
    reference = train_alone(zygote, tmp_path / "alone", OPTIONS | adam)
    place = {"SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "volume"), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.1"}
    cluster = make_cluster(2, replication=copies, pace=0.04, environment=place, **adam)
    workers = cluster.start(2)
    for slots in losses:
        lost = cluster.reply.states_lost if cluster.reply is not None else 0
        known = saved(cluster)
        cluster.until(lambda old=known: saved(cluster) > old + 3, "a checkpoint of later steps")
        for server in [server for server in cluster.servers if server.slot in slots and server.running]:
            server.kill()
            cluster.add_server(server.slot)
        cluster.until(lambda old=lost: cluster.reply.states_lost > old, "word of the loss")
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference, [*workers, joiner])
    assert cluster.reply is not None
    assert cluster.reply.states_lost == len(losses)


def test_without_a_checkpoint_to_go_back_to_the_workers_leave(
    make_cluster: Callable[..., WorkerCluster], tmp_path: Path
) -> None:
    (tmp_path / "volume").mkdir()
    place = {"SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "volume"), "SPRINGTIDE_CHECKPOINT_SECONDS": "1000"}
    cluster = make_cluster(2, environment=place)
    workers = cluster.start(2)
    cluster.until_step(5)
    cluster.servers[1].kill()
    cluster.add_server(1)
    cluster.until_done()
    for worker in workers:
        end = worker.outcome()
        assert isinstance(end, outcome.Left)
        assert "StateLost" in end.reason


def test_a_coordinator_is_killed(make_cluster: Callable[..., WorkerCluster], reference: Reference) -> None:
    cluster = make_cluster(2, pace=0.03)
    workers = cluster.start(2)
    cluster.until_step(5)
    cluster.kill_coordinator()
    cluster.until_step(10)
    cluster.start_coordinator(same_pod=True)
    cluster.until_step(14)
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference, [*workers, joiner])

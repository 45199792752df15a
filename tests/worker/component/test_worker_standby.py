"""Real processes and a standby: it takes the place of whoever is killed or leaves, and no number changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from worker_checks import check
from worker_cluster import Worker, WorkerCluster, Zygote
from worker_reference import Reference, train_alone

from springtide.coordination import outcome
from springtide_protocol import coordinator_pb2 as pb

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 7, "pace": 0.03}
ADAM = OPTIONS | {"optimizer": "adam", "lr": 0.003, "hidden": 96}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def adam(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The undisturbed run with Adam, in one process."""
    return train_alone(zygote, tmp_path_factory.mktemp("alone"), ADAM)


def standing(cluster: WorkerCluster, worker: Worker) -> int:
    """Return where the coordinator says that a worker is; -1 while it does not know it."""
    members = [] if cluster.reply is None else cluster.reply.members
    return next((int(m.standing) for m in members if m.member.pod_name == worker.name), -1)


def stand_by(cluster: WorkerCluster) -> Worker:
    """Start a standby, and wait until it is ready."""
    cluster.standby, now = 1, time.monotonic()
    cluster.until(lambda: cluster.asked_at > now, "the coordinator to know that one is to stand by")
    worker = cluster.add()
    cluster.until(lambda: standing(cluster, worker) == pb.PARKED, "the standby to be ready")
    return worker


def follows(cluster: WorkerCluster, worker: Worker, generation: int) -> None:
    """Wait until the standby trains: in the very next generation, with three members."""
    cluster.until(lambda: bool(worker.commits()), "the standby's first commit")
    assert worker.commits()[0]["generation"] == generation + 1, "no generation goes on without it"


@pytest.mark.slow
def test_standby_follows_one_that_is_killed_and_one_that_leaves(
    new_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = new_cluster(OPTIONS)
    first, second, third = cluster.start(3)
    fourth = stand_by(cluster)
    cluster.until_step(6)
    assert cluster.reply is not None
    assert cluster.reply.generation.number == 1, cluster.logs()
    assert fourth.commits() == []
    second.kill()
    follows(cluster, fourth, 1)
    fifth = stand_by(cluster)
    third.terminate()
    follows(cluster, fifth, 2)
    assert isinstance(third.outcome(), outcome.Left)
    cluster.until_done(first, fourth, fifth)
    check(cluster, reference, [first, fourth, fifth])
    assert f"standby {fourth.name} takes the place of {second.name}" in cluster.coordinator_log()
    assert f"standby {fifth.name} takes the place of {third.name}" in cluster.coordinator_log()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", "on servers"])
def test_standby_follows_in_a_job(
    new_cluster: Callable[..., WorkerCluster],
    new_server_cluster: Callable[..., WorkerCluster],
    adam: Reference,
    how: str,
) -> None:
    if how == "sharded":
        cluster = new_cluster(ADAM, environment={"SPRINGTIDE_SHARD": "Optimizer"})
    else:
        cluster = new_server_cluster(ADAM, 1, 1)
    first, second, third = cluster.start(3)
    fourth = stand_by(cluster)
    cluster.until_step(6)
    second.kill()
    follows(cluster, fourth, 1)
    cluster.until_done(first, third, fourth)
    check(cluster, adam, [first, third, fourth])

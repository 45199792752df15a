"""Real processes with the optimizer's state in shards: whoever dies, and when, the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_checks import check
from worker_cluster import WorkerCluster, Zygote
from worker_reference import Reference, train_alone

OPTIONS: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 7,
    "pace": 0.02,
    "optimizer": "adam",
    "lr": 0.003,
}
ENVIRONMENT = {"SPRINGTIDE_SHARD": "Optimizer"}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def adam(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return train_alone(zygote, tmp_path_factory.mktemp("alone"), OPTIONS)


@pytest.fixture
def make_cluster(new_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    def make(**settings: Any) -> WorkerCluster:
        options = OPTIONS | settings.pop("options", {})
        environment = ENVIRONMENT | settings.pop("environment", {})
        return new_cluster(options, environment=environment, **settings)

    return make


def test_undisturbed_equals_one_process(
    make_cluster: Callable[..., WorkerCluster], adam: Reference
) -> None:
    cluster = make_cluster(options={"pace": 0.0})
    workers = cluster.start(3)
    cluster.until_done()
    check(cluster, adam, workers)
    assert all("of optimizer state" in worker.log() for worker in workers)


@pytest.mark.parametrize(
    "point",
    ["body", "backward", "gradients", "pushed", "prepared", "reduced", "stepping", "stepped", "committed"],
)
def test_killed_in_a_step(
    make_cluster: Callable[..., WorkerCluster], adam: Reference, point: str
) -> None:
    """One of three dies, another comes: nothing is read, nobody goes back."""
    cluster = make_cluster()
    first, second, victim = cluster.start(3, faults={2: f"{point}:6:kill"})
    cluster.until(lambda: not victim.running, f"the death at {point}")
    joiner = cluster.add()
    cluster.until_done()
    assert victim.code == -9
    check(cluster, adam, [first, second, joiner])

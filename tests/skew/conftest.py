"""Fixtures of the tests of processes that are of different releases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from releases import TODAY, Tree, last_release, next_release
from worker_cluster import WorkerCluster, Zygote
from worker_reference import Reference, train_alone

OPTIONS = {"samples": 160, "batch": 32, "epochs": 4, "pace": 0.02}


@pytest.fixture(scope="session")
def tree_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tree]:
    """`tree_of("last")`, "next" or "today"; skips where the last release cannot be had."""
    trees = {"today": TODAY}
    makers = {"last": last_release, "next": next_release}

    def tree(name: str) -> Tree:
        if name not in trees:
            trees[name] = makers[name](tmp_path_factory.mktemp("release") / name)
        return trees[name]

    return tree


@pytest.fixture(scope="session")
def zygote_of(tree_of: Callable[[str], Tree]) -> Iterator[Callable[[str], Zygote]]:
    """`zygote_of("last")` makes processes of the last release. All zygotes import torch at the same time."""
    zygotes: dict[str, Zygote] = {}
    missing: dict[str, BaseException] = {}
    for release in ("today", "last", "next"):
        try:
            zygotes[release] = Zygote(PYTHONPATH=tree_of(release).python_path)
        except (pytest.skip.Exception, pytest.fail.Exception) as why:
            missing[release] = why  # of the tests that need it

    def zygote(name: str) -> Zygote:
        if name in missing:
            raise missing[name]
        return zygotes[name]

    yield zygote
    for made in zygotes.values():
        made.close()


@pytest.fixture(scope="session")
def reference(zygote_of: Callable[[str], Zygote], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The undisturbed run of the script in one process of today's release."""
    return train_alone(zygote_of("today"), tmp_path_factory.mktemp("alone"), OPTIONS)


@pytest.fixture
def job_of(
    tree_of: Callable[[str], Tree], zygote_of: Callable[[str], Zygote], tmp_path: Path
) -> Iterator[Callable[..., WorkerCluster]]:
    """`job_of(workers="last", coordinator="today", servers="next")` is a job of these releases."""
    clusters: list[WorkerCluster] = []

    def make(workers: str, coordinator: str, servers: str = "", **environment: str) -> WorkerCluster:
        of_servers = {"SPRINGTIDE_STRATEGY": "ParameterServer", "SPRINGTIDE_REPLICATION": "2"}
        cluster = WorkerCluster(
            zygote_of(workers),
            tmp_path,
            OPTIONS,
            script=tree_of(workers).script,
            environment=environment | (of_servers if servers else {}),
        )
        cluster.coordinator_zygote = zygote_of(coordinator)
        if servers:
            cluster.servers_wanted, cluster.server_zygote = 2, zygote_of(servers)
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        cluster.close()

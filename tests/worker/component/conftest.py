"""Fixtures of the tests of real worker processes; `OPTIONS` of a test's module are those of its script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_cluster import WorkerCluster, Zygote
from worker_groups import FormedGroups
from worker_reference import Reference, train_alone

from springtide.comm.process_group import Group


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """The undisturbed run of the same script in one process."""
    return train_alone(zygote, tmp_path_factory.mktemp("alone"), request.module.OPTIONS)


@pytest.fixture
def new_cluster(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., WorkerCluster]]:
    """`new_cluster(OPTIONS, **settings)` of WorkerCluster; closed at the test's end."""
    clusters: list[WorkerCluster] = []

    def make(options: dict[str, Any], **settings: Any) -> WorkerCluster:
        clusters.append(WorkerCluster(zygote, tmp_path, options, **settings))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


@pytest.fixture
def new_server_cluster(new_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    """The same of a job with parameter servers; `environment` of its workers besides what makes it one."""

    def make(
        options: dict[str, Any],
        servers: int,
        replication: int,
        strategy: str = "ParameterServer",
        environment: dict[str, str] | None = None,
    ) -> WorkerCluster:
        of_servers = {
            "SPRINGTIDE_STRATEGY": strategy,
            "SPRINGTIDE_REPLICATION": str(replication),
            "SPRINGTIDE_BUCKET_MIB": "0.002",
        }
        cluster = new_cluster(options, environment=of_servers | (environment or {}))
        cluster.servers_wanted = servers
        return cluster

    return make


@pytest.fixture
def groups() -> Iterator[Callable[[int], list[Group]]]:
    """`groups(n)` forms a group of n members in this process; all are freed at the test's end."""
    formed = FormedGroups()
    yield formed
    assert formed.close()

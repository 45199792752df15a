"""One cluster and one operator for all end-to-end tests; a namespace for each test."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2e_cluster import E2ECluster, cluster
from e2e_jobs import TRAIN, RunningJob, job, script


@pytest.fixture(scope="session")
def e2e(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2ECluster]:
    with cluster(tmp_path_factory.mktemp("e2e")) as running:
        yield running


NEVER_INIT = "import threading\nprint('reads a large file', flush=True)\nthreading.Event().wait()\n"


@pytest.fixture(scope="session", autouse=True)
def silent(e2e: E2ECluster) -> Iterator[RunningJob]:
    """A job whose worker never calls `init()`; it begins first, so that its test need not wait."""
    with e2e.namespace(f"e2e-{secrets.token_hex(4)}") as namespace:
        e2e.apply(script("silent", NEVER_INIT), job("silent", e2e.image), namespace=namespace)
        yield RunningJob(e2e, namespace, "silent")


@pytest.fixture
def namespace(e2e: E2ECluster) -> Iterator[str]:
    with e2e.namespace(f"e2e-{secrets.token_hex(4)}") as name:
        yield name


@pytest.fixture
def start(e2e: E2ECluster, namespace: str) -> Callable[..., RunningJob]:
    """`start("name", code=TRAIN, workers=2, ...)` applies a script and a job that runs it."""

    def apply(name: str, code: str = TRAIN, image: str = "", pace: str = "", **arguments: Any) -> RunningJob:
        e2e.apply(script(name, code, pace), job(name, image or e2e.image, **arguments), namespace=namespace)
        return RunningJob(e2e, namespace, name)

    return apply

"""One cluster and one operator for all end-to-end tests; a namespace for each test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2e_cluster import E2ECluster, UnfitError, cluster, facts, fresh_name
from e2e_jobs import NEVER_INIT, TRAIN, RunningJob, job, script


@pytest.fixture(scope="session")
def e2e(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[E2ECluster]:
    """The cluster, with the chart as packaged where there is a helm; the terminal says what it is."""
    folder = tmp_path_factory.mktemp("e2e")
    try:
        with cluster(folder, packaged=shutil.which("helm") is not None) as running:
            _say(request.config, facts(running))
            yield running
    except UnfitError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


def _say(config: pytest.Config, lines: list[str]) -> None:
    """Write lines to the terminal, past the capture of prints; one of several processes has none."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if terminal is None or capture is None:
        return
    with capture.global_and_fixture_disabled():
        terminal.ensure_newline()
        for line in lines:
            terminal.write_line(f"e2e: {line}")


@pytest.fixture(scope="session", autouse=True)
def silent(e2e: E2ECluster) -> Iterator[RunningJob]:
    """A job whose worker never calls `init()`; it begins first, so that its test need not wait."""
    with e2e.namespace(fresh_name()) as namespace:
        e2e.apply(script("silent", NEVER_INIT), job("silent", e2e.image), namespace=namespace)
        yield RunningJob(e2e, namespace, "silent")


@pytest.fixture
def namespace(e2e: E2ECluster) -> Iterator[str]:
    with e2e.namespace(fresh_name()) as name:
        yield name


@pytest.fixture
def start(e2e: E2ECluster, namespace: str) -> Callable[..., RunningJob]:
    """`start("name", code=TRAIN, workers=2, ...)` applies a script and a job that runs it."""

    def apply(name: str, code: str = TRAIN, image: str = "", pace: str = "", **arguments: Any) -> RunningJob:
        e2e.apply(script(name, code, pace), job(name, image or e2e.image, **arguments), namespace=namespace)
        return RunningJob(e2e, namespace, name)

    return apply

"""Fixtures for tests of the API server: `pytest_plugins = ["local_api_fixtures"]`.

`api` is an embedded server, or any cluster that SPRINGTIDE_E2E_KUBECONFIG names. `embedded` is for tests that
look inside the embedded server (its store, its hook for logs); it skips on other clusters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from local_api import Api, EmbeddedServer


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The cluster under test."""
    given = os.environ.get("SPRINGTIDE_E2E_KUBECONFIG")
    if given:
        yield Api(Path(given).expanduser())
        return
    folder = tmp_path_factory.mktemp("api")
    server = EmbeddedServer(folder)
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(server.server.kubeconfig())
    try:
        yield Api(kubeconfig, server)
    finally:
        server.stop()


@pytest.fixture
def embedded(api: Api) -> EmbeddedServer:
    """The embedded server behind `api`."""
    if api.server is None:
        pytest.skip("this looks inside the embedded server; SPRINGTIDE_E2E_KUBECONFIG names another cluster")
    return api.server


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    with api.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def widgets(api: Api) -> Iterator[str]:
    """The path of the group version of the test's own kind; its definition is there while the tests run."""
    definition = yaml.safe_load((Path(__file__).parent / "local_api_widgets.yaml").read_text())
    name = definition["metadata"]["name"]
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    status, answer, _ = api.request("POST", path, definition)
    assert status in (201, 409), answer

    def established() -> bool:
        conditions = api.ok("GET", f"{path}/{name}").get("status", {}).get("conditions", [])
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    api.until("the definition to be established", established)
    group = "/apis/widgets.test.springtide.dev/v1"
    api.until("the resource to be served", lambda: api.request("GET", f"{group}/widgets")[0] == 200)
    yield group
    api.request("DELETE", f"{path}/{name}")

"""The end-to-end tests on a cluster of somebody else: what they say, what they skip, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from forked_start import forked
from required import require_tool

from springtide_local.cluster import Cluster
from springtide_local.settings import Settings

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[3]
IMAGE = "springtide/worker:given"
SECONDS = 300.0
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "springtide-system"}}
TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": IMAGE, "command": ["true"]}]}}
OURS = "?labelSelector=springtide.dev/e2e"
# A test that still runs when the first worker does, which is the one of the session's silent job.
LASTING = ("tests/e2e/test_e2e_bad_input.py", "-k", "wrong_image")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two small nodes that the tests are told of by a kubeconfig."""
    for tool in ("kubectl", "helm"):
        require_tool(tool)
    folder = tmp_path_factory.mktemp("foreign") / "cluster"
    with forked():
        started = Cluster.start(folder, Settings(nodes=2, cpus="2", memory="4Gi"))
    with started as cluster:
        yield cluster


def begin(cluster: Cluster, *arguments: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"SPRINGTIDE_E2E_KUBECONFIG": str(cluster.kubeconfig), "SPRINGTIDE_E2E_IMAGE": IMAGE}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left(cluster: Cluster) -> list[str]:
    """Return what of the tests is still in the cluster."""
    paths = {
        "/api/v1/namespaces": OURS,
        CRDS: "",
        "/apis/rbac.authorization.k8s.io/v1/clusterroles": OURS,
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings": OURS,
    }
    found = [item for path, query in paths.items() for item in cluster.request("GET", path + query)["items"]]
    return [str(item["metadata"]["name"]) for item in found]


def until_there(cluster: Cluster, process: subprocess.Popen[str]) -> None:
    """Wait until the tests have a worker that runs."""
    deadline = time.monotonic() + SECONDS
    query = "?labelSelector=springtide.dev/role=worker&fieldSelector=status.phase=Running"
    while not cluster.request("GET", f"/api/v1/pods{query}")["items"]:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no worker ran"
        time.sleep(0.2)


@pytest.mark.slow
def test_given_cluster_is_told_used_by_one_image_and_left_clean(foreign: Cluster) -> None:
    chosen = "suspended or dns or ends_without_training"
    process = begin(foreign, "tests/e2e", "-k", chosen)
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert "e2e: Kubernetes v1." in said
    assert said.count("2 cores, 4Gi") == 2
    assert f": {IMAGE} process://" in said
    assert f"e2e: coordinators and servers: {IMAGE}; workers: {IMAGE}" in said
    assert "1 passed, 2 skipped" in said
    assert "neither a default StorageClass nor a free volume" in said
    assert "SPRINGTIDE_E2E_DNS_STOP" in said
    assert left(foreign) == []


@pytest.mark.slow
def test_interrupted_tests_leave_nothing(foreign: Cluster) -> None:
    process = begin(foreign, *LASTING)
    until_there(foreign, process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, said
    assert left(foreign) == []


@pytest.mark.slow
def test_killed_tests_are_cleaned_up_by_the_next(foreign: Cluster) -> None:
    killed = begin(foreign, *LASTING)
    until_there(foreign, killed)
    killed.kill()
    killed.communicate()
    assert left(foreign) != []
    process = begin(foreign, "tests/e2e", "-k", "too_long_is_refused")
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert left(foreign) == []


@pytest.mark.slow
def test_crd_and_namespace_that_were_there_stay(foreign: Cluster) -> None:
    crd = yaml.safe_load((ROOT / "deploy/crd/trainingjobs.yaml").read_text())
    foreign.request("POST", CRDS, crd)
    foreign.request("POST", "/api/v1/namespaces", NAMESPACE)
    process = begin(foreign, "tests/e2e", "-k", "ends_without_training")
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert left(foreign) == ["trainingjobs.springtide.dev"]
    for kind in ("pods", "secrets", "serviceaccounts", "services"):
        items = foreign.request("GET", f"/api/v1/namespaces/springtide-system/{kind}")["items"]
        assert [item["metadata"]["name"] for item in items if item["metadata"]["name"] != "default"] == []
    # A job of somebody is enough to stay away.
    job = {"apiVersion": "springtide.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "theirs"}}
    job["spec"] = {"strategy": {"type": "AllReduce"}, "workers": {"template": TEMPLATE}}  # type: ignore[assignment]
    path = "/apis/springtide.dev/v1alpha1/namespaces/default/trainingjobs"
    foreign.request("POST", path, job)
    process = begin(foreign, "tests/e2e")
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == pytest.ExitCode.USAGE_ERROR, said
    assert "this cluster has the job default/theirs already, not of these tests" in said
    foreign.request("GET", f"{path}/theirs")

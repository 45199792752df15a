"""The operator in a cluster whose DNS is down, with tokens that end after seconds."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from e2e_cluster import (
    EMBEDDED_IMAGE,
    OPERATOR_LABELS,
    OPERATOR_NAMESPACE,
    ROOT,
    E2ECluster,
    RefusedError,
    until_operator_is_ready,
)
from e2e_jobs import TRAIN, RunningJob, job, script

from springtide_demo.kube import Kube
from springtide_local.cluster import Cluster
from springtide_local.settings import Settings

pytestmark = pytest.mark.timeout(400)
Object = dict[str, Any]
TOKEN_SECONDS = 12.0


@dataclass(frozen=True)
class System:
    """The installed operator, and the embedded cluster below it."""

    cluster: Cluster
    e2e: E2ECluster

    def operator(self) -> Object:
        """Return the operator's pod."""
        (pod,) = self.e2e.pods(OPERATOR_NAMESPACE, OPERATOR_LABELS)
        return pod

    def environment(self) -> dict[str, str]:
        """Return the environment of the operator's process."""
        identity = self.operator()["status"]["containerStatuses"][0]["containerID"]
        content = Path(f"/proc/{identity.removeprefix('process://')}/environ").read_bytes()
        pairs = (pair.decode().partition("=") for pair in content.split(b"\0") if pair)
        return {name: value for name, _, value in pairs}

    def token(self) -> str:
        """Return the operator's token, as it is on disk."""
        return (Path(self.environment()["SPRINGTIDE_SERVICE_ACCOUNT_DIR"]) / "token").read_text()

    def status_of(self, token: str) -> int:
        """Return what the API server answers to a token: 200, or 401."""
        address = urlsplit(self.cluster.url)
        context = ssl.create_default_context(cafile=self.cluster.files.pki / "ca.crt")
        connection = http.client.HTTPSConnection(
            address.hostname or "", address.port, context=context, timeout=10
        )
        try:
            connection.request("GET", "/version", headers={"Authorization": f"Bearer {token}"})
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("nodns")
    settings = Settings(nodes=1, dns=False, token_seconds=TOKEN_SECONDS)
    with Cluster.start(folder / "cluster", settings) as embedded, Kube(embedded.kubeconfig) as api:
        here = E2ECluster(embedded.kubeconfig, api, EMBEDDED_IMAGE, slow=2.0)
        here.kubectl("apply", "-f", str(ROOT / "deploy/crd"), "-f", str(ROOT / "deploy/operator.yaml"))
        until_operator_is_ready(here)
        yield System(embedded, here)


def test_no_name_resolves_in_any_pod(system: System) -> None:
    code = (
        "import socket\n"
        "for name in ('kubernetes.default.svc', 'example.com', 'localhost'):\n"
        "    try: print(socket.getaddrinfo(name, 443)[0][4][0])\n"
        "    except socket.gaierror as error: print(error.errno == socket.EAI_AGAIN)\n"
    )
    container = {"name": "main", "image": EMBEDDED_IMAGE, "command": ["python", "-c", code]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asks"}}
    spec = {"restartPolicy": "Never", "containers": [container]}
    system.e2e.apply({**pod, "spec": spec}, namespace="default")
    system.e2e.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/asks", "--timeout=60s")
    said = system.e2e.kubectl("logs", "asks").split()
    assert said[:2] == ["True", "True"]
    assert said[2] in ("127.0.0.1", "::1")


@pytest.mark.slow
def test_operator_becomes_ready_and_a_job_trains(system: System) -> None:
    environment = system.environment()
    assert "KUBECONFIG" not in environment
    assert environment["RES_OPTIONS"] == "attempts:0"
    assert environment["KUBERNETES_SERVICE_HOST"] == urlsplit(system.cluster.url).hostname
    first = system.token()
    with system.e2e.namespace("nodns") as namespace:
        workload = [script("line", TRAIN), job("line", EMBEDDED_IMAGE, epochs=100_000)]
        system.e2e.apply(*workload, namespace=namespace)
        running = RunningJob(system.e2e, namespace, "line")
        running.until_trains(1)
        for pod in running.pods():
            assert all("kube-api-access" not in volume["name"] for volume in pod["spec"]["volumes"])

        def renewed() -> bool:
            return system.token() != first

        system.e2e.until(60, "the kubelet to replace the token", renewed)
        system.e2e.until(60, "the first token to end", lambda: system.status_of(first) == 401)
        assert system.status_of(system.token()) == 200
        # Its watches and its own requests go on, in the same process.
        system.e2e.kubectl("scale", "stj/line", "-n", namespace, "--replicas=2")
        running.until_trains(2)
        system.e2e.kubectl("delete", "stj/line", "-n", namespace, "--timeout=60s")
    status = system.operator()["status"]["containerStatuses"][0]
    assert status["restartCount"] == 0
    assert status["ready"]


def test_operator_is_refused_what_its_role_lacks(system: System) -> None:
    """Rights are those of deploy/operator.yaml, and nothing else."""
    user = f"--as=system:serviceaccount:{OPERATOR_NAMESPACE}:springtide-operator"

    def may(*question: str) -> bool:
        try:
            return system.e2e.kubectl("auth", "can-i", *question, user).strip() == "yes"
        except RefusedError:
            return False

    assert may("create", "pods", "--all-namespaces")
    assert may("get", "secrets/springtide-root-key", "-n", OPERATOR_NAMESPACE)
    assert not may("get", "secrets/other", "-n", OPERATOR_NAMESPACE)
    assert not may("list", "secrets", "--all-namespaces")
    assert not may("update", "trainingjobs.springtide.dev", "--all-namespaces")

"""A cluster for tests: an embedded one, or the one that SPRINGTIDE_E2E_KUBECONFIG names; and a small client
for its API.

`cluster, kube, target_kubeconfig = FIXTURES` in a test module gives the fixtures: `cluster` (one embedded
cluster per module; a module that makes nodes fail says `NODE_TIMES = QUICK`), `kube` (a client with a
namespace of its own that is removed afterwards, against whichever cluster is to be tested).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from required import require_tool

from springtide_kube.blocking import BlockingClient
from springtide_kube.client import Caller
from springtide_kube.content_types import JSON, MERGE_PATCH
from springtide_kube.errors import ApiRefusal
from springtide_local.cluster import Cluster
from springtide_local.settings import NodeTimes, Settings
from springtide_local.strays import program_of

Object = dict[str, Any]
# A machine with much to do may hold a healthy node up for longer than a quick test can wait for a lost one.
QUICK = NodeTimes(heartbeat=0.1, grace=1.5, toleration=0.5)
STEADY = NodeTimes(heartbeat=1.0, grace=20.0, toleration=20.0)
EXTERNAL = os.environ.get("SPRINGTIDE_E2E_KUBECONFIG", "")
IMAGE = os.environ.get("SPRINGTIDE_E2E_IMAGE", "springtide/worker:test")


def until(condition: Callable[[], Any], what: str, timeout: float = 90.0) -> Any:
    """Poll until `condition()` is true, and return its value; fail with what was waited for and what was
    there last.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what}; last seen: {value!r}")
        time.sleep(0.02)


@dataclass
class Kube:
    """The API of a cluster as JSON, seen from one namespace."""

    kubeconfig: Path
    namespace: str

    def __post_init__(self) -> None:
        self._client = BlockingClient(self.kubeconfig, Caller("springtide-tests"), timeout=30)

    def close(self) -> None:
        self._client.close()

    def request(self, method: str, path: str, body: Any = None, kind: str = JSON) -> Any:
        """Return the answer. Raise ApiRefusal."""
        return self._client.request(method, path, body, kind)

    def path(self, resource: str, name: str = "", group: str = "api/v1") -> str:
        return f"/{group}/namespaces/{self.namespace}/{resource}" + (f"/{name}" if name else "")

    def create(self, resource: str, obj: Object, group: str = "api/v1") -> Object:
        version = group.removeprefix("apis/").removeprefix("api/")
        return self.request("POST", self.path(resource, group=group), {"apiVersion": version, **obj})

    def get(self, resource: str, name: str, group: str = "api/v1") -> Object:
        return self.request("GET", self.path(resource, name, group))

    def list(self, resource: str, group: str = "api/v1", **query: str) -> list[Object]:
        return self._client.request("GET", self.path(resource, group=group), **query)["items"]

    def gone(self, resource: str, name: str, group: str = "api/v1") -> bool:
        try:
            self.get(resource, name, group)
        except ApiRefusal as failure:
            if failure.code == 404:
                return True
            raise
        return False

    def delete(self, resource: str, name: str, group: str = "api/v1", **options: Any) -> Object:
        """Return the answer: the object as it is now, or a Status."""
        answer: Object = self.request("DELETE", self.path(resource, name, group), options or None)
        return answer

    def patch(self, resource: str, name: str, patch: Object, group: str = "api/v1") -> Object:
        return self.request("PATCH", self.path(resource, name, group), patch, MERGE_PATCH)

    def pod(
        self, name: str, command: list[str] | None = None, spec: Object | None = None, **container: Any
    ) -> Object:
        """Create a pod with one container `main` that is never restarted (unless `spec` says otherwise)."""
        main = {"name": "main", "image": IMAGE, **({"command": command} if command else {}), **container}
        full = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 2,
            "containers": [main],
            **(spec or {}),
        }
        labels = full.pop("labels", {})
        return self.create(
            "pods", {"kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": full}
        )

    def wait_pod(
        self, name: str, condition: Callable[[Object], Any], what: str, timeout: float = 90.0
    ) -> Object:
        """The pod as soon as `condition(pod)` holds."""
        last: list[Object] = []

        def holds() -> Object | None:
            last[:] = [self.get("pods", name)]
            return last[0] if condition(last[0]) else None

        try:
            return until(holds, what, timeout)
        except AssertionError as error:
            raise AssertionError(
                f"pod {name}: {error}; status: {json.dumps(last[0].get('status'))}"
            ) from None

    def wait_phase(self, name: str, phase: str, timeout: float = 90.0) -> Object:
        return self.wait_pod(name, lambda pod: pod["status"].get("phase") == phase, f"phase {phase}", timeout)

    def logs(self, name: str, **query: Any) -> str:
        return self._client.text(self.path("pods", f"{name}/log"), **query)

    def try_logs(self, name: str, **query: Any) -> str:
        """Return a pod's log; "" as long as there is nothing to read from."""
        try:
            return self.logs(name, **query)
        except ApiRefusal as failure:
            if failure.code not in (400, 404):
                raise
            return ""

    def events(self, name: str, reason: str) -> list[str]:
        """Messages of the events of that reason about the object of that name."""
        found = self.list("events", fieldSelector=f"involvedObject.name={name},reason={reason}")
        return [event["message"] for event in found]

    def until_event(self, name: str, reason: str, text: str = "") -> str:
        """The message of an event of that reason about the object of that name, as soon as there is one with
        the text in it.
        """
        what = f"an event {reason} about {name} with {text!r}"
        return str(until(lambda: next((m for m in self.events(name, reason) if text in m), None), what))

    def kubectl(self, *args: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._kubectl(*args), capture_output=True, text=True, timeout=timeout, check=False
        )

    def _kubectl(self, *args: str) -> list[str]:
        return [
            require_tool("kubectl"),
            "--kubeconfig",
            str(self.kubeconfig),
            "--namespace",
            self.namespace,
            *args,
        ]

    def kubectl_says(self, text: str, *args: str) -> None:
        """Run a kubectl that goes on until it has said so on stderr, and end it. Raise AssertionError when it
        ends before.
        """
        said = ""
        command = self._kubectl(*args)
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                said += line
                if text in line:
                    process.kill()
                    return
        raise AssertionError(f"kubectl {' '.join(args)} ended without {text!r}: {said}")


def state_of(pod: Object, container: str = "main") -> Object:
    """{"waiting"|"running"|"terminated": {...}} of a container; empty when the kubelet has said nothing
    yet.
    """
    statuses = pod["status"].get("containerStatuses") or []
    return next((status["state"] for status in statuses if status["name"] == container), {})


def status_of(pod: Object, container: str = "main") -> Object:
    statuses = [
        *(pod["status"].get("containerStatuses") or []),
        *(pod["status"].get("initContainerStatuses") or []),
    ]
    return next((status for status in statuses if status["name"] == container), {})


def pid_of(pod: Object, container: str = "main") -> int:
    """The process of a running container of an embedded cluster: of its command, not of an init process."""
    return program_of(int(status_of(pod, container)["containerID"].removeprefix("process://")))


def condition_of(obj: Object, kind: str) -> Object:
    return next((c for c in obj["status"].get("conditions") or [] if c["type"] == kind), {})


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ends while it is being read
        return False


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An embedded cluster of three nodes."""
    folder = tmp_path_factory.mktemp("cluster")
    times = getattr(request.module, "NODE_TIMES", STEADY)
    with Cluster.start(
        folder / "data", Settings(nodes=3, cpus="4", memory="8Gi", gpus=2, times=times)
    ) as started:
        yield started


@pytest.fixture(scope="module")
def target_kubeconfig(request: pytest.FixtureRequest) -> Path:
    """Return the kubeconfig of the cluster under test: SPRINGTIDE_E2E_KUBECONFIG's, or an embedded one's."""
    if EXTERNAL:
        return Path(EXTERNAL)
    return request.getfixturevalue("cluster").kubeconfig


@pytest.fixture
def kube(target_kubeconfig: Path) -> Iterator[Kube]:
    """A client in a fresh namespace."""
    made = Kube(target_kubeconfig, f"test-{secrets.token_hex(4)}")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": made.namespace}}
    made.request("POST", "/api/v1/namespaces", namespace)
    until(lambda: not made.gone("serviceaccounts", "default"), "the namespace's service account")
    yield made
    made.request("DELETE", f"/api/v1/namespaces/{made.namespace}")
    made.close()


FIXTURES = (cluster, kube, target_kubeconfig)

"""The cluster that the end-to-end tests run on: any that a kubeconfig names, or an embedded one.

`SPRINGTIDE_E2E_KUBECONFIG` names a kubeconfig; then `SPRINGTIDE_E2E_IMAGE` names one image with Springtide
and all its extras that the cluster can pull. Without them the embedded cluster is started. What a user
would do goes through the real `kubectl`.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from required import require_tool

from springtide_demo.kube import Kube, KubeError

ROOT = Path(__file__).resolve().parents[2]
OPERATOR_NAMESPACE = "springtide-system"
OPERATOR_LABELS = "springtide.dev/role=operator"
EMBEDDED_IMAGE = "springtide/worker:0.1.0"

Object = dict[str, Any]
Result = TypeVar("Result")


class RefusedError(Exception):
    """kubectl ended with an error; the text is what it said."""


@dataclass(frozen=True)
class E2ECluster:
    """A cluster with the operator installed. `slow` stretches every patience: machines of tests
    may be busy, and real clusters pull images."""

    kubeconfig: Path
    api: Kube
    image: str
    slow: float = 1.0

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        """Return what kubectl prints. Raises RefusedError with what it says to stderr."""
        done = subprocess.run(
            [require_tool("kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout * self.slow,
            check=False,
        )
        if done.returncode != 0:
            raise RefusedError(done.stderr.strip() or done.stdout.strip())
        return done.stdout

    def pods(self, namespace: str, labels: str) -> list[Object]:
        """List pods in order of their names (kubectl costs too much to be asked often)."""
        return sorted(self.labelled("pods", namespace, labels), key=lambda pod: str(pod["metadata"]["name"]))

    def labelled(self, kind: str, namespace: str, labels: str) -> list[Object]:
        """List objects of a core kind (plural)."""
        answer = self.api.request("GET", f"/api/v1/namespaces/{namespace}/{kind}", labelSelector=labels)
        return list(answer["items"])

    def apply(self, *objects: Object, namespace: str) -> str:
        """Apply objects; return kubectl's lines."""
        return self.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump_all(objects))

    def until(self, seconds: float, what: str, attempt: Callable[[], Result | None]) -> Result:
        """Ask again and again until the answer is true. Raises AssertionError naming what was waited for."""
        deadline = time.monotonic() + seconds * self.slow
        last = ""
        while True:
            try:
                if result := attempt():
                    return result
            except (RefusedError, KubeError, KeyError) as error:
                last = f" (last: {type(error).__name__}: {error})"
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds * self.slow:.0f} s for {what}{last}")
            time.sleep(0.2)

    @contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """A namespace of its own, removed at the end (without waiting)."""
        self.kubectl("create", "namespace", name)
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")


@contextmanager
def cluster(folder: Path) -> Iterator[E2ECluster]:
    """The cluster of the session, with the CRD and the operator installed from deploy/ by kubectl."""
    require_tool("kubectl")
    given = os.environ.get("SPRINGTIDE_E2E_KUBECONFIG")
    if given:
        image = os.environ.get("SPRINGTIDE_E2E_IMAGE")
        if not image:
            raise AssertionError(
                "SPRINGTIDE_E2E_KUBECONFIG is set: set SPRINGTIDE_E2E_IMAGE to an image with Springtide too"
            )
        kubeconfig = Path(given).expanduser()
        with Kube(kubeconfig) as api:
            real = E2ECluster(kubeconfig, api, image, slow=4.0)
            with _installed(real, folder):
                yield real
        return
    from springtide_local.cluster import Cluster
    from springtide_local.settings import Settings

    with Cluster.start(folder / "cluster", Settings(nodes=3)) as embedded, Kube(embedded.kubeconfig) as api:
        here = E2ECluster(embedded.kubeconfig, api, EMBEDDED_IMAGE, slow=2.0)
        with _installed(here, folder):
            yield here


@contextmanager
def _installed(cluster: E2ECluster, folder: Path) -> Iterator[None]:
    manifest = folder / "operator.yaml"
    documents = [d for d in yaml.safe_load_all((ROOT / "deploy/operator.yaml").read_text()) if d]
    if cluster.image != EMBEDDED_IMAGE:
        _use_image(documents, cluster.image)
    manifest.write_text(yaml.safe_dump_all(documents))
    cluster.kubectl("apply", "-f", str(ROOT / "deploy/crd"), "-f", str(manifest))
    try:
        cluster.kubectl(
            "wait", "--for=condition=Established", "crd/trainingjobs.springtide.dev", "--timeout=60s"
        )
        until_operator_is_ready(cluster)
        yield
    finally:
        cluster.kubectl("delete", "-f", str(manifest), "--ignore-not-found", "--wait=false")
        cluster.kubectl("delete", "-f", str(ROOT / "deploy/crd"), "--ignore-not-found", "--timeout=60s")


def _use_image(documents: list[Object], image: str) -> None:
    """Run the operator, and the coordinators that it makes, from one image."""
    for document in documents:
        if document["kind"] == "Deployment":
            container = document["spec"]["template"]["spec"]["containers"][0]
            container["image"] = image
            env = [e for e in container.get("env") or [] if e["name"] != "SPRINGTIDE_COORDINATOR_IMAGE"]
            container["env"] = [*env, {"name": "SPRINGTIDE_COORDINATOR_IMAGE", "value": image}]


def until_operator_is_ready(cluster: E2ECluster, other_than: str = "") -> str:
    """Wait for a ready operator pod (of another uid than the given one); return its name."""

    def ready() -> str:
        pods = cluster.pods(OPERATOR_NAMESPACE, OPERATOR_LABELS)
        for pod in pods:
            conditions = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions", [])}
            gone = "deletionTimestamp" in pod["metadata"] or pod["metadata"]["uid"] == other_than
            if not gone and conditions.get("Ready") == "True":
                return str(pod["metadata"]["name"])
        raise KeyError([(pod["metadata"], pod.get("status")) for pod in pods])

    return cluster.until(120, "an operator pod to be ready", ready)

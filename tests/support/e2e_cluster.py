"""The cluster that the end-to-end tests run on: any that a kubeconfig names, or an embedded one.

`SPRINGTIDE_E2E_KUBECONFIG` names a kubeconfig; then `SPRINGTIDE_E2E_IMAGE` names one image with Springtide
and all its extras that the cluster can pull, which runs operator, coordinators, parameter servers and
workers. Without them the embedded cluster is started. Actions of users go through the real `kubectl`.

A cluster of somebody else is left as it was found: one with an operator or jobs of others is refused, a CRD
and a namespace that were there stay, what an interrupted run has left is removed first, and what may break it
(a node that dies, DNS that stops) is done only by commands that its owner gives (`e2e_hands`).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from e2e_hands import Hands, given_hands
from forked_start import forked
from required import require_tool

from springtide_demo.kube import Kube
from springtide_kube.errors import ApiError, ApiRefusal

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "springtide"
OPERATOR_NAMESPACE = "springtide-system"
OPERATOR_LABELS = "springtide.dev/role=operator"
RELEASE = "springtide"
CRD = "trainingjobs.springtide.dev"
CRD_FILES = {f"{path.stem}.springtide.dev": path for path in sorted((ROOT / "deploy" / "crd").glob("*.yaml"))}
NAMESPACE_PATH = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}"
EMBEDDED_IMAGE = "springtide/worker:0.1.0"
# On all that these tests put into a cluster: what an interrupted run has left is known by it.
OURS = "springtide.dev/e2e"
GONE_SECONDS = 10.0

Object = dict[str, Any]
Result = TypeVar("Result")


class RefusedError(Exception):
    """kubectl or helm ended with an error; the text is what it said."""


class UnfitError(Exception):
    """The tests must not run on this cluster, or not so: the message says why and what to do."""


@dataclass(frozen=True)
class E2ECluster:
    """A cluster with the operator installed.

    `slow` stretches every patience: machines of tests may be busy, and real clusters pull images. `ours`:
    the machine is shared with other tests, so that no promise about seconds can be held to the letter.
    """

    kubeconfig: Path
    api: Kube
    image: str
    slow: float = 1.0
    ours: bool = True
    hands: Hands = field(default_factory=Hands)

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        """Return what kubectl prints. Raises RefusedError with what it says to stderr."""
        command = [require_tool("kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]
        return _run(command, timeout * self.slow, stdin)

    def helm(self, *arguments: str, stdin: str | None = None, timeout: float = 240.0) -> str:
        """Return what helm prints. Raises RefusedError with what it says to stderr."""
        command = [require_tool("helm"), "--kubeconfig", str(self.kubeconfig), *arguments]
        return _run(command, timeout * self.slow, stdin)

    @property
    def gone_within(self) -> float:
        """Return the seconds in which pods of a job have to be gone."""
        return GONE_SECONDS * (self.slow if self.ours else 1.0)

    def read(self, path: str, **query: str) -> Object:
        """Return an object or a list from the API."""
        return self.api.request("GET", path, **query)

    def pods(self, namespace: str, labels: str) -> list[Object]:
        """List pods in order of their names (kubectl costs too much to be asked often)."""
        return sorted(self.labelled("pods", namespace, labels), key=lambda pod: str(pod["metadata"]["name"]))

    def labelled(self, kind: str, namespace: str, labels: str) -> list[Object]:
        """List objects of a core kind (plural)."""
        answer = self.read(f"/api/v1/namespaces/{namespace}/{kind}", labelSelector=labels)
        return list(answer["items"])

    def warnings(self, namespace: str) -> list[str]:
        """Return the Warning events of a namespace, a line for each: the object, the reason, the message."""
        events = self.read(f"/api/v1/namespaces/{namespace}/events")["items"]
        lines = []
        for event in events:
            if event.get("type") == "Warning":
                about = event["involvedObject"]
                where = f"{about.get('kind', '').lower()}/{about.get('name')}"
                lines.append(f"{where}: {event.get('reason')}: {event.get('message')}")
        return lines

    def apply(self, *objects: Object, namespace: str) -> str:
        """Apply objects; return kubectl's lines."""
        return self.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump_all(objects))

    def drain(self, node: str, job: str) -> str:
        """Drain a node of the pods of one job: others live on it, too."""
        flags = ["--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={60 * self.slow:.0f}s"]
        return self.kubectl("drain", node, f"--pod-selector=springtide.dev/job={job}", *flags)

    def until(self, seconds: float, what: str, attempt: Callable[[], Result | None]) -> Result:
        """Ask again and again until the answer is true. Raises AssertionError naming what was waited for."""
        deadline = time.monotonic() + seconds * self.slow
        last = ""
        while True:
            try:
                if result := attempt():
                    return result
            except (RefusedError, ApiError, KeyError) as error:
                last = f" (last: {type(error).__name__}: {error})"
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds * self.slow:.0f} s for {what}{last}")
            time.sleep(0.2)

    @contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """A namespace of its own, removed at the end (without waiting)."""
        self.api.request("POST", "/api/v1/namespaces", _namespace(name))
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


def _run(command: list[str], timeout: float, stdin: str | None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise RefusedError(done.stderr.strip() or done.stdout.strip())
    return done.stdout


def _namespace(name: str) -> Object:
    labels = {OURS: "true"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


@contextmanager
def cluster(folder: Path, packaged: bool = False) -> Iterator[E2ECluster]:
    """The cluster of the session, with the CRD and the operator installed.

    Args:
        folder: for files of the installation.
        packaged: install the chart as `helm package` makes it; otherwise deploy/ by kubectl, which is what
            remains where there is no helm.

    Raises:
        UnfitError: the cluster that was named must not be used, or not so.
    """
    require_tool("kubectl")
    if packaged:
        require_tool("helm")
    with _interruptible():
        given = os.environ.get("SPRINGTIDE_E2E_KUBECONFIG")
        if given:
            image = os.environ.get("SPRINGTIDE_E2E_IMAGE")
            if not image:
                raise UnfitError(
                    "SPRINGTIDE_E2E_KUBECONFIG is set: set SPRINGTIDE_E2E_IMAGE, too, to an image with"
                    " Springtide"
                )
            if "PYTEST_XDIST_WORKER" in os.environ:
                raise UnfitError(
                    "SPRINGTIDE_E2E_KUBECONFIG is set: one operator is installed there, so run these tests in"
                    " one process: python -m pytest tests/e2e"
                )
            kubeconfig = Path(given).expanduser()
            with Kube(kubeconfig) as api:
                hands = given_hands(os.environ)
                real = E2ECluster(kubeconfig, api, image, slow=4.0, ours=False, hands=hands)
                with _installed(real, folder, packaged):
                    yield real
            return
        from springtide_local.cluster import Cluster, ClusterError
        from springtide_local.settings import Settings

        # Two small nodes are what the end-to-end tests ask of any cluster.
        size = Settings(nodes=2, cpus="2", memory="4Gi") if packaged else Settings(nodes=3)
        with forked():
            started = Cluster.start(folder / "cluster", size)
        with started as embedded, Kube(embedded.kubeconfig) as api:

            def crash(node: str) -> None:
                try:
                    embedded.crash_node(node)
                except ClusterError:  # this machine does not let it keep its peers in the dark
                    embedded.kill_node(node)

            hands = Hands(crash_node=crash, restore_node=embedded.restore_node)
            here = E2ECluster(embedded.kubeconfig, api, EMBEDDED_IMAGE, slow=2.0, hands=hands)
            with _installed(here, folder, packaged):
                yield here


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end the tests as Ctrl-C does: what was installed is removed on the way out."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- install and remove


@contextmanager
def _installed(cluster: E2ECluster, folder: Path, packaged: bool) -> Iterator[None]:
    _check_unused(cluster)
    manifest = folder / "operator.yaml"
    try:
        if packaged:
            install_chart(cluster, package_chart(folder))
        else:
            documents = operator_documents(cluster.image)
            if _exists(cluster, NAMESPACE_PATH):
                documents = [document for document in documents if document["kind"] != "Namespace"]
            if not _apply_crds(cluster):
                documents += [one for path in CRD_FILES.values() for one in _documents(path)]
            for document in documents:
                document["metadata"].setdefault("labels", {})[OURS] = "true"
            manifest.write_text(yaml.safe_dump_all(documents))
            cluster.kubectl("apply", "--server-side", "-f", str(manifest))
        crds = [f"crd/{name}" for name in CRD_FILES]
        cluster.kubectl("wait", "--for=condition=Established", *crds, "--timeout=60s")
        until_operator_is_ready(cluster)
        yield
    finally:
        _remove(cluster)


def operator_documents(image: str) -> list[Object]:
    """Return the documents of deploy/operator.yaml that run everything from one image."""
    documents = _documents(ROOT / "deploy/operator.yaml")
    if image == EMBEDDED_IMAGE:
        return documents
    variables = {"SPRINGTIDE_COORDINATOR_IMAGE", "SPRINGTIDE_PARAMETER_SERVER_IMAGE"}
    for document in documents:
        if document["kind"] == "Deployment":
            container = document["spec"]["template"]["spec"]["containers"][0]
            container["image"] = image
            kept = [entry for entry in container.get("env") or [] if entry["name"] not in variables]
            container["env"] = kept + [{"name": name, "value": image} for name in sorted(variables)]
    return documents


def chart_values(image: str) -> Object:
    """Return values of the chart that run everything from one image."""
    if image == EMBEDDED_IMAGE:
        return {"replicas": 1}  # two of them are another test's matter: their machine is small
    repository, at, digest = image.partition("@")
    tag = ""
    head, colon, tail = repository.rpartition(":")
    if colon and "/" not in tail:
        repository, tag = head, tail
    own = (
        {"repository": repository, "digest": digest}
        if at
        else {"repository": repository, "tag": tag or "latest"}
    )
    return {"image": own, "parameterServerImage": image, "helmTest": {"workerImage": image}}


def package_chart(folder: Path, version: str = "") -> Path:
    """Return the archive that `helm package` makes of the chart (under another version)."""
    target = folder / f"chart-{version or 'as-it-is'}"
    target.mkdir(parents=True, exist_ok=True)
    flags = ["--version", version] if version else []
    _run([require_tool("helm"), "package", str(CHART), "--destination", str(target), *flags], 60, None)
    (archive,) = target.glob("*.tgz")
    return archive


def install_chart(cluster: E2ECluster, archive: Path) -> None:
    """Install the packaged chart as docs/install.md says, with labels by which it is known as ours."""
    if not _exists(cluster, NAMESPACE_PATH):
        cluster.api.request("POST", "/api/v1/namespaces", _namespace(OPERATOR_NAMESPACE))
    values = {**chart_values(cluster.image), "commonLabels": {OURS: "true"}}
    if _apply_crds(cluster):
        values["crds"] = {"enabled": False}
    flags = ["-n", OPERATOR_NAMESPACE, "--wait", f"--timeout={120 * cluster.slow:.0f}s", "--values", "-"]
    try:
        cluster.helm("install", RELEASE, str(archive), *flags, stdin=json.dumps(values))
    except RefusedError as error:
        raise AssertionError(f"{error}\n{describe(cluster, OPERATOR_NAMESPACE)}") from None


def _crd_path(name: str) -> str:
    return f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"


def _apply_crds(cluster: E2ECluster) -> bool:
    """Bring CRDs that were there before to this version, and say whether that of jobs was: they stay."""
    if not _exists(cluster, _crd_path(CRD)):
        return False
    for name, path in CRD_FILES.items():
        [document] = _documents(path)
        if not _exists(cluster, _crd_path(name)):
            document["metadata"].setdefault("labels", {})[OURS] = "true"
        flags = ("--server-side", "--force-conflicts", "-f", "-")
        cluster.kubectl("apply", *flags, stdin=yaml.safe_dump(document))
    return True


def _our_crds(cluster: E2ECluster) -> list[str]:
    return [name for name in CRD_FILES if _is_ours(cluster, _crd_path(name))]


def _documents(path: Path) -> list[Object]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def _exists(cluster: E2ECluster, path: str) -> bool:
    try:
        cluster.read(path)
    except ApiRefusal as error:
        if error.code != 404:
            raise
        return False
    return True


def _is_ours(cluster: E2ECluster, path: str) -> bool:
    return _exists(cluster, path) and (cluster.read(path)["metadata"].get("labels") or {}).get(OURS) == "true"


def _check_unused(cluster: E2ECluster) -> None:
    """Remove what an interrupted run has left; refuse a cluster that others use Springtide on.

    A CRD without jobs and a namespace without an operator are of no use to anybody: they stay as they are.
    """
    if _namespaces(cluster) or _our_crds(cluster):
        _remove(cluster)
    used = [
        f"the operator {pod['metadata']['namespace']}/{pod['metadata']['name']}"
        for pod in cluster.read("/api/v1/pods", labelSelector=OPERATOR_LABELS)["items"]
    ]
    if _exists(cluster, _crd_path(CRD)):
        jobs = cluster.read("/apis/springtide.dev/v1alpha1/trainingjobs")["items"]
        used += [f"the job {job['metadata']['namespace']}/{job['metadata']['name']}" for job in jobs]
    if used:
        raise UnfitError(
            f"this cluster has {', '.join(used)} already, not of these tests, whose operator would run all"
            " jobs: remove that, or use another cluster"
        )


def _namespaces(cluster: E2ECluster) -> list[str]:
    items = cluster.read("/api/v1/namespaces", labelSelector=f"{OURS}=true")["items"]
    return [str(item["metadata"]["name"]) for item in items]


def _remove(cluster: E2ECluster) -> None:
    """Remove all that carries our label, and wait until it is gone; our own cluster goes as a whole."""
    if cluster.ours:
        return
    namespaces = _namespaces(cluster)
    for name in namespaces:
        cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")
    if OPERATOR_NAMESPACE not in namespaces and _exists(cluster, NAMESPACE_PATH):
        _empty_operator_namespace(cluster)
    for name in _our_crds(cluster):
        cluster.kubectl("delete", "crd", name, "--ignore-not-found", "--wait=false")
    kinds = "clusterroles,clusterrolebindings"
    cluster.kubectl("delete", kinds, "-l", f"{OURS}=true", "--ignore-not-found")

    def left() -> list[str]:
        return [*_namespaces(cluster), *_our_crds(cluster)]

    try:
        cluster.until(60, "what was installed to be gone", lambda: not left())
    except AssertionError as error:
        raise AssertionError(f"{error}: still there: {', '.join(left())}") from None


def _empty_operator_namespace(cluster: E2ECluster) -> None:
    """Take what is ours out of a namespace that was there before."""
    place = ("-n", OPERATOR_NAMESPACE, "--ignore-not-found")
    kinds = "deployments,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,pods"
    cluster.kubectl("delete", f"{kinds},poddisruptionbudgets", "-l", f"{OURS}=true", *place)
    cluster.kubectl("delete", "secrets", "-l", f"owner=helm,name={RELEASE}", *place)
    cluster.kubectl("delete", "secret/springtide-root-key", "lease/springtide-operator", *place)


def describe(cluster: E2ECluster, namespace: str) -> str:
    """Return what a person would look at in a namespace: its pods, its events, what its pods said."""
    parts = []
    for arguments in (
        ("get", "pods", "-o", "wide"),
        ("get", "events", "--sort-by=.lastTimestamp"),
        ("logs", "-l", "app.kubernetes.io/name=springtide", "--tail=25", "--prefix", "--all-containers"),
    ):
        try:
            parts.append(cluster.kubectl(*arguments, "-n", namespace))
        except RefusedError as error:
            parts.append(str(error))
    return "\n".join(parts)


# ---- what is asked of any cluster


def facts(cluster: E2ECluster) -> list[str]:
    """Return lines that say what the tests run on: server and nodes with their versions, and our images."""
    version = cluster.read("/version")
    lines = [f"Kubernetes {version.get('gitVersion')} ({version.get('platform', 'unknown platform')})"]
    for node in cluster.read("/api/v1/nodes")["items"]:
        info, room = node["status"].get("nodeInfo") or {}, node["status"].get("allocatable") or {}
        lines.append(
            f"node {node['metadata']['name']}: kubelet {info.get('kubeletVersion')},"
            f" {info.get('containerRuntimeVersion')}, {info.get('osImage')},"
            f" {room.get('cpu')} cores, {room.get('memory')}"
        )
    for pod in cluster.pods(OPERATOR_NAMESPACE, OPERATOR_LABELS):
        container = pod["spec"]["containers"][0]
        running = (pod["status"].get("containerStatuses") or [{}])[0].get("imageID", "")
        images = {e["value"] for e in container.get("env") or [] if e["name"].endswith("_IMAGE")}
        lines.append(f"operator {pod['metadata']['name']}: {container['image']} {running}".rstrip())
        lines.append(f"coordinators and servers: {', '.join(sorted(images))}; workers: {cluster.image}")
    return lines


def why_no_volume(cluster: E2ECluster) -> str:
    """Say why a claim without a class would wait for ever; empty where it is bound."""
    if cluster.ours:
        return ""
    classes = cluster.read("/apis/storage.k8s.io/v1/storageclasses")["items"]
    key = "storageclass.kubernetes.io/is-default-class"
    if any((c["metadata"].get("annotations") or {}).get(key) == "true" for c in classes):
        return ""
    for volume in cluster.read("/api/v1/persistentvolumes")["items"]:
        if volume["status"].get("phase") == "Available" and not volume["spec"].get("storageClassName"):
            return ""
    return "the cluster has neither a default StorageClass nor a free volume without a class"


def schedulable_nodes(cluster: E2ECluster) -> list[str]:
    """Return the names of nodes that take our pods: Ready, not cordoned, without taints."""
    found = []
    for node in cluster.read("/api/v1/nodes")["items"]:
        conditions = {c["type"]: c["status"] for c in node["status"].get("conditions") or []}
        spec = node.get("spec") or {}
        taints = [t for t in spec.get("taints") or [] if t.get("effect") in ("NoSchedule", "NoExecute")]
        if conditions.get("Ready") == "True" and not spec.get("unschedulable") and not taints:
            found.append(str(node["metadata"]["name"]))
    return sorted(found)


def fresh_name() -> str:
    """Return a name for a namespace that nobody else uses."""
    return f"e2e-{secrets.token_hex(4)}"


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

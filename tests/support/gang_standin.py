"""A gang scheduler's stand-in: it binds the pods of a group when its PodGroup's minMember is there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from e2e_cluster import E2ECluster

from springtide_demo.kube import Kube
from springtide_kube.errors import ApiRefusal

Object = dict[str, Any]

CRDS = Path(__file__).with_suffix(".yaml")
SCHEDULERS = {  # schedulerName: API, part of a pod's metadata, key of the group's name
    "volcano": ("scheduling.volcano.sh/v1beta1", "annotations", "scheduling.k8s.io/group-name"),
    "coscheduling": ("scheduling.x-k8s.io/v1alpha1", "labels", "scheduling.x-k8s.io/pod-group"),
}


def bind_once(api: Kube, namespace: str, node: str) -> None:
    """Bind what may start. A group that lacks members stays unbound, as do pods without a PodGroup."""
    groups: dict[tuple[str, str], list[Object]] = {}
    for pod in api.pods(namespace, "springtide.dev/job"):
        _, part, key = SCHEDULERS.get(pod["spec"].get("schedulerName", ""), ("", "labels", ""))
        name = (pod["metadata"].get(part) or {}).get(key)
        if name and pod["status"].get("phase") in ("Pending", "Running"):
            groups.setdefault((pod["spec"]["schedulerName"], name), []).append(pod)
    for (scheduler, name), pods in groups.items():
        prefix = SCHEDULERS[scheduler][0]
        with contextlib.suppress(ApiRefusal):  # gone, or changed meanwhile: the next round looks again
            group = api.request("GET", f"/apis/{prefix}/namespaces/{namespace}/podgroups/{name}")
            if len(pods) < group["spec"]["minMember"]:
                continue
            for pod in pods:
                if not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]:
                    _bind(api, namespace, pod["metadata"]["name"], node)


def _bind(api: Kube, namespace: str, pod: str, node: str) -> None:
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod, "namespace": namespace},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    api.request("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/binding", binding)


@contextlib.contextmanager
def gang_scheduler(system: E2ECluster, namespace: str) -> Iterator[None]:
    """The stand-in at work in one namespace. Its failures other than the API's are the test's."""
    over = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with Kube(system.kubeconfig) as api:
                node = api.request("GET", "/api/v1/nodes")["items"][0]["metadata"]["name"]
                while not over.wait(0.2):
                    bind_once(api, namespace, node)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="gang scheduler")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)
    assert not failures, failures

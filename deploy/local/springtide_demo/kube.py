"""The few calls to the Kubernetes API that the demo needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from springtide_kube.blocking import BlockingClient
from springtide_kube.client import Caller
from springtide_kube.content_types import APPLY_PATCH, MERGE_PATCH
from springtide_kube.discovery import Discovery
from springtide_kube.errors import ApiRefusal

Object = dict[str, Any]

JOBS = "/apis/springtide.dev/v1alpha1/namespaces/{namespace}/trainingjobs"


class Kube(BlockingClient):
    """A connection to one cluster."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(kubeconfig, Caller("springtide-demo", "springtide-demo"))
        self._discovery = Discovery(self.client)

    def apply(self, obj: Object, namespace: str = "default") -> Object:
        """Apply an object server-side, by force.

        Args:
            obj: the object.
            namespace: it goes into this one where it does not say another.

        Returns:
            The object as the server has it now.

        Raises:
            ApiRefusal: the server refuses.
        """
        where = self.run(self._discovery.path(obj, namespace))
        if where is None:
            raise ApiRefusal(404, "NotFound", f"the server has no kind {obj['kind']} in {obj['apiVersion']}")
        return self.request("PATCH", where, obj, APPLY_PATCH, force="true")

    def apply_file(self, path: Path) -> list[str]:
        """Apply every document of a YAML file; return `kind/name` of each."""
        applied = []
        for obj in load(path):
            self.apply(obj)
            applied.append(f"{obj['kind'].lower()}/{obj['metadata']['name']}")
        return applied

    def pods(self, namespace: str, selector: str) -> list[Object]:
        """List pods by labels.

        Args:
            namespace: of the pods.
            selector: by labels, as kubectl's `-l` has it.

        Raises:
            ApiRefusal: the server refuses.
        """
        answer = self.request("GET", f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
        return list(answer["items"])

    def pods_on(self, node: str) -> list[Object]:
        """List the pods of all namespaces on a node that have not ended."""
        answer = self.request("GET", "/api/v1/pods", fieldSelector=f"spec.nodeName={node}")
        return [pod for pod in answer["items"] if pod["status"].get("phase") not in ("Succeeded", "Failed")]

    def job(self, namespace: str, name: str) -> Object:
        """Read a TrainingJob.

        Args:
            namespace: of the object.
            name: of the job.

        Raises:
            ApiRefusal: the server refuses, or there is none.
        """
        return self.request("GET", f"{JOBS.format(namespace=namespace)}/{name}")

    def scale(self, namespace: str, name: str, replicas: int) -> Object:
        """Write the scale subresource, as `kubectl scale` does.

        Args:
            namespace: of the object.
            name: of the job.
            replicas: workers that it is to have.

        Returns:
            The Scale as the server has it now.

        Raises:
            ApiRefusal: the server refuses.
        """
        path = f"{JOBS.format(namespace=namespace)}/{name}/scale"
        return self.request("PATCH", path, {"spec": {"replicas": replicas}}, MERGE_PATCH)

    def cordon(self, node: str) -> Object:
        """Mark a node unschedulable."""
        return self.request("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}}, MERGE_PATCH)

    def evict(self, namespace: str, pod: str) -> Object:
        """Evict a pod, as `kubectl drain` does.

        Args:
            namespace: of the object.
            pod: its name.

        Returns:
            The server's answer.

        Raises:
            ApiRefusal: 429: a disruption budget does not allow it now.
        """
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        return self.request("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", body)


def load(path: Path) -> list[Object]:
    """Read the documents of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]

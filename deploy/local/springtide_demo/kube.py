"""The few calls to the Kubernetes API that the demo needs, as plain JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import yaml
from kubernetes import config

Object = dict[str, Any]

JOBS = "/apis/springtide.dev/v1alpha1/namespaces/{namespace}/trainingjobs"
_MERGE = "application/merge-patch+json"


class KubeError(Exception):
    """The API server refused: its code and its message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} (HTTP {code})")
        self.code = code


class Kube:
    """A connection to one cluster."""

    def __init__(self, kubeconfig: Path) -> None:
        self._api = config.new_client_from_config(str(kubeconfig))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.close()

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", **query: str
    ) -> Object:
        """Send a request, and return the answer's JSON.

        Args:
            method: of HTTP.
            path: of the URL, from `/api` or `/apis` on.
            body: plain JSON; None: no body.
            content_type: of the body.
            query: parameters of the URL.

        Raises:
            KubeError: the server refuses. urllib3's errors come through when nobody answers within 10 s.
        """
        text = self.text(path, method, body, content_type, **query)
        answer: Object = json.loads(text)
        return answer

    def text(
        self,
        path: str,
        method: str = "GET",
        body: Any = None,
        content_type: str = "application/json",
        **query: str,
    ) -> str:
        """Send a request, and return the answer as it is (logs are no JSON).

        Args:
            path: of the URL, from `/api` or `/apis` on.
            method: of HTTP.
            body: plain JSON; None: no body.
            content_type: of the body.
            query: parameters of the URL.

        Raises:
            KubeError: the server refuses. urllib3's errors come through when nobody answers within 10 s.
        """
        parameters = self._api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json, */*", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        response = self._api.call_api(*parameters, _request_timeout=10)
        text: str = response.read().decode(errors="replace")
        if not 200 <= response.status < 300:
            try:
                message = str(json.loads(text).get("message") or text)
            except ValueError:
                message = text
            raise KubeError(response.status, message)
        return text

    def apply(self, obj: Object, namespace: str = "default") -> Object:
        """Apply an object server-side, by force.

        Args:
            obj: the object.
            namespace: it goes into this one where it does not say another.

        Returns:
            The object as the server has it now.

        Raises:
            KubeError: the server refuses.
        """
        where = self._path(obj, namespace)
        return self.request(
            "PATCH", where, obj, "application/apply-patch+yaml", fieldManager="springtide-demo", force="true"
        )

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
            KubeError: the server refuses.
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
            KubeError: the server refuses, or there is none.
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
            KubeError: the server refuses.
        """
        path = f"{JOBS.format(namespace=namespace)}/{name}/scale"
        return self.request("PATCH", path, {"spec": {"replicas": replicas}}, _MERGE)

    def cordon(self, node: str) -> Object:
        """Mark a node unschedulable."""
        return self.request("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}}, _MERGE)

    def evict(self, namespace: str, pod: str) -> Object:
        """Evict a pod, as `kubectl drain` does.

        Args:
            namespace: of the object.
            pod: its name.

        Returns:
            The server's answer.

        Raises:
            KubeError: 429: a disruption budget does not allow it now.
        """
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        return self.request("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", body)

    def _path(self, obj: Object, namespace: str) -> str:
        group, _, version = str(obj["apiVersion"]).rpartition("/")
        prefix = f"/apis/{group}/{version}" if group else f"/api/{version}"
        kind, name = obj["kind"], obj["metadata"]["name"]
        for resource in self.request("GET", prefix)["resources"]:
            if resource["kind"] == kind and "/" not in resource["name"]:
                inside = (
                    f"/namespaces/{obj['metadata'].get('namespace', namespace)}"
                    if resource["namespaced"]
                    else ""
                )
                return f"{prefix}{inside}/{resource['name']}/{name}"
        raise KubeError(404, f"the server has no kind {kind} in {obj['apiVersion']}")


def load(path: Path) -> list[Object]:
    """Read the documents of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]

"""An API server that only lists: so many jobs, pods and nodes that an operator keeps, each as large as real
ones are, made while they are sent.

    python -m benchmarks.support.large_cluster ADDRESS JOBS PODS NODES HOSTILE

ADDRESS is host:port. Discovery, lists in pages, watches, a Lease that another operator renews, and the root
key are served; nothing is written. HOSTILE pods have 30,000 variables in their environment and are nobody's:
they are in the lists, and each watch brings them again.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

Object = dict[str, Any]

VERSION = 1_000_000  # of the first lists; single objects have lower ones
HOSTILE_ENTRIES = 30_000
_GROUPS = {
    "springtide.dev/v1alpha1": [("TrainingJob", "trainingjobs", True)],
    "policy/v1": [("PodDisruptionBudget", "poddisruptionbudgets", True)],
    "networking.k8s.io/v1": [("NetworkPolicy", "networkpolicies", True)],
    "apiextensions.k8s.io/v1": [("CustomResourceDefinition", "customresourcedefinitions", False)],
}
_CORE = [("Pod", "pods", True), ("Node", "nodes", False), ("Namespace", "namespaces", False)]
_SECONDS = "2026-01-01T00:00:00Z"


def pod_template() -> str:
    """Return a worker's pod of eight GPUs as JSON of some 10 KB, with %(name)s, %(job)s, %(owner)s, %(uid)s,
    %(version)s, %(number)s and %(node)s to be filled in.
    """
    env = [
        {"name": f"TRAINING_VARIABLE_{n}", "value": f"/data/some/where/in/the/cluster/{n}"} for n in range(24)
    ]
    fields: Object = {f'k:{{"name":"{one["name"]}"}}': {".": {}, "f:name": {}, "f:value": {}} for one in env}
    mounts = [{"name": f"volume-{n}", "mountPath": f"/mnt/volume-{n}", "readOnly": True} for n in range(8)]
    container: Object = {
        "name": "worker",
        "image": "registry.example.com/team/training@sha256:" + "0123456789abcdef" * 4,
        "command": ["python", "train.py", "--epochs", "90"],
        "env": [*env, {"name": "SPRINGTIDE_TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "t"}}}],
        "ports": [{"name": "metrics", "containerPort": 9400}],
        "resources": {"limits": {"nvidia.com/gpu": "8", "memory": "900Gi"}, "requests": {"cpu": "96"}},
        "volumeMounts": mounts,
        "terminationMessagePolicy": "File",
    }
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": _SECONDS, "observedGeneration": 1}
        for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    ]
    owner = {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingJob",
        "name": "%(job)s",
        "uid": "%(owner)s",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    started = {"running": {"startedAt": _SECONDS}}
    pod: Object = {
        "metadata": {
            "name": "%(name)s",
            "namespace": "team",
            "uid": "%(uid)s",
            "resourceVersion": "%(version)s",
            "creationTimestamp": _SECONDS,
            "labels": {"springtide.dev/job": "%(job)s", "springtide.dev/role": "worker", "team": "vision"},
            "annotations": {
                "springtide.dev/template-hash": "0123456789abcdef",
                "cni.example.com/status": "x" * 600,
            },
            "ownerReferences": [owner],
            "managedFields": [
                {"manager": "springtide-operator", "operation": "Update", "fieldsV1": {"f:spec": fields}},
                {"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": fields}},
            ],
        },
        "spec": {
            "containers": [container],
            "nodeName": "%(node)s",
            "terminationGracePeriodSeconds": 120,
            "volumes": [{"name": f"volume-{n}", "emptyDir": {}} for n in range(8)],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
        "status": {
            "phase": "Running",
            "podIP": "10.%(number)s",
            "conditions": conditions,
            "containerStatuses": [
                {
                    "name": "worker",
                    "image": container["image"],
                    "ready": True,
                    "restartCount": 0,
                    "started": True,
                    "state": started,
                }
            ],
        },
    }
    return json.dumps(pod)


def worker_pods(jobs: int, count: int, nodes: int) -> Iterator[str]:
    """Yield pods, spread over the jobs and nodes.

    Args:
        jobs: number of jobs.
        count: number of pods.
        nodes: number of nodes.
    """
    template = pod_template()
    for number in range(count):
        job, slot = number % jobs, number // jobs
        yield template % {
            "name": f"training-run-{job}-worker-{slot}-0",
            "job": f"training-run-{job}",
            "owner": _uid("a", job),
            "uid": _uid("b", number),
            "version": number + 1,
            "number": f"{number // 65536}.{number // 256 % 256}.{number % 256}",
            "node": _node(number % max(1, nodes)),
        }


def hostile_pods(count: int, version: int) -> Iterator[str]:
    """Yield pods of about 1 MB that say that they are a job's, of a controller that does not exist.

    Args:
        count: number of pods.
        version: resourceVersion of the first one.
    """
    entries = ",".join(f'{{"name":"V{n}","value":"0123456789"}}' for n in range(HOSTILE_ENTRIES))
    for number in range(count):
        meta: Object = {
            "name": f"fat-worker-{number}-0",
            "namespace": "tenant",
            "uid": _uid("c", number),
            "resourceVersion": str(version + number),
            "labels": {"springtide.dev/job": "fat", "springtide.dev/role": "worker"},
            "ownerReferences": [
                {
                    "apiVersion": "springtide.dev/v1alpha1",
                    "kind": "TrainingJob",
                    "name": "fat",
                    "uid": _uid("d", number),
                    "controller": True,
                }
            ],
        }
        spec = f'{{"containers":[{{"name":"worker","env":[{entries}]}}]}}'
        yield f'{{"metadata":{json.dumps(meta)},"spec":{spec},"status":{{"phase":"Pending"}}}}'


def node_objects(count: int) -> Iterator[str]:
    """Yield nodes of about 20 KB, as those with many images are."""
    images = [{"names": [f"registry.example.com/i@sha256:{n:064}"] * 2, "sizeBytes": n} for n in range(90)]
    kinds = ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")
    conditions = [
        {
            "type": kind,
            "status": str(kind == "Ready"),
            "lastTransitionTime": _SECONDS,
            "lastHeartbeatTime": _SECONDS,
        }
        for kind in kinds
    ]
    labels = {f"feature.node.kubernetes.io/cpu-{n}": "true" for n in range(60)}
    rest = json.dumps({"conditions": conditions, "images": images})
    for number in range(count):
        meta = {
            "name": _node(number),
            "uid": _uid("e", number),
            "resourceVersion": str(number + 1),
            "labels": {**labels, "topology.kubernetes.io/zone": f"zone-{number % 3}"},
        }
        yield f'{{"metadata":{json.dumps(meta)},"spec":{{}},"status":{rest}}}'


def job_objects(count: int) -> Iterator[str]:
    """Yield jobs with templates of some 3 KB."""
    env = [{"name": f"TRAINING_VARIABLE_{n}", "value": f"/data/some/where/{n}"} for n in range(24)]
    container = {"name": "worker", "image": "registry.example.com/team/training:1", "env": env}
    spec = {"workers": {"replicas": 8, "template": {"spec": {"containers": [container]}}}}
    for number in range(count):
        meta = {
            "name": f"training-run-{number}",
            "namespace": "team",
            "uid": _uid("a", number),
            "resourceVersion": str(number + 1),
            "generation": 1,
            "creationTimestamp": _SECONDS,
        }
        job = {"apiVersion": "springtide.dev/v1alpha1", "kind": "TrainingJob", "metadata": meta, "spec": spec}
        yield json.dumps(job)


def _uid(kind: str, number: int) -> str:
    return f"{kind * 8}-0000-4000-8000-{number:012}"


def _node(number: int) -> str:
    return f"gpu-node-{number:05}.example.internal"


class LargeCluster:
    """The server. `jobs`, `pods`, `nodes` and `hostile` are numbers of objects."""

    def __init__(self, jobs: int, pods: int, nodes: int, hostile: int) -> None:
        self.hostile = hostile
        self.version = VERSION  # grows with each event: an older list tells of a restored store
        self.kinds: dict[str, Callable[[], Iterator[str]]] = {
            "trainingjobs": lambda: job_objects(jobs),
            "pods": lambda: itertools.chain(
                worker_pods(jobs, pods, nodes), hostile_pods(hostile, VERSION - hostile)
            ),
            "nodes": lambda: node_objects(nodes),
        }
        self.running: dict[str, Iterator[str]] = {}  # by token, lists that go on
        self.whole: dict[str, int] = {}  # by kind: lists that were read to their end

    def app(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer any GET.

        Args:
            request: whose path decides.
        """
        path = request.path.rstrip("/")
        last = path.rpartition("/")[2]
        if path == "/debug/lists":
            return web.json_response(self.whole)
        if path == "/api":
            return web.json_response({"versions": ["v1"]})
        if path == "/apis":
            return web.json_response({"groups": [_group(api) for api in _GROUPS]})
        api = path.removeprefix("/apis/").removeprefix("/api/")
        if api == "v1" or api in _GROUPS:
            return web.json_response({"resources": [_resource(*one) for one in _GROUPS.get(api, _CORE)]})
        if last == "springtide-root-key":
            return web.json_response({"data": {"key": base64.b64encode(b"k" * 32).decode()}})
        if last == "springtide-operator":
            return web.json_response(_lease())
        if request.query.get("watch") == "true":
            return await self._watch(request, last)
        return self._page(last, int(request.query.get("limit", "500")), request.query.get("continue", ""))

    def _page(self, kind: str, limit: int, token: str) -> web.Response:
        items = self.running.pop(token, None) if token else self.kinds.get(kind, lambda: iter(()))()
        if items is None:
            return web.json_response({"message": "the token is of no list"}, status=410)
        page = list(itertools.islice(items, limit))
        following = ""
        if len(page) == limit:
            following = f"{kind}-{time.monotonic_ns()}"
            self.running[following] = items
        else:
            self.whole[kind] = self.whole.get(kind, 0) + 1
        meta = json.dumps({"resourceVersion": str(self.version), "continue": following})
        return web.Response(
            text=f'{{"kind":"List","metadata":{meta},"items":[{",".join(page)}]}}',
            content_type="application/json",
        )

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        count = self.hostile if kind == "pods" else 0
        first = self.version + 1
        self.version += count
        for text in hostile_pods(count, first):
            await response.write(f'{{"type":"MODIFIED","object":{text}}}\n'.encode())
        await asyncio.sleep(float(request.query.get("timeoutSeconds", "60")))
        return response


def _group(api: str) -> Object:
    name, _, version = api.partition("/")
    found = {"groupVersion": api, "version": version}
    return {"name": name, "versions": [found], "preferredVersion": found}


def _resource(kind: str, plural: str, namespaced: bool) -> Object:
    verbs = ["get", "list", "watch", "create", "patch", "delete"]
    return {
        "name": plural,
        "kind": kind,
        "singularName": kind.lower(),
        "namespaced": namespaced,
        "verbs": verbs,
    }


def _lease() -> Object:
    spec = {"holderIdentity": "another", "leaseDurationSeconds": 10, "renewTime": str(datetime.now(UTC))}
    return {
        "metadata": {"name": "springtide-operator", "namespace": "x", "resourceVersion": "1"},
        "spec": spec,
    }


def main() -> None:
    address, *numbers = sys.argv[1:]
    host, _, port = address.rpartition(":")
    web.run_app(
        LargeCluster(*(int(number) for number in numbers)).app(), host=host, port=int(port), print=None
    )


if __name__ == "__main__":
    main()

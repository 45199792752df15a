"""Install the CRD and the operator into a cluster, and wait until the operator is ready.

The manifests are those of `deploy/`: this package holds links to them, which a built package holds as files.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from importlib import resources
from typing import Any

import yaml

from springtide_cli.apply import Applier
from springtide_cli.errors import CliError
from springtide_cli.kube import KubePort
from springtide_kube.errors import ApiRefusal, Unreachable

Object = dict[str, Any]

MANIFESTS = (
    "trainingjobs.yaml",
    "trainingtemplates.yaml",
    "clustertrainingtemplates.yaml",
    "operator.yaml",
)
POLL_SECONDS = 0.1
LOOK_SECONDS = 5.0
LOG_LINES = 10


class InstallError(CliError):
    """The operator did not get ready; the message says what it waits for."""


def objects(name: str) -> list[Object]:
    """The documents of one of MANIFESTS."""
    text = resources.files("springtide_cli").joinpath(name).read_text(encoding="utf-8")
    return [document for document in yaml.safe_load_all(text) if document]


async def install(kube: KubePort, timeout: float = 60.0) -> None:
    """Apply all of MANIFESTS, and wait until the operator is ready.

    Args:
        kube: the cluster.
        timeout: in seconds, for all of it.

    Raises:
        Refused: the cluster refuses an object.
        InstallError: something is not ready in time.
    """
    deadline = time.monotonic() + timeout
    for name in MANIFESTS:
        for obj in objects(name):
            # A new Applier each: the CRD adds a kind to discovery.
            await Applier(kube, "default", force=True).apply(obj)
            if obj["kind"] in _WAITS:
                await _wait(kube, obj, deadline, timeout)


def _established(obj: Object) -> str:
    conditions = (obj.get("status") or {}).get("conditions") or []
    if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
        return ""
    return "its kind is not served yet"


def _available(obj: Object) -> str:
    status = obj.get("status") or {}
    if status.get("observedGeneration", 0) < obj["metadata"].get("generation", 1):
        return "its controller has not seen it"
    wanted = obj["spec"].get("replicas", 1)
    updated = min(status.get("updatedReplicas") or 0, status.get("availableReplicas") or 0)
    if updated >= wanted:
        return ""
    reasons = [str(c.get("message")) for c in status.get("conditions") or [] if c.get("status") != "True"]
    return f"{updated} of {wanted} pods are ready" + "".join(f"; {reason}" for reason in reasons)


_WAITS = {
    "CustomResourceDefinition": (
        _established,
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}",
    ),
    "Deployment": (_available, "/apis/apps/v1/namespaces/{namespace}/deployments/{name}"),
}


async def _wait(kube: KubePort, obj: Object, deadline: float, timeout: float) -> None:
    missing, path = _WAITS[obj["kind"]]
    where = path.format(name=obj["metadata"]["name"], namespace=obj["metadata"].get("namespace", ""))
    while True:
        try:
            text = missing(await kube.request("GET", where))
        except ApiRefusal as error:
            text = error.message
        if not text:
            return
        if time.monotonic() > deadline:
            name = f"{obj['kind']} {obj['metadata']['name']}"
            text += await _of_pods(kube, obj)
            raise InstallError(f"{name} is not ready after {timeout:.0f} s: {text}")
        await asyncio.sleep(POLL_SECONDS)


async def _of_pods(kube: KubePort, obj: Object) -> str:
    """How the pods of a Deployment are, and the end of their logs; "" where that cannot be had."""
    if obj["kind"] != "Deployment":
        return ""
    pods = f"/api/v1/namespaces/{obj['metadata']['namespace']}/pods"
    labels = ",".join(f"{key}={value}" for key, value in obj["spec"]["selector"]["matchLabels"].items())
    texts = []
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            found = await kube.request("GET", pods, query={"labelSelector": labels})
            for pod in found["items"]:
                texts.append(f"\n  pod {pod['metadata']['name']}: {_state(pod)}")
                path, query = f"{pods}/{pod['metadata']['name']}/log", {"tailLines": str(LOG_LINES)}
                with contextlib.suppress(ApiRefusal):  # it has not begun
                    async for line in kube.lines(path, query):
                        texts.append(f"\n    {line}")
    except (ApiRefusal, Unreachable, TimeoutError):
        pass
    return "".join(texts)


def _state(pod: Object) -> str:
    status = pod.get("status") or {}
    words = [str(status.get("phase", "Pending"))]
    for container in status.get("containerStatuses") or []:
        for kind, state in {**(container.get("state") or {}), "last": None}.items():
            ended = (container.get("lastState") or {}).get("terminated") if kind == "last" else state
            said = [str(ended[key]) for key in ("reason", "exitCode", "message") if ended and key in ended]
            words += [f"{kind} ({' '.join(said)})"] if said else []
    conditions = [c for c in status.get("conditions") or [] if c.get("status") != "True"]
    return ", ".join(words + [f"not {c.get('type')} ({c.get('message', '')})" for c in conditions])

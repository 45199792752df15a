"""Endpoints and EndpointSlices of Services: which pods stand behind each port, and whether they are ready."""

from __future__ import annotations

from typing import Any, NamedTuple

from springtide_local.controllers.conditions import is_true
from springtide_local.controllers.loop import Controller
from springtide_local.informer import Change, Informers
from springtide_local.ports import ApiError, StorePort

Object = dict[str, Any]
_SLICES = "endpointslices.discovery.k8s.io"


class Endpoint(NamedTuple):
    """One pod behind a Service. `serving`: its processes answer; `ready`: new connections shall go to it."""

    ip: str
    ports: tuple[tuple[str, int, str], ...]
    ready: bool
    serving: bool
    terminating: bool
    pod: Object


def endpoints_of(service: Object, pods: list[Object]) -> list[Endpoint]:
    """Return the pods that a Service selects and that have an address, by name.

    Ended pods are none; port entries are (name, number, protocol).

    Args:
        service: the Service.
        pods: of the Service's namespace.
    """
    spec = service["spec"]
    selector = spec.get("selector")
    if not selector:
        return []
    always = bool(spec.get("publishNotReadyAddresses"))
    found = []
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        labels, status = pod["metadata"].get("labels") or {}, pod.get("status") or {}
        if any(labels.get(name) != value for name, value in selector.items()):
            continue
        if not status.get("podIP") or status.get("phase") in ("Succeeded", "Failed"):
            continue
        terminating = bool(pod["metadata"].get("deletionTimestamp"))
        serving = is_true(pod, "Ready")
        ready = always or (serving and not terminating)
        ports = []
        for port in spec.get("ports") or []:
            number = target_port(port, pod)
            if number is not None:
                ports.append((port.get("name") or "", number, port.get("protocol") or "TCP"))
        found.append(Endpoint(status["podIP"], tuple(ports), ready, serving or always, terminating, pod))
    return found


def target_port(port: Object, pod: Object) -> int | None:
    """Return the number of a Service port's target in a pod.

    Args:
        port: of the Service.
        pod: that it selects.

    Returns:
        None when the pod has no port of that name.
    """
    target = port.get("targetPort") or port["port"]
    if isinstance(target, int) or str(target).isdigit():
        return int(target)
    for container in pod["spec"]["containers"]:
        for declared in container.get("ports") or []:
            if declared.get("name") == target:
                return int(declared["containerPort"])
    return None


class EndpointsController:
    """Writes both kinds for every Service that has a selector, and removes them with it."""

    def __init__(self, store: StorePort, informers: Informers) -> None:
        self._store = store
        self._services = informers.of("services")
        self._pods = informers.of("pods")
        self.controller = Controller("endpoints", self._reconcile)
        self._services.on_change(self.controller.on_change)
        self._pods.on_change(self._on_pod)

    def _on_pod(self, change: Change) -> None:
        versions = [change.object] + ([change.old] if change.old is not None else [])
        for service in self._services.all(change.object["metadata"]["namespace"]):
            selector = service["spec"].get("selector")
            labels = [version["metadata"].get("labels") or {} for version in versions]
            if selector and any(selector.items() <= each.items() for each in labels):
                self.controller.on_change(Change("MODIFIED", service, None))

    def _reconcile(self, namespace: str, name: str) -> None:
        service = self._services.get(namespace, name)
        if service is None:
            for resource in ("endpoints", _SLICES):
                self._remove(resource, name, namespace)
            return
        if not service["spec"].get("selector"):
            return
        found = endpoints_of(service, list(self._pods.all(namespace)))
        self._write("endpoints", namespace, name, endpoints_object(service, found))
        self._write(_SLICES, namespace, name, slice_object(service, found))

    def _remove(self, resource: str, name: str, namespace: str) -> None:
        try:
            self._store.delete(resource, name, namespace)
        except ApiError as error:
            if error.code != 404:
                raise

    def _write(self, resource: str, namespace: str, name: str, wanted: Object) -> None:
        content = {
            key: value for key, value in wanted.items() if key not in ("metadata", "apiVersion", "kind")
        }
        try:
            self._store.mutate(resource, name, namespace, lambda obj: obj.update(content))
        except ApiError as error:
            if error.code != 404:
                raise
            self._store.create(resource, wanted, namespace)


def _metadata(service: Object, labels: dict[str, str]) -> Object:
    owner = {
        "apiVersion": "v1",
        "kind": "Service",
        "name": service["metadata"]["name"],
        "uid": service["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    return {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [owner]}


def _reference(pod: Object) -> Object:
    metadata = pod["metadata"]
    return {
        "kind": "Pod",
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "uid": metadata["uid"],
    }


def endpoints_object(service: Object, found: list[Endpoint]) -> Object:
    """Return the core/v1 Endpoints: one subset for each set of ports.

    Args:
        service: the Service.
        found: made by `endpoints_of`.
    """
    by_ports: dict[tuple[tuple[str, int, str], ...], list[Endpoint]] = {}
    for endpoint in found:
        by_ports.setdefault(endpoint.ports, []).append(endpoint)
    subsets = []
    for ports, members in by_ports.items():
        addresses: dict[bool, list[Object]] = {True: [], False: []}
        for member in members:
            entry = {
                "ip": member.ip,
                "nodeName": member.pod["spec"].get("nodeName", ""),
                "targetRef": _reference(member.pod),
            }
            addresses[member.ready].append(entry)
        subset: Object = {
            "ports": [{**({"name": n} if n else {}), "port": p, "protocol": proto} for n, p, proto in ports]
        }
        if addresses[True]:
            subset["addresses"] = addresses[True]
        if addresses[False]:
            subset["notReadyAddresses"] = addresses[False]
        subsets.append(subset)
    labels = dict(service["metadata"].get("labels") or {})
    return {
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": _metadata(service, labels),
        "subsets": subsets,
    }


def slice_object(service: Object, found: list[Endpoint]) -> Object:
    """Return the EndpointSlice.

    There is one: pods whose named ports differ in number are left out of it after the first kind of ports.

    Args:
        service: the Service.
        found: made by `endpoints_of`.
    """
    ports = next((endpoint.ports for endpoint in found if endpoint.ports), ())
    endpoints = [
        {
            "addresses": [endpoint.ip],
            "conditions": {
                "ready": endpoint.ready,
                "serving": endpoint.serving,
                "terminating": endpoint.terminating,
            },
            "nodeName": endpoint.pod["spec"].get("nodeName", ""),
            "targetRef": _reference(endpoint.pod),
        }
        for endpoint in found
        if endpoint.ports == ports
    ]
    labels = {
        **(service["metadata"].get("labels") or {}),
        "kubernetes.io/service-name": service["metadata"]["name"],
        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
    }
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": _metadata(service, labels),
        "addressType": "IPv4",
        "ports": [{"name": name, "port": port, "protocol": protocol} for name, port, protocol in ports],
        "endpoints": endpoints,
    }

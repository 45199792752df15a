"""Pods: defaults, and what may never change after creation. The checks of a pod's spec are in
`pod_checks`.
"""

from __future__ import annotations

from typing import Any

from springtide_local.api.errors import FieldError, field_forbidden
from springtide_local.api.kinds import pod_checks
from springtide_local.api.kinds.base import Kind, Reader
from springtide_local.api.objects import clone
from springtide_local.ports import Object

_IMMUTABLE = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


class Pods(Kind):
    def default(self, obj: Object) -> None:
        default_pod_spec(obj.setdefault("spec", {}))

    def prepare_create(self, store: Reader, obj: Object) -> None:
        """Begin as pending, with the QoS class of its requests.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
        """
        obj["status"] = {"phase": "Pending", "qosClass": qos_class(obj["spec"])}

    def prepare_update(self, store: Reader, obj: Object, old: Object, subresource: str | None) -> None:
        """Keep the QoS class, and fill in the statuses of containers.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        for statuses in ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"):
            for status in obj.get("status", {}).get(statuses) or ():
                for name, zero in (("ready", False), ("restartCount", 0), ("image", ""), ("imageID", "")):
                    status.setdefault(name, zero)
        if "qosClass" in old.get("status", {}):
            obj.setdefault("status", {})["qosClass"] = old["status"]["qosClass"]

    def check(self, obj: Object) -> list[FieldError]:
        return pod_checks.check_pod_spec(obj["spec"], "spec")

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        """Return an error if the spec is changed beyond images, deadline and added tolerations.

        Args:
            obj: the object as it is to be stored.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        if subresource in ("status", "binding") or obj["spec"] == old["spec"]:
            return []
        if _frozen(obj["spec"]) == _frozen(old["spec"]) and _only_added(obj["spec"], old["spec"]):
            return []
        return [field_forbidden("spec", _IMMUTABLE)]


def _frozen(spec: Object) -> Object:
    rest = clone(spec)
    rest.pop("activeDeadlineSeconds", None)
    rest.pop("tolerations", None)
    if rest.get("terminationGracePeriodSeconds") == 1:
        rest.pop("terminationGracePeriodSeconds")
    for containers in ("containers", "initContainers"):
        for container in rest.get(containers) or ():
            container.pop("image", None)
    return rest


def _only_added(spec: Object, old: Object) -> bool:
    now = spec.get("tolerations") or []
    return all(toleration in now for toleration in old.get("tolerations") or [])


def default_pod_spec(spec: Object) -> None:
    """The defaults of a PodSpec, in place; also of pod templates."""
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("enableServiceLinks", True)
    account = spec.get("serviceAccountName") or spec.get("serviceAccount")
    if account:
        spec["serviceAccountName"] = spec["serviceAccount"] = account
    for volume in spec.get("volumes") or ():
        _default_volume(volume)
    for containers in ("initContainers", "containers"):
        for container in spec.get(containers) or ():
            if isinstance(container, dict):
                _default_container(container, bool(spec.get("hostNetwork")))


def _default_container(container: Object, host_network: bool) -> None:
    image = container.get("image") or ""
    tagged = ":" in image.rpartition("/")[2] or "@" in image
    latest = image.endswith(":latest") or not tagged
    container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    for port in container.get("ports") or ():
        port.setdefault("protocol", "TCP")
        if host_network and "containerPort" in port:
            port.setdefault("hostPort", port["containerPort"])
    for entry in container.get("env") or ():
        ref = (entry.get("valueFrom") or {}).get("fieldRef")
        if isinstance(ref, dict):
            ref.setdefault("apiVersion", "v1")
    _default_resources(container.setdefault("resources", {}))
    for name in _PROBES:
        if isinstance(container.get(name), dict):
            _default_probe(container[name])


def _default_resources(resources: Object) -> None:
    for part in ("limits", "requests"):
        amounts = resources.get(part)
        if isinstance(amounts, dict):
            for name, amount in amounts.items():
                if isinstance(amount, int | float) and not isinstance(amount, bool):
                    amounts[name] = str(amount)
    limits = resources.get("limits")
    if isinstance(limits, dict) and limits:
        requests = resources.setdefault("requests", {})
        for name, amount in limits.items():
            requests.setdefault(name, amount)


def _default_probe(probe: Object) -> None:
    for name, value in (
        ("timeoutSeconds", 1),
        ("periodSeconds", 10),
        ("successThreshold", 1),
        ("failureThreshold", 3),
    ):
        probe[name] = probe.get(name) or value
    if isinstance(probe.get("httpGet"), dict):
        probe["httpGet"].setdefault("scheme", "HTTP")
        probe["httpGet"].setdefault("path", "/")
    if isinstance(probe.get("grpc"), dict):
        probe["grpc"].setdefault("service", "")


def _default_volume(volume: Object) -> None:
    sources = [name for name in volume if name != "name"]
    if not sources:
        volume["emptyDir"] = {}
    for source in ("secret", "configMap", "projected", "downwardAPI"):
        if isinstance(volume.get(source), dict):
            volume[source].setdefault("defaultMode", 0o644)
    projected = volume.get("projected")
    for source in (projected.get("sources") or ()) if isinstance(projected, dict) else ():
        token = source.get("serviceAccountToken") if isinstance(source, dict) else None
        if isinstance(token, dict):
            token.setdefault("expirationSeconds", 3600)
    if isinstance(volume.get("hostPath"), dict):
        volume["hostPath"].setdefault("type", "")


def qos_class(spec: Object) -> str:
    """Guaranteed, Burstable or BestEffort, by the requests and limits of all containers."""
    any_set, guaranteed = False, True
    for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
        resources: dict[str, Any] = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        counted = {name for name in (*limits, *requests) if name in ("cpu", "memory")}
        any_set = any_set or bool(counted)
        for name in ("cpu", "memory"):
            if name not in limits or str(requests.get(name)) != str(limits[name]):
                guaranteed = False
    if not any_set:
        return "BestEffort"
    return "Guaranteed" if guaranteed else "Burstable"

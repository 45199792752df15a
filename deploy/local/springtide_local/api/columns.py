"""The columns in which kubectl shows built-in kinds, after Kubernetes' internal printers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from springtide_local.api.durations import age
from springtide_local.api.objects import lookup
from springtide_local.api.pod_state import pod_cells
from springtide_local.api.selectors import selector_of
from springtide_local.ports import Object

Cell = Callable[[Object, float], Any]


class Column(NamedTuple):
    """`wide` columns show with `-o wide` only. The cell is computed from the object and the time (s since
    the epoch).
    """

    name: str
    cell: Cell
    type: str = "string"
    wide: bool = False
    format: str = ""
    description: str = ""


def _at(*path: str, empty: Any = "<none>") -> Cell:
    def get(obj: Object, now: float) -> Any:
        value = lookup(obj, *path)
        return empty if value in (None, "", [], {}) else value

    return get


def _count(*path: str) -> Cell:
    return lambda obj, now: len(lookup(obj, *path) or ())


def _number(*path: str) -> Cell:
    return lambda obj, now: lookup(obj, *path) or 0


def _age(obj: Object, now: float) -> str:
    return age(obj["metadata"].get("creationTimestamp"), now)


def _joined(*path: str, empty: str = "<none>") -> Cell:
    return lambda obj, now: ",".join(map(str, lookup(obj, *path) or ())) or empty


NAME = Column("Name", _at("metadata", "name"), format="name")
AGE = Column("Age", _age)


def _selector(obj: Object, now: float) -> str:
    selector = lookup(obj, "spec", "selector") or {}
    if not any(isinstance(value, dict | list) for value in selector.values()):
        return ",".join(f"{key}={value}" for key, value in sorted(selector.items())) or "<none>"
    parts = []
    for requirement in selector_of(selector).requirements:
        if requirement.operator == "In" and len(requirement.values) == 1:
            parts.append(f"{requirement.key}={requirement.values[0]}")
        else:
            parts.append(f"{requirement.key} {requirement.operator.lower()} ({','.join(requirement.values)})")
    return ",".join(parts) or "<none>"


def _containers(part: str) -> Cell:
    def get(obj: Object, now: float) -> str:
        found = lookup(obj, "spec", "template", "spec", "containers") or ()
        return ",".join(str(container.get(part, "")) for container in found)

    return get


def _ready(obj: Object, now: float) -> str:
    return f"{lookup(obj, 'status', 'readyReplicas') or 0}/{lookup(obj, 'spec', 'replicas') or 0}"


def _service_ports(obj: Object, now: float) -> str:
    ports = lookup(obj, "spec", "ports") or ()
    texts = []
    for port in ports:
        outside = f":{port['nodePort']}" if port.get("nodePort") else ""
        texts.append(f"{port['port']}{outside}/{port.get('protocol', 'TCP')}")
    return ",".join(texts) or "<none>"


def _node_status(obj: Object, now: float) -> str:
    conditions = {c["type"]: c["status"] for c in lookup(obj, "status", "conditions") or ()}
    text = {"True": "Ready", "False": "NotReady"}.get(conditions.get("Ready", ""), "NotReady")
    if "Ready" not in conditions:
        text = "Unknown"
    return text + (",SchedulingDisabled" if lookup(obj, "spec", "unschedulable") else "")


def _node_roles(obj: Object, now: float) -> str:
    labels = obj["metadata"].get("labels") or {}
    prefix = "node-role.kubernetes.io/"
    return ",".join(sorted(key.removeprefix(prefix) for key in labels if key.startswith(prefix))) or "<none>"


def _node_address(kind: str) -> Cell:
    def get(obj: Object, now: float) -> str:
        for address in lookup(obj, "status", "addresses") or ():
            if address["type"] == kind:
                return str(address["address"])
        return "<none>"

    return get


def _endpoints(obj: Object, now: float) -> str:
    found = [
        f"{address['ip']}:{port['port']}"
        for subset in obj.get("subsets") or ()
        for address in subset.get("addresses") or ()
        for port in subset.get("ports") or ({"port": ""},)
    ]
    more = f" + {len(found) - 3} more..." if len(found) > 3 else ""
    return ",".join(found[:3]) + more or "<none>"


def _slice_addresses(obj: Object, now: float) -> str:
    found = [
        address for endpoint in obj.get("endpoints") or () for address in endpoint.get("addresses") or ()
    ]
    return ",".join(found[:3]) + (f" + {len(found) - 3} more..." if len(found) > 3 else "") or "<unset>"


def _event_seen(obj: Object, now: float) -> str:
    series = lookup(obj, "series", "lastObservedTime")
    return age(series or obj.get("lastTimestamp") or obj.get("eventTime") or obj.get("firstTimestamp"), now)


def _event_object(obj: Object, now: float) -> str:
    involved = obj.get("involvedObject") or {}
    return f"{str(involved.get('kind', '')).lower()}/{involved.get('name', '')}"


def _quota(part: str) -> Cell:
    def get(obj: Object, now: float) -> str:
        hard, used = lookup(obj, "status", "hard") or {}, lookup(obj, "status", "used") or {}
        names = sorted(name for name in hard if name.startswith("limits.") == (part == "limits"))
        return ", ".join(f"{name}: {used.get(name, '0')}/{hard[name]}" for name in names)

    return get


def _role_ref(obj: Object, now: float) -> str:
    ref = obj.get("roleRef") or {}
    return f"{ref.get('kind')}/{ref.get('name')}"


_POD_COLUMNS = (
    ("Ready", "string", False),
    ("Status", "string", False),
    ("Restarts", "string", False),
    ("Age", "string", False),
    ("IP", "string", True),
    ("Node", "string", True),
    ("Nominated Node", "string", True),
    ("Readiness Gates", "string", True),
)


def _pod(index: int) -> Cell:
    return lambda obj, now: pod_cells(obj, now)[index]


def _with_age(*columns: Column) -> tuple[Column, ...]:
    return (NAME, *columns, AGE)


_TEMPLATE = (
    Column("Containers", _containers("name"), wide=True),
    Column("Images", _containers("image"), wide=True),
    Column("Selector", _selector, wide=True),
)
_EVENTS = (
    Column("Last Seen", _event_seen),
    Column("Type", _at("type", empty="")),
    Column("Reason", _at("reason", empty="")),
    Column("Object", _event_object),
    Column("Subobject", _at("involvedObject", "fieldPath", empty=""), wide=True),
    Column("Source", _at("source", "component", empty=""), wide=True),
    Column("Message", lambda obj, now: str(obj.get("message", "")).strip()),
    Column(
        "First Seen", lambda obj, now: age(obj.get("firstTimestamp") or obj.get("eventTime"), now), wide=True
    ),
    Column("Count", lambda obj, now: lookup(obj, "series", "count") or obj.get("count") or 1, wide=True),
    Column("Name", NAME.cell, wide=True, format="name"),
)

COLUMNS: dict[str, Sequence[Column]] = {
    "pods": (
        NAME,
        *(Column(name, _pod(index), kind, wide) for index, (name, kind, wide) in enumerate(_POD_COLUMNS)),
    ),
    "namespaces": _with_age(Column("Status", _at("status", "phase"))),
    "nodes": (
        NAME,
        Column("Status", _node_status),
        Column("Roles", _node_roles),
        AGE,
        Column("Version", _at("status", "nodeInfo", "kubeletVersion", empty="")),
        Column("Internal-IP", _node_address("InternalIP"), wide=True),
        Column("External-IP", _node_address("ExternalIP"), wide=True),
        Column("OS-Image", _at("status", "nodeInfo", "osImage", empty="<unknown>"), wide=True),
        Column("Kernel-Version", _at("status", "nodeInfo", "kernelVersion", empty="<unknown>"), wide=True),
        Column(
            "Container-Runtime",
            _at("status", "nodeInfo", "containerRuntimeVersion", empty="<unknown>"),
            wide=True,
        ),
    ),
    "services": (
        NAME,
        Column("Type", _at("spec", "type")),
        Column("Cluster-IP", _at("spec", "clusterIP")),
        Column("External-IP", _joined("spec", "externalIPs")),
        Column("Port(s)", _service_ports),
        AGE,
        Column("Selector", _selector, wide=True),
    ),
    "endpoints": _with_age(Column("Endpoints", _endpoints)),
    "secrets": _with_age(Column("Type", _at("type")), Column("Data", _count("data"), "integer")),
    "configmaps": _with_age(
        Column("Data", lambda o, now: len(o.get("data") or ()) + len(o.get("binaryData") or ()), "integer")
    ),
    "serviceaccounts": _with_age(Column("Secrets", _count("secrets"), "integer")),
    "events": _EVENTS,
    "persistentvolumeclaims": (
        NAME,
        Column("Status", _at("status", "phase", empty="")),
        Column("Volume", _at("spec", "volumeName", empty="")),
        Column("Capacity", _at("status", "capacity", "storage", empty="")),
        Column("Access Modes", _joined("status", "accessModes", empty="")),
        Column("StorageClass", _at("spec", "storageClassName", empty="")),
        AGE,
        Column("VolumeMode", _at("spec", "volumeMode"), wide=True),
    ),
    "persistentvolumes": (
        NAME,
        Column("Capacity", _at("spec", "capacity", "storage")),
        Column("Access Modes", _joined("spec", "accessModes")),
        Column("Reclaim Policy", _at("spec", "persistentVolumeReclaimPolicy")),
        Column("Status", _at("status", "phase")),
        Column("Claim", _at("spec", "claimRef", "name", empty="")),
        Column("StorageClass", _at("spec", "storageClassName", empty="")),
        AGE,
    ),
    "resourcequotas": (NAME, Column("Request", _quota("requests")), Column("Limit", _quota("limits")), AGE),
    "limitranges": (NAME, Column("Created At", _at("metadata", "creationTimestamp"))),
    "deployments.apps": (
        NAME,
        Column("Ready", _ready),
        Column("Up-to-date", _number("status", "updatedReplicas"), "integer"),
        Column("Available", _number("status", "availableReplicas"), "integer"),
        AGE,
        *_TEMPLATE,
    ),
    "replicasets.apps": (
        NAME,
        Column("Desired", _number("spec", "replicas"), "integer"),
        Column("Current", _number("status", "replicas"), "integer"),
        Column("Ready", _number("status", "readyReplicas"), "integer"),
        AGE,
        *_TEMPLATE,
    ),
    "poddisruptionbudgets.policy": (
        NAME,
        Column("Min Available", _at("spec", "minAvailable", empty="N/A")),
        Column("Max Unavailable", _at("spec", "maxUnavailable", empty="N/A")),
        Column("Allowed Disruptions", _number("status", "disruptionsAllowed"), "integer"),
        AGE,
    ),
    "horizontalpodautoscalers.autoscaling": (
        NAME,
        Column("Reference", lambda o, now: "{kind}/{name}".format(**o["spec"]["scaleTargetRef"])),
        Column("Targets", lambda o, now: "<unknown>"),
        Column("MinPods", _at("spec", "minReplicas", empty="<unset>")),
        Column("MaxPods", _number("spec", "maxReplicas"), "integer"),
        Column("Replicas", _number("status", "currentReplicas"), "integer"),
        AGE,
    ),
    "networkpolicies.networking.k8s.io": (
        NAME,
        Column(
            "Pod-Selector",
            lambda o, now: _selector({"spec": {"selector": lookup(o, "spec", "podSelector") or {}}}, now),
        ),
        AGE,
    ),
    "leases.coordination.k8s.io": _with_age(Column("Holder", _at("spec", "holderIdentity", empty=""))),
    "endpointslices.discovery.k8s.io": _with_age(
        Column("AddressType", _at("addressType")),
        Column(
            "Ports",
            lambda o, now: ",".join(str(p.get("port", "*")) for p in o.get("ports") or ()) or "<unset>",
        ),
        Column("Endpoints", _slice_addresses),
    ),
    "roles.rbac.authorization.k8s.io": (NAME, Column("Created At", _at("metadata", "creationTimestamp"))),
    "clusterroles.rbac.authorization.k8s.io": (
        NAME,
        Column("Created At", _at("metadata", "creationTimestamp")),
    ),
    "rolebindings.rbac.authorization.k8s.io": (NAME, Column("Role", _role_ref), AGE),
    "clusterrolebindings.rbac.authorization.k8s.io": (NAME, Column("Role", _role_ref), AGE),
    "priorityclasses.scheduling.k8s.io": (
        NAME,
        Column("Value", _number("value"), "integer"),
        Column("Global-Default", lambda o, now: bool(o.get("globalDefault")), "boolean"),
        AGE,
        Column("PreemptionPolicy", _at("preemptionPolicy"), wide=True),
    ),
    "storageclasses.storage.k8s.io": (
        NAME,
        Column("Provisioner", _at("provisioner")),
        Column("ReclaimPolicy", _at("reclaimPolicy")),
        Column("VolumeBindingMode", _at("volumeBindingMode")),
        AGE,
    ),
    "customresourcedefinitions.apiextensions.k8s.io": (
        NAME,
        Column("Created At", _at("metadata", "creationTimestamp")),
    ),
}

"""The fields of an object that the operator reads, and no others.

A pod of 10 KB costs 51 KiB as Python objects, one of a tenant's making up to 35 MB. A policy that needs
another field of a pod, a node or a job adds it here. Objects of nobody's job come out as a name alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from springtide_operator.api import limits, names

Object = dict[str, Any]
Reader = Callable[[Object], Object]

_META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)
_IDENTITY = ("name", "namespace", "uid", "resourceVersion")
_JOB_LABELS = (names.LABEL_QUEUE, names.LABEL_QUEUE_PRIORITY, names.PREBUILT_WORKLOAD)
_JOB_ANNOTATIONS = (names.ANNOTATION_KEY_TURN, names.ANNOTATION_ELASTIC, names.PREBUILT_WORKLOAD)
_OWN = f"{names.GROUP}/"
_OWNER = ("apiVersion", "kind", "name", "uid", "controller")
_POD_STATUS = ("phase", "reason", "podIP")
_STATUSES = ("initContainerStatuses", "containerStatuses")
_CONTAINER_STATUS = ("name", "image", "ready", "restartCount", "started")
_STATES = ("waiting", "running", "terminated")
_STATE = ("reason", "message", "exitCode", "signal", "startedAt", "finishedAt")
_CONDITION = ("type", "status", "reason", "lastTransitionTime", "message")
_MOST = 64  # entries of a list
_MOST_TEXT = 16 * 1024
_MOST_WORD = 512  # of our own labels and annotations, which are names, numbers, hashes and single words
# Of a status that is too large only what `plan.decide.invalid` writes, so that it is not written again.
_LEAST_STATUS = ("state", "message", "observedGeneration", "conditions")


def controller(obj: Object) -> str | None:
    """Return the uid of the TrainingJob that controls the object; None where none does."""
    for one in (obj.get("metadata") or {}).get("ownerReferences") or []:
        group = str(one.get("apiVersion") or "").partition("/")[0]
        if one.get("controller") and one.get("kind") == names.KIND and group == names.GROUP:
            return str(one.get("uid"))
    return None


def job(obj: Object) -> Object:
    """Return a TrainingJob with its spec and status; one that is too large or too deep to work with comes
    with `names.UNREADABLE`, which says why, instead of its spec.
    """
    meta = obj["metadata"]
    slim: Object = {key: obj[key] for key in ("apiVersion", "kind", "status", names.UNREADABLE) if key in obj}
    slim["metadata"] = _pick(meta, _META)
    labels = _pick(meta.get("labels") or {}, _JOB_LABELS)
    if labels:
        slim["metadata"]["labels"] = labels
    annotations = _pick(meta.get("annotations") or {}, _JOB_ANNOTATIONS)
    if annotations:
        slim["metadata"]["annotations"] = annotations
    spec = obj.get("spec") or {}
    wrong = slim.get(names.UNREADABLE) or _wrong_template(spec)
    status = slim.get("status")
    if status is not None and not isinstance(status, dict):
        wrong, slim["status"] = "status is no object", {}
    elif status and _size(status) > limits.MAX_STATUS_BYTES:
        wrong = wrong or f"status is larger than {limits.MAX_STATUS_BYTES:,} bytes: it is not the operator's"
        slim["status"] = _pick(status, _LEAST_STATUS)
        if _size(slim["status"]) > limits.MAX_STATUS_BYTES:
            slim["status"] = {}
    slim["spec"] = spec
    if wrong:
        slim[names.UNREADABLE] = wrong
        slim["spec"] = _class_alone(spec)
    return slim


def job_class(obj: Object) -> str:
    """Return the class of a job, by which a release knows those that it runs."""
    spec = obj.get("spec")
    said = spec.get("managedBy") if isinstance(spec, dict) else None
    return said if isinstance(said, str) and said else names.DEFAULT_CLASS


def _class_alone(spec: Any) -> Object:
    """Return a spec of which nothing is left but whose job it is."""
    said = spec.get("managedBy") if isinstance(spec, dict) else None
    return {"managedBy": said} if isinstance(said, str) else {}


def pod(obj: Object) -> Object:
    """Return a job's pod, as far as it is observed; of any other pod, its name."""
    meta = obj["metadata"]
    if controller(obj) is None:
        return {"kind": "Pod", "metadata": _pick(meta, _IDENTITY)}
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    owners = [_pick(one, _OWNER) for one in meta.get("ownerReferences") or [] if one.get("controller")]
    slim_meta = {**_pick(meta, _META), "ownerReferences": owners}
    for part in ("labels", "annotations"):
        slim_meta[part] = {
            key: _short(value, _MOST_WORD)
            for key, value in (meta.get(part) or {}).items()
            if key.startswith(_OWN)
        }
    slim_spec = _pick(spec, ("nodeName", "terminationGracePeriodSeconds"))
    gates = [{"name": _short(one.get("name"), _MOST_WORD)} for one in spec.get("schedulingGates") or []]
    if gates:
        slim_spec["schedulingGates"] = gates[:_MOST]
    slim_spec["containers"] = [_container(one) for one in (spec.get("containers") or [])[:_MOST]]
    return {"kind": "Pod", "metadata": slim_meta, "spec": slim_spec, "status": _pod_status(status)}


def waiting_pod(obj: Object) -> Object:
    """Return a pod of anybody's that waits for a node: why, and since when."""
    meta = obj["metadata"]
    labels = {key: value for key, value in (meta.get("labels") or {}).items() if key == names.LABEL_JOB}
    return {
        "metadata": {**_pick(meta, _META), "labels": labels},
        "spec": _pick(obj.get("spec") or {}, ("nodeName",)),
        "status": _pod_status(obj.get("status") or {}),
    }


def node(obj: Object) -> Object:
    """Return a node without its images, annotations and history."""
    meta, status = obj["metadata"], obj.get("status") or {}
    slim_meta = {**_pick(meta, _META), "labels": dict(meta.get("labels") or {})}
    spec = _pick(obj.get("spec") or {}, ("unschedulable", "taints", "providerID"))
    conditions = [_pick(one, (*_CONDITION, "lastHeartbeatTime")) for one in status.get("conditions") or []]
    return {"kind": "Node", "metadata": slim_meta, "spec": spec, "status": {"conditions": conditions}}


def protection(obj: Object) -> Object:
    """Return which NetworkPolicy or disruption budget an object is, and of which job."""
    meta = obj["metadata"]
    labels = {key: value for key, value in (meta.get("labels") or {}).items() if key == names.LABEL_JOB}
    return {"metadata": {**_pick(meta, (*_IDENTITY, "generation")), "labels": labels}}


def definition(obj: Object) -> Object:
    """Return a CustomResourceDefinition without its schemas, of which there may be megabytes."""
    spec = _pick(obj.get("spec") or {}, ("group", "names", "scope"))
    return {"metadata": _pick(obj["metadata"], _META), "spec": spec}


READERS: dict[str, Reader] = {
    names.PLURAL: job,
    "pods": pod,
    "nodes": node,
    "networkpolicies": protection,
    "poddisruptionbudgets": protection,
    "customresourcedefinitions": definition,
}


def plural_of(path: str) -> str:
    """Return what the objects of a URL's path are called: of that of a list or a watch its last part."""
    return path.rstrip("/").rpartition("/")[2]


def reader_for(path: str) -> Reader | None:
    """Return what reads the objects of a URL's path; None for kinds that are kept as they are."""
    return READERS.get(plural_of(path))


def read(obj: Object, reader: Reader) -> Object:
    """Return what is read of an object; where it cannot be read, what is known of it.

    Args:
        obj: as the API server gives it.
        reader: makes of it what is read.

    Raises:
        KeyError: the object has no name.
        TypeError: likewise.
    """
    try:
        return reader(obj)
    except Exception as error:  # one object that nobody foresaw must not hide the others
        meta = obj["metadata"]
        text = f"it cannot be read: {type(error).__name__}: {str(error)[:200]}"
        spec = _class_alone(obj.get("spec"))
        return {"metadata": _pick(meta, _META), "spec": spec, names.UNREADABLE: text}


def _wrong_template(spec: Any) -> str:
    if not isinstance(spec, dict):
        return "spec is no object"
    for part in ("workers", "parameterServers"):
        holder = spec.get(part)
        template = holder.get("template") if isinstance(holder, dict) else None
        if template is None:
            continue
        where = f"spec.{part}.template"
        size = _size(template)
        if size > limits.MAX_TEMPLATE_BYTES:
            return (
                f"{where} has {size:,} bytes of JSON, and at most {limits.MAX_TEMPLATE_BYTES:,} are read:"
                " put large values into a ConfigMap, and create the job anew"
            )
        if _deeper(template, limits.MAX_TEMPLATE_DEPTH):
            return (
                f"{where} is nested more than {limits.MAX_TEMPLATE_DEPTH} levels deep, which no pod needs:"
                " correct it, or create the job anew"
            )
    rest = {key: value for key, value in spec.items() if key not in ("workers", "parameterServers")}
    if _size(rest) > 4 * limits.MAX_TEMPLATE_BYTES or _deeper(rest, limits.MAX_TEMPLATE_DEPTH):
        return f"spec is larger than {4 * limits.MAX_TEMPLATE_BYTES:,} bytes, its templates not counted"
    return ""


def _size(value: Any) -> int:
    """Return the bytes of a value as compact JSON."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace"))


def _deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [inner for one in level for inner in _inside(one) if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _pod_status(status: Object) -> Object:
    slim = _pick(status, _POD_STATUS)
    if status.get("message"):
        slim["message"] = _short(status["message"])
    slim["conditions"] = [_pick(one, _CONDITION) for one in (status.get("conditions") or [])[:_MOST]]
    for key in _STATUSES:
        if status.get(key):
            slim[key] = [_container_status(one) for one in status[key][:_MOST]]
    return slim


def _container_status(status: Object) -> Object:
    slim = _pick(status, _CONTAINER_STATUS)
    for key in ("state", "lastState"):
        given = status.get(key) or {}
        slim[key] = {name: _pick(given[name] or {}, _STATE) for name in _STATES if name in given}
    return slim


def _container(container: Object) -> Object:
    """Return its name, the port of its metrics, and whether it was given the job's token."""
    slim = _pick(container, ("name",))
    ports = [port for port in (container.get("ports") or [])[:_MOST] if port.get("name") == "metrics"]
    if ports:
        slim["ports"] = [_pick(port, ("name", "containerPort")) for port in ports]
    if any(entry.get("name") == names.TOKEN for entry in container.get("env") or []):
        slim["env"] = [{"name": names.TOKEN}]
    return slim


def _pick(source: Object, keys: Iterable[str]) -> Object:
    return {key: _short(source[key]) for key in keys if key in source}


def _short(value: Any, most: int = _MOST_TEXT) -> Any:
    """Return a value, or the beginning of a text that is longer than any that Kubernetes writes."""
    return value[:most] if isinstance(value, str) else value

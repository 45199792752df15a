"""Subresources that are more than a part of their object: scale, eviction, binding, token."""

from __future__ import annotations

from springtide_local.api import bodies, errors, eviction, writes
from springtide_local.api.auth import ISSUER, Tokens
from springtide_local.api.collection import Stored
from springtide_local.api.objects import clone, timestamp
from springtide_local.api.requests import Target
from springtide_local.api.resources import get_path, set_path
from springtide_local.api.selectors import selector_of
from springtide_local.api.store import Store
from springtide_local.api.writes import Options
from springtide_local.ports import Object

_SHORTEST_TOKEN = 600
_LONGEST_TOKEN = 2**32


def scale_of(target: Target, obj: Object) -> Object:
    """Return the Scale of an object.

    Args:
        target: its resource has the paths of the numbers.
        obj: the object.

    Raises:
        ApiError: 404: the resource has no scale; 500: the spec has no number of replicas, as Kubernetes
            answers.
    """
    paths = target.resource.scale
    if paths is None:
        raise errors.no_such_path()
    replicas = get_path(obj, paths.spec_replicas)
    if not isinstance(replicas, int):
        where = "." + ".".join(paths.spec_replicas)
        raise errors.internal(f'the spec replicas field "{where}" does not exist')
    meta = obj["metadata"]
    selector = get_path(obj, paths.selector) if paths.selector else ""
    shown: Object = {"replicas": get_path(obj, paths.status_replicas) or 0}
    text = _selector_text(selector)
    if text:
        shown["selector"] = text
    kept = {
        name: meta[name]
        for name in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        if name in meta
    }
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": kept,
        "spec": {"replicas": replicas} if replicas else {},
        "status": shown,
    }


def _selector_text(selector: object) -> str:
    if not isinstance(selector, dict):
        return selector if isinstance(selector, str) else ""
    parts = []
    for requirement in selector_of(selector).requirements:
        match requirement.operator:
            case "In" if len(requirement.values) == 1:
                parts.append(f"{requirement.key}={requirement.values[0]}")
            case "In" | "NotIn":
                word = "in" if requirement.operator == "In" else "notin"
                parts.append(f"{requirement.key} {word} ({','.join(requirement.values)})")
            case "Exists":
                parts.append(requirement.key)
            case _:
                parts.append(f"!{requirement.key}")
    return ",".join(sorted(parts))


def set_scale(store: Store, target: Target, scale: Object, options: Options) -> Object:
    """Write the number of replicas; the rest of a Scale is ignored.

    Args:
        store: of all objects.
        target: the object that the request names.
        scale: as the client sent it.
        options: of the write.

    Returns:
        The Scale as it is now.

    Raises:
        ApiError: 404: there is no such object; 409: it has changed since; 422: the number cannot be.
    """
    paths = target.resource.scale
    if paths is None:
        raise errors.no_such_path()
    replicas = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        found = [errors.field_invalid("spec.replicas", replicas, "must be greater than or equal to 0")]
        raise errors.invalid("autoscaling", "Scale", target.name, found)
    obj = clone(store.get_stored(target.resource, target.name, target.namespace).object)
    given = scale.get("metadata") or {}
    if given.get("uid"):
        obj["metadata"]["uid"] = given["uid"]
    obj["metadata"]["resourceVersion"] = given.get("resourceVersion") or obj["metadata"]["resourceVersion"]
    set_path(obj, paths.spec_replicas, replicas)
    options.subresource = "scale"
    return scale_of(
        target, writes.update(store, target.resource, target.name, target.namespace, obj, options).object
    )


def bind(store: Store, target: Target, binding: Object, options: Options) -> Object:
    """Assign a pod to a node, once.

    Args:
        store: of all objects.
        target: the object that the request names.
        binding: the Binding.
        options: of the write.

    Returns:
        A Status.

    Raises:
        ApiError: 404: there is no such pod; 409: it has a node already or is going away; 422: no node is
            named.
    """
    to = bodies.of_type(binding, "Binding", "target", "object") or {}
    node = bodies.of_type(to, "ObjectReference", "name", "string")
    if not node:
        found = [errors.field_required("target.name")]
        raise errors.invalid("", "Binding", target.name, found)
    stored = store.get_stored(target.resource, target.name, target.namespace)
    obj = clone(stored.object)
    if obj["spec"].get("nodeName"):
        raise errors.conflict(
            "",
            "pods/binding",
            target.name,
            f'pod {target.name} is already assigned to node "{obj["spec"]["nodeName"]}"',
        )
    if obj["metadata"].get("deletionTimestamp"):
        why = f"pod {target.name} is being deleted, cannot be assigned to a host"
        raise errors.conflict("", "pods/binding", target.name, why)
    obj["spec"]["nodeName"] = node
    conditions = obj["status"].setdefault("conditions", [])
    if not any(condition["type"] == "PodScheduled" for condition in conditions):
        conditions.append(
            {
                "type": "PodScheduled",
                "status": "True",
                "lastProbeTime": None,
                "lastTransitionTime": timestamp(store.now()),
            }
        )
    store.commit(target.resource, "MODIFIED", obj, stored)
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def evict(store: Store, target: Target, body: Object, options: Options) -> Object:
    """Delete a pod gracefully unless a budget forbids it.

    Args:
        store: of all objects.
        target: the object that the request names.
        body: the Eviction.
        options: of the write.

    Returns:
        A Status.

    Raises:
        ApiError: 404, 409, 429 or 500, as `eviction.evict` has them.
    """
    eviction.evict(store, target.name, target.namespace or "", body, options)
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def request_token(store: Store, tokens: Tokens, target: Target, body: Object) -> Object:
    """Issue a token for a service account, bound to a pod where one is named.

    Args:
        store: of all objects.
        tokens: issues them.
        target: the service account that the request names.
        body: the TokenRequest.

    Returns:
        The TokenRequest with its status.

    Raises:
        ApiError: 400 and 422 for what cannot be asked for, 404 and 409 for a pod that is not there.
    """
    spec = bodies.of_type(body, "TokenRequest", "spec", "object") or {}
    where = "TokenRequestSpec"
    seconds = bodies.of_type(spec, where, "expirationSeconds", "int64") or 3600
    audiences = tuple(bodies.of_type(spec, where, "audiences", "[]string") or (ISSUER,))
    found = []
    if seconds < _SHORTEST_TOKEN:
        text = "may not specify a duration less than 10 minutes"
        found.append(errors.field_invalid("spec.expirationSeconds", seconds, text))
    elif seconds > _LONGEST_TOKEN:
        text = "may not specify a duration larger than 2^32 seconds"
        found.append(errors.field_invalid("spec.expirationSeconds", seconds, text))
    if found:
        raise errors.invalid("authentication.k8s.io", "TokenRequest", target.name, found)
    bound = bodies.of_type(spec, where, "boundObjectRef", "object")
    pod = _bound_pod(store, target, bound) if bound else None
    token, expires = tokens.issue(target.namespace or "", target.name, seconds, audiences, pod)
    return {
        "kind": "TokenRequest",
        "apiVersion": "authentication.k8s.io/v1",
        "metadata": {
            "name": target.name,
            "namespace": target.namespace,
            "creationTimestamp": timestamp(store.now()),
        },
        "spec": {"audiences": list(audiences), "expirationSeconds": seconds, "boundObjectRef": bound},
        "status": {"token": token, "expirationTimestamp": timestamp(expires)},
    }


def _bound_pod(store: Store, target: Target, bound: Object) -> Object:
    kind, name, uid = (
        bodies.of_type(bound, "BoundObjectReference", part, "string") or ""
        for part in ("kind", "name", "uid")
    )
    if kind != "Pod":
        raise errors.bad_request(f"cannot bind token to object of type {kind}: only Pods are served here")
    pod = store.get("pods", name, target.namespace)
    if uid and uid != pod["metadata"]["uid"]:
        text = (
            f"the UID in the bound object reference ({uid}) does not match the UID in record. The object "
            "might have been deleted and then recreated"
        )
        raise errors.conflict("", "pods", name, text)
    if pod["spec"].get("serviceAccountName") != target.name:
        raise errors.bad_request(
            f'cannot bind token for serviceaccount "{target.name}" to pod running with different '
            "serviceaccount name."
        )
    return pod


def answer_status(target: Target, stored: Stored) -> Object:
    """Return the Status with which DELETE answers for an object that is gone.

    Args:
        target: of the request.
        stored: the object as it was last.
    """
    resource = target.resource
    details: Object = {"name": target.name, "kind": resource.plural, "uid": stored.object["metadata"]["uid"]}
    if resource.group:
        details["group"] = resource.group
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

"""Metadata: what the system sets, what a writer may not touch, what is malformed."""

from __future__ import annotations

import uuid
from typing import Any

from springtide_local.api import builtin, errors, schema
from springtide_local.api.errors import FieldError
from springtide_local.api.objects import label_value_problem, qualified_name_problem, random_suffix, timestamp
from springtide_local.api.resources import ResourceType
from springtide_local.ports import Object

_SYSTEM = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "namespace",
)
_STANDARD_FINALIZERS = ("kubernetes", "orphan", "foregroundDeletion")
_MAX_ANNOTATIONS = 256 * 1024
_NAME_LIMIT = 63 - 5


def prepare_create(resource: ResourceType, obj: Object, namespace: str, now: float) -> None:
    """Set name, uid and times of a new object, in place.

    Args:
        resource: its type.
        obj: the new object.
        namespace: of the request; "" for objects without.
        now: in unix seconds.

    Raises:
        ApiError: 400: the object names another namespace than the request.
    """
    meta = obj["metadata"]
    given = meta.get("namespace") or ""
    if resource.namespaced and given not in ("", namespace):
        raise errors.bad_request(
            f"the namespace of the provided object does not match the namespace sent on the request "
            f"({given!r} and {namespace!r})"
        )
    if not meta.get("name") and meta.get("generateName"):
        meta["name"] = meta["generateName"][:_NAME_LIMIT] + random_suffix()
    for name in (
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "selfLink",
        "resourceVersion",
        "generation",
    ):
        meta.pop(name, None)
    if resource.namespaced:
        meta["namespace"] = namespace
    else:
        meta.pop("namespace", None)
    meta["uid"] = str(uuid.uuid4())
    meta["creationTimestamp"] = timestamp(now)
    if resource.generation:
        meta["generation"] = 1


def prepare_update(obj: Object, old: Object) -> None:
    """Carry over what only the system sets, in place.

    Args:
        obj: as it is to be stored.
        old: as it is stored.
    """
    meta, before = obj["metadata"], old["metadata"]
    meta.pop("selfLink", None)
    for name in _SYSTEM:
        if name in before:
            meta[name] = before[name]
        else:
            meta.pop(name, None)
    meta["name"] = before["name"]


def warnings(resource: ResourceType, obj: Object) -> list[str]:
    """Return what is odd about an object's metadata and still allowed.

    Args:
        resource: its kind; only custom ones may have finalizers without a domain.
        obj: as it is to be stored.
    """
    if not resource.custom:
        return []
    return [
        f'metadata.finalizers: "{name}": prefer a domain-qualified finalizer name to avoid accidental'
        " conflicts with other finalizer writers"
        for name in obj["metadata"].get("finalizers") or ()
        if "/" not in name and name not in _STANDARD_FINALIZERS
    ]


def check(resource: ResourceType, obj: Object) -> list[FieldError]:
    """Return what is malformed in an object's metadata.

    Args:
        resource: its kind.
        obj: as it is to be stored.
    """
    meta = obj["metadata"]
    found: list[FieldError] = []
    name = meta.get("name")
    if not name:
        found.append(errors.field_required("metadata.name", "name or generateName is required"))
    else:
        problem = resource.name_problem(name)
        if problem:
            found.append(errors.field_invalid("metadata.name", name, problem))
    _check_labels(meta.get("labels"), found)
    _check_annotations(meta.get("annotations"), found)
    _check_owners(meta.get("ownerReferences"), found)
    for index, finalizer in enumerate(meta.get("finalizers") or ()):
        problem = qualified_name_problem(finalizer)
        if problem:
            found.append(errors.field_invalid("metadata.finalizers", finalizer, problem))
        if "/" not in finalizer and finalizer not in _STANDARD_FINALIZERS and not resource.custom:
            text = "name is neither a standard finalizer name nor is it fully qualified"
            found.append(errors.field_invalid(f"metadata.finalizers[{index}]", finalizer, text))
    return found


def undecodable(resource: ResourceType, obj: Object, accepted: Object | None = None) -> str | None:
    """Return why an object cannot even be decoded: a wrong JSON type where Kubernetes has a Go type.

    Args:
        resource: its type.
        obj: as it came.
        accepted: the object as it is stored, where it is a built-in kind's and is known.

    Returns:
        The reason in the words of Go's decoder, or None.
    """
    meta = obj.get("metadata")
    if meta is not None and not isinstance(meta, dict):
        return _cannot(resource.kind, "metadata", schema.json_type(meta), "ObjectMeta")
    found: list[FieldError] = []
    known = (accepted or {}).get("metadata")
    schema.validate(builtin.node(builtin.OBJECT_META), meta or {}, "metadata", found, known)
    wrong = [error for error in found if error.reason == errors.TYPE_INVALID]
    if not wrong and resource.node is not None and not resource.custom:
        schema.validate(resource.node, obj, "", found, accepted)
        wrong = [error for error in found if error.reason == errors.TYPE_INVALID]
    if not wrong:
        return None
    got, _, _ = wrong[0].message.removeprefix('Invalid value: "').partition('"')
    expected = wrong[0].message.partition("must be of type ")[2].partition(":")[0]
    return _cannot(resource.kind, wrong[0].path, got, expected)


def _cannot(kind: str, path: str, got: str, expected: str) -> str:
    return f"json: cannot unmarshal {got} into Go struct field {kind}.{path} of type {expected}"


def check_update(obj: Object, old: Object) -> list[FieldError]:
    """Return what is wrong with a change of the metadata.

    Args:
        obj: as it is to be stored.
        old: as it is stored.
    """
    found: list[FieldError] = []
    if old["metadata"].get("deletionTimestamp"):
        before = old["metadata"].get("finalizers") or []
        added = [name for name in obj["metadata"].get("finalizers") or () if name not in before]
        if added:
            shown = ", ".join(errors.shown(name) for name in added)
            text = (
                "no new finalizers can be added if the object is being deleted, found new finalizers "
                f"[]string{{{shown}}}"
            )
            found.append(errors.field_forbidden("metadata.finalizers", text))
    return found


def _check_labels(labels: Any, found: list[FieldError]) -> None:
    for key, value in (labels or {}).items():
        problem = qualified_name_problem(key)
        if problem:
            found.append(errors.field_invalid("metadata.labels", key, problem))
        problem = label_value_problem(value)
        if problem:
            found.append(errors.field_invalid("metadata.labels", value, problem))


def _check_annotations(annotations: Any, found: list[FieldError]) -> None:
    size = 0
    for key, value in (annotations or {}).items():
        size += len(key) + len(value)
        problem = qualified_name_problem(key.lower())
        if problem:
            found.append(errors.field_invalid("metadata.annotations", key, problem))
    if size > _MAX_ANNOTATIONS:
        text = f"Too long: may not be more than {_MAX_ANNOTATIONS} bytes"
        found.append(errors.FieldError("metadata.annotations", errors.TOO_LONG, text))


def _check_owners(owners: Any, found: list[FieldError]) -> None:
    controllers = []
    for owner in owners or ():
        for name in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(name):
                text = "version must not be empty" if name == "apiVersion" else "must not be empty"
                found.append(errors.field_invalid(f"metadata.ownerReferences.{name}", "", text))
        if owner.get("controller"):
            controllers.append(f"{owner.get('kind')}/{owner.get('name')}")
    if len(controllers) > 1:
        text = (
            'Only one reference can have Controller set to true. Found "true" in references for '
            + " and ".join(map(str, controllers))
        )
        found.append(errors.field_invalid("metadata.ownerReferences", None, text))

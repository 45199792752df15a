"""The rules of a write: decode, default, prepare, validate, admit, then commit.

The order is that of the Kubernetes API server's registry. `dry_run` goes all the way but for the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from springtide_local.api import (
    admission,
    builtin,
    default_roles,
    definitions,
    errors,
    given,
    managed,
    meta,
    rights,
    schema,
)
from springtide_local.api.cel.evaluation import validate_rules
from springtide_local.api.collection import Stored
from springtide_local.api.errors import FieldError
from springtide_local.api.object_store import ObjectStore
from springtide_local.api.objects import clone, timestamp
from springtide_local.api.resources import ResourceType
from springtide_local.clock import parse_timestamp
from springtide_local.ports import Object

_BOUND = ("Succeeded", "Failed")
# What a custom resource's rules are not run after: they rely on types, and cost as much as there is.
_BLOCKING = (errors.TYPE_INVALID, errors.REQUIRED, errors.NOT_SUPPORTED, errors.TOO_LONG, errors.TOO_MANY)
_UNCHECKED = (
    "some validation rules were not checked because the object was invalid; correct the existing errors to"
    " complete validation"
)
_NAMESPACES = ("default", "kube-system", "kube-node-lease", "kube-public")

LOCAL = "springtide-local"
"""Manager of the fields that components in this process write."""
_COLLECTOR = "kube-controller-manager"


@dataclass(slots=True)
class Options:
    """How a write was asked for. `warnings` collects what goes back in Warning headers.

    `guard` looks at (resource, object to be written, object as it was or None) last, and may refuse it.
    """

    manager: str
    subresource: str | None = None
    dry_run: bool = False
    field_validation: str = "Ignore"
    in_patch: bool = False
    warnings: list[str] = field(default_factory=list)
    guard: Callable[[ResourceType, Object, Object | None], None] | None = None


@dataclass(slots=True)
class Deletion:
    grace: int | None = None
    uid: str | None = None
    resource_version: str | None = None
    orphan: bool = False


def decode(resource: ResourceType, obj: Object, options: Options, accepted: Object | None = None) -> None:
    """Bring an object into the shape of its schema, in place: types of metadata, unknown fields, defaults.

    Args:
        resource: type of the object.
        obj: as it came.
        options: of the write; gets warnings of unknown fields.
        accepted: the object as it is stored, where it is: what did not change is not looked at again.

    Raises:
        ApiError: 400: it cannot be decoded, or, with strict validation, has unknown fields.
    """
    given = (obj.get("apiVersion") or resource.api_version, obj.get("kind") or resource.kind)
    if given[0] != resource.api_version:
        raise errors.bad_request(
            f"the API version in the data ({given[0]}) does not match the expected API version"
            f" ({resource.api_version})"
        )
    if given[1] != resource.kind:
        _refuse_kind(resource, obj, str(given[1]))
    obj["apiVersion"], obj["kind"] = given
    if obj.get("metadata") is None:
        obj["metadata"] = {}
    check_decodable(resource, obj, accepted)
    unknown: list[str] = []
    node = resource.node
    schema.prune(builtin.node(builtin.OBJECT_META), obj["metadata"], "metadata", unknown, drop_nulls=True)
    if node is not None:
        schema.prune(node, obj, "", unknown, drop_nulls=not resource.custom, root=True)
        if resource.custom:
            schema.apply_defaults(node, obj)
    if unknown:
        _report_unknown(resource, unknown, options)
    resource.rules.default(obj)


def _refuse_kind(resource: ResourceType, obj: Object, kind: str) -> NoReturn:
    """Raise ApiError for an object of another kind: 422 where definitions make kinds, 400 where code does."""
    if resource.custom:
        found = [errors.field_invalid("kind", kind, f"must be {resource.kind}")]
        name = (obj.get("metadata") or {}).get("name") or ""
        raise errors.invalid(resource.group, kind, str(name), found)
    raise errors.bad_request(
        f'{kind} in version "{resource.version}" cannot be handled as a {resource.kind}: no kind "{kind}" is'
        f' registered for version "{resource.api_version}" in scheme "pkg/api/legacyscheme/scheme.go:30"'
    )


def _cannot_handle(resource: ResourceType, why: str) -> str:
    return f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: {why}'


def check_decodable(resource: ResourceType, obj: Object, accepted: Object | None = None) -> None:
    """Refuse an object with a JSON type that is refused as a whole, before validation.

    Args:
        resource: type of the object.
        obj: as it came.
        accepted: the object as it is stored, where it is: what did not change is not looked at again.

    Raises:
        ApiError: 400: the place is named.
    """
    problem = meta.undecodable(resource, obj, accepted)
    if problem is not None:
        raise errors.bad_request(_cannot_handle(resource, problem))


def _report_unknown(resource: ResourceType, unknown: list[str], options: Options) -> None:
    texts = [f'unknown field "{path}"' for path in unknown]
    if options.field_validation == "Warn":
        options.warnings.extend(texts)
    elif options.field_validation == "Strict":
        joined = "strict decoding error: " + ", ".join(texts)
        if options.in_patch:
            found = [FieldError("patch", errors.INVALID, f"Invalid value: {joined}")]
            raise errors.invalid("", "", "", found)
        raise errors.bad_request(_cannot_handle(resource, joined))


def create(
    store: ObjectStore,
    resource: ResourceType,
    obj: Object,
    namespace: str | None,
    options: Options,
    prepared: Callable[[Object], None] | None = None,
) -> Stored:
    """Create an object.

    Args:
        store: of all objects.
        resource: type of the object.
        obj: belongs to the store afterwards.
        namespace: of the object; None: it has none.
        options: of the write.
        prepared: sets managed fields instead of the usual tracking.

    Returns:
        The object as it is stored; with dry run, as it would be.

    Raises:
        ApiError: the write is refused.
    """
    decode(resource, obj, options)
    space = (namespace or "") if resource.namespaced else ""
    if resource.namespaced and not space:
        raise errors.bad_request("an empty namespace may not be set during creation")
    if obj["metadata"].get("resourceVersion"):
        raise errors.bad_request("resourceVersion should not be set on objects to be created")
    meta.prepare_create(resource, obj, space, store.now())
    if resource.custom and definitions.is_terminating(store, resource.storage):
        raise errors.method_not_allowed("create not allowed while custom resource definition is terminating")
    name = obj["metadata"]["name"] if obj["metadata"].get("name") else ""
    if resource.namespaced:
        _check_namespace(store, resource, name, space)
    if resource.custom and resource.has_status:
        obj.pop("status", None)
    found = meta.check(resource, obj)
    options.warnings.extend(meta.warnings(resource, obj))
    if any(error.path == "metadata.name" for error in found):
        raise resource.invalid(name or "", found)
    items = store.collection(resource.storage).items
    admission.mutate(store, resource, obj)
    if (space, name) not in items:
        resource.rules.prepare_create(store, obj)
    found += _check(resource, obj, None, None)
    if found:
        raise resource.invalid(name, found)
    if (space, name) in items:
        raise errors.already_exists(resource.group, resource.plural, name)
    if options.guard is not None:
        options.guard(resource, obj, None)
    admission.admit(store, resource, obj, options.warnings)
    if prepared is not None:
        prepared(obj)
    else:
        managed.track(None, obj, resource, options.manager, None, store.now())
    if options.dry_run:
        return Stored(obj)
    stored = store.commit(resource, "ADDED", obj, None)
    _created(store, resource, obj)
    return stored


def _check_namespace(store: ObjectStore, resource: ResourceType, name: str, namespace: str) -> None:
    found = store.peek("namespaces", namespace)
    if found is None:
        raise errors.not_found("", "namespaces", namespace)
    if found["metadata"].get("deletionTimestamp"):
        text = f"unable to create new content in namespace {namespace} because it is being terminated"
        cause = {
            "reason": "NamespaceTerminating",
            "message": f"namespace {namespace} is being terminated",
            "field": "metadata.namespace",
        }
        raise resource.forbidden(name, text, [cause])


def _check(
    resource: ResourceType, obj: Object, old: Object | None, subresource: str | None
) -> list[FieldError]:
    found: list[FieldError] = []
    node = resource.node
    if node is not None:
        # A definition's schema may have become stricter since; that of a built-in kind never does.
        schema.validate(node, obj, "", found, None if resource.custom else old)
        if not resource.custom:
            # The Go types write zeros for what a status lacks; only custom resources require fields there.
            found = [
                e
                for e in found
                if not (e.reason == errors.REQUIRED and e.path.startswith(("status", "metadata")))
            ]
        elif node.has_rules and any(error.reason in _BLOCKING for error in found):
            found.append(errors.FieldError("<nil>", errors.INVALID, f"Invalid value: null: {_UNCHECKED}"))
        else:
            validate_rules(node, obj, schema.MISSING if old is None else old, "", found)
    # A kind's own checks rely on the types and on the presence of what the schema requires.
    if not any(error.reason in (errors.TYPE_INVALID, errors.REQUIRED) for error in found):
        own = resource.rules.check(obj)
        if old is not None:
            own += resource.rules.check_update(obj, old, subresource)
        paths = {error.path for error in found}
        found += [error for error in own if error.path not in paths]
    return found


def update(
    store: ObjectStore,
    resource: ResourceType,
    name: str,
    namespace: str | None,
    obj: Object,
    options: Options,
    prepared: Callable[[Object], None] | None = None,
    demand_version: bool = False,
) -> Stored:
    """Replace an object, or the part that `options.subresource` names; nothing is written when nothing
    changed.

    Args:
        store: of all objects.
        resource: type of the object.
        name: of the object.
        namespace: of the object; None: it has none.
        obj: belongs to the store afterwards.
        options: of the write.
        prepared: sets managed fields instead of the usual tracking.
        demand_version: an update of a custom resource without a resourceVersion is refused, as for PUT.

    Returns:
        The object as it is stored; with dry run, as it would be.

    Raises:
        ApiError: 404: it is not there; 409: it has changed since; 422: something is wrong with it. Another
            code: a policy refuses it.
    """
    decode(resource, obj, options, store.peek(resource.storage, name, namespace))
    stored = store.get_stored(resource, name, namespace)
    old = stored.object
    _check_preconditions(resource, obj, old, name, namespace, demand_version, options.in_patch)
    if options.subresource == "status":
        obj = _with_status(resource, old, obj)
    elif resource.has_status and not options.subresource:
        _keep_status(old, obj)
    meta.prepare_update(obj, old)
    resource.rules.prepare_update(store, obj, old, options.subresource)
    found = meta.check(resource, obj) + meta.check_update(obj, old)
    options.warnings.extend(meta.warnings(resource, obj))
    found += _check(resource, obj, old, options.subresource)
    if found:
        raise resource.invalid(name, found)
    if options.guard is not None:
        options.guard(resource, obj, old)
    if resource.generation and _spec_changed(resource, obj, old):
        obj["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
    obj["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
    if prepared is not None:
        prepared(obj)
    elif obj != old:
        managed.track(old, obj, resource, options.manager, options.subresource, store.now())
    if obj == old:
        return stored
    if options.dry_run:
        return Stored(obj)
    if obj["metadata"].get("deletionTimestamp") and _may_go(resource, obj):
        removed = store.commit(resource, "DELETED", obj, stored)
        _deleted(store, resource, obj)
        return removed
    made = store.commit(resource, "MODIFIED", obj, stored)
    if resource.storage == definitions.STORAGE:
        definitions.serve(store, obj)
    return made


def _other_uid(asked: str, old: Object) -> str:
    return f"Precondition failed: UID in precondition: {asked}, UID in object meta: {old['metadata']['uid']}"


def _check_preconditions(
    resource: ResourceType,
    obj: Object,
    old: Object,
    name: str,
    namespace: str | None,
    demand_version: bool,
    in_patch: bool,
) -> None:
    given = obj["metadata"]
    if given.get("name") not in (None, "", name):
        raise errors.bad_request(
            f"the name of the object ({given['name']}) does not match the name on the URL ({name})"
        )
    if resource.namespaced and given.get("namespace") not in (None, "", namespace):
        raise errors.bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    if given.get("uid") and given["uid"] != old["metadata"]["uid"]:
        if in_patch:  # only what replaces an object may name the one that it means
            text = "field is immutable"
            raise resource.invalid(name, [errors.field_invalid("metadata.uid", given["uid"], text)])
        why = _other_uid(given["uid"], old)
        raise errors.conflict(resource.group, resource.plural, name, why)
    version = given.get("resourceVersion")
    if version and version != old["metadata"]["resourceVersion"]:
        raise errors.modified(resource.group, resource.plural, name)
    if not version and demand_version and not resource.unconditional_update:
        text = "Invalid value: 0x0: must be specified for an update"
        raise resource.invalid(name, [FieldError("metadata.resourceVersion", errors.INVALID, text)])


def _with_status(resource: ResourceType, old: Object, obj: Object) -> Object:
    made = clone({name: value for name, value in old.items() if name != "status"})
    if "status" in obj:
        made["status"] = obj["status"]
    if "managedFields" in obj["metadata"]:
        made["metadata"]["managedFields"] = obj["metadata"]["managedFields"]
    if resource.storage in ("pods", "nodes"):
        for name in ("labels", "annotations"):
            if name in obj["metadata"]:
                made["metadata"][name] = obj["metadata"][name]
    return made


def _keep_status(old: Object, obj: Object) -> None:
    if "status" in old:
        obj["status"] = clone(old["status"])
    else:
        obj.pop("status", None)


def _spec_changed(resource: ResourceType, obj: Object, old: Object) -> bool:
    ignored = {"metadata", "apiVersion", "kind"}
    if resource.has_status or not resource.custom:
        ignored.add("status")
    names = {*obj, *old} - ignored
    return any(obj.get(name) != old.get(name) for name in names)


def _may_go(resource: ResourceType, obj: Object) -> bool:
    """Whether a terminating object has nothing left that holds it."""
    if obj["metadata"].get("finalizers"):
        return False
    if resource.storage == "namespaces":
        return not obj.get("spec", {}).get("finalizers")
    return not obj["metadata"].get("deletionGracePeriodSeconds")


def delete(
    store: ObjectStore,
    resource: ResourceType,
    name: str,
    namespace: str | None,
    request: Deletion,
    options: Options,
) -> Stored:
    """Remove the object, or mark it: for its finalizers, for the grace of a bound pod, for a namespace's
    contents.

    Args:
        store: of all objects.
        resource: type of the object.
        name: of the object.
        namespace: of the object; None: it has none.
        request: preconditions, grace, and what becomes of dependents.
        options: of the write.

    Returns:
        The object's last state.

    Raises:
        ApiError: 403: it may never be deleted; 404: it is not there; 409: a precondition fails.
    """
    stored = store.get_stored(resource, name, namespace)
    old = stored.object
    before = old["metadata"]
    if request.uid and request.uid != before["uid"]:
        why = (
            f"the UID in the precondition ({request.uid}) does not match the UID in record ({before['uid']})."
            " The object might have been deleted and then recreated"
        )
        raise errors.conflict(resource.group, resource.kind, name, why)
    if request.resource_version and request.resource_version != before["resourceVersion"]:
        why = (
            f"the ResourceVersion in the precondition ({request.resource_version}) does not match the"
            f" ResourceVersion in record ({before['resourceVersion']}). The object might have been modified"
        )
        raise errors.conflict(resource.group, resource.kind, name, why)
    if resource.storage == "namespaces" and name in _NAMESPACES[:3]:
        raise resource.forbidden(name, "this namespace may not be deleted")
    if request.orphan and not options.dry_run:
        _orphan_dependents(store, before["uid"])
        stored = store.get_stored(resource, name, namespace)
        old = stored.object
    obj = clone(old)
    if resource.storage == definitions.STORAGE and not options.dry_run:
        definitions.hold(obj)
    grace = _grace(resource, obj, request.grace)
    held = bool(obj["metadata"].get("finalizers")) or resource.storage == "namespaces"
    if not held and not grace:
        if options.dry_run:
            return stored
        obj["metadata"].setdefault("deletionTimestamp", timestamp(store.now()))
        obj["metadata"]["deletionGracePeriodSeconds"] = 0
        removed = store.commit(resource, "DELETED", obj, stored)
        _deleted(store, resource, obj)
        return removed
    began = store.now()
    if before.get("deletionTimestamp"):
        # A later deletion can only shorten the grace, which counts from the first one.
        former = before.get("deletionGracePeriodSeconds") or 0
        if request.grace is None or grace >= former:
            return stored
        began = (parse_timestamp(before["deletionTimestamp"]) or began) - former
    obj["metadata"]["deletionTimestamp"] = timestamp(began + grace)
    obj["metadata"]["deletionGracePeriodSeconds"] = grace
    if obj["metadata"].get("generation"):
        obj["metadata"]["generation"] += 1
    if resource.storage == "namespaces":
        obj["metadata"].pop("deletionGracePeriodSeconds")
        obj["status"] = {**obj.get("status", {}), "phase": "Terminating"}
    if options.dry_run:
        return Stored(obj)
    return store.commit(resource, "MODIFIED", obj, stored)


def _orphan_dependents(store: ObjectStore, uid: str) -> None:
    """Take the owner `uid` out of every object that names it (propagationPolicy Orphan)."""
    for storage in store.registry.storages():
        resource = store.registry.stored(storage)
        for key, stored in list(store.collection(storage).items.items()):
            if uid in [owner["uid"] for owner in stored.object["metadata"].get("ownerReferences") or ()]:
                obj = clone(stored.object)
                owners = [owner for owner in obj["metadata"]["ownerReferences"] if owner["uid"] != uid]
                obj["metadata"]["ownerReferences"] = owners
                update(store, resource, key[1], key[0] or None, obj, Options(manager=_COLLECTOR))


def _grace(resource: ResourceType, obj: Object, asked: int | None) -> int:
    """Seconds a deleted object stays: only bound, running pods get any."""
    if resource.storage != "pods":
        return 0
    if not obj["spec"].get("nodeName") or obj.get("status", {}).get("phase") in _BOUND:
        return 0
    if asked is not None:
        return max(asked, 0)
    value: Any = obj["spec"].get("terminationGracePeriodSeconds", 30)
    return int(value)


def _created(store: ObjectStore, resource: ResourceType, obj: Object) -> None:
    if resource.storage == "namespaces":
        provide(store, obj["metadata"]["name"])
    elif resource.storage == definitions.STORAGE:
        definitions.serve(store, obj)


def _deleted(store: ObjectStore, resource: ResourceType, obj: Object) -> None:
    if resource.storage == definitions.STORAGE:
        definitions.withdraw(store, obj)


def provide(store: ObjectStore, namespace: str) -> None:
    """Make what every namespace is given where it is missing.

    Args:
        store: of all objects.
        namespace: its name.

    Raises:
        ApiError: a quota of the namespace is full.
    """
    for storage, obj in given.missing(store, namespace):
        resource, name = store.registry.stored(storage), obj["metadata"]["name"]
        if store.peek(storage, name, namespace) is None:
            create(store, resource, obj, namespace, Options(manager=LOCAL))
        else:
            _change(store, resource, name, namespace, {"data": obj["data"]})


def aggregate_roles(store: ObjectStore) -> bool:
    """Write the rules of cluster roles that aggregate others; return whether any changed.

    A role that is selected may be such a role itself, so call it again then.
    """
    changed = rights.aggregated(store)
    for name, rules in changed.items():
        _change(store, store.registry.stored(rights.ROLES[1]), name, None, {"rules": rules})
    return bool(changed)


def _change(
    store: ObjectStore, resource: ResourceType, name: str, namespace: str | None, fields: Object
) -> None:
    """Replace some of the fields of an object."""
    obj = {**clone(store.get_stored(resource, name, namespace).object), **fields}
    update(store, resource, name, namespace, obj, Options(manager=LOCAL))


def bootstrap(store: ObjectStore) -> None:
    """Make the objects that every cluster has."""
    namespaces = store.registry.stored("namespaces")
    options = Options("kube-apiserver")
    for name in _NAMESPACES:
        create(store, namespaces, {"metadata": {"name": name}}, None, options)
    classes = store.registry.stored("priorityclasses.scheduling.k8s.io")
    for name, value in (("system-cluster-critical", 2_000_000_000), ("system-node-critical", 2_000_001_000)):
        create(store, classes, {"metadata": {"name": name}, "value": value}, None, options)
    for role in default_roles.cluster_roles():
        create(store, store.registry.stored(rights.ROLES[1]), role, None, options)
    for binding in default_roles.cluster_role_bindings():
        create(store, store.registry.stored(rights.BINDINGS[1]), binding, None, options)
    while aggregate_roles(store):
        pass

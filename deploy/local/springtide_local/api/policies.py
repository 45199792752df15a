"""ValidatingAdmissionPolicies: what they have against a request, in the API server's words.

A policy is in force where a binding names it. Requests that come over HTTP are judged, as the last thing
before they are carried out; components of this process, which write into the store directly, are not.
Policies themselves are never judged, so that none can lock everybody out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from celpy import celtypes

from springtide_local.api import errors
from springtide_local.api.auth import User
from springtide_local.api.cel.evaluation import RuleProblem, evaluate, to_cel
from springtide_local.api.kinds.admission_policies import GROUP
from springtide_local.api.object_store import ObjectStore
from springtide_local.api.resources import ResourceType
from springtide_local.api.selectors import selector_of
from springtide_local.ports import ApiError, Object

POLICIES = errors.qualified(GROUP, "validatingadmissionpolicies")
BINDINGS = errors.qualified(GROUP, "validatingadmissionpolicybindings")
_CODES = {"Unauthorized": 401, "Forbidden": 403, "RequestEntityTooLarge": 413}
_INVALID = 422  # the code of every other reason


@dataclass(frozen=True)
class Attempt:
    """A write that somebody asks for.

    Attributes:
        user: who asks.
        operation: CREATE, UPDATE or DELETE.
        resource: type of the object.
        subresource: that is written; "" for the object itself.
        obj: as it is to be stored; None for a deletion.
        old: as it is stored; None for a new object.
        dry_run: nothing is to be stored.
    """

    user: User
    operation: str
    resource: ResourceType
    subresource: str
    obj: Object | None
    old: Object | None
    dry_run: bool = False

    @property
    def metadata(self) -> Object:
        """The metadata of the object, or of the one that is deleted."""
        meta: Object = (self.obj or self.old or {}).get("metadata") or {}
        return meta


class _Denied(Exception):
    """A validation does not hold, or cannot be evaluated."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or "Invalid"


def judge(store: ObjectStore, attempt: Attempt, warnings: list[str]) -> None:
    """Ask every policy in force about a write.

    Args:
        store: of all objects.
        attempt: the write.
        warnings: gets what bindings with the action Warn say.

    Raises:
        ApiError: one of them denies it.
    """
    if attempt.resource.group == GROUP:
        return
    policies = {one["metadata"]["name"]: one for one in store.scan(POLICIES)}
    if not policies:
        return
    namespace = store.peek("namespaces", str(attempt.metadata.get("namespace") or ""))
    if attempt.resource.storage == "namespaces":
        namespace = attempt.obj or attempt.old
    for binding in sorted(store.scan(BINDINGS), key=lambda one: str(one["metadata"]["name"])):
        policy = policies.get(binding["spec"]["policyName"])
        if policy is None or not _matches(policy["spec"].get("matchConstraints"), attempt, namespace):
            continue
        if not _matches(binding["spec"].get("matchResources"), attempt, namespace):
            continue
        actions = binding["spec"]["validationActions"]
        for denied in _denials(store, policy, binding, attempt, namespace):
            where = f"'{policy['metadata']['name']}' with binding '{binding['metadata']['name']}'"
            if "Deny" in actions:
                raise _refusal(attempt, f"ValidatingAdmissionPolicy {where} denied request: {denied}", denied)
            if "Warn" in actions:
                warnings.append(f"Validation failed for ValidatingAdmissionPolicy {where}: {denied}")


def _refusal(attempt: Attempt, message: str, denied: _Denied) -> ApiError:
    name = str(attempt.metadata.get("name") or "")
    error = attempt.resource.forbidden(name, message, [{"message": message}])
    return ApiError(_CODES.get(denied.reason, _INVALID), denied.reason, error.message, error.details)


def _matches(match: Object | None, attempt: Attempt, namespace: Object | None) -> bool:
    """Return whether a policy or a binding is about a request; one that names no resources is about all."""
    if not match:
        return True
    rules = match.get("resourceRules") or ()
    if rules and not any(_is_about(rule, attempt) for rule in rules):
        return False
    if any(_is_about(rule, attempt) for rule in match.get("excludeResourceRules") or ()):
        return False
    if attempt.resource.namespaced or attempt.resource.storage == "namespaces":
        labels = ((namespace or {}).get("metadata") or {}).get("labels")
        if not selector_of(match.get("namespaceSelector") or {}).matches(labels):
            return False
    chosen = selector_of(match.get("objectSelector") or {})
    objects = [one for one in (attempt.obj, attempt.old) if one is not None]
    return any(chosen.matches(one["metadata"].get("labels")) for one in objects)


def _is_about(rule: Object, attempt: Attempt) -> bool:
    resource = attempt.resource
    whole = f"{resource.plural}/{attempt.subresource}" if attempt.subresource else resource.plural
    names = {whole, f"{resource.plural}/*", "*/*"} | (
        {f"*/{attempt.subresource}"} if attempt.subresource else {"*"}
    )
    scope = rule.get("scope") or "*"
    return (
        _has(rule.get("apiGroups"), resource.group)
        and _has(rule.get("apiVersions"), resource.version)
        and _has(rule.get("operations"), attempt.operation)
        and any(one in names for one in rule.get("resources") or ())
        and scope in ("*", "Namespaced" if resource.namespaced else "Cluster")
        and (not rule.get("resourceNames") or attempt.metadata.get("name") in rule["resourceNames"])
    )


def _has(values: Any, wanted: str) -> bool:
    return "*" in (values or ()) or wanted in (values or ())


def _denials(
    store: ObjectStore, policy: Object, binding: Object, attempt: Attempt, namespace: Object | None
) -> Iterator[_Denied]:
    """Yield what a policy has against a request, with each of the objects that parametrize it."""
    spec = policy["spec"]
    lenient = spec.get("failurePolicy") == "Ignore"
    try:
        parameters = _parameters(store, policy, binding, attempt)
    except _Denied as denied:
        if not lenient:
            yield denied
        return
    for parameter in parameters:
        known = _variables(attempt, namespace, parameter)
        if not _conditions_hold(spec, known, lenient):
            continue
        known["variables"] = _composed(spec, known)
        for validation in spec.get("validations") or ():
            try:
                _validate(validation, known)
            except _Denied as denied:
                if not (lenient and denied.reason == _BROKEN):
                    yield denied if denied.reason != _BROKEN else _Denied(str(denied))


_BROKEN = "broken"


def _validate(validation: Object, known: dict[str, Any]) -> None:
    text = validation["expression"]
    try:
        holds = evaluate(text, known)
    except RuleProblem as problem:
        raise _Denied(f"expression '{text}' resulted in error: {problem}", _BROKEN) from None
    if holds:
        return
    message = ""
    if validation.get("messageExpression"):
        try:
            message = str(evaluate(validation["messageExpression"], known)).strip()
        except RuleProblem:
            message = ""
    message = message or str(validation.get("message") or f"failed expression: {text.strip()}")
    raise _Denied(message, validation.get("reason") or "")


def _conditions_hold(spec: Object, known: dict[str, Any], lenient: bool) -> bool:
    for condition in spec.get("matchConditions") or ():
        try:
            if not evaluate(condition["expression"], known):
                return False
        except RuleProblem:
            # A condition that fails decides nothing: with failurePolicy Fail the validations are asked.
            if lenient:
                return False
    return True


def _composed(spec: Object, known: dict[str, Any]) -> Any:
    """Return the policy's variables, each of which sees those before it. One that fails is absent, so that a
    validation fails which uses it.
    """
    made: dict[Any, Any] = {}
    for variable in spec.get("variables") or ():
        try:
            value = evaluate(variable["expression"], {**known, "variables": celtypes.MapType(made)})
        except RuleProblem:
            continue
        made[celtypes.StringType(variable["name"])] = value
    return celtypes.MapType(made)


def _parameters(store: ObjectStore, policy: Object, binding: Object, attempt: Attempt) -> list[Object | None]:
    """Return the objects that parametrize a policy; None for one without parameters. Raise _Denied."""
    kind, reference = policy["spec"].get("paramKind"), binding["spec"].get("paramRef")
    if not kind or not reference:
        return [None]
    resource = store.registry.of_kind(str(kind.get("apiVersion")), str(kind.get("kind")))
    if resource is None:
        raise _Denied(f"failed to find resource referenced by paramKind: '{kind.get('kind')}'")
    namespace = reference.get("namespace") or attempt.metadata.get("namespace")
    candidates = store.scan(resource.storage, str(namespace) if resource.namespaced else None)
    if reference.get("name"):
        found = [one for one in candidates if one["metadata"]["name"] == reference["name"]]
    else:
        chosen = selector_of(reference.get("selector"))
        found = [one for one in candidates if chosen.matches(one["metadata"].get("labels"))]
    if not found and reference["parameterNotFoundAction"] == "Deny":
        raise _Denied("no params found for policy binding with `Deny` parameterNotFoundAction")
    return list(found)


def _variables(attempt: Attempt, namespace: Object | None, parameter: Object | None) -> dict[str, Any]:
    node = None if attempt.subresource == "scale" else attempt.resource.node
    user, resource = attempt.user, attempt.resource
    of_kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    request = {
        "uid": "",
        "kind": of_kind,
        "resource": {"group": resource.group, "version": resource.version, "resource": resource.plural},
        "subResource": attempt.subresource,
        "name": str(attempt.metadata.get("name") or ""),
        "namespace": str(attempt.metadata.get("namespace") or ""),
        "operation": attempt.operation,
        "userInfo": {"username": user.name, "uid": user.uid, "groups": list(user.groups)},
        "dryRun": attempt.dry_run,
    }
    return {
        "object": None if attempt.obj is None else to_cel(attempt.obj, node),
        "oldObject": None if attempt.old is None else to_cel(attempt.old, node),
        "request": to_cel(request, None),
        "namespaceObject": None if namespace is None else to_cel(namespace, None),
        "params": None if parameter is None else to_cel(parameter, None),
    }

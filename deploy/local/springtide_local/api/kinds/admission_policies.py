"""ValidatingAdmissionPolicies and their bindings, as they are written; `policies` asks them of requests."""

from __future__ import annotations

from springtide_local.api import errors
from springtide_local.api.cel.checking import check as check_expression
from springtide_local.api.cel.syntax import CelError
from springtide_local.api.cel.types import BOOL, DYN, STRING, Declared, Type
from springtide_local.api.errors import FieldError
from springtide_local.api.kinds.base import Kind
from springtide_local.ports import Object

GROUP = "admissionregistration.k8s.io"
REASONS = ("Unauthorized", "Forbidden", "Invalid", "RequestEntityTooLarge")
_FAILURE_POLICIES = ("Ignore", "Fail")
_ACTIONS = ("Audit", "Deny", "Warn")
_OPERATIONS = ("*", "CONNECT", "CREATE", "DELETE", "UPDATE")
_NAMES = ("object", "oldObject", "request", "namespaceObject", "variables", "params")


class Policies(Kind):
    """Checks expressions when a policy is written, as far as they say without an object: they must parse,
    know their variables and be of the right type.
    """

    def default(self, obj: Object) -> None:
        spec = obj.get("spec")
        if not isinstance(spec, dict):
            return
        spec.setdefault("failurePolicy", "Fail")
        if isinstance(spec.get("matchConstraints"), dict):
            _default_match(spec["matchConstraints"])

    def check(self, obj: Object) -> list[FieldError]:
        spec = obj.get("spec") or {}
        found: list[FieldError] = []
        if spec.get("failurePolicy") not in _FAILURE_POLICIES:
            given = spec.get("failurePolicy")
            found.append(errors.field_unsupported("spec.failurePolicy", given, _FAILURE_POLICIES))
        found += _match_problems(spec.get("matchConstraints"), "spec.matchConstraints", required=True)
        if not spec.get("validations") and not spec.get("auditAnnotations"):
            text = "validations or auditAnnotations must contain at least one item"
            found.append(errors.field_required("spec.validations", text))
        known: list[str] = []
        for index, variable in enumerate(spec.get("variables") or ()):
            path = f"spec.variables[{index}]"
            if not variable.get("name"):
                found.append(errors.field_required(f"{path}.name", "name is not specified"))
            elif variable["name"] in known:
                found.append(errors.field_duplicate(f"{path}.name", variable["name"]))
            found += _expression_problems(variable.get("expression"), f"{path}.expression", None)
            known.append(str(variable.get("name")))
        for index, condition in enumerate(spec.get("matchConditions") or ()):
            path = f"spec.matchConditions[{index}]"
            found += _expression_problems(condition.get("expression"), f"{path}.expression", BOOL)
        for index, validation in enumerate(spec.get("validations") or ()):
            path = f"spec.validations[{index}]"
            found += _expression_problems(validation.get("expression"), f"{path}.expression", BOOL)
            if validation.get("messageExpression"):
                text = validation["messageExpression"]
                found += _expression_problems(text, f"{path}.messageExpression", STRING)
            reason = validation.get("reason")
            if reason is not None and reason not in REASONS:
                found.append(errors.field_unsupported(f"{path}.reason", reason, REASONS))
        return found


class Bindings(Kind):
    """Checks what a binding says of the policy that it puts into force."""

    def default(self, obj: Object) -> None:
        spec = obj.get("spec")
        if not isinstance(spec, dict):
            return
        if isinstance(spec.get("matchResources"), dict):
            _default_match(spec["matchResources"])

    def check(self, obj: Object) -> list[FieldError]:
        spec = obj.get("spec") or {}
        found: list[FieldError] = []
        if not spec.get("policyName"):
            found.append(errors.field_required("spec.policyName"))
        actions = spec.get("validationActions") or ()
        if not actions:
            text = "at least one validation action is required"
            found.append(errors.field_required("spec.validationActions", text))
        for index, action in enumerate(actions):
            if action not in _ACTIONS:
                found.append(errors.field_unsupported(f"spec.validationActions[{index}]", action, _ACTIONS))
        if {"Deny", "Warn"} <= set(actions):
            text = (
                "must not contain both Deny and Warn (repeating the same validation failure information in"
                " the API response and headers serves no purpose)"
            )
            found.append(errors.field_invalid("spec.validationActions", list(actions), text))
        if spec.get("matchResources"):
            found += _match_problems(spec["matchResources"], "spec.matchResources", required=False)
        reference = spec.get("paramRef")
        if reference is not None:
            if bool(reference.get("name")) == (reference.get("selector") is not None):
                text = "one of name or selector must be specified"
                found.append(errors.field_required("spec.paramRef.name", text))
            if reference.get("parameterNotFoundAction") not in ("Allow", "Deny"):
                given = reference.get("parameterNotFoundAction")
                where = "spec.paramRef.parameterNotFoundAction"
                found.append(errors.field_unsupported(where, given, ("Allow", "Deny")))
        return found


def _default_match(match: Object) -> None:
    match.setdefault("matchPolicy", "Equivalent")
    match.setdefault("namespaceSelector", {})
    match.setdefault("objectSelector", {})
    for rule in match.get("resourceRules") or ():
        if isinstance(rule, dict):
            rule.setdefault("scope", "*")


def _match_problems(match: Object | None, path: str, required: bool) -> list[FieldError]:
    rules = (match or {}).get("resourceRules") or ()
    found: list[FieldError] = []
    if required and not rules:
        found.append(errors.field_required(f"{path}.resourceRules"))
    for index, rule in enumerate(rules):
        where = f"{path}.resourceRules[{index}]"
        for name in ("apiGroups", "apiVersions", "operations", "resources"):
            if not rule.get(name):
                found.append(errors.field_required(f"{where}.{name}"))
        for place, operation in enumerate(rule.get("operations") or ()):
            if operation not in _OPERATIONS:
                there = f"{where}.operations[{place}]"
                found.append(errors.field_unsupported(there, operation, _OPERATIONS))
    return found


def _expression_problems(text: str | None, path: str, wanted: Type | None) -> list[FieldError]:
    if not text or not text.strip():
        return [errors.field_required(path, "expression is not specified")]
    try:
        checked = check_expression(text, {name: Declared(DYN) for name in _NAMES})
    except CelError as problem:
        return [errors.field_invalid(path, text, f"compilation failed: {problem}")]
    if wanted is not None and checked.type not in (wanted, DYN):
        return [errors.field_invalid(path, text, f"must evaluate to {wanted.kind}")]
    return []

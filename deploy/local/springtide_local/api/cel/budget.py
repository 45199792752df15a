"""The rules of a CRD's schema: whether they compile, and whether the API server would think them too dear.

A rule's cost counts as often as the place of the rule can occur in one object: the product of the limits of
the lists and maps above it, or, where one of them has no limit, as often as the smallest such value fits into
a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from springtide_local.api import errors
from springtide_local.api.cel.checking import Checked, check
from springtide_local.api.cel.cost import DEFINITION_LIMIT, EXPRESSION_LIMIT, LARGEST, cardinality, estimate
from springtide_local.api.cel.library import can_be_evaluated
from springtide_local.api.cel.syntax import CelError
from springtide_local.api.cel.types import BOOL, STRING, Declared, Type, declared, escape
from springtide_local.api.errors import FieldError
from springtide_local.ports import Object

_HINT = (
    "(try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and"
    " strings are declared)"
)
_UNCORRELATED = "oldSelf cannot be used on the uncorrelatable portion of the schema within"
_SHOWN = 4


@dataclass(frozen=True)
class RuleCost:
    """Upper bound of the cost of one expression of a schema in one object."""

    path: str
    cost: int


@dataclass
class Findings:
    """Errors and costs of all rules below one schema."""

    errors: list[FieldError] = field(default_factory=list)
    costs: list[RuleCost] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The cost of all rules together."""
        return min(sum(each.cost for each in self.costs), LARGEST)


@dataclass(frozen=True)
class _Place:
    """Position of a schema within its definition.

    Attributes:
        path: For errors.
        times: How often it can occur in one object; None without a limit.
        what: Its CEL type, where one above it has rules.
        root: Whether it is that of the whole resource.
        uncorrelated: The topmost schema above whose parts cannot be found again in an earlier object.
    """

    path: str
    times: int | None = 1
    what: Declared | None = None
    root: bool = False
    uncorrelated: str | None = None


def inspect_rules(raw: Object, path: str) -> Findings:
    """Check and price all rules of a CRD's schema.

    Args:
        raw: The schema of a version, which is structural.
        path: Its path, for errors.

    Returns:
        The errors, and the cost of the rules.
    """
    findings = Findings()
    _inspect(raw, _Place(path, root=True), findings)
    if findings.total > DEFINITION_LIMIT:
        dearest = sorted(
            (each for each in findings.costs if each.cost >= DEFINITION_LIMIT // 100),
            key=lambda each: -each.cost,
        )
        text = "contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema"
        findings.errors += [errors.field_forbidden(each.path, text) for each in dearest[:_SHOWN]]
        what = "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema"
        findings.errors.append(errors.field_forbidden(path, _beyond(what, findings.total, DEFINITION_LIMIT)))
    return findings


def _inspect(raw: Object, place: _Place, findings: Findings) -> None:
    rules = raw.get("x-kubernetes-validations") or []
    what = place.what
    embedded = bool(raw.get("x-kubernetes-embedded-resource"))
    if rules and what is None:
        what = declared(raw, place.root or embedded)
    for child, below in _children(raw, replace(place, what=what)):
        _inspect(child, below, findings)
    if rules and what is None:
        text = (
            "Internal error: internal error: failed to construct type information for"
            " x-kubernetes-validations rules: unable to convert structural schema to CEL declarations"
        )
        where = f"{place.path}.x-kubernetes-validations"
        findings.errors.append(FieldError(where, "InternalError", text))
        return
    for index, rule in enumerate(rules):
        where = f"{place.path}.x-kubernetes-validations[{index}]"
        _rule(rule, where, replace(place, what=what), findings)


def _children(raw: Object, place: _Place) -> list[tuple[Object, _Place]]:
    """Return the schemas below with their places."""
    result = []
    what = place.what
    additional = raw.get("additionalProperties")
    times = _times(raw, place.times)
    if isinstance(additional, dict):
        below = replace(
            place,
            path=f"{place.path}.additionalProperties",
            times=times,
            what=what.element if what else None,
            root=False,
        )
        result.append((additional, below))
    for name, child in (raw.get("properties") or {}).items():
        path = f"{place.path}.properties[{name}]"
        below = _Place(path, times, _field(what, name), False, place.uncorrelated)
        result.append((child, below))
    if isinstance(raw.get("items"), dict):
        uncorrelated = place.uncorrelated
        if raw.get("x-kubernetes-list-type") != "map":
            uncorrelated = uncorrelated or place.path
        element = what.element if what else None
        result.append((raw["items"], _Place(f"{place.path}.items", times, element, False, uncorrelated)))
    return result


def _field(what: Declared | None, name: str) -> Declared | None:
    cel_name = escape(name)
    return what.fields.get(cel_name) if what is not None and cel_name is not None else None


def _times(raw: Object, times: int | None) -> int | None:
    """Return how often what is below a schema can occur, given how often the schema can."""
    most: int | None = 1
    if raw.get("type") == "array":
        most = raw.get("maxItems")
    elif raw.get("type") == "object" and "additionalProperties" in raw:
        most = raw.get("maxProperties")
    return None if most is None or times is None else min(times * max(most, 0), LARGEST)


def _rule(rule: Object, where: str, place: _Place, findings: Findings) -> None:
    what = place.what
    assert what is not None
    text = rule.get("rule") or ""
    variables = {"self": what, "oldSelf": what}
    checked = _compiled(rule, "rule", where, variables, findings)
    if checked is None:
        findings.costs.append(RuleCost(f"{where}.rule", 0))
        return
    times = place.times if place.times is not None else cardinality(what.least)
    cost = min(estimate(checked, what).high * times, LARGEST)
    _charge("rule", f"{where}.rule", cost, findings)
    if rule.get("messageExpression"):
        made = _compiled(rule, "messageExpression", where, variables, findings)
        if made is not None:
            most = estimate(made, what).high
            _charge("messageExpression", f"{where}.messageExpression", most, findings)
    if "oldSelf" in checked.names:
        if place.uncorrelated is not None:
            detail = f"{_UNCORRELATED} {place.uncorrelated}"
            findings.errors.append(errors.field_invalid(f"{where}.rule", text, detail))
        if rule.get("optionalOldSelf"):
            detail = "the embedded API server has no optionalOldSelf"
            findings.errors.append(errors.field_invalid(f"{where}.optionalOldSelf", True, detail))
    elif rule.get("optionalOldSelf") is not None:
        detail = "may not be set if oldSelf is not used in rule"
        findings.errors.append(
            errors.field_invalid(f"{where}.optionalOldSelf", rule["optionalOldSelf"], detail)
        )


def _charge(name: str, path: str, cost: int, findings: Findings) -> None:
    if cost > EXPRESSION_LIMIT:
        text = _beyond(f"estimated {name} cost", cost, EXPRESSION_LIMIT)
        findings.errors.append(errors.field_forbidden(path, text))
    findings.costs.append(RuleCost(path, cost))


def _beyond(what: str, cost: int, limit: int) -> str:
    factor = cost / limit
    if factor > 100:
        shown = "more than 100x"
    elif factor < 1.5:
        shown = f"{factor:f}x"
    else:
        shown = f"{factor:.1f}x"
    return f"{what} exceeds budget by factor of {shown} {_HINT}"


def _compiled(
    rule: Object, name: str, where: str, variables: Mapping[str, Declared], findings: Findings
) -> Checked | None:
    """Return an expression with its types; None, and an error among the findings, where it is wrong."""
    wanted: Type = BOOL if name == "rule" else STRING
    lead = "" if name == "rule" else "messageExpression "
    detail = ""
    try:
        checked = check(rule[name], variables)
    except CelError as problem:
        detail = f"{lead}compilation failed: {problem}"
    else:
        if checked.type != wanted:
            subject = "cel expression" if name == "rule" else "messageExpression"
            detail = f"{subject} must evaluate to a {wanted}"
        missing = sorted(each for each in checked.functions if not can_be_evaluated(each))
        if missing and not detail:
            detail = f"the embedded API server cannot evaluate {', '.join(missing)}(); Kubernetes can"
        if not detail:
            return checked
    findings.errors.append(errors.field_invalid(f"{where}.{name}", _shown(rule), detail))
    return None


def _shown(rule: Object) -> Object:
    """Return a rule the way the API server shows it in errors: with the names of its Go fields."""
    return {
        "Rule": rule.get("rule", ""),
        "Message": rule.get("message", ""),
        "MessageExpression": rule.get("messageExpression", ""),
        "Reason": rule.get("reason"),
        "FieldPath": rule.get("fieldPath", ""),
        "OptionalOldSelf": rule.get("optionalOldSelf"),
    }

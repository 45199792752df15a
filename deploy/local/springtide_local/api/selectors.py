"""Label and field selectors: text (or a LabelSelector object) in, predicates out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from springtide_local.api import errors
from springtide_local.api.objects import label_value_problem, lookup, qualified_name_problem
from springtide_local.ports import Object

_REQUIREMENT = re.compile(
    r"""\s*(?:
        (?P<absent>!)\s*(?P<absent_key>[^\s=!,()<>]+)
      | (?P<key>[^\s=!,()<>]+)\s*(?:
            (?P<set_op>in|notin)\s*\((?P<values>[^()]*)\)
          | (?P<op>==|=|!=|>|<)\s*(?P<value>[^\s=!,()<>]*)
        )?
    )\s*\Z""",
    re.VERBOSE,
)
_SPLIT = re.compile(r",(?![^()]*\))")

Labels = Mapping[str, str]
FieldGetter = Callable[[Object], str]


class Requirement(NamedTuple):
    key: str
    operator: str
    values: tuple[str, ...] = ()

    def matches(self, labels: Labels) -> bool:
        present = self.key in labels
        value = labels.get(self.key, "")
        match self.operator:
            case "In":
                return present and value in self.values
            case "NotIn":
                return not present or value not in self.values
            case "Exists":
                return present
            case "DoesNotExist":
                return not present
            case _:
                return present and _compares(value, self.operator, self.values[0])


class LabelSelector:
    """Requirements that must all hold; none at all matches everything."""

    def __init__(self, requirements: Sequence[Requirement] = (), nothing: bool = False) -> None:
        self.requirements = tuple(requirements)
        self._nothing = nothing

    def __bool__(self) -> bool:
        return bool(self.requirements) or self._nothing

    def matches(self, labels: Labels | None) -> bool:
        found = labels or {}
        return not self._nothing and all(requirement.matches(found) for requirement in self.requirements)


def parse_label_selector(text: str) -> LabelSelector:
    """Equality and set based requirements. Raise ApiError 400 for text that is none."""
    if not text.strip():
        return LabelSelector()
    return LabelSelector([_requirement(part, text) for part in _SPLIT.split(text)])


def selector_of(obj: Object | None) -> LabelSelector:
    """The LabelSelector object of a spec: None selects nothing, an empty one everything."""
    if obj is None:
        return LabelSelector(nothing=True)
    found = [Requirement(key, "In", (value,)) for key, value in (obj.get("matchLabels") or {}).items()]
    for expression in obj.get("matchExpressions") or ():
        found.append(
            Requirement(expression["key"], expression["operator"], tuple(expression.get("values") or ()))
        )
    return LabelSelector(found)


class FieldSelector:
    def __init__(self, terms: Sequence[tuple[str, bool, str]], getters: Mapping[str, FieldGetter]) -> None:
        self.terms = tuple(terms)
        self._checks = [(getters[name], equal, value) for name, equal, value in terms]

    def __bool__(self) -> bool:
        return bool(self.terms)

    def matches(self, obj: Object) -> bool:
        return all((getter(obj) == value) is equal for getter, equal, value in self._checks)

    def only(self, name: str) -> str | None:
        """The value that field `name` must have, if the selector says so."""
        for term, equal, value in self.terms:
            if term == name and equal:
                return value
        return None


def field(*path: str, empty: str = "") -> FieldGetter:
    def get(obj: Object) -> str:
        value = lookup(obj, *path)
        if value is None:
            return empty
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value)

    return get


COMMON_FIELDS: dict[str, FieldGetter] = {
    "metadata.name": field("metadata", "name"),
    "metadata.namespace": field("metadata", "namespace"),
}


def parse_field_selector(text: str, extra: Mapping[str, FieldGetter]) -> FieldSelector:
    """Read a field selector.

    Args:
        text: `a=b,c!=d`; "" selects all.
        extra: fields of the kind besides those that every kind has.

    Raises:
        ApiError: 400: it cannot be read, or the kind cannot be selected by a field.
    """
    getters = {**COMMON_FIELDS, **extra}
    terms: list[tuple[str, bool, str]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.match(r"([^=!]+)(==|=|!=)(.*)\Z", part)
        if match is None:
            raise errors.bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        name = match.group(1).strip()
        if name not in getters:
            raise errors.bad_request(f"field label not supported: {name}")
        terms.append((name, match.group(2) != "!=", match.group(3).strip()))
    return FieldSelector(terms, getters)


def _requirement(part: str, whole: str) -> Requirement:
    match = _REQUIREMENT.match(part)
    if match is None:
        raise errors.bad_request(f"unable to parse requirement: {whole!r}: can't understand {part.strip()!r}")
    if match["absent"]:
        made = Requirement(match["absent_key"], "DoesNotExist")
    elif match["set_op"]:
        values = tuple(value.strip() for value in match["values"].split(","))
        made = Requirement(match["key"], "In" if match["set_op"] == "in" else "NotIn", values)
    elif match["op"]:
        operator = {"!=": "NotIn", ">": "Gt", "<": "Lt"}.get(match["op"], "In")
        made = Requirement(match["key"], operator, (match["value"],))
    else:
        made = Requirement(match["key"], "Exists")
    _check(made)
    return made


def _check(requirement: Requirement) -> None:
    problem = qualified_name_problem(requirement.key)
    if problem:
        raise errors.bad_request(
            f"unable to parse requirement: <nil>: Invalid value: {errors.shown(requirement.key)}: {problem}"
        )
    for value in requirement.values:
        problem = label_value_problem(value)
        if problem:
            raise errors.bad_request(
                f"unable to parse requirement: values[0][{requirement.key}]: Invalid value: "
                f"{errors.shown(value)}: {problem}"
            )


def _compares(value: Any, operator: str, bound: str) -> bool:
    try:
        left, right = int(value), int(bound)
    except ValueError:
        return False
    return left > right if operator == "Gt" else left < right

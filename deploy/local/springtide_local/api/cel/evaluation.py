"""CEL rules of custom resources (`x-kubernetes-validations`), evaluated with the library cel-python.

A rule sees `self` and, where a value existed before at the same place, `oldSelf`; a rule that names `oldSelf`
is a transition rule and is skipped on creation. Values are typed by the schema, as in Kubernetes: a `number`
is a double even if it was written as `1`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import celpy
from celpy import celtypes
from celpy.evaluation import CELEvalError

from springtide_local.api import errors
from springtide_local.api.cel.functions import FUNCTIONS
from springtide_local.api.cel.types import RESERVED, escape
from springtide_local.api.errors import FieldError
from springtide_local.api.objects import parse_timestamp
from springtide_local.api.schema import MISSING, Node
from springtide_local.ports import Object

_LARGEST_REMEMBERED = 1 << 16
"""Characters of JSON, of a value and its former one together, up to which an answer is remembered."""

_REASONS = {
    "FieldValueInvalid": errors.INVALID,
    "FieldValueForbidden": errors.FORBIDDEN,
    "FieldValueRequired": errors.REQUIRED,
    "FieldValueDuplicate": errors.DUPLICATE,
}


class RuleProblem(Exception):
    """A rule could not be compiled or evaluated; the text says why."""


@functools.cache
def _environment() -> celpy.Environment:
    return celpy.Environment()


@functools.lru_cache(maxsize=4096)
def _program(rule: str) -> Any:
    environment = _environment()
    return environment.program(environment.compile(rule), functions=FUNCTIONS)


def evaluate(rule: str, variables: dict[str, Any]) -> Any:
    """Return the value of an expression.

    Args:
        rule: in CEL.
        variables: CEL values by name.

    Raises:
        RuleProblem: it cannot be parsed, or its evaluation fails.
    """
    try:
        return _program(rule).evaluate(variables)
    except celpy.CELParseError as problem:
        raise RuleProblem(f"Syntax error: {problem.args[0] if problem.args else problem}") from None
    except CELEvalError as problem:
        raise RuleProblem(_eval_text(problem)) from None
    except (TypeError, ValueError, KeyError, ArithmeticError) as problem:
        raise RuleProblem(str(problem)) from None


def _eval_text(problem: CELEvalError) -> str:
    return str(problem.args[0]) if problem.args else "evaluation failed"


def names_old_self(rule: str) -> bool:
    return re.search(r"\boldSelf\b", rule) is not None


def to_cel(value: Any, node: Node | None) -> Any:
    """Return a JSON value as a CEL value, typed by its schema.

    Args:
        value: decoded JSON.
        node: its schema; None: typed by JSON alone.
    """
    if isinstance(value, dict):
        made: dict[Any, Any] = {}
        for name, item in value.items():
            child = node.properties.get(name) if node is not None else None
            if child is not None:
                key = escape(name)
                if key is None or item is None:
                    continue
            else:
                key, child = name, node.additional if node is not None else None
            made[celtypes.StringType(key)] = to_cel(item, child)
            if name in RESERVED and key != name:
                made[celtypes.StringType(name)] = made[celtypes.StringType(key)]
        return celtypes.MapType(made)
    if isinstance(value, list):
        below = node.items if node is not None else None
        return celtypes.ListType([to_cel(item, below) for item in value])
    if isinstance(value, bool):
        return celtypes.BoolType(value)
    if isinstance(value, int | float):
        kind = node.type if node is not None else None
        large = not -(2**63) <= value < 2**63
        if large or kind == "number" or (isinstance(value, float) and kind != "integer"):
            return celtypes.DoubleType(value)
        return celtypes.IntType(int(value))
    if value is None:
        return None
    if node is not None and node.format in ("date-time", "date") and isinstance(value, str):
        return _time(value)
    if node is not None and node.format == "duration" and isinstance(value, str):
        return celtypes.DurationType(value)
    return celtypes.StringType(value)


def _time(text: str) -> Any:
    try:
        parse_timestamp(text)
        return celtypes.TimestampType(text if "T" in text else f"{text}T00:00:00Z")
    except ValueError:
        return celtypes.StringType(text)


def validate_rules(node: Node, value: Any, old: Any, path: str, found: list[FieldError]) -> None:
    """Find what the rules of a schema have against a value.

    Answers are remembered: a rule depends on nothing but the value and the former one, and most writes change
    a status and leave the spec as it was.

    Args:
        node: the schema; rules below it count too.
        value: decoded JSON.
        old: the former value, or `schema.MISSING`.
        path: of the value, for errors; empty for a whole object.
        found: gets one error for each rule that does not hold.
    """
    if not node.has_rules or value is None:
        return
    if path or not isinstance(value, dict):
        _walk(node, value, old, path, found)
        return
    before = old if isinstance(old, dict) else {}
    if node.rules:
        seen = _seen_at_root(tuple(rule["rule"] + rule.get("messageExpression", "") for rule in node.rules))
        found += _remembered(node, _part(value, seen), _part(old, seen), path, False)
    for name, item, below, where in _children(node, value, path):
        found += _remembered(below, item, before.get(name, MISSING), where, True)


def _walk(node: Node, value: Any, old: Any, path: str, found: list[FieldError]) -> None:
    """Evaluate the rules of a schema and of all schemas below it."""
    if not node.has_rules or value is None:
        return
    _own_rules(node, value, old, path, found)
    if isinstance(value, dict):
        before = old if isinstance(old, dict) else {}
        for name, item, below, where in _children(node, value, path):
            _walk(below, item, before.get(name, MISSING), where, found)
    elif isinstance(value, list) and node.items is not None:
        for index, item in enumerate(value):
            _walk(node.items, item, _old_item(node, item, old), f"{path}[{index}]", found)


def _children(node: Node, value: Object, path: str) -> Iterator[tuple[str, Any, Node, str]]:
    """Each item of an object whose schema has rules: its name, itself, its schema, its path."""
    for name, item in value.items():
        child = node.properties.get(name)
        below = child or node.additional
        if below is not None and below.has_rules:
            where = f"{path}.{name}" if path else name
            yield name, item, below, f"{path}[{name}]" if child is None else where


def _own_rules(node: Node, value: Any, old: Any, path: str, found: list[FieldError]) -> None:
    if not node.rules:
        return
    variables = {"self": to_cel(value, node)}
    if old is not MISSING and old is not None:
        variables["oldSelf"] = to_cel(old, node)
    for rule in node.rules:
        error = _check(rule, variables, node, value, path)
        if error is not None:
            found.append(error)


def _remembered(node: Node, value: Any, old: Any, path: str, deep: bool) -> Sequence[FieldError]:
    """Return what a schema's rules (`deep`: and all below) have against a value, if possible from memory."""
    text = json.dumps(value)
    before = None if old is MISSING or old is None else json.dumps(old)
    if len(text) + len(before or "") <= _LARGEST_REMEMBERED:
        return _errors(node, text, before, path, deep)
    return _errors.__wrapped__(node, text, before, path, deep)


@functools.lru_cache(maxsize=1024)
def _errors(node: Node, text: str, before: str | None, path: str, deep: bool) -> tuple[FieldError, ...]:
    found: list[FieldError] = []
    check = _walk if deep else _own_rules
    check(node, json.loads(text), MISSING if before is None else json.loads(before), path, found)
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _seen_at_root(rules: tuple[str, ...]) -> frozenset[str] | None:
    """The properties of a whole object that its own rules read; None: any of them."""
    names: set[str] = set()
    for rule in rules:
        for name in re.findall(r"\b(?:self|oldSelf)\b(?:\.(\w+))?", rule):
            if not name or "__" in name:  # read whole, by an index, or under an escaped name
                return None
            names.add(name)
    return frozenset(names)


def _part(value: Any, names: frozenset[str] | None) -> Any:
    """Return what rules see of a whole object: as in Kubernetes, of its metadata the two names alone."""
    if not isinstance(value, dict):
        return value
    part = {name: item for name, item in value.items() if names is None or name in names}
    if isinstance(part.get("metadata"), dict):
        part["metadata"] = {
            name: item for name, item in part["metadata"].items() if name in ("name", "generateName")
        }
    return part


def _old_item(node: Node, item: Any, old: Any) -> Any:
    """Items of a map list are the same item when their keys are equal; others have no past."""
    if node.list_type != "map" or not isinstance(old, list) or not isinstance(item, dict):
        return MISSING
    for candidate in old:
        if all(candidate.get(key) == item.get(key) for key in node.list_keys):
            return candidate
    return MISSING


def _check(rule: Object, variables: dict[str, Any], node: Node, value: Any, path: str) -> FieldError | None:
    text = rule["rule"]
    if "oldSelf" not in variables and names_old_self(text):
        return None
    kind = "object" if isinstance(value, dict) else node.type or "object"
    try:
        if evaluate(text, variables):
            return None
    except RuleProblem as problem:
        detail = f"failed rule evaluation: {problem} evaluating rule: {_name(rule)}"
        return FieldError(path or "<nil>", errors.INVALID, f'Invalid value: "{kind}": {detail}')
    where = path
    if rule.get("fieldPath"):
        where = f"{path}{rule['fieldPath']}" if path else rule["fieldPath"].lstrip(".")
    reason = _REASONS.get(rule.get("reason", ""), errors.INVALID)
    detail = _message(rule, variables)
    where = where or "<nil>"
    match reason:
        case errors.FORBIDDEN:
            return errors.field_forbidden(where, detail)
        case errors.REQUIRED:
            return errors.field_required(where, detail)
        case errors.DUPLICATE:
            return FieldError(where, reason, f'Duplicate value: "{kind}"')
        case _:
            return FieldError(where, errors.INVALID, f'Invalid value: "{kind}": {detail}')


def _message(rule: Object, variables: dict[str, Any]) -> str:
    if rule.get("messageExpression"):
        try:
            made = evaluate(rule["messageExpression"], variables)
        except RuleProblem:
            made = None
        if isinstance(made, str) and made.strip() and "\n" not in made:
            return str(made)
    return str(rule.get("message") or f"failed rule: {rule['rule']}")


def _name(rule: Object) -> str:
    return str(rule.get("message") or rule["rule"])

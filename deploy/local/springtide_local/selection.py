"""Matching as Kubernetes does it: label selectors, node selector terms, taints against tolerations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Object = dict[str, Any]


def matches_selector(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Return whether labels match a `metav1.LabelSelector`.

    Args:
        selector: None matches nothing; an empty one matches everything.
        labels: of an object.

    Raises:
        ValueError: an operator is unknown.
    """
    if selector is None:
        return False
    if any(labels.get(name) != value for name, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_matches(expression, labels) for expression in selector.get("matchExpressions") or [])


def matches_node_terms(terms: Sequence[Object], node: Object) -> bool:
    """Return whether a node matches `nodeSelectorTerms`: one matching term is enough; a term without
    requirements matches nothing.

    Args:
        terms: of a pod's node affinity.
        node: the Node.

    Raises:
        ValueError: an operator is unknown.
    """
    labels = node["metadata"].get("labels") or {}
    fields = {"metadata.name": node["metadata"]["name"]}
    for term in terms:
        by_label, by_field = term.get("matchExpressions") or [], term.get("matchFields") or []
        if not by_label and not by_field:
            continue
        if all(_matches(e, labels) for e in by_label) and all(_matches(e, fields) for e in by_field):
            return True
    return False


def _matches(expression: Object, labels: Mapping[str, str]) -> bool:
    key, operator, values = expression["key"], expression["operator"], expression.get("values") or []
    value = labels.get(key)
    if operator == "In":
        return value in values
    if operator == "NotIn":
        return value not in values
    if operator == "Exists":
        return value is not None
    if operator == "DoesNotExist":
        return value is None
    if operator in ("Gt", "Lt"):
        try:
            number, bound = int(str(value)), int(values[0])
        except (ValueError, IndexError):
            return False
        return number > bound if operator == "Gt" else number < bound
    raise ValueError(
        f"unknown operator {operator!r} for key {key!r}: use In, NotIn, Exists, DoesNotExist, Gt or Lt"
    )


def toleration_of(tolerations: Sequence[Object], taint: Object) -> Object | None:
    """Return the first toleration that covers a taint; None where there is none.

    Args:
        tolerations: of a pod.
        taint: of a node.
    """
    for toleration in tolerations:
        if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
            continue
        operator = toleration.get("operator") or "Equal"
        key = toleration.get("key") or ""
        if not key and operator != "Exists":
            continue
        if key and key != taint["key"]:
            continue
        if operator == "Exists" or (toleration.get("value") or "") == (taint.get("value") or ""):
            return toleration
    return None


def tolerates(tolerations: Sequence[Object], taint: Object) -> bool:
    """Return whether a toleration covers a taint.

    Args:
        tolerations: of a pod.
        taint: of a node.
    """
    return toleration_of(tolerations, taint) is not None

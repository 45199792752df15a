"""Conditions in a status: set one, keep the others and the time of its last change."""

from __future__ import annotations

from typing import Any

from springtide_local.clock import timestamp

Object = dict[str, Any]


def condition(obj: Object, kind: str) -> Object | None:
    """Return a condition; None where there is none of that type.

    Args:
        obj: with a status.
        kind: type of the condition, as `Ready`.
    """
    found: list[Object] = [c for c in (obj.get("status") or {}).get("conditions") or [] if c["type"] == kind]
    return found[0] if found else None


def is_true(obj: Object, kind: str) -> bool:
    """Return whether a condition is there and True.

    Args:
        obj: with a status.
        kind: type of the condition, as `Ready`.
    """
    found = condition(obj, kind)
    return found is not None and found["status"] == "True"


def set_condition(
    status: Object, kind: str, value: str, reason: str, message: str, now: float, **more: str
) -> None:
    """Set a condition; the others, and their order, stay.

    Args:
        status: is changed in place.
        kind: type of the condition, as `Ready`.
        value: True, False or Unknown; `lastTransitionTime` moves only with it.
        reason: one word in CamelCase.
        message: in words.
        now: in unix seconds.
        more: further fields of the condition.
    """
    conditions = status.setdefault("conditions", [])
    old = next((c for c in conditions if c["type"] == kind), None)
    since = old["lastTransitionTime"] if old is not None and old["status"] == value else timestamp(now)
    fresh = {
        "type": kind,
        "status": value,
        "reason": reason,
        "message": message,
        "lastTransitionTime": since,
        **more,
    }
    if old is None:
        conditions.append(fresh)
    else:
        conditions[conditions.index(old)] = {**old, **fresh}


def controller_of(obj: Object) -> Object | None:
    """The owner reference that has `controller: true`."""
    for reference in obj["metadata"].get("ownerReferences") or []:
        if reference.get("controller"):
            found: Object = reference
            return found
    return None


def is_active(pod: Object) -> bool:
    """Return whether a pod has neither ended nor is being deleted."""
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed") and not pod["metadata"].get(
        "deletionTimestamp"
    )

"""The plan for a job with which nothing is done: its conditions say why, and it has one event. PURE."""

from __future__ import annotations

from typing import Any

from springtide_operator.api import reasons
from springtide_operator.plan import conditions
from springtide_operator.plan.actions import Event, Plan
from springtide_operator.plan.conditions import Truth

Status = dict[str, Any]


def only_said(status: Status, generation: int, truths: dict[str, Truth], now: float) -> Plan:
    """Return the plan that writes conditions over the old status, and posts an event when their reason is
    new.

    Args:
        status: the old one; the rest of it stays.
        generation: of the object.
        truths: conditions by type; Degraded among them, whose reason and message are told.
        now: unix seconds.
    """
    degraded = truths[reasons.DEGRADED]
    others = [one for one in status.get("conditions") or [] if one.get("type") not in truths]
    written = conditions.write(truths, status, generation, now)
    new = {
        **status,
        "message": degraded.message,
        "observedGeneration": generation,
        "conditions": others + written,
    }
    new.setdefault("state", reasons.STATE_PENDING)
    known = conditions.reason_of(status, reasons.DEGRADED) == degraded.reason
    return Plan(new, (), () if known else (Event(degraded.reason, degraded.message, warning=True),))

"""The generic rules of kstatus (kubernetes-sigs/cli-utils, pkg/kstatus), said again in Python.

They hold for kinds that kstatus has no rules of their own for, such as TrainingJob: what Flux waits for.
"""

from __future__ import annotations

from typing import Any


def status_of(obj: dict[str, Any]) -> str:
    """Return Terminating, InProgress, Failed or Current, for an object as the API server stores it."""
    meta, status = obj["metadata"], obj.get("status") or {}
    if meta.get("deletionTimestamp"):
        return "Terminating"
    observed = status.get("observedGeneration")
    if observed is not None and "generation" in meta and observed != meta["generation"]:
        return "InProgress"
    conditions = status.get("conditions") or []
    # The first of the two that is True decides, in the order in which they stand.
    for condition in conditions:
        if condition["status"] == "True" and condition["type"] in ("Reconciling", "Stalled"):
            return "InProgress" if condition["type"] == "Reconciling" else "Failed"
    ready = next((condition for condition in conditions if condition["type"] == "Ready"), None)
    return "Current" if ready is None or ready["status"] == "True" else "InProgress"

"""Read a Workload of Kueue, as the API server gives it, into what the policy needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from springtide_operator.api import names

Object = dict[str, Any]


@dataclass(frozen=True)
class WorkloadSeen:
    """`counts`, `placements`: by pod set, from the admission. `trouble`: why placements cannot be told."""

    name: str
    uid: str
    queue: str
    version: str  # of the job that it was made from
    deleting: bool = False
    active: bool = True
    reserved: bool = False
    admitted: bool = False
    finished: bool = False
    pods_ready: bool = False
    evicted: str | None = None  # Kueue's reason
    message: str = ""  # Kueue's word on why it waits, or was evicted
    cluster_queue: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    placements: Mapping[str, Object] = field(default_factory=dict)
    trouble: str = ""


def workload_seen(raw: Object, flavors: Mapping[str, Object | str]) -> WorkloadSeen:
    """Return what the policy needs of a Workload.

    Args:
        raw: as the API server gives it.
        flavors: ResourceFlavors by name, or in words why one cannot be read.
    """
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or []}

    def true(kind: str) -> bool:
        return bool(conditions.get(kind, {}).get("status") == "True")

    admission = status.get("admission") or {}
    evicted = conditions["Evicted"] if true("Evicted") else None
    asked = {one["name"]: one.get("count", 1) for one in spec.get("podSets") or []}
    counts, placements, trouble = dict(asked), {}, ""
    for assignment in admission.get("podSetAssignments") or []:
        name = assignment["name"]
        counts[name] = assignment.get("count", asked.get(name, 1))
        placements[name], missing = _placement(assignment, status.get("admissionChecks") or [], flavors)
        trouble = trouble or missing
    told = evicted or conditions.get("QuotaReserved") or {}
    waits = _waiting_checks(status.get("admissionChecks") or []) if true("QuotaReserved") else ""
    return WorkloadSeen(
        name=meta["name"],
        uid=meta["uid"],
        queue=spec.get("queueName") or "",
        version=(meta.get("annotations") or {}).get(names.ANNOTATION_WORKLOAD_VERSION, ""),
        deleting="deletionTimestamp" in meta,
        active=spec.get("active", True),
        reserved=true("QuotaReserved"),
        admitted=true("Admitted") and bool(admission),
        finished=true("Finished"),
        pods_ready=true("PodsReady"),
        evicted=evicted["reason"] if evicted is not None else None,
        message=waits or str(told.get("message") or ""),
        cluster_queue=admission.get("clusterQueue", ""),
        counts=counts,
        placements=placements,
        trouble=trouble,
    )


def flavors_named(raw: Object) -> set[str]:
    """ResourceFlavors that the admission assigns."""
    admission = (raw.get("status") or {}).get("admission") or {}
    return {
        flavor
        for assignment in admission.get("podSetAssignments") or []
        for flavor in (assignment.get("flavors") or {}).values()
    }


def _placement(
    assignment: Object, checks: list[Object], flavors: Mapping[str, Object | str]
) -> tuple[Object, str]:
    """(where the set's pods go, why that cannot be told). Labels and tolerations of all its flavors, then
    what admission checks that are ready add.
    """
    result: Object = {"nodeSelector": {}, "tolerations": [], "labels": {}, "annotations": {}}
    trouble = ""
    for name in sorted(set((assignment.get("flavors") or {}).values())):
        flavor = flavors.get(name)
        if not isinstance(flavor, dict):
            trouble = trouble or flavor or f"the ResourceFlavor {name} is being read"
            continue
        spec = flavor.get("spec") or {}
        result["nodeSelector"] |= spec.get("nodeLabels") or {}
        result["tolerations"] += [t for t in spec.get("tolerations") or [] if t not in result["tolerations"]]
    for check in checks:
        for update in (check.get("podSetUpdates") or []) if check.get("state") == "Ready" else []:
            if update.get("name") != assignment["name"]:
                continue
            for part in ("nodeSelector", "labels", "annotations"):
                result[part] |= update.get(part) or {}
            more = update.get("tolerations") or []
            result["tolerations"] += [t for t in more if t not in result["tolerations"]]
    return {key: value for key, value in result.items() if value}, trouble


def _waiting_checks(checks: list[Object]) -> str:
    texts = [
        f"{check['name']}: {check.get('message') or check.get('state')}"
        for check in checks
        if check.get("state") != "Ready"
    ]
    return "waits for admission checks: " + "; ".join(texts) if texts else ""

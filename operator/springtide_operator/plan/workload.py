"""Read a Workload of Kueue, as the API server gives it, into what the policy needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from springtide_operator.api import names

Object = dict[str, Any]


REPLACED = "WorkloadSliceReplaced"  # reason of Finished: another Workload of the job has its quota


@dataclass(frozen=True)
class WorkloadSeen:
    """A Workload of a job, and the others that the job has while it grows.

    Attributes:
        counts: by pod set, how many pods may run: those admitted, less those that were given back.
        asked: by pod set, what its spec says.
        placements: by pod set, from the admission.
        trouble: why placements cannot be told.
        replaces: the name of the Workload whose place it takes.
        replaced: another Workload has taken its place.
        successor: the Workload that waits to take its place.
        takes_over: it has taken the place of another; it may not be admitted in full yet.
        others: names and uids of Workloads that are of no use any more.
    """

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
    asked: Mapping[str, int] = field(default_factory=dict)
    placements: Mapping[str, Object] = field(default_factory=dict)
    trouble: str = ""
    replaces: str = ""
    replaced: bool = False
    successor: WorkloadSeen | None = None
    takes_over: bool = False
    others: tuple[tuple[str, str], ...] = ()

    @property
    def number(self) -> int:
        """How many Workloads of the job were replaced before it."""
        return names.parse_workload_number(self.name)

    @property
    def holds(self) -> bool:
        """Whether pods may run by its admission."""
        return self.admitted and self.evicted is None and not self.finished and not self.deleting


def job_workload_seen(raws: Iterable[Object], flavors: Mapping[str, Object | str]) -> WorkloadSeen | None:
    """Return the Workload by which a job is admitted or waits, with the others in their relation to it.

    A job that grows while it is admitted has two: the one that it runs by, and one that asks for more and
    takes the place of the first when Kueue admits it.

    Args:
        raws: all Workloads of the job, as the API server gives them.
        flavors: ResourceFlavors by name, or in words why one cannot be read.
    """
    found = sorted((workload_seen(raw, flavors) for raw in raws), key=lambda one: one.number)
    live = [one for one in found if not one.replaced]
    if not live:
        return found[-1] if found else None
    holding = [one for one in live if one.holds]
    current = holding[-1] if holding else live[0]
    later = [one for one in live if one.number > current.number and not one.deleting]
    successor = later[-1] if later else None
    there = {one.name for one in found if one.replaced}
    others = [one for one in found if one is not current and one is not successor and not one.deleting]
    return replace(
        current,
        successor=successor,
        takes_over=current.replaces in there,
        others=tuple((one.name, one.uid) for one in others),
    )


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
    given_back = {one["name"]: one.get("count", 0) for one in status.get("reclaimablePods") or []}
    counts = {name: count - given_back.get(name, 0) for name, count in asked.items()}
    placements, trouble = {}, ""
    for assignment in admission.get("podSetAssignments") or []:
        name = assignment["name"]
        admitted = assignment.get("count", asked.get(name, 1))
        counts[name] = min(admitted, counts.get(name, admitted))
        placements[name], missing = _placement(assignment, status.get("admissionChecks") or [], flavors)
        trouble = trouble or missing
    told = evicted or conditions.get("QuotaReserved") or {}
    waits = _waiting_checks(status.get("admissionChecks") or []) if true("QuotaReserved") else ""
    annotations = meta.get("annotations") or {}
    return WorkloadSeen(
        name=meta["name"],
        uid=meta["uid"],
        queue=spec.get("queueName") or "",
        version=annotations.get(names.ANNOTATION_WORKLOAD_VERSION, ""),
        asked=asked,
        replaces=str(annotations.get(names.ANNOTATION_REPLACES) or "").rpartition("/")[2],
        replaced=true("Finished") and conditions["Finished"].get("reason") == REPLACED,
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

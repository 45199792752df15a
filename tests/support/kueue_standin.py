"""Stand-in for Kueue: admits a Workload and evicts it; on a cluster, when the test says so.

An eviction ends the reservation only by the job's controller, when its pods are gone, as in Kueue. Objects
that Kueue's webhook and the rules of its CRD refuse are refused here (`check_spec`, `check_update`), from its
sources of August 2026 (v1beta1 and v1beta2).
"""

from __future__ import annotations

import contextlib
import copy
import time
from pathlib import Path
from typing import Any

import yaml
from e2e_cluster import E2ECluster

from springtide_kube.errors import ApiError
from springtide_operator.plan.values import timestamp

Object = dict[str, Any]

CRDS = Path(__file__).with_suffix(".yaml")
V1BETA1, V1BETA2 = "kueue.x-k8s.io/v1beta1", "kueue.x-k8s.io/v1beta2"
ELASTIC = "kueue.x-k8s.io/elastic-job"
REPLACES = "kueue.x-k8s.io/workload-slice-replacement-for"
_SPEC_FIELDS = {
    V1BETA1: {"priorityClassName", "priorityClassSource"},
    V1BETA2: {"priorityClassRef", "preemptionGates"},
}
_COMMON_FIELDS = {"podSets", "queueName", "priority", "active", "maximumExecutionTimeSeconds"}
_CLASS_KINDS = {"kueue.x-k8s.io": "WorkloadPriorityClass", "scheduling.k8s.io": "PriorityClass"}


class RefusedWorkloadError(AssertionError):
    """Kueue's webhook, or a rule of its CRD, refuses the Workload."""


def _require(fine: object, text: str) -> None:
    if not fine:
        raise RefusedWorkloadError(text)


def serve(system: E2ECluster, *versions: str) -> None:
    """Have the cluster serve Kueue's kinds in these versions, and in no others."""
    made = list(yaml.safe_load_all(CRDS.read_text()))
    for crd in made:
        for version in crd["spec"]["versions"]:
            version["served"] = f"kueue.x-k8s.io/{version['name']}" in versions
    system.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(made))


def reserved(workload: Object) -> bool:
    return bool(condition(workload, "QuotaReserved").get("status") == "True")


def check_spec(workload: Object) -> None:
    """Raise RefusedWorkloadError where a Workload could not be made, or written, as it is."""
    spec, annotations = workload["spec"], workload["metadata"].get("annotations") or {}
    unknown = set(spec) - _COMMON_FIELDS - _SPEC_FIELDS[workload["apiVersion"]]
    _require(not unknown, f"fields that would be pruned: {unknown}")
    sets = {one["name"]: one for one in spec["podSets"]}
    _require(0 < len(sets) == len(spec["podSets"]) <= 18, "podSets: 1 to 18, each with a name of its own")
    least = [one for one in spec["podSets"] if one.get("minCount") is not None]
    _require(len(least) <= 1, "at most one podSet can use minCount")
    _require(all(1 <= one["minCount"] <= one["count"] for one in least), "minCount must be 1 to count")
    elastic = annotations.get(ELASTIC) == "true"
    _require(not least or not elastic, "partial admission and elastic job cannot be used together")
    ref = spec.get("priorityClassRef")
    named = ref is not None or bool(spec.get("priorityClassName"))
    _require(not named or spec.get("priority") is not None, "priority should not be nil")
    _require(ref is None or _CLASS_KINDS.get(ref["group"]) == ref["kind"], f"no such kind: {ref}")
    for back in (workload.get("status") or {}).get("reclaimablePods") or []:
        _require(back["name"] in sets, f"reclaimablePods: no podSet {back['name']}")
        _require(0 <= back["count"] <= sets[back["name"]]["count"], "reclaimablePods: more than there are")


def check_update(old: Object, new: Object) -> None:
    """Raise RefusedWorkloadError where a Workload must not change like this.

    Args:
        old: as it was.
        new: as it would be.
    """
    check_spec(new)
    before, after = old.get("status") or {}, new.get("status") or {}
    _require(not reserved(new) or after.get("admission"), "admission must be set while quota is reserved")
    given, kept = before.get("admission"), after.get("admission")
    _require(given is None or kept is None or given == kept, "admission is immutable")
    if not reserved(old):
        return
    _require(
        old["spec"]["podSets"] == new["spec"]["podSets"], "podSets are immutable while quota is reserved"
    )
    if not reserved(new):
        return
    for key in ("queueName", "priorityClassSource"):
        _require(old["spec"].get(key) == new["spec"].get(key), f"{key} is immutable while quota is reserved")
    one, other = old["spec"].get("priorityClassRef"), new["spec"].get("priorityClassRef")
    _require((one is None) == (other is None), "priorityClassRef is immutable while quota is reserved")
    counts = {back["name"]: back["count"] for back in after.get("reclaimablePods") or []}
    for back in before.get("reclaimablePods") or []:
        _require(counts.get(back["name"], -1) >= back["count"], "reclaimablePods must not become fewer")


def quota(workload: Object) -> dict[str, int]:
    """Return the pods by pod set for which a Workload takes quota, as Kueue counts them."""
    status = workload.get("status") or {}
    if not reserved(workload) or condition(workload, "Finished").get("status") == "True":
        return {}
    back = {one["name"]: one["count"] for one in status.get("reclaimablePods") or []}
    asked = {one["name"]: one["count"] - back.get(one["name"], 0) for one in workload["spec"]["podSets"]}
    given = status["admission"]["podSetAssignments"]
    return {one["name"]: min(one["count"], asked[one["name"]]) for one in given}


def replaced(workload: Object) -> Object:
    """The Workload when Kueue has admitted the one that takes its place."""
    text = "Replaced to accommodate a workload due to workload slice aggregation"
    return _with(workload, ("Finished", "True", "WorkloadSliceReplaced", text))


def condition(workload: Object, kind: str) -> Object:
    conditions = (workload.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind), {})


def _with(workload: Object, *changes: tuple[str, str, str, str]) -> Object:
    """The Workload with conditions (type, status, reason, message) set."""
    workload = copy.deepcopy(workload)
    status = workload.setdefault("status", {})
    found = {c["type"]: c for c in status.get("conditions") or []}
    for kind, value, reason, message in changes:
        found[kind] = {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": message,
            "lastTransitionTime": timestamp(time.time()),
        }
    status["conditions"] = list(found.values())
    return workload


def pending(workload: Object, message: str) -> Object:
    return _with(workload, ("QuotaReserved", "False", "Pending", message))


def admitted(
    workload: Object, workers: int | None = None, flavor: str | None = None, checks_ready: bool = True
) -> Object:
    """Quota for all, or for fewer workers; of one flavor for everything.

    Args:
        workload: as it waits.
        workers: that are admitted.
        flavor: of everything.
        checks_ready: False: quota is reserved, and admission checks keep the Workload waiting.
    """
    changes = [("QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue lab")]
    if checks_ready:
        changes.append(("Admitted", "True", "Admitted", "The workload is admitted"))
    if condition(workload, "Evicted"):
        changes.append(("Evicted", "False", "QuotaReserved", "Previously: evicted"))
    result = _with(workload, *changes)
    assignments = []
    for one in workload["spec"]["podSets"]:
        count = workers if workers is not None and one["name"] == "workers" else one["count"]
        assert one.get("minCount", one["count"]) <= count <= one["count"]
        flavors = {"cpu": flavor} if flavor else {}
        assignments.append({"name": one["name"], "count": count, "flavors": flavors})
    result["status"]["admission"] = {"clusterQueue": "lab", "podSetAssignments": assignments}
    return result


def evicted(
    workload: Object, reason: str = "Preempted", message: str = "for a job of higher priority"
) -> Object:
    return _with(workload, ("Evicted", "True", reason, message))


class Kueue:
    """Admits and evicts when the test says so, as Kueue's controller would."""

    def __init__(self, system: E2ECluster, namespace: str, api: str = V1BETA2) -> None:
        self._system = system
        self._namespace = namespace
        self._api = api

    def workloads(self) -> list[Object]:
        """All of the namespace, by name."""
        items: list[Object] = self._request("GET")["items"]
        return sorted(items, key=lambda one: str(one["metadata"]["name"]))

    def workload(self) -> Object | None:
        """The only one of the namespace."""
        items = self.workloads()
        assert len(items) <= 1
        return items[0] if items else None

    def until(self, what: str, seconds: float = 60) -> Object:
        """Wait for the Workload to be there (`queued`), or to have a true condition of that type."""

        def there() -> Object | None:
            found = self.workload()
            if found is None or what == "queued":
                return found
            return found if condition(found, what).get("status") == "True" else None

        return self._system.until(seconds, f"a Workload that is {what}", there)

    def admit(self, workers: int | None = None, flavor: str | None = None) -> None:
        self._write(admitted(self.until("queued"), workers, flavor))

    def evict(self) -> None:
        self._write(evicted(self.until("Admitted")))

    def grow(self) -> None:
        """Admit the Workload that asks for more, in the place of the one that it names."""

        def both() -> list[Object] | None:
            found = self.workloads()
            return found if len(found) == 2 else None

        old, new = self._system.until(60, "a Workload that asks for more", both)
        name = new["metadata"]["annotations"][REPLACES]
        assert name == f"{self._namespace}/{old['metadata']['name']}"
        self._write(admitted(new))
        with contextlib.suppress(ApiError):  # the operator may have deleted it
            self._write(replaced(old))

    def _write(self, workload: Object) -> None:
        name = workload["metadata"]["name"]
        self._request("PUT", f"/{name}/status", workload)

    def _request(self, method: str, path: str = "", body: Object | None = None) -> Object:
        where = f"/apis/{self._api}/namespaces/{self._namespace}/workloads{path}"
        return self._system.api.request(method, where, body)

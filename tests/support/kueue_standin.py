"""Stand-in for Kueue: admits a Workload and evicts it; on a cluster, when the test says so.

As in Kueue, an eviction ends the reservation only by the job's controller, when its pods are gone.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

from e2e_cluster import E2ECluster

from springtide_operator.plan.values import timestamp

Object = dict[str, Any]

CRDS = Path(__file__).with_suffix(".yaml")
API = "/apis/kueue.x-k8s.io/v1beta1"


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


def admitted(workload: Object, workers: int | None = None, flavor: str | None = None) -> Object:
    """Quota for all, or for fewer workers; of one flavor for everything."""
    changes = [
        ("QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue lab"),
        ("Admitted", "True", "Admitted", "The workload is admitted"),
    ]
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

    def __init__(self, system: E2ECluster, namespace: str) -> None:
        self._system = system
        self._namespace = namespace

    def workload(self) -> Object | None:
        """The only one of the namespace."""
        items: list[Object] = self._request("GET")["items"]
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

    def _write(self, workload: Object) -> None:
        name = workload["metadata"]["name"]
        self._request("PUT", f"/{name}/status", workload)

    def _request(self, method: str, path: str = "", body: Object | None = None) -> Object:
        where = f"{API}/namespaces/{self._namespace}/workloads{path}"
        return self._system.api.request(method, where, body)

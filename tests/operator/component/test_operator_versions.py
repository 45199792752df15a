"""Two versions of the operator at one ledger, and an operator that is newer than the cluster's CRD."""

from __future__ import annotations

from operator_cluster import FakeCluster
from operator_running import operator, until

from springtide_operator.api import reasons
from springtide_operator.plan import conditions


def degraded(cluster: FakeCluster) -> str | None:
    return conditions.reason_of(cluster.job().get("status") or {}, reasons.DEGRADED)


async def test_fields_of_a_later_version_survive_an_earlier_one() -> None:
    cluster = FakeCluster()
    job = cluster.add_job(replicas=1)
    job["status"] = {
        "laterLedger": {"counted": 7},
        "workers": {"laterCount": 3},
        "conditions": [{"type": "Degraded", "status": "False", "reason": "Healthy", "laterWord": "x"}],
    }
    cluster.put("trainingjobs", job)
    async with operator(cluster):
        await until(lambda: bool(cluster.job()["status"].get("slots")), "the ledger")
        await until(lambda: bool(cluster.pods()), "a pod")
        await until(lambda: "summary" in cluster.job()["status"]["workers"], "the counts")
    status = cluster.job()["status"]
    assert status["laterLedger"] == {"counted": 7}
    assert status["workers"]["laterCount"] == 3
    [condition] = [item for item in status["conditions"] if item["type"] == "Degraded"]
    assert condition["laterWord"] == "x"


async def test_nothing_is_done_while_the_crd_drops_the_ledger() -> None:
    cluster = FakeCluster()
    cluster.unknown_to_crd = {"slots"}
    cluster.add_job(replicas=1)
    async with operator(cluster) as made:
        await until(lambda: degraded(cluster) == reasons.OUTDATED_CRD, "the condition")
        assert "status.slots" in cluster.job()["status"]["message"]
        assert not cluster.pods()
        assert made.unready() is None
        cluster.unknown_to_crd = set()
        await until(lambda: bool(cluster.pods()), "a pod, once the CRD knows the ledger")
        await until(lambda: degraded(cluster) != reasons.OUTDATED_CRD, "the condition to go")

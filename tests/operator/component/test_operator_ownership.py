"""Ownership: no object of others is taken over, and none is deleted that status only says is ours."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from kube_connections import to
from operator_cluster import FakeCluster
from operator_running import operator, until

from springtide_kube.errors import ApiError
from springtide_operator import job_loop
from springtide_operator.api import names, reasons
from springtide_operator.cluster import KubeCluster
from springtide_operator.kube import Kube
from springtide_operator.manifests.kueue import POD_PRIORITY_SOURCE
from springtide_operator.manifests.protection import Doors
from springtide_operator.plan import conditions
from springtide_operator.runtime import PROTECTION

Object = dict[str, Any]
NAMESPACE = "default"
DOORS = Doors("springtide-system")


def servers_job(cluster: FakeCluster) -> Object:
    job = cluster.add_job(replicas=1)
    job["spec"] |= {"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": 2}}
    return cluster.put("trainingjobs", job)


def somebodys(kind: str, name: str, spec: Object, owner: Object | None = None) -> Object:
    meta: Object = {"name": name, "namespace": NAMESPACE, "uid": f"uid-of-{name}"}
    if owner is not None:
        meta["ownerReferences"] = [owner]
    return {"kind": kind, "metadata": meta, "spec": spec}


def owner_of(job: Object) -> Object:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": True,
    }


def found(cluster: FakeCluster, plural: str) -> dict[str, Object]:
    return {name: obj for (kind, _, name), obj in cluster.objects.items() if kind == plural}


def degraded(cluster: FakeCluster) -> tuple[str | None, str]:
    status = cluster.job().get("status") or {}
    return conditions.reason_of(status, reasons.DEGRADED), conditions.message_of(status, reasons.DEGRADED)


async def test_policies_of_others_are_left_alone() -> None:
    cluster = FakeCluster()
    job = servers_job(cluster)
    theirs = [
        ("networkpolicies", somebodys("NetworkPolicy", "digits-pods", {"podSelector": {}})),
        ("poddisruptionbudgets", somebodys("PodDisruptionBudget", "digits-servers", {"minAvailable": 3})),
    ]
    for plural, obj in theirs:
        cluster.put(plural, obj)
    uid8 = job["metadata"]["uid"][:8]
    async with operator(cluster, doors=DOORS):
        await until(lambda: len(found(cluster, "networkpolicies")) == 2, "its own policy")
        await until(lambda: len(found(cluster, "poddisruptionbudgets")) == 2, "its own budget")
        await until(lambda: cluster.pods(names.ROLE_PARAMETER_SERVER), "servers")
    assert f"digits-pods-{uid8}" in found(cluster, "networkpolicies")
    assert f"digits-servers-{uid8}" in found(cluster, "poddisruptionbudgets")
    for plural, obj in theirs:
        assert found(cluster, plural)[obj["metadata"]["name"]]["spec"] == obj["spec"]
        assert "ownerReferences" not in found(cluster, plural)[obj["metadata"]["name"]]["metadata"]


@pytest.mark.parametrize(
    ("plural", "kind", "name", "reason"),
    [
        ("networkpolicies", "NetworkPolicy", names.network_policy_name, reasons.NETWORK_POLICY_REFUSED),
        (
            "poddisruptionbudgets",
            "PodDisruptionBudget",
            names.server_budget_name,
            reasons.SERVER_BUDGET_REFUSED,
        ),
        ("services", "Service", lambda job, uid: names.service_name(job), reasons.SERVICE_REFUSED),
    ],
)
@pytest.mark.parametrize("owner", [None, {"kind": "Deployment", "uid": "other", "controller": True}])
async def test_a_foreign_object_of_our_name_is_a_condition(
    plural: str, kind: str, name: Callable[[str, str], str], reason: str, owner: Object | None
) -> None:
    cluster = FakeCluster()
    job = servers_job(cluster)
    taken = name("digits", job["metadata"]["uid"])
    cluster.put(plural, somebodys(kind, taken, {"theirs": True}, owner))
    async with operator(cluster, doors=DOORS):
        await until(lambda: f"{kind} {taken!r} exists" in degraded(cluster)[1], "the condition")
        if reason != reasons.SERVICE_REFUSED:
            await until(lambda: cluster.pods(), "its worker all the same")
    assert degraded(cluster)[0] == reason
    assert found(cluster, plural)[taken]["spec"] == {"theirs": True}
    assert (found(cluster, plural)[taken]["metadata"].get("ownerReferences") or [None])[0] == owner


async def test_an_object_made_meanwhile_is_not_taken_over() -> None:
    """Make the object between the look that finds nothing and the write."""
    cluster = FakeCluster()
    job = cluster.add_job(replicas=1)
    taken = names.network_policy_name("digits", job["metadata"]["uid"])

    def meddle(method: str, name: str) -> None:
        if method == "apply_network_policy" and not found(cluster, "networkpolicies"):
            cluster.put("networkpolicies", somebodys("NetworkPolicy", taken, {"theirs": True}))

    cluster.before = meddle
    async with operator(cluster, doors=DOORS):
        await until(lambda: degraded(cluster)[0] == reasons.NETWORK_POLICY_REFUSED, "the condition")
    assert found(cluster, "networkpolicies")[taken]["spec"] == {"theirs": True}


def resized(job: Object, replicas: int) -> Object:
    workers = {**job["spec"]["workers"], "replicas": replicas}
    return {**job, "spec": {**job["spec"], "workers": workers}}


async def test_what_protects_a_job_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_loop, "PROTECTION_SECONDS", 0.05)
    monkeypatch.setattr(job_loop, "PROTECTION_PAUSES", 0.0)
    cluster = FakeCluster()
    servers_job(cluster)

    def policy() -> Object | None:
        return next(iter(found(cluster, "networkpolicies").values()), None)

    async with operator(cluster, doors=DOORS, tick=0.02):
        await until(lambda: policy() and found(cluster, "poddisruptionbudgets"), "both")
        applied = cluster.calls["apply_network_policy"]
        looked = cluster.calls["get_network_policy"]
        await until(lambda: cluster.calls["get_network_policy"] > looked + 2, "looks")
        assert cluster.calls["apply_network_policy"] == applied  # nothing to mend, nothing written
        for plural in ("networkpolicies", "poddisruptionbudgets"):
            cluster.remove(plural, NAMESPACE, next(iter(found(cluster, plural))))
        await until(lambda: policy() and found(cluster, "poddisruptionbudgets"), "both again")
        changed = policy()
        assert changed is not None
        changed["spec"]["podSelector"] = {}
        cluster.put("networkpolicies", changed)
        await until(lambda: (policy() or changed)["spec"]["podSelector"], "the policy as it was")


async def test_what_is_watched_is_mended_and_not_asked_for() -> None:
    cluster = FakeCluster()
    servers_job(cluster)

    def both() -> bool:
        return all(found(cluster, plural) for plural in PROTECTION)

    async with operator(cluster, doors=DOORS, tick=0.02) as made:
        for plural in PROTECTION:
            made.listed(plural, "", set(), "0")
        await until(both, "both")
        looked = [cluster.calls["get_network_policy"], cluster.calls["get_disruption_budget"]]
        budget = next(iter(found(cluster, "poddisruptionbudgets").values()))
        cluster.put("poddisruptionbudgets", {**budget, "status": {"disruptionsAllowed": 1}})
        for replicas in (2, 3):
            cluster.put("trainingjobs", resized(cluster.job(), replicas))
            await until(lambda: len(cluster.pods()) == replicas, "a round")  # noqa: B023
        assert [cluster.calls["get_network_policy"], cluster.calls["get_disruption_budget"]] == looked
        for plural in PROTECTION:
            cluster.remove(plural, NAMESPACE, next(iter(found(cluster, plural))))
        await until(both, "both again")
        changed = next(iter(found(cluster, "networkpolicies").values()))
        cluster.put("networkpolicies", {**changed, "spec": {"podSelector": {}}})
        await until(
            lambda: next(iter(found(cluster, "networkpolicies").values()))["spec"]["podSelector"],
            "the policy as it was",
        )


async def test_former_names_are_cleaned_up_unless_others_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_loop, "PROTECTION_SECONDS", 0.05)
    monkeypatch.setattr(job_loop, "PROTECTION_PAUSES", 0.0)
    cluster = FakeCluster()
    job = servers_job(cluster)
    policy = somebodys("NetworkPolicy", "digits-pods", {}, owner_of(job))
    policy["metadata"]["managedFields"] = [{"manager": names.MANAGER}]
    budget = somebodys("PodDisruptionBudget", "digits-servers", {"minAvailable": 3}, owner_of(job))
    budget["metadata"]["managedFields"] = [{"manager": "kubectl"}, {"manager": names.MANAGER}]
    cluster.put("networkpolicies", policy)
    cluster.put("poddisruptionbudgets", budget)
    async with operator(cluster, doors=DOORS):
        await until(lambda: "digits-pods" not in found(cluster, "networkpolicies"), "the former one to go")
        await until(lambda: len(found(cluster, "poddisruptionbudgets")) == 2, "the budget")
    assert len(found(cluster, "networkpolicies")) == 1
    assert "digits-servers" in found(cluster, "poddisruptionbudgets")


async def test_a_former_budget_goes_with_the_first_new_one() -> None:
    """A pod that two budgets select cannot be evicted at all. Kubernetes writes the status of each."""
    cluster = FakeCluster()
    job = servers_job(cluster)
    budget = somebodys("PodDisruptionBudget", "digits-servers", {"minAvailable": 1}, owner_of(job))
    budget["metadata"]["managedFields"] = [
        {"manager": names.MANAGER, "operation": "Apply"},
        {"manager": "kube-controller-manager", "operation": "Update", "subresource": "status"},
    ]
    cluster.put("poddisruptionbudgets", budget)
    async with operator(cluster):
        await until(lambda: "digits-servers" not in found(cluster, "poddisruptionbudgets"), "it to go")
        assert set(found(cluster, "poddisruptionbudgets")) == {
            names.server_budget_name("digits", job["metadata"]["uid"])
        }


async def test_a_policy_that_cannot_be_read_hides_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_loop, "PROTECTION_SECONDS", 0.0)
    monkeypatch.setattr(job_loop, "PROTECTION_PAUSES", 0.0)
    cluster = FakeCluster()
    cluster.add_job(replicas=1)

    said: list[str] = []

    def refuse(method: str, name: str) -> None:
        if method == "create_event":
            said.append(name)
        if method == "get_network_policy":
            raise ApiError(500, "InternalError", "etcd is slow")

    async with operator(cluster, doors=DOORS):
        await until(lambda: found(cluster, "networkpolicies"), "the policy")
        cluster.before = refuse
        job = cluster.job()
        job["spec"]["suspend"] = True
        job["metadata"]["generation"] = 2
        cluster.put("trainingjobs", job)
        await until(lambda: said, "an event", 5.0)


async def test_forged_status_deletes_nothing_of_others() -> None:
    cluster = FakeCluster()
    cluster.apis = {names.VOLCANO_API, "x/y"}
    job = cluster.add_job(replicas=1)
    job["status"] = {
        "gang": {
            "scheduler": "Volcano",
            "apiVersion": "x/y",
            "podGroup": "../../../../../../api/v1/namespaces/other/pods/victim",
            "minMember": 1,
        }
    }
    cluster.put("trainingjobs", job)
    async with operator(cluster):
        await until(lambda: cluster.pods(), "a worker")
        assert "gang" not in cluster.job()["status"]
        job = cluster.job()
        job["status"]["gang"] = {"apiVersion": names.VOLCANO_API, "podGroup": "victim", "minMember": 1}
        cluster.put("podgroups", somebodys("PodGroup", "victim", {}))
        own = names.pod_group_name("digits", job["metadata"]["uid"])
        cluster.put("podgroups", somebodys("PodGroup", own, {}, {"uid": "other", "controller": True}))
        cluster.put("trainingjobs", job)
        await until(lambda: "gang" not in cluster.job()["status"], "the forged entry to go")
    assert set(found(cluster, "podgroups")) == {"victim", own}
    assert cluster.calls["delete_pod_group"] == 0


@contextlib.asynccontextmanager
async def api(seen: list[str]) -> AsyncIterator[KubeCluster]:
    async def answer(request: web.Request) -> web.Response:
        seen.append(request.raw_path)
        return web.json_response({"metadata": {"name": "x", "resourceVersion": "1", "uid": "u"}, "value": 3})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with Kube(to(url)) as kube:
            yield KubeCluster(kube)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "name", ["../../../../api/v1/namespaces/other/pods/victim", "a/b", "x?y=1", "x#", "%2e%2e"]
)
async def test_a_name_is_one_segment_of_a_path(name: str) -> None:
    seen: list[str] = []
    async with api(seen) as cluster:
        await cluster.get_priority(names.KUEUE_V1BETA2, POD_PRIORITY_SOURCE, name)
        await cluster.get_flavor(names.KUEUE_V1BETA2, name)
        await cluster.delete_pod_group(names.VOLCANO_API, "ns", name, "u")
        await cluster.delete_service("ns", name, "u")
        await cluster.get_pod("ns", name)
        await cluster.delete_workload(names.KUEUE_V1BETA2, "ns", name, "u")
    starts = (
        "/apis/scheduling.k8s.io/v1/priorityclasses/",
        f"/apis/{names.KUEUE_V1BETA2}/resourceflavors/",
        f"/apis/{names.VOLCANO_API}/namespaces/ns/podgroups/",
        "/api/v1/namespaces/ns/services/",
        "/api/v1/namespaces/ns/pods/",
        f"/apis/{names.KUEUE_V1BETA2}/namespaces/ns/workloads/",
    )
    assert len(seen) == len(starts)
    for path, start in zip(seen, starts, strict=True):
        assert path.startswith(start)
        assert "/" not in path.removeprefix(start)
        assert "?" not in path


@pytest.mark.parametrize("name", ["", ".", ".."])
async def test_a_name_of_dots_is_no_name(name: str) -> None:
    seen: list[str] = []
    async with api(seen) as cluster:
        with pytest.raises(ApiError, match="no name"):
            await cluster.get_pod("ns", name)
    assert seen == []

"""NetworkPolicy and disruption budget of a job; when the policy is applied, and what its refusal does."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
from operator_world import World, job_object

from springtide_operator.api import names, reasons
from springtide_operator.api.job import Job
from springtide_operator.manifests.coordinator import coordinator_pod
from springtide_operator.manifests.protection import Doors, network_policy, server_disruption_budget
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.plan.actions import ApplyNetworkPolicy, CreateCoordinator, CreateWorker
from springtide_operator.plan.decide import plan
from springtide_operator.plan.observation import Observation
from springtide_operator.plan.retry import refuse

MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def job() -> Job:
    return Job.parse(job_object(2))


def selected(selector: dict[str, Any], pod: dict[str, Any]) -> bool:
    return bool(selector["matchLabels"].items() <= pod["metadata"]["labels"].items())


def test_policy_closes_pods_of_one_job_and_opens_three_doors() -> None:
    policy = network_policy(job(), Doors("springtide-system", (MONITORING,)))
    kubernetes_validate.validate(policy, "1.31", strict=True)
    assert policy["metadata"]["ownerReferences"] == [job().owner_reference]
    spec = policy["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    ours = [worker_pod(job(), 0, 0, "a:1"), coordinator_pod(job(), 1)]
    assert all(selected(spec["podSelector"], pod) for pod in ours)
    other = worker_pod(
        Job.parse({**job_object(2), "metadata": {**job_object(2)["metadata"], "name": "b"}}), 0, 0, ""
    )
    assert not selected(spec["podSelector"], other)
    among, operator, metrics = spec["ingress"]
    assert among == {"from": [{"podSelector": spec["podSelector"]}]}
    assert operator["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "springtide-system"}}}
    ]
    assert operator["ports"] == [{"port": 7070, "protocol": "TCP"}]
    assert metrics == {
        "from": [*operator["from"], MONITORING],
        "ports": [{"port": "metrics", "protocol": "TCP"}],
    }
    for pod in ours:  # the port by its name, as every pod that we make calls it
        assert "metrics" in {port["name"] for port in pod["spec"]["containers"][0]["ports"]}


def test_metrics_are_closed_unless_peers_are_chosen() -> None:
    found = network_policy(job(), Doors("ns"))["spec"]["ingress"][2]["from"]
    assert found == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ns"}}}]


def test_a_peer_of_pods_alone_means_the_operators_namespace() -> None:
    """Restrict the peer to the operator's namespace: without it the policy would mean pods of the job's,
    which may be anybody's.
    """
    peer = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    doors = Doors.parse('{"metricsFrom": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]}', "ns")
    found = network_policy(job(), doors)["spec"]["ingress"][2]["from"]
    own = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ns"}}}
    assert found == [own, {**peer, **own}]
    assert doors.metrics_from == (peer,)


@pytest.mark.parametrize(("servers", "minimum"), [(1, 0), (2, 1), (5, 4)])
def test_servers_are_evicted_one_by_one_and_a_drain_ends(servers: int, minimum: int) -> None:
    budget = server_disruption_budget(job(), servers)
    kubernetes_validate.validate(budget, "1.31", strict=True)
    assert budget["spec"]["minAvailable"] == minimum
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    labels = budget["spec"]["selector"]["matchLabels"]
    for pod in (worker_pod(job(), 0, 0, "a:1"), coordinator_pod(job(), 1)):
        assert not labels.items() <= pod["metadata"]["labels"].items()


def test_no_node_has_to_stay_up_for_our_pods() -> None:
    for pod in (worker_pod(job(), 0, 0, "a:1"), coordinator_pod(job(), 1)):
        assert pod["metadata"]["annotations"][names.ANNOTATION_SAFE_TO_EVICT] == "true"
    said = job_object(2)
    said["spec"]["workers"]["template"]["metadata"] = {
        "annotations": {names.ANNOTATION_SAFE_TO_EVICT: "false"}
    }
    pod = worker_pod(Job.parse(said), 0, 0, "a:1")
    assert pod["metadata"]["annotations"][names.ANNOTATION_SAFE_TO_EVICT] == "false"


def test_the_coordinators_image_is_pulled_as_the_installer_says() -> None:
    pod = coordinator_pod(job(), 1, "registry/operator:1", "Always")
    assert pod["spec"]["containers"][0]["imagePullPolicy"] == "Always"


def test_the_policy_is_applied_before_pods_and_once() -> None:
    world = World()
    kinds = [type(a) for a in plan(world.parsed(), Observation(policy_missing=True), world.now).actions]
    assert kinds.index(ApplyNetworkPolicy) < kinds.index(CreateCoordinator)
    again = plan(world.parsed(), Observation(policy_missing=False), world.now).actions
    assert not any(isinstance(a, ApplyNetworkPolicy) for a in again)


def test_a_refused_policy_is_said_and_retried_and_stops_no_pod() -> None:
    world = World()
    world.settle()
    refusal = refuse(None, 403, "networkpolicies is forbidden", world.now)
    seen = Observation(
        **{**world.observe().__dict__, "policy_missing": True, "refusals": {"networkpolicy": refusal}}
    )
    world.job["spec"]["workers"]["replicas"] = 4
    now = plan(world.parsed(), seen, world.now)
    assert not any(isinstance(a, ApplyNetworkPolicy) for a in now.actions)
    assert any(isinstance(a, CreateWorker) for a in now.actions)
    degraded = next(c for c in now.status["conditions"] if c["type"] == reasons.DEGRADED)
    assert (degraded["status"], degraded["reason"]) == ("True", reasons.NETWORK_POLICY_REFUSED)
    assert (
        "the API server refuses the job's NetworkPolicy: networkpolicies is forbidden" in degraded["message"]
    )
    later = plan(world.parsed(), seen, refusal.retry_at + 1)
    assert any(isinstance(a, ApplyNetworkPolicy) for a in later.actions)

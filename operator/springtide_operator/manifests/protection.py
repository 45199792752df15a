"""Protection of a job's pods: peers that may reach them, and how many servers may be evicted at once."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

from springtide_operator.api import names
from springtide_operator.api.job import Job

Object = dict[str, Any]

_NAMESPACE_LABEL = "kubernetes.io/metadata.name"  # set by Kubernetes on every namespace
_PEER_KEYS = {"podSelector", "namespaceSelector", "ipBlock"}


@dataclass(frozen=True)
class Doors:
    """Peers besides the job's own pods that may come in: the operator, and scrapers of metrics.

    metrics_from: NetworkPolicyPeers, besides the operator's namespace. One that selects pods without naming
    namespaces means those of the operator's namespace.
    """

    operator_namespace: str
    metrics_from: tuple[Object, ...] = field(default=())

    @classmethod
    def parse(cls, text: str, operator_namespace: str) -> Doors:
        """Parse JSON `{"metricsFrom": [PEER...]}`. Raise ValueError that says what is wrong.

        Args:
            text: JSON; "" for none.
            operator_namespace: from which the operator calls.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from error
        if not isinstance(given, dict) or set(given) - {"metricsFrom"}:
            raise ValueError('must be an object like {"metricsFrom": []}')
        peers = given.get("metricsFrom") or []
        if not isinstance(peers, list):
            raise ValueError("metricsFrom must be a list of NetworkPolicy peers")
        for index, peer in enumerate(peers):
            if not isinstance(peer, dict) or not peer or set(peer) - _PEER_KEYS:
                raise ValueError(
                    f"metricsFrom[{index}] must be a NetworkPolicy peer: an object with podSelector,"
                    " namespaceSelector or ipBlock"
                )
        return cls(operator_namespace, tuple(peers))

    @property
    def operator(self) -> Object:
        """The selector of the operator's namespace."""
        return {"matchLabels": {_NAMESPACE_LABEL: self.operator_namespace}}


def network_policy(job: Job, doors: Doors) -> Object:
    """Close the pods of one job to all but each other, the operator (coordinator's port) and metrics.

    gloo, NCCL and torch's store ask nobody for a token: this is what keeps other pods out. Where somebody
    else must get in, a policy of their own adds to this one. The metrics port goes by its name, as for
    PodMonitors, so that a template may move it.

    Args:
        job: the TrainingJob.
        doors: who may reach the pods.

    Returns:
        The NetworkPolicy.
    """
    own = {"matchLabels": {names.LABEL_JOB: job.name}}
    readers = [_anchored(peer, doors) for peer in doors.metrics_from]
    metrics: Object = {  # the operator asks there who misses a coordinator that does not answer
        "from": [{"namespaceSelector": doors.operator}, *readers],
        "ports": [{"port": "metrics", "protocol": "TCP"}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": names.network_policy_name(job.name, job.uid),
            "namespace": job.namespace,
            "labels": names.labels(job.name),
            "ownerReferences": [job.owner_reference],
        },
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": own}]},
                {
                    "from": [{"namespaceSelector": doors.operator}],
                    "ports": [{"port": names.COORDINATOR_PORT, "protocol": "TCP"}],
                },
                metrics,
            ],
        },
    }


def _anchored(peer: Object, doors: Doors) -> Object:
    peer = copy.deepcopy(peer)
    if "podSelector" in peer and "namespaceSelector" not in peer:
        peer["namespaceSelector"] = doors.operator
    return peer


def server_disruption_budget(job: Job, servers: int) -> Object:
    """Let one parameter server be evicted at a time; a single one always, else no drain ends.

    An integer: for owners that are custom resources the disruption controller takes percentages and
    `maxUnavailable` of the owner's scale, which here counts workers. Servers that are not ready may always
    go, so that a broken one never holds a drain up.

    Args:
        job: the TrainingJob.
        servers: how many there are to be.

    Returns:
        The PodDisruptionBudget.
    """
    role = names.ROLE_PARAMETER_SERVER
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": names.server_budget_name(job.name, job.uid),
            "namespace": job.namespace,
            "labels": names.labels(job.name, role),
            "ownerReferences": [job.owner_reference],
        },
        "spec": {
            "minAvailable": max(0, servers - 1),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {names.LABEL_JOB: job.name, names.LABEL_ROLE: role}},
        },
    }

"""Pods that a node has taken and whose containers do not begin.

Kubernetes says only ContainerCreating of them, for as long as it lasts. Why (a volume that cannot be
attached, a network that is not ready, a very large image) stands in the pod's events, which the operator
does not read: it says which pod, on which node, and where to look.
"""

from __future__ import annotations

from springtide_operator.api import reasons
from springtide_operator.plan import coordinator as coordinator_policy
from springtide_operator.plan import servers, sizing
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import CoordinatorPod, Observation, Problem, ServerPod, WorkerPod

PATIENCE_SECONDS = 120.0

_Pod = WorkerPod | ServerPod | CoordinatorPod


def problems(observation: Observation, ledger: Ledger, now: float) -> list[Problem]:
    """One for each role, the coordinator first; it names the first pod and counts the others."""
    coordinator = coordinator_policy.current(observation, ledger)
    roles: tuple[tuple[str, list[_Pod]], ...] = (
        ("the coordinator", [coordinator] if coordinator is not None else []),
        ("worker", [*sizing.live_pods(observation)]),
        ("parameter server", [*servers.live(observation)]),
    )
    result = []
    for role, pods in roles:
        stuck = [pod for pod in pods if _stuck(pod, now)]
        if stuck:
            result.append(Problem(reasons.CONTAINERS_NOT_STARTED, _text(role, stuck)))
    return result


def _stuck(pod: _Pod, now: float) -> bool:
    if pod.problem is not None or pod.starting_since is None:
        return False
    return now - pod.starting_since >= PATIENCE_SECONDS


def _text(role: str, stuck: list[_Pod]) -> str:
    first = stuck[0]
    more = f" (and {len(stuck) - 1} more)" if len(stuck) > 1 else ""
    return (
        f"no container of {role} {first.name} on node {first.node} has begun within {PATIENCE_SECONDS:.0f} s"
        f"{more}: its image is still pulled, a volume cannot be mounted, or its network is not ready;"
        f" the events of the pod say which (kubectl describe pod {first.name})"
    )

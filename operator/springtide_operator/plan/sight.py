"""Observations of the operator itself while a coordinator does not answer, and what follows from them.

A successor may be made at any time: its incarnation fences the coordinator before it. So Kubernetes' word
that a node is lost, which takes forty seconds, is not needed. The evidence needed is that it is not the
operator that is cut off: workers that miss the coordinator, too, or a node whose kubelet renews no lease.

All durations are differences of one monotonic clock: the operator's, or a worker's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from springtide_operator.plan.observation import (
    CoordinatorPod,
    Node,
    Observation,
    ServerPod,
    Testimony,
    WorkerPod,
)

GIVEN_UP_SECONDS = 8.0
"""Without an answer, until a coordinator may have a successor."""
TRIED_SECONDS = 2.0
"""An operator that took over has tried for so long itself, at least."""
MISSED_SECONDS = 3.0
"""A worker that has no stream for so long misses its coordinator: it tries once a second."""
LATE_SECONDS = 12.0
"""Kubelets renew their lease every ten seconds."""
UNHEARD_SECONDS = 3.0
"""A pod that was asked for so long, and whose address is silent, is not heard of."""
TESTIMONY_SECONDS = 3.5
"""Without an answer, until status says that no step is known of."""

MANY_LOST = 3
LOST_SHARE = 0.55
"""So many nodes of a zone, and such a share of them, are not lost one by one: who looks is likelier at fault.

Kubernetes' node life cycle controller stops evicting by the same numbers.
"""


def why_given_up(pod: CoordinatorPod, observation: Observation, now: float) -> str:
    """Say why a coordinator that Kubernetes calls running counts as lost; "" while it does not.

    Args:
        pod: of the coordinator.
        observation: of the job.
        now: in unix seconds.
    """
    sight = observation.sight
    if pod.deleting or pod.phase != "Running":
        return ""
    if sight is None or sight.coordinator != pod.uid or pod.running_since is None:
        return ""  # a container that is not running is its kubelet's to start again
    if not sight.answered and pod.ready_since is None:
        return ""  # it has not begun to serve
    missing = {told.pod: told.missing for told in sight.testimonies if told.missing is not None}
    if any(seconds < MISSED_SECONDS for seconds in missing.values()):
        return ""  # somebody has it: it is the operator that does not reach it
    seconds = sight.silence
    if seconds >= TRIED_SECONDS:  # workers may have missed it for longer, but not since before it began
        seconds = max(seconds, min(max(missing.values(), default=0.0), now - pod.running_since))
    if seconds < GIVEN_UP_SECONDS:
        return ""
    if names := list(missing):
        verb = "miss" if len(names) > 1 else "misses"
        return f"{pod.name} does not answer, and {some(names)} {verb} it, too"
    if lease_is_late(pod.node, observation) and not too_many_lost(pod.node, observation):
        return f"{pod.name} does not answer, and its node {pod.node} does not renew its lease"
    return ""


def lease_is_late(node: str | None, observation: Observation) -> bool:
    """Return whether the operator has looked at the node's lease for long enough and seen no renewal.

    Args:
        node: its name; None: not known.
        observation: of the job.
    """
    sight = observation.sight
    lease = sight.leases.get(node) if sight is not None and node is not None else None
    return lease is not None and lease.unchanged >= LATE_SECONDS


def lease_is_renewed(node: str | None, observation: Observation) -> bool:
    """Return whether the operator has seen a renewal of the node's lease while it looked, and not long ago.

    Args:
        node: its name; None: not known.
        observation: of the job.
    """
    sight = observation.sight
    lease = sight.leases.get(node) if sight is not None and node is not None else None
    return lease is not None and lease.renewed and lease.unchanged < LATE_SECONDS


def is_unheard(pod: WorkerPod | ServerPod, observation: Observation) -> bool:
    """Return whether nothing is heard of a pod: its address is silent, or its node is lost or has a late
    lease.

    Never of one that the coordinator is connected to. Silence of an address says something only while another
    pod of the job answers or refuses: where a firewall drops what the operator asks, all are silent.

    Args:
        pod: of the job.
        observation: of the job.
    """
    report = observation.report
    if report is not None and observation.unreachable_since is None:
        connected = {member.pod_uid for member in report.members if member.connected}
        connected |= {server.pod_uid for server in report.servers if server.connected}
        if pod.uid in connected:
            return False
    told = testimony_of(pod.uid, observation)
    if told is not None and told.reached:
        return False
    node = observation.nodes.get(pod.node) if observation.nodes and pod.node else None
    if node is not None and not node.gone and node.ready is None:
        return True
    if lease_is_renewed(pod.node, observation):
        return False
    others = observation.sight.testimonies if observation.sight is not None else ()
    silent = told is not None and told.silent >= UNHEARD_SECONDS and any(one.silent == 0 for one in others)
    return silent or lease_is_late(pod.node, observation)


def testimony_of(uid: str, observation: Observation) -> Testimony | None:
    """Return what a pod said that the operator asked; None where it was not asked.

    Args:
        uid: of the pod.
        observation: of the job.
    """
    sight = observation.sight
    return next((told for told in sight.testimonies if told.uid == uid), None) if sight is not None else None


def to_avoid(observation: Observation) -> str | None:
    """Name the node that a coordinator's successor must not be on: that of the one given up, though
    Kubernetes still calls it Ready. None where that node's kubelet lives, or where there is no other node.
    """
    lost = [pod for pod in observation.coordinators if pod.lost and pod.node]
    if not lost or not observation.nodes:
        return None
    name = max(lost, key=lambda pod: pod.incarnation).node
    others = (node for node in observation.nodes.values() if node.name != name)
    elsewhere = any(node.ready and not node.cordoned and not node.gone for node in others)
    return name if elsewhere and not lease_is_renewed(name, observation) else None


def too_many_lost(name: str | None, observation: Observation) -> str:
    """Say why no pod may go for this node's state: so many look lost that who looks is likelier at fault.

    Args:
        name: of the node; None: not known.
        observation: of the job.

    Returns:
        "" while pods may go.
    """
    nodes = observation.nodes or {}
    node = nodes.get(name) if name is not None else None
    if node is None:
        return ""
    lost = {one.name for one in nodes.values() if not one.ready}
    lost |= {one for one in nodes if lease_is_late(one, observation)}
    if len(nodes) > 1 and len(lost) == len(nodes):
        return f"all {len(nodes)} nodes look lost"
    return _in_zone(node, nodes, lost)


def _in_zone(node: Node, nodes: Mapping[str, Node], lost: set[str]) -> str:
    zone = {one.name for one in nodes.values() if one.zone == node.zone}
    count = len(zone & lost)
    if count < max(MANY_LOST, ceil(LOST_SHARE * len(zone))):
        return ""
    return f"{count} of {len(zone)} nodes{f' of zone {node.zone}' if node.zone else ''} look lost"


def idle(observation: Observation) -> float | None:
    """Seconds since the newest commit that a worker told of; None where none of them told of any."""
    sight = observation.sight
    told = sight.testimonies if sight is not None else ()
    return min((one.idle for one in told if one.idle is not None), default=None)


def some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

"""Observations of the operator itself while a coordinator does not answer, and what follows from them.

A successor may be made at any time: its incarnation fences the coordinator before it. So Kubernetes' word
that a node is lost, which takes forty seconds, is not needed. The evidence needed is that it is not the
operator that is cut off: workers that miss the coordinator, too, or a node whose kubelet renews no lease.

All durations are differences of one monotonic clock: the operator's, or a worker's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from springtide_operator.plan.observation import (
    CoordinatorPod,
    Node,
    Observation,
    ServerPod,
    Testimony,
    WorkerPod,
)

GIVEN_UP_SECONDS = 8.0
"""Time without an answer until a coordinator may have a successor."""
TRIED_SECONDS = 2.0
"""An operator that took over has tried for so long itself, at least."""
MISSED_SECONDS = 3.0
"""A worker that has no stream for so long misses its coordinator: it tries once a second."""
LATE_SECONDS = 12.0
"""Kubelets renew their lease every ten seconds."""
UNHEARD_SECONDS = 3.0
"""A pod that was asked for so long, and whose address is silent, is not heard of."""
TESTIMONY_SECONDS = 3.5
"""Time without an answer until status says that no step is known of."""

HEARD_SECONDS = 10.0
"""A pod that its coordinator called connected within this time lives, whatever is said of it and its node."""

MANY_LOST = 3
LOST_SHARE = 1 / 3
"""Number of nodes, and share of all or of a zone, beyond which nodes are not lost one by one: the one that
looks is likelier at fault.

Kubernetes' node life cycle controller slows down or stops evicting from a zone by a rule of this form (more
than 2 nodes, and 55 % of them), and stops altogether while all nodes are lost.
"""


@dataclass(frozen=True)
class Brake:
    """Reasons for which no pod may go for its node's state; "" where there is none.

    Attributes:
        everywhere: of all nodes.
        zones: by zone, of its nodes.
        lost: how many nodes look lost.
        total: how many there are.
    """

    everywhere: str = ""
    zones: Mapping[str, str] = field(default_factory=dict)
    lost: int = 0
    total: int = 0

    def holds(self, node: Node | None) -> str:
        """Say why no pod may go for this node's state; "" where it may."""
        return (self.everywhere or self.zones.get(node.zone, "")) if node is not None else ""


def brake(observation: Observation) -> Brake:
    """Count the nodes that look lost: NotReady, not heard of, or with a late lease.

    A Node object that was deleted counts neither as lost nor as one of all: somebody has taken it away.
    """
    every: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for node in (observation.nodes or {}).values():
        if not node.gone:
            every[node.zone] += 1
            lost[node.zone] += not node.ready or lease_is_late(node.name, observation)
    total, count = every.total(), lost.total()
    everywhere = ""
    if total and count == total:
        everywhere = "the only node looks lost" if total == 1 else f"all {total} nodes look lost"
    elif too_many(count, total):
        everywhere = f"{count} of {total} nodes look lost"
    zones = {
        zone: f"{lost[zone]} of {size} nodes {f'of zone {zone}' if zone else 'without a zone'} look lost"
        for zone, size in every.items()
        if too_many(lost[zone], size)
    }
    return Brake(everywhere, zones, count, total)


def too_many(lost: int, total: int) -> bool:
    """Whether so many of so many are likelier not heard than lost.

    Args:
        lost: how many look lost, or do not answer.
        total: how many there are.
    """
    return lost >= MANY_LOST and lost > LOST_SHARE * total


def deaf(observation: Observation) -> str:
    """Say why a coordinator's silence towards the operator is no evidence; "" where it is.

    Coordinators on nodes that look lost do not count: their node explains it. Nor do those of a single node:
    it may be lost, and Kubernetes not know it yet.
    """
    seen, nodes = observation.sight, observation.nodes or {}
    if seen is None:
        return ""
    silent = {
        name: count
        for name, count in seen.unanswered.items()
        if (name not in nodes or nodes[name].ready) and not lease_is_late(name, observation)
    }
    count = sum(silent.values())
    total = count + seen.answering
    if len(silent) < 2 or not (too_many(count, total) or not seen.answering):
        return ""
    return f"{count} of {total} coordinators do not answer the operator"


def running_from(pod: CoordinatorPod) -> float:
    """Return when the operator first saw that its container runs, by the steady clock; infinite while it does
    not.
    """
    if pod.running_seen_at is not None:
        return pod.running_seen_at
    return pod.running_since if pod.running_since is not None else inf


def lives(uid: str, observation: Observation, now: float) -> bool:
    """Whether the coordinator called a pod connected a short time ago, as far as this process can know: one
    that has listened for a shorter time does not know the opposite.

    Args:
        uid: of the pod.
        observation: of the job.
        now: in unix seconds.
    """
    at = observation.heard_at.get(uid, observation.listening_since)
    return at is not None and observation.seen_for(at, now) < HEARD_SECONDS


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
        ran = observation.seen_for(running_from(pod), now)
        seconds = max(seconds, min(max(missing.values(), default=0.0), ran))
    if seconds < GIVEN_UP_SECONDS:
        return ""
    if names := list(missing):
        verb = "miss" if len(names) > 1 else "misses"
        return f"{pod.name} does not answer, and {some(names)} {verb} it, too"
    if lease_is_late(pod.node, observation) and not held(pod, observation):
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
    if report is not None and observation.unreachable_since is None and pod.uid in report.connected:
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


def held(pod: CoordinatorPod, observation: Observation) -> str:
    """Say why a coordinator may not be given up for its silence and its node's alone; "" where it may.

    Args:
        pod: of the coordinator.
        observation: of the job.
    """
    node = (observation.nodes or {}).get(pod.node) if pod.node is not None else None
    return brake(observation).holds(node) or deaf(observation)


def idle(observation: Observation) -> float | None:
    """Seconds since the newest commit that a worker told of; None where none of them told of any."""
    sight = observation.sight
    told = sight.testimonies if sight is not None else ()
    return min((one.idle for one in told if one.idle is not None), default=None)


def some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

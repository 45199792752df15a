"""The scheduler: which node gets a pod. `decide` is pure; `Scheduler` binds pods and says why one stays
Pending.

Tasks: one task in the event loop binds pods; informers' callbacks set `_wake`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from springtide_local.clock import timestamp
from springtide_local.events import EventRecorder
from springtide_local.informer import Change, Informers
from springtide_local.ports import ApiError, StorePort
from springtide_local.quantities import assumed_requests, pod_requests, units
from springtide_local.selection import matches_node_terms, matches_selector, tolerates

Object = dict[str, Any]
_log = logging.getLogger(__name__)
_NAME = "default-scheduler"


class Demand(NamedTuple):
    """Amounts that a pod takes of its node, in the units of `quantities`."""

    requested: dict[str, int]
    assumed: dict[str, int]
    host_ports: set[tuple[str, int]]


def demand_of(pod: Object) -> Demand:
    """Return what a pod takes of its node."""
    return Demand(pod_requests(pod), assumed_requests(pod), _host_ports(pod))


@dataclass
class NodeState:
    """A node as the scheduler sees it: the object, and the sums of what its pods ask for (see `quantities`
    for units).
    """

    node: Object
    requested: dict[str, int] = field(default_factory=dict)
    assumed: dict[str, int] = field(default_factory=dict)
    host_ports: set[tuple[str, int]] = field(default_factory=set)
    pods: list[Object] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.node["metadata"]["name"])

    def allocatable(self, resource: str) -> int:
        value = (self.node.get("status") or {}).get("allocatable", {}).get(resource)
        return 0 if value is None else units(resource, value)

    def add(self, pod: Object, demand: Demand | None = None) -> None:
        """Count a pod that is on this node.

        Args:
            pod: the Pod.
            demand: of the pod, where it is known already.
        """
        demand = demand or demand_of(pod)
        for name, amount in demand.requested.items():
            self.requested[name] = self.requested.get(name, 0) + amount
        for name, amount in demand.assumed.items():
            self.assumed[name] = self.assumed.get(name, 0) + amount
        self.host_ports |= demand.host_ports
        self.pods.append(pod)


@dataclass(frozen=True)
class Decision:
    """`node` is the chosen one, or None; `reason` says why, in the words of kube-scheduler when there is
    none.
    """

    node: str | None
    reason: str


def decide(pod: Object, nodes: Iterable[NodeState], claims: Mapping[str, str | None]) -> Decision:
    """Choose the node with the most room left among those that fit.

    Args:
        pod: the Pod.
        nodes: with what is free of each.
        claims: phase of each PersistentVolumeClaim of the pod's namespace (absent: there is none of that
            name).

    Returns:
        The node, or None, with the reason in the scheduler's words.
    """
    nodes = list(nodes)
    total = len(nodes)
    for name in _claim_names(pod):
        if name not in claims:
            return Decision(None, f'0/{total} nodes are available: persistentvolumeclaim "{name}" not found.')
        if claims[name] != "Bound":
            return Decision(
                None, f"0/{total} nodes are available: pod has unbound immediate PersistentVolumeClaims."
            )
    if total == 0:
        return Decision(None, "no nodes available to schedule pods")
    reasons: Counter[str] = Counter()
    fitting: list[tuple[float, float, str]] = []
    curable = 0
    for node in nodes:
        refusals, by_resources = _refusals(pod, node)
        if refusals:
            reasons.update(refusals)
            curable += by_resources
        else:
            fitting.append((-_preference(pod, node), _fullness(pod, node), node.name))
    if fitting:
        _, fullness, name = min(fitting)
        return Decision(
            name,
            f"{len(fitting)} of {total} nodes fit; {name} has the most room (would be {fullness:.0%} full)",
        )
    text = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
    hints = []
    if total - curable:
        hints.append(f"{total - curable} Preemption is not helpful for scheduling")
    if curable:
        hints.append(f"{curable} No preemption victims found for incoming pod")
    return Decision(
        None,
        f"0/{total} nodes are available: {text}. preemption: 0/{total} nodes are available: "
        f"{', '.join(hints)}.",
    )


def _refusals(pod: Object, state: NodeState) -> tuple[list[str], bool]:
    """Why this node cannot take the pod, and whether only a lack of resources stands against it. Empty: it
    can.
    """
    spec, node = pod["spec"], state.node
    tolerations = spec.get("tolerations") or []
    taints = (node.get("spec") or {}).get("taints") or []
    unschedulable = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    if (node.get("spec") or {}).get("unschedulable") and not tolerates(tolerations, unschedulable):
        return ["node(s) were unschedulable"], False
    for taint in taints:
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not tolerates(tolerations, taint):
            return [f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"], False
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    labels = node["metadata"].get("labels") or {}
    selected = all(labels.get(name) == value for name, value in (spec.get("nodeSelector") or {}).items())
    if not selected or (affinity and not matches_node_terms(affinity.get("nodeSelectorTerms") or [], node)):
        return ["node(s) didn't match Pod's node affinity/selector"], False
    if _breaks_anti_affinity(pod, state):
        return ["node(s) didn't match pod anti-affinity rules"], False
    short = []
    if _host_ports(pod) & state.host_ports:
        short.append("node(s) didn't have free ports for the requested pod ports")
    for name, amount in pod_requests(pod).items():
        if amount > state.allocatable(name) - state.requested.get(name, 0):
            short.append("Too many pods" if name == "pods" else f"Insufficient {name}")
    return short, bool(short)


def _breaks_anti_affinity(pod: Object, state: NodeState) -> bool:
    """Required anti-affinity by host name, in both directions. Other topologies: every node is a domain of
    its own here.
    """

    def repels(one: Object, other: Object) -> bool:
        anti = (one["spec"].get("affinity") or {}).get("podAntiAffinity") or {}
        for term in anti.get("requiredDuringSchedulingIgnoredDuringExecution") or []:
            spaces = term.get("namespaces") or [one["metadata"].get("namespace")]
            labels = other["metadata"].get("labels") or {}
            if other["metadata"].get("namespace") in spaces and matches_selector(
                term.get("labelSelector"), labels
            ):
                return True
        return False

    return any(repels(pod, other) or repels(other, pod) for other in state.pods)


def _fullness(pod: Object, state: NodeState) -> float:
    """How full cpu and memory would be, on average (kube-scheduler's LeastAllocated, as a cost)."""
    wanted = assumed_requests(pod)
    shares = []
    for name in ("cpu", "memory"):
        if allocatable := state.allocatable(name):
            shares.append((state.assumed.get(name, 0) + wanted.get(name, 0)) / allocatable)
    return sum(shares) / len(shares) if shares else 1.0


def _preference(pod: Object, state: NodeState) -> float:
    """Weights of the preferred node affinity terms that match, less untolerated PreferNoSchedule taints."""
    spec = pod["spec"]
    preferred = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "preferredDuringSchedulingIgnoredDuringExecution"
    )
    weight = sum(
        term.get("weight", 1)
        for term in preferred or []
        if matches_node_terms([term.get("preference") or {}], state.node)
    )
    avoided = sum(
        taint.get("effect") == "PreferNoSchedule" and not tolerates(spec.get("tolerations") or [], taint)
        for taint in (state.node.get("spec") or {}).get("taints") or []
    )
    return float(weight - 100 * avoided)


def _host_ports(pod: Object) -> set[tuple[str, int]]:
    return {
        (port.get("protocol", "TCP"), int(port["hostPort"]))
        for container in pod["spec"]["containers"]
        for port in container.get("ports") or []
        if port.get("hostPort")
    }


def _claim_names(pod: Object) -> list[str]:
    volumes = pod["spec"].get("volumes") or []
    return [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes
        if volume.get("persistentVolumeClaim")
    ]


def finished(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


class Scheduler:
    """Binds pending pods, highest priority and oldest first, and tries again whenever pods, nodes or claims
    change.
    """

    def __init__(self, store: StorePort, informers: Informers) -> None:
        self._store = store
        self._pods = informers.of("pods")
        self._nodes = informers.of("nodes")
        self._claims = informers.of("persistentvolumeclaims")
        self._events = EventRecorder(store, _NAME)
        self._wake = asyncio.Event()
        # Bound by us, but not yet seen so by the informer: uid of the pod -> node.
        self._assumed: dict[str, str] = {}
        # By uid of the pod: its version and demand. There are thousands of pods, and one changes at a time.
        self._demands: dict[str, tuple[str, Demand]] = {}
        self._pods.on_change(self._on_pod)
        for informer in (self._nodes, self._claims):
            informer.on_change(lambda change: self._wake.set())

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._schedule_all()

    def _schedule_all(self) -> None:
        waiting = [pod for pod in self._pods.all() if self._is_waiting(pod)]
        if not waiting:
            return
        waiting.sort(
            key=lambda pod: (
                -int(pod["spec"].get("priority") or 0),
                pod["metadata"].get("creationTimestamp") or "",
            )
        )
        nodes = {state.name: state for state in self._states()}
        for pod in waiting:
            namespace = pod["metadata"].get("namespace")
            claims = {
                claim["metadata"]["name"]: (claim.get("status") or {}).get("phase")
                for claim in self._claims.all(namespace)
            }
            gates = pod["spec"].get("schedulingGates")
            if gates:
                self._explain(
                    pod, "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates"
                )
                continue
            decision = decide(pod, nodes.values(), claims)
            if decision.node is None:
                self._explain(pod, "Unschedulable", decision.reason)
            elif self._bind(pod, decision):
                nodes[decision.node].add(pod)

    def _is_waiting(self, pod: Object) -> bool:
        spec, metadata = pod["spec"], pod["metadata"]
        if spec.get("nodeName") or metadata.get("deletionTimestamp") or finished(pod):
            return False
        return metadata["uid"] not in self._assumed and spec.get("schedulerName", _NAME) == _NAME

    def _on_pod(self, change: Change) -> None:
        pod, old = change.object, change.old
        bound = bool(pod["spec"].get("nodeName"))
        if change.type == "DELETED" or bound:
            self._assumed.pop(pod["metadata"]["uid"], None)
        if change.type == "DELETED":
            self._demands.pop(pod["metadata"]["uid"], None)
        # Most changes are of statuses of running pods: they make no room and ask for none.
        if change.type == "DELETED" or not bound or finished(pod) != (old is not None and finished(old)):
            self._wake.set()

    def _states(self) -> list[NodeState]:
        states = {node["metadata"]["name"]: NodeState(node) for node in self._nodes.all()}
        for pod in self._pods.all():
            node = pod["spec"].get("nodeName") or self._assumed.get(pod["metadata"]["uid"])
            if node in states and not finished(pod):
                states[node].add(pod, self._demand(pod))
        return list(states.values())

    def _demand(self, pod: Object) -> Demand:
        uid, version = pod["metadata"]["uid"], pod["metadata"]["resourceVersion"]
        known = self._demands.get(uid)
        if known is None or known[0] != version:
            known = self._demands[uid] = version, demand_of(pod)
        return known[1]

    def _bind(self, pod: Object, decision: Decision) -> bool:
        metadata = pod["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]

        def bind(fresh: Object) -> None:
            if fresh["metadata"]["uid"] != metadata["uid"] or fresh["spec"].get("nodeName"):
                raise ApiError(409, "Conflict", f'pod "{name}" has been replaced or bound meanwhile')
            fresh["spec"]["nodeName"] = decision.node
            _set_condition(fresh, {"type": "PodScheduled", "status": "True"})

        try:
            self._store.mutate("pods", name, namespace, bind, subresource="binding")
        except ApiError as error:
            _log.info("pod %s/%s was not bound: %s", namespace, name, error.message)
            return False
        self._assumed[metadata["uid"]] = str(decision.node)
        self._events.normal(pod, "Scheduled", f"Successfully assigned {namespace}/{name} to {decision.node}")
        return True

    def _explain(self, pod: Object, reason: str, message: str) -> None:
        metadata = pod["metadata"]
        conditions = (pod.get("status") or {}).get("conditions") or []
        if any(
            c["type"] == "PodScheduled" and (c.get("reason"), c.get("message")) == (reason, message)
            for c in conditions
        ):
            return
        condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
        try:
            self._store.mutate(
                "pods",
                metadata["name"],
                metadata["namespace"],
                lambda fresh: _set_condition(fresh, condition),
                subresource="status",
            )
        except ApiError as error:
            _log.info("pod %s/%s: %s", metadata["namespace"], metadata["name"], error.message)
            return
        if reason == "Unschedulable":
            self._events.warning(pod, "FailedScheduling", message)


def _set_condition(pod: Object, condition: Object) -> None:
    conditions = pod.setdefault("status", {}).setdefault("conditions", [])
    old = next((c for c in conditions if c["type"] == condition["type"]), None)
    moved = old is None or old["status"] != condition["status"]
    since = timestamp(time.time()) if moved or old is None else old.get("lastTransitionTime")
    fresh = {**condition, "lastProbeTime": None, "lastTransitionTime": since}
    pod["status"]["conditions"] = [c for c in conditions if c["type"] != condition["type"]] + [fresh]

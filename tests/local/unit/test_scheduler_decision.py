"""Decisions of the scheduler: the node of a pod, and the words in which it says that there is none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_local.quantities import pod_requests
from springtide_local.scheduler import NodeState, decide

Object = dict[str, Any]


def node(
    name: str, cpu: str = "4", gpus: int = 0, pods: int = 110, labels: Object | None = None, **spec: Any
) -> NodeState:
    allocatable = {"cpu": cpu, "memory": "8Gi", "pods": str(pods), "nvidia.com/gpu": str(gpus)}
    metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
    return NodeState({"metadata": metadata, "spec": spec, "status": {"allocatable": allocatable}})


def pod(cpu: str = "1", gpus: int = 0, labels: Object | None = None, **spec: Any) -> Object:
    requests = {"cpu": cpu, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    containers = spec.pop("containers", None) or [{"name": "c", "resources": {"requests": requests}}]
    metadata = {"name": "p", "namespace": "ns", "labels": labels or {}}
    return {"metadata": metadata, "spec": {"containers": containers, **spec}}


def taint(key: str, effect: str = "NoSchedule", value: str = "") -> Object:
    return {"key": key, "effect": effect, "value": value}


def test_the_node_with_the_most_room_is_chosen() -> None:
    full, empty = node("a"), node("b")
    full.add(pod("2"))
    decision = decide(pod(), [full, empty], {})
    assert decision.node == "b"
    assert "2 of 2 nodes fit" in decision.reason


def test_pods_that_ask_for_nothing_spread_too() -> None:
    nodes = [node("a"), node("b"), node("c")]
    placed = []
    for _ in range(6):
        wanted = pod(containers=[{"name": "c"}])
        chosen = decide(wanted, nodes, {}).node
        next(n for n in nodes if n.name == chosen).add(wanted)
        placed.append(chosen)
    assert sorted(placed) == ["a", "a", "b", "b", "c", "c"]


def test_each_node_says_what_it_lacks() -> None:
    nodes = [
        node("small", cpu="500m"),
        node("no-gpu", cpu="8"),
        node("cordoned", gpus=8, unschedulable=True),
        node("tainted", gpus=8, taints=[taint("team", value="red")]),
        node("other", gpus=8, labels={"zone": "z"}),
        node("full", gpus=8, pods=0),
    ]
    decision = decide(pod(gpus=1, nodeSelector={"kubernetes.io/hostname": "none"}), nodes, {})
    assert decision.node is None
    decision = decide(pod(gpus=1), [n for n in nodes if n.name != "other"], {})
    assert decision.reason == (
        "0/5 nodes are available: 1 Insufficient cpu, 1 Too many pods, "
        "1 node(s) had untolerated taint {team: red}, "
        "1 node(s) were unschedulable, 2 Insufficient nvidia.com/gpu. preemption: 0/5 nodes are available: "
        "2 Preemption is not helpful for scheduling, 3 No preemption victims found for incoming pod."
    )


def test_without_nodes() -> None:
    assert decide(pod(), [], {}).reason == "no nodes available to schedule pods"


@pytest.mark.parametrize(
    ("tolerations", "fits"),
    [
        ([], False),
        ([{"operator": "Exists"}], True),
        ([{"key": "team", "operator": "Exists"}], True),
        ([{"key": "team", "value": "red", "effect": "NoSchedule"}], True),
        ([{"key": "team", "value": "blue"}], False),
        ([{"key": "team", "value": "red", "effect": "NoExecute"}], False),
    ],
)
def test_taints_and_tolerations(tolerations: list[Object], fits: bool) -> None:
    tainted = node("a", taints=[taint("team", value="red")])
    assert (decide(pod(tolerations=tolerations), [tainted], {}).node == "a") is fits


def test_a_soft_taint_only_repels() -> None:
    soft = node("a", taints=[taint("slow", "PreferNoSchedule")])
    busy = node("b")
    busy.add(pod("3"))
    assert decide(pod(), [soft, busy], {}).node == "b"
    assert decide(pod(), [soft], {}).node == "a"


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ({"key": "zone", "operator": "In", "values": ["x", "y"]}, "a"),
        ({"key": "zone", "operator": "NotIn", "values": ["x"]}, "b"),
        ({"key": "zone", "operator": "Exists"}, "a"),
        ({"key": "zone", "operator": "DoesNotExist"}, "b"),
        ({"key": "size", "operator": "Gt", "values": ["5"]}, "b"),
        ({"key": "size", "operator": "Lt", "values": ["5"]}, "a"),
    ],
)
def test_node_affinity(expression: Object, chosen: str) -> None:
    nodes = [node("a", labels={"zone": "x", "size": "3"}), node("b", labels={"size": "9"})]
    term = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}
    decision = decide(pod(affinity=affinity), nodes, {})
    assert decision.node == chosen
    assert decision.reason.startswith("1 of 2 nodes fit")


def test_preferred_node_affinity_outweighs_room() -> None:
    liked = node("z", labels={"disk": "fast"})
    liked.add(pod("2"))
    term = {"weight": 1, "preference": {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    assert decide(pod(affinity=affinity), [node("a"), liked], {}).node == "z"


def test_required_anti_affinity_holds_in_both_directions() -> None:
    term = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
    anti = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    taken = node("a")
    taken.add(pod(labels={"app": "x"}, affinity=anti))
    decision = decide(pod(labels={"app": "x"}), [taken], {})
    assert "1 node(s) didn't match pod anti-affinity rules" in decision.reason
    assert decide(pod(labels={"app": "y"}), [taken], {}).node == "a"


def test_host_ports_are_given_once() -> None:
    wanted = pod(containers=[{"name": "c", "ports": [{"containerPort": 80, "hostPort": 8080}]}])
    taken = node("a")
    taken.add(wanted)
    assert "didn't have free ports" in decide(wanted, [taken], {}).reason
    assert decide(wanted, [taken, node("b")], {}).node == "b"


def test_claims_have_to_be_bound() -> None:
    wanted = pod(volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}])
    assert 'persistentvolumeclaim "data" not found' in decide(wanted, [node("a")], {}).reason
    assert (
        "unbound immediate PersistentVolumeClaims" in decide(wanted, [node("a")], {"data": "Pending"}).reason
    )
    assert decide(wanted, [node("a")], {"data": "Bound"}).node == "a"


@given(st.lists(st.integers(100, 3000), max_size=30))
def test_no_node_is_ever_given_more_than_it_has(sizes: list[int]) -> None:
    nodes = [node("a", cpu="2"), node("b", cpu="3", pods=5)]
    for size in sizes:
        wanted = pod(f"{size}m")
        decision = decide(wanted, nodes, {})
        room = [
            n
            for n in nodes
            if n.requested.get("cpu", 0) + size <= n.allocatable("cpu")
            and n.requested.get("pods", 0) < n.allocatable("pods")
        ]
        assert (decision.node is None) == (not room)
        if decision.node:
            next(n for n in nodes if n.name == decision.node).add(wanted)
    for n in nodes:
        assert n.requested.get("cpu", 0) <= n.allocatable("cpu")
        assert n.requested.get("pods", 0) <= n.allocatable("pods")
    assert pod_requests(pod("1"))["pods"] == 1

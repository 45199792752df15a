"""Nodes that are lost, cordoned, drained and deleted, through the real plan()."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_failure_table import done, worker
from operator_world import World, finished_message, job_object

from springtide_operator.api import names
from springtide_operator.plan import nodes, observe
from springtide_operator.plan.actions import DeletePod
from springtide_operator.plan.coordinator_sync import make_sync
from springtide_operator.plan.observation import MemberReport, Node
from springtide_operator.plan.values import timestamp

Object = dict[str, Any]


def world_of_nodes(replicas: int = 3, **workers: Any) -> World:
    """Workers 0, 1, 2 on nodes n0, n1, n2; the coordinator somewhere."""
    world = World(job=job_object(replicas, **workers))
    world.nodes = {f"n{number}": Node(f"n{number}") for number in range(3)}
    world.settle()
    for pod in world.workers():
        pod["spec"]["nodeName"] = f"n{pod['metadata']['labels'][names.LABEL_SLOT]}"
    world.coordinators()[0]["spec"]["nodeName"] = "n0"
    world.now += 100
    world.reports()
    return world


def moving_world(**workers: Any) -> World:
    """`world_of_nodes` of a job whose workers leave a node as soon as it is cordoned."""
    world = world_of_nodes(**workers)
    world.job["spec"]["elasticity"] = {"moveOnCordon": True}
    return world


def silent(world: World, *slots: int) -> None:
    """The coordinator says that these are not connected, and that the others train."""
    gone = {worker(world, slot)["metadata"]["uid"] for slot in slots}
    members = tuple(
        MemberReport(pod["metadata"]["uid"], True, pod["metadata"]["uid"] not in gone, False)
        for pod in world.workers()
        if pod["status"]["phase"] == "Running"
    )
    world.reports(members=members)


def counts(world: World) -> tuple[int, int]:
    return world.status["restarts"]["failures"], world.status["restarts"]["preemptions"]


def living(world: World) -> list[str]:
    """Return the names of the pods that the coordinator is told about."""
    seen = nodes.with_node_health(world.observe(), world.now)
    return [pod.name for pod in make_sync(world.parsed(), seen, 1, world.now).living]


@pytest.mark.parametrize(
    ("taint", "leaves"),
    [
        ("ToBeDeletedByClusterAutoscaler", True),
        ("karpenter.sh/disrupted", True),
        ("karpenter.sh/disruption", True),
        ("cloud.google.com/impending-node-termination", True),
        ("aws-node-termination-handler/spot-itn", True),
        ("DeletionCandidateOfClusterAutoscaler", False),
        ("nvidia.com/gpu", False),
    ],
)
def test_a_node_whose_taint_says_that_it_goes_is_left_in_time(taint: str, leaves: bool) -> None:
    seen = observe.node(
        {
            "metadata": {"name": "node-1"},
            "spec": {"taints": [{"key": taint, "effect": "NoSchedule"}]},
            "status": {
                "conditions": [
                    {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
                ]
            },
        }
    )
    assert (seen.ready, seen.cordoned, seen.leaving) == (True, leaves, leaves)


@pytest.mark.parametrize(("status", "ready"), [("True", True), ("False", False), ("Unknown", None)])
def test_what_kubernetes_says_of_a_node_is_read(status: str, ready: bool | None) -> None:
    said = {"type": "Ready", "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    seen = observe.node(
        {
            "metadata": {"name": "n"},
            "spec": {"unschedulable": True},
            "status": {"conditions": [{"type": "DiskPressure", "status": "True"}, said]},
        }
    )
    assert (seen.ready, seen.since, seen.cordoned, seen.leaving) == (ready, 1767225600.0, True, False)


def test_worker_heard_of_stays_whatever_its_kubelet_says() -> None:
    world = world_of_nodes()
    world.node("n1", ready=False)
    world.now += 600
    world.reports()
    assert done(world.round()) == set()


def test_silent_worker_on_lost_node_is_replaced_and_preempted() -> None:
    world = world_of_nodes()
    world.node("n1", ready=None)
    silent(world, 1)
    assert done(world.round()) == set()  # a kubelet may be starting again
    world.now += 6
    decided = world.round()
    assert done(decided) == {"+1-1", "-1-0:NodeLost"}
    assert counts(world) == (0, 1)
    assert "nothing is heard of node n1" in decided.events[0].message
    world.kubelet()
    assert {p["spec"]["nodeName"] for p in world.workers()} == {"n0", "n2"}
    world.now += 16
    forced = [a for a in world.round().actions if isinstance(a, DeletePod) and a.force]
    assert [(a.name, a.because) for a in forced] == [("digits-worker-1-0", "NodeLost")]
    assert "digits-worker-1-0" not in {pod["metadata"]["name"] for pod in world.pods.values()}
    assert counts(world) == (0, 1)


def test_it_is_looked_at_again_when_something_gets_due() -> None:
    world = world_of_nodes()
    assert world.plan().wake_at is None
    world.node("n1", ready=None)
    assert world.plan().wake_at == world.now + 2
    world.node("n1", ready=True)
    pod = worker(world, 2)
    world.ask_deletion(pod, grace=30)
    world.round()
    assert world.plan().wake_at is None  # its node lives, and says when it has ended
    world.nodes.clear()
    pod["status"]["conditions"] = DRIVEN_OUT
    assert world.plan().wake_at == world.now + 15
    world.job["spec"]["podCleanup"] = "None"
    world.end(worker(world, 0), 0, finished_message(1))
    world.round()
    assert world.status["state"] == "Succeeded"
    assert world.plan().wake_at == world.now + 15


def test_without_coordinators_word_it_waits_for_the_next_one() -> None:
    world = world_of_nodes()
    world.node("n0", ready=None)  # the coordinator's, too
    world.unreachable_since = world.now
    world.now += 6
    decided = world.round()
    assert "+c2" in done(decided)
    assert "+0-1" not in done(decided)
    world.now += 300
    assert "+0-1" not in done(world.round())
    world.kubelet()
    world.unreachable_since = None
    for pod in world.coordinators():
        world.run(pod)
    world.now += 11
    silent(world, 0)
    assert world.report is not None
    world.report = replace(world.report, incarnation=2)
    assert "+0-1" in done(world.round())


def test_an_unreachable_coordinator_on_a_good_node_stays() -> None:
    world = world_of_nodes()
    world.unreachable_since = world.now - 300
    assert done(world.round()) == set()


def test_a_deleted_node_takes_its_pods_with_it() -> None:
    world = world_of_nodes()
    world.lose_node("n1")
    silent(world, 1)
    assert done(world.round()) == set()  # whoever is heard of would stay
    world.now += 39
    assert done(world.round()) == set()  # it may be registered anew
    world.now += 1
    assert done(world.round()) == {"+1-1", "-1-0:NodeLost"}
    assert "digits-worker-1-0" not in living(world)
    forced = {a.name for a in world.round().actions if isinstance(a, DeletePod) and a.force}
    assert forced == {"digits-worker-1-0"}


def test_deleted_node_ends_no_worker_that_is_heard_of() -> None:
    world = world_of_nodes()
    world.lose_node("n1")
    world.now += 600
    world.reports()
    assert done(world.round()) == set()


def test_a_node_that_is_not_known_yet_is_no_lost_node() -> None:
    world = world_of_nodes()
    worker(world, 2)["spec"]["nodeName"] = "just-made-by-the-autoscaler"
    world.now += 600
    world.reports()
    assert done(world.round()) == set()


DRIVEN_OUT = [
    {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"},
    {"type": "Ready", "status": "False"},
]


def test_pod_driven_out_of_a_lost_node_is_forced_later() -> None:
    world = world_of_nodes()
    world.nodes.clear()  # they cannot be read
    worker(world, 2)["status"]["conditions"] = DRIVEN_OUT
    world.ask_deletion(worker(world, 2), grace=120)
    assert done(world.round()) == {"+2-1"}
    world.now += 14
    assert done(world.round()) == set()
    world.now += 2
    decided = world.round()
    assert done(decided) == {"-2-0:StuckTerminating"}
    assert all(a.force for a in decided.actions if isinstance(a, DeletePod))
    said = [(event.reason, event.message) for event in decided.events]
    assert said == [
        ("PodDeletedByForce", "pod digits-worker-2-0 is deleted by force: its node was lost"),
    ]
    assert counts(world) == (0, 1)


@pytest.mark.parametrize("readable", [True, False])
def test_pod_on_a_node_that_lives_is_never_forced(readable: bool) -> None:
    world = world_of_nodes()
    if not readable:
        world.nodes.clear()
    world.ask_deletion(worker(world, 2), grace=30)
    assert done(world.round()) == {"+2-1"}
    world.now += 30 + 3600
    assert done(world.round()) == set()
    assert "digits-worker-2-0" not in living(world)  # the job does not wait for it


def test_forced_deletion_is_asked_for_once() -> None:
    world = world_of_nodes()
    pod = worker(world, 2)
    world.node("n2", ready=None)
    silent(world, 2)
    world.now += 6
    world.round()
    world.now += 16
    pod["metadata"].setdefault("finalizers", ["somebody/holds"])
    assert done(world.round()) == {"-2-0:NodeLost"}
    pod["metadata"]["deletionGracePeriodSeconds"] = 0  # what the API server makes of a forced deletion
    pod["metadata"]["deletionTimestamp"] = timestamp(world.now)
    world.pods[pod["metadata"]["uid"]] = pod
    world.now += 600
    assert not [a for a in world.round().actions if isinstance(a, DeletePod)]


def test_no_worker_goes_while_most_nodes_look_lost() -> None:
    world = world_of_nodes()
    for name in ("n0", "n1", "n2"):
        world.node(name, ready=None)
    silent(world, 1, 2)
    world.now += 600
    assert done(world.round()) == set()
    world.node("n0", ready=True)  # two of three are lost one by one
    assert {"-1-0:NodeLost", "-2-0:NodeLost"} <= done(world.round())


def test_nothing_is_forced_while_most_nodes_look_lost() -> None:
    world = world_of_nodes()
    world.node("n0", ready=None)
    world.unreachable_since = world.now
    world.now += 6
    assert done(world.round()) == {"+c2", "-c1:Superseded"}
    for name in ("n1", "n2"):
        world.node(name, ready=None)
    world.now += 600
    assert not [a for a in world.round().actions if isinstance(a, DeletePod) and a.force]
    world.node("n1", ready=True)
    forced = {a.name for a in world.round().actions if isinstance(a, DeletePod) and a.force}
    assert forced == {"digits-coordinator-1"}


def test_cordon_alone_moves_nobody_without_move_on_cordon() -> None:
    world = world_of_nodes()
    world.node("n1", cordoned=True)
    assert done(world.round()) == set()
    world.job["spec"]["elasticity"] = {"moveOnCordon": True}
    assert done(world.round()) == {"+1-1"}


def test_taint_of_leaving_node_moves_workers_in_any_case() -> None:
    world = world_of_nodes()
    world.node("n1", cordoned=True, leaving=True)
    assert done(world.round()) == {"+1-1"}


def test_evicted_worker_of_drained_node_is_replaced_at_once() -> None:
    world = world_of_nodes()
    world.node("n1", cordoned=True)
    world.ask_deletion(worker(world, 1))
    assert done(world.round()) == {"+1-1"}
    world.kubelet()
    assert "n1" not in {pod["spec"]["nodeName"] for pod in world.workers()}


@pytest.mark.parametrize("readable", [True, False])
def test_force_after_a_limit_only_where_job_asks_for_it(readable: bool) -> None:
    world = world_of_nodes()
    if not readable:
        world.nodes.clear()
    world.job["spec"]["failurePolicy"]["forceDeleteAfterSeconds"] = 100
    world.ask_deletion(worker(world, 2), grace=30)
    assert done(world.round()) == {"+2-1"}
    assert world.plan().wake_at == world.now + 130
    world.now += 129
    assert done(world.round()) == set()
    world.now += 1
    decided = world.round()
    assert done(decided) == {"-2-0:StuckTerminating"}
    assert [a.force for a in decided.actions if isinstance(a, DeletePod)] == [True]
    assert "Terminating for more than 100 s" in decided.events[0].message


def test_on_cordoned_node_replacement_starts_elsewhere_first() -> None:
    world = moving_world()
    world.node("n1", cordoned=True)
    assert done(world.round()) == {"+1-1"}
    world.reports()
    assert done(world.round()) == set()  # it is not there yet
    assert len(world.workers()) == 4
    world.kubelet()
    silent_new = [MemberReport(p["metadata"]["uid"], True, True, False) for p in world.workers()
                  if not p["metadata"]["name"].endswith("-1-1")]  # fmt: skip
    world.reports(members=tuple(silent_new))
    assert done(world.round()) == set()  # it runs, and does not train
    world.reports()
    decided = world.round()
    assert done(decided) == {"-1-0:NodeCordoned"}
    assert [(event.reason, event.message) for event in decided.events] == [
        (
            "WorkerMoved",
            "worker digits-worker-1-0 leaves: digits-worker-1-1 has taken over from node n1, which takes no"
            " more pods",
        )
    ]
    assert "moves" not in world.status["slots"]["1"]
    world.settle()
    assert counts(world) == (0, 0)
    assert len(world.workers()) == 3
    assert all(p["spec"]["nodeName"] != "n1" for p in world.workers())


def test_failing_replacement_is_retried_while_worker_goes_on() -> None:
    world = moving_world()
    world.node("n1", cordoned=True)
    world.round(1)  # the operator dies before it is made
    assert done(world.round()) == {"+1-1"}
    world.round()
    world.vanish(next(p for p in world.workers() if p["metadata"]["name"] == "digits-worker-1-1"))
    assert done(world.round()) == {"+1-2"}
    assert counts(world) == (0, 1)
    world.settle()
    assert [p["metadata"]["name"] for p in world.workers()][-1] == "digits-worker-1-2"
    assert counts(world) == (0, 1)


@pytest.mark.parametrize("end", ["fails", "evicted", "vanishes"])
def test_a_worker_that_ends_while_it_is_replaced_counts_once(end: str) -> None:
    world = moving_world()
    world.node("n1", cordoned=True)
    world.round()
    pod = next(p for p in world.workers() if p["metadata"]["name"] == "digits-worker-1-0")
    {"fails": world.fail, "evicted": world.ask_deletion, "vanishes": world.vanish}[end](pod)
    world.settle()
    assert counts(world) == ((1, 0) if end == "fails" else (0, 1))
    assert sorted(p["metadata"]["name"][-3:] for p in world.workers()) == ["0-0", "1-1", "2-0"]


def test_without_room_for_one_more_it_stays_until_evicted() -> None:
    world = moving_world(maxReplicas=3)
    world.node("n1", cordoned=True)
    assert done(world.round()) == set()
    world.ask_deletion(worker(world, 1))
    assert done(world.round()) == {"+1-1"}


def test_scaling_up_to_the_limit_ends_a_replacement_early() -> None:
    world = moving_world(maxReplicas=4)
    world.node("n1", cordoned=True)
    world.round()
    world.scale(4)
    assert done(world.round()) == {"+3-0", "-1-0:NodeCordoned"}
    assert len(world.workers()) == 4


def test_scaling_down_takes_both() -> None:
    world = moving_world()
    world.node("n2", cordoned=True)
    world.round()
    world.scale(2)
    world.settle()
    assert sorted(p["metadata"]["labels"][names.LABEL_SLOT] for p in world.workers()) == ["0", "1"]
    assert counts(world) == (0, 0)


def test_suspending_takes_both() -> None:
    world = moving_world()
    world.node("n2", cordoned=True)
    world.round()
    world.job["spec"]["suspend"] = True
    world.round()
    assert world.workers() == []
    world.settle()
    assert counts(world) == (0, 0)
    assert world.status["slots"]["2"].get("moves") is None


def test_a_job_that_ends_moves_nobody() -> None:
    world = moving_world()
    world.reports(phase="ENDING")
    world.node("n1", cordoned=True)
    assert done(world.round()) == set()


# One flat choice, each followed by a round: nested ones seldom reach two events that matter.
KINDS = ["die", "cut", "kubelet", "report", "silence", "wait"]
KINDS += ["down", "up", "cordon", "delete", "fail", "evict", "vanish", "scale"]
STEPS = st.tuples(st.sampled_from(KINDS), st.integers(0, 6))


def apply(world: World, kind: str, number: int) -> None:
    alive, node = world.workers(), f"n{number % 4}"
    if kind == "cut":
        world.round(number)
        world.die()
    elif kind == "die":
        world.die()
    elif kind == "kubelet":
        world.kubelet()
    elif kind == "report":
        world.reports()
    elif kind == "silence":
        world.report = None
    elif kind == "wait":
        world.now += (0.5, 6.0, 40.0, 200.0)[number % 4]
    elif kind == "down":
        world.node(node, ready=None)
    elif kind == "up":
        world.node(node, ready=True, cordoned=False, gone=False)
    elif kind == "cordon":
        world.node(node, cordoned=True)
    elif kind == "delete":
        world.lose_node(node)
    elif kind == "scale":
        world.scale(1 + number % 5)
    elif alive:
        pod = alive[number % len(alive)]
        {"fail": world.fail, "evict": world.ask_deletion, "vanish": world.vanish}[kind](pod)
    world.round()
    assert len(world.workers()) <= max(5, len(alive))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(replicas=st.integers(1, 5), history=st.lists(STEPS, min_size=5, max_size=25))
def test_never_above_the_limit_and_converges_on_good_nodes(
    replicas: int, history: list[tuple[str, int]]
) -> None:
    world = World(job=job_object(replicas, maxReplicas=5))
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 10_000
    world.job["spec"]["elasticity"] = {"moveOnCordon": True}
    world.nodes = {f"n{number}": Node(f"n{number}") for number in range(4)}
    world.settle()
    world.reports()
    for kind, number in history:
        apply(world, kind, number)
    for name in ("n0", "n1"):
        world.node(name, ready=True, cordoned=False, gone=False)
    for _ in range(60):
        world.kubelet()
        world.round()
        if any(world.nodes[pod["spec"].get("nodeName", "n0")].ready for pod in world.coordinators()):
            world.unreachable_since = None
            world.reports(members=heard_of(world))
        else:  # nobody hears of a coordinator on a node that is down
            world.unreachable_since = world.unreachable_since or world.now
        world.now += 10
    wanted = world.job["spec"]["workers"]["replicas"]
    assert len(world.workers()) == wanted
    assert len(world.coordinators()) == 1
    for pod in (*world.workers(), *world.coordinators()):
        node = world.nodes[pod["spec"]["nodeName"]]
        assert node.ready, pod["metadata"]["name"]
        if observe_worker(pod) and wanted < 5:
            assert not node.cordoned
    assert not any(world.deleting(pod) for pod in world.pods.values())
    assert not any("moves" in slot for slot in world.status["slots"].values())
    assert world.plan().actions == ()


def observe_worker(pod: Object) -> bool:
    return names.parse_worker_name(pod["metadata"]["name"]) is not None


def heard_of(world: World) -> tuple[MemberReport, ...]:
    """Workers that run on nodes that work."""
    return tuple(
        MemberReport(pod["metadata"]["uid"], True, True, False)
        for pod in world.workers()
        if pod["status"]["phase"] == "Running" and world.nodes[pod["spec"]["nodeName"]].ready
    )

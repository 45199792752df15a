"""Successors of a coordinator that does not answer, pods that are not heard of, and evidence that keeps pods
alive.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_failure_table import done, worker
from operator_world import World, avoided, job_object

from springtide_operator.manifests.coordinator import coordinator_pod
from springtide_operator.plan import nodes, sight
from springtide_operator.plan.actions import CreateCoordinator, DeletePod
from springtide_operator.plan.coordinator_sync import make_sync
from springtide_operator.plan.observation import (
    LeaseSeen,
    MemberReport,
    Node,
    Observation,
    Sight,
    WorkerPod,
)
from springtide_operator.plan.observation import Testimony as Told
from springtide_operator.plan.values import timestamp


class Doubted(World):
    """Workers 0, 1, 2 and the coordinator on nodes n0, n1, n2 and n0; tests say what the operator sees."""

    sight: Sight | None = None

    def observe(self) -> Observation:
        return replace(super().observe(), sight=self.sight)

    def sees(self, silence: float, *told: Told, **leases: LeaseSeen) -> None:
        uid = self.coordinators()[0]["metadata"]["uid"]
        self.sight = Sight(uid, silence, True, told, leases)
        self.unreachable_since = self.now - silence

    def says(self, slot: int, **told: Any) -> Told:
        meta = worker(self, slot)["metadata"]
        return Told(meta["uid"], meta["name"], **{"reached": True, **told})


def doubted() -> Doubted:
    world = Doubted(job=job_object(3))
    world.nodes = {f"n{number}": Node(f"n{number}") for number in range(3)}
    world.settle()
    for number, pod in enumerate(world.workers()):
        pod["spec"]["nodeName"] = f"n{number}"
    world.coordinators()[0]["spec"]["nodeName"] = "n0"
    world.now += 100
    world.reports(last_commit_at=world.now)
    world.round()
    world.reports(last_commit_at=world.now)
    return world


def successor(world: World) -> CreateCoordinator | None:
    made = [action for action in world.round().actions if isinstance(action, CreateCoordinator)]
    return made[0] if made else None


def test_workers_that_miss_it_make_a_successor_elsewhere() -> None:
    world = doubted()
    world.sees(8.0, world.says(1, missing=7.0), world.says(2, missing=7.5), n0=LeaseSeen(4.0))
    decided = world.round()
    assert done(decided) == {"+c2", "-c1:Superseded"}, "no worker goes"
    made = next(action for action in decided.actions if isinstance(action, CreateCoordinator))
    assert made.avoid == "n0"
    assert avoided(coordinator_pod(world.parsed(), 2, avoid=made.avoid)) == {"n0"}
    assert made.reason == (
        "digits-coordinator-1 does not answer, and digits-worker-1-0, digits-worker-2-0 miss it, too"
    )


def test_late_lease_makes_a_successor_where_no_worker_speaks() -> None:
    world = doubted()
    world.sees(14.0, world.says(1, reached=False, silent=14.0), n0=LeaseSeen(11.9))
    assert successor(world) is None
    world.sees(14.1, world.says(1, reached=False, silent=14.1), n0=LeaseSeen(12.0))
    made = successor(world)
    assert made is not None
    assert made.reason == "digits-coordinator-1 does not answer, and its node n0 does not renew its lease"


def test_operator_that_alone_is_cut_off_makes_no_successor() -> None:
    world = doubted()
    world.sees(600.0, world.says(1, missing=0.0), world.says(2, missing=90.0), n0=LeaseSeen(500.0))
    assert successor(world) is None
    world.sees(600.0, n0=LeaseSeen(3.0, renewed=True))
    assert successor(world) is None
    world.sees(600.0)
    assert successor(world) is None


def test_silence_of_less_than_eight_seconds_is_no_reason() -> None:
    world = doubted()
    world.sees(7.9, world.says(1, missing=7.0))
    assert successor(world) is None


def test_operator_that_took_over_believes_workers_sooner() -> None:
    world = doubted()
    world.sees(1.9, world.says(1, missing=60.0))
    assert successor(world) is None
    world.sees(2.0, world.says(1, missing=7.9))
    assert successor(world) is None
    world.sees(2.0, world.says(1, missing=8.0))
    assert successor(world) is not None


def test_coordinator_just_begun_is_not_blamed_for_the_last() -> None:
    world = doubted()
    pod = world.coordinators()[0]
    pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = timestamp(world.now - 5)
    world.sees(3.0, world.says(1, missing=600.0))
    assert successor(world) is None


def test_container_that_restarts_is_left_to_its_kubelet() -> None:
    world = doubted()
    state = world.coordinators()[0]["status"]["containerStatuses"][0]
    state["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    world.sees(60.0, world.says(1, missing=60.0), n0=LeaseSeen(60.0))
    assert successor(world) is None


def test_coordinator_that_has_not_begun_to_serve_owes_no_answer() -> None:
    world = doubted()
    world.sees(60.0, world.says(1, missing=60.0))
    assert world.sight is not None
    world.sight = replace(world.sight, answered=False)
    assert successor(world) is None


def test_successor_may_come_to_a_node_whose_kubelet_lives() -> None:
    world = doubted()
    world.sees(20.0, world.says(1, missing=20.0), n0=LeaseSeen(2.0, renewed=True))
    made = successor(world)
    assert made is not None
    assert made.avoid is None


def test_successor_is_not_kept_off_the_only_node() -> None:
    world = doubted()
    for name in ("n1", "n2"):
        world.node(name, cordoned=True)
    world.sees(20.0, world.says(1, missing=20.0))
    made = successor(world)
    assert made is not None
    assert made.avoid is None


# ---- who is not heard of


def unheard(world: Doubted) -> set[int]:
    said = make_sync(world.parsed(), nodes.with_node_health(world.observe(), world.now), 1, world.now)
    return {pod.slot for pod in said.living if pod.unheard}


def test_silent_address_is_told_to_the_coordinator() -> None:
    world = doubted()
    world.sees(9.0, world.says(0, reached=False, silent=2.9), world.says(1, missing=8.0))
    assert unheard(world) == set()
    world.sees(9.0, world.says(0, reached=False, silent=3.0), world.says(1, missing=8.0))
    assert unheard(world) == {0}
    world.sees(9.0, world.says(0, reached=False, silent=9.0), n0=LeaseSeen(1.0, renewed=True))
    assert unheard(world) == set(), "its node lives: a policy may keep the operator from it"


def test_silence_of_all_addresses_is_a_firewall_and_no_loss() -> None:
    world = doubted()
    silent = [world.says(slot, reached=False, silent=9.0) for slot in range(3)]
    world.sees(9.0, *silent)
    assert unheard(world) == set()
    world.sees(9.0, *silent, n0=LeaseSeen(12.0))
    assert unheard(world) == {0}


def test_late_lease_speaks_for_all_pods_of_its_node() -> None:
    world = doubted()
    world.sees(20.0, world.says(1, missing=8.0), n0=LeaseSeen(12.0), n1=LeaseSeen(12.0))
    assert unheard(world) == {0}, "worker 1 answers for itself"


def test_connected_worker_is_heard_of() -> None:
    world = doubted()
    world.sees(0.0, world.says(0, reached=False, silent=60.0), world.says(1, missing=0.0))
    world.unreachable_since = None
    assert unheard(world) == set()
    assert world.report is not None
    members = tuple(replace(m, connected=False) for m in world.report.members)
    world.report = replace(world.report, members=members)
    assert unheard(world) == {0}


# ---- what status says


def test_job_of_which_nothing_is_known_does_not_train() -> None:
    world = doubted()
    since = timestamp(world.now)
    world.sees(3.4, world.says(0, reached=False, silent=3.0), world.says(1, missing=3.0, idle=5.0))
    decided = world.round()
    assert world.status["state"] == "Running"
    assert decided.wake_at == pytest.approx(world.now + 0.1)
    world.sees(3.5, world.says(0, reached=False, silent=3.1), world.says(1, missing=3.1, idle=5.1))
    world.round()
    assert world.status["state"] == "Recovering"
    assert world.status["samplesPerSecond"] == "0"
    assert world.status["workers"]["summary"] == "0/3"
    assert world.status["message"].startswith(
        f"no step is known of since {since}: digits-coordinator-1 (node n0) does not answer,"
        " and nothing is heard of digits-worker-0-0"
    )


def test_job_whose_workers_tell_of_steps_trains_on() -> None:
    world = doubted()
    world.sees(600.0, world.says(1, missing=0.0, idle=0.1))
    world.round()
    assert world.status["state"] == "Running"
    assert world.status["workers"]["summary"] == "3/3"


def test_message_stays_until_the_successor_knows() -> None:
    world = doubted()
    world.sees(9.0, world.says(1, missing=9.0, idle=9.0))
    world.round()
    before = world.status["message"]
    world.sight, world.unreachable_since = None, None
    world.round()
    assert world.status["state"] == "Recovering"
    assert world.status["message"] == before


# ---- the brake


NODES = st.lists(
    st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from([True, False, None])), min_size=1, max_size=12
)


@given(NODES)
def test_brake_holds_where_most_of_a_zone_looks_lost(drawn: list[tuple[str, bool | None]]) -> None:
    found = {f"n{i}": Node(f"n{i}", ready, zone=zone) for i, (zone, ready) in enumerate(drawn)}
    brake = sight.brake(Observation(nodes=found))
    for node in found.values():
        zone = [other for other in found.values() if other.zone == node.zone]
        groups = zone, list(found.values())
        lost = [sum(not other.ready for other in group) for group in groups]
        many = any(n >= 3 and 3 * n > len(group) for n, group in zip(lost, groups, strict=True))
        assert bool(brake.holds(node)) == (many or lost[1] == len(found))


@pytest.mark.slow
@settings(deadline=None)
@given(NODES, st.lists(st.booleans(), min_size=12, max_size=12), st.booleans())
def test_no_pod_is_lost_that_its_coordinator_hears(
    drawn: list[tuple[str, bool | None]], heard: list[bool], answers: bool
) -> None:
    world = doubted()
    world.nodes = {f"n{i}": Node(f"n{i}", ready, zone=zone) for i, (zone, ready) in enumerate(drawn)}
    uids = [pod["metadata"]["uid"] for pod in world.workers()]
    members = (MemberReport(uid, True, on, False) for uid, on in zip(uids, heard, strict=False))
    world.reports(members=tuple(members))
    world.unreachable_since = None if answers else world.now - 3600
    judged = nodes.with_node_health(world.observe(), world.now)
    for pod, on in zip(judged.workers, heard, strict=False):
        if on or not answers:
            assert pod.end is None, "a coordinator that cannot be heard is no evidence"
    deleted = [a for a in world.plan().actions if isinstance(a, DeletePod)]
    for name in {a.name for a in deleted if "worker" in a.name}:
        pod = next(p for p in judged.workers if p.name == name)
        assert isinstance(pod, WorkerPod)
        assert pod.end is not None
        assert pod.node is not None
        seen = world.observe()
        assert not sight.brake(seen).holds(world.nodes[pod.node])

"""The operator's whole life: a job that may finish at any moment, news that come late and in pieces."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from operator_late_world import LEFT, LateWorld
from operator_world import job_object

from springtide_operator.api import names, reasons

Object = dict[str, Any]
INDEX = st.integers(0, 20)
NODES = ("n0", "n1", "n2")
ENDS = (reasons.EVENT_WORKER_FAILED, reasons.EVENT_WORKER_PREEMPTED, reasons.EVENT_WORKER_IGNORED)


class Life(RuleBasedStateMachine):
    """Users, kubelets, the coordinator and the operator's parts take turns in any order."""

    world: LateWorld

    @initialize(
        replicas=st.integers(1, 3), limit=st.sampled_from([0, 1, 10_000]), rounds=st.sampled_from([0, 6])
    )
    def begin(self, replicas: int, limit: int, rounds: int) -> None:
        self.world = LateWorld(job=job_object(replicas, maxReplicas=4))
        self.world.job["spec"]["failurePolicy"]["backoffLimit"] = limit
        for name in NODES:
            self.world.node(name, ready=True)
        self.final: Object = {}
        self.moved: set[str] = set()
        self.calm(rounds)

    # ---- the operator

    @precondition(lambda self: self.world.decided is None)
    @rule()
    def decide(self) -> None:
        self.world.decide()

    @precondition(lambda self: self.world.decided is not None)
    @rule(count=st.sampled_from([0, 1, 2, 99]))
    def carry_on(self, count: int) -> None:
        self.world.carry_on(count)

    @rule(dies=st.booleans())
    def operator_begins_anew_or_lists(self, dies: bool) -> None:
        if dies:
            self.world.die()
        else:
            self.world.list_all()

    @rule(count=st.sampled_from([1, 2, 5]))
    def a_watch_delivers(self, count: int) -> None:
        self.world.deliver(count)

    @rule()
    def call_the_coordinator(self) -> None:
        self.world.ask()

    @rule()
    def the_coordinator_answers(self) -> None:
        self.world.hear_answer()

    @rule()
    def all_goes_well_for_a_while(self) -> None:
        self.calm(2)

    # ---- what it hears of

    @rule(index=INDEX)
    def a_pod_starts(self, index: int) -> None:
        waiting = [pod for pod in self.world.pods.values() if pod["status"]["phase"] == "Pending"]
        waiting = [pod for pod in waiting if not self.world.deleting(pod)]
        if waiting:
            pod = waiting[index % len(waiting)]
            self.world.bind(pod)
            self.world.run(pod)

    @rule(index=INDEX)
    def a_pod_that_was_to_go_is_gone(self, index: int) -> None:
        going = [pod for pod in self.world.pods.values() if self.world.deleting(pod)]
        if going:
            self.world.vanish(going[index % len(going)])

    @rule(index=INDEX)
    def a_worker_leaves_before_it_is_gone(self, index: int) -> None:
        going = [pod for pod in self.world.running_workers() if self.world.deleting(pod)]
        if going:
            self.world.end(going[index % len(going)], 0, LEFT)

    @rule(index=INDEX, how=st.sampled_from(["fail", "exit0", "left", "evict", "delete", "vanish"]))
    def something_happens_to_a_worker(self, index: int, how: str) -> None:
        world, running = self.world, self.world.running_workers()
        if not running:
            return
        pod = running[index % len(running)]
        uid = pod["metadata"]["uid"]
        (world.failed if how in ("fail", "exit0") else world.disturbed).add(uid)
        if how in ("fail", "exit0", "left"):
            world.end(pod, 1 if how == "fail" else 0, LEFT if how == "left" else "")
        elif how == "evict":
            world.evict(pod)
        elif how == "delete":
            world.ask_deletion(pod)
        else:
            world.vanish(pod)

    @rule(how=st.sampled_from(["delete", "fail", "vanish"]))
    def the_coordinator_is_lost(self, how: str) -> None:
        for pod in self.world.coordinators()[:1]:
            if how == "delete":
                self.world.ask_deletion(pod, 5)
            elif how == "fail":
                self.world.end(pod, 1)
            else:
                self.world.vanish(pod)

    @rule()
    def all_that_run_train(self) -> None:
        self.world.train()

    @rule()
    def the_last_step_is_committed(self) -> None:
        self.world.train()
        self.world.finish()

    @precondition(lambda self: self.world.over)
    @rule(index=INDEX)
    def a_worker_ends_after_the_job(self, index: int) -> None:
        running = self.world.running_workers()
        if running:
            self.world.end_with_the_job(running[index % len(running)])

    @rule(replicas=st.integers(1, 4))
    def scale(self, replicas: int) -> None:
        self.world.scale(replicas)

    @rule(value=st.booleans())
    def suspend(self, value: bool) -> None:
        self.world.job["spec"]["suspend"] = value
        self.world.job["metadata"]["generation"] += 1

    @rule(name=st.sampled_from(NODES), cordoned=st.booleans())
    def cordon(self, name: str, cordoned: bool) -> None:
        self.world.node(name, cordoned=cordoned, leaving=cordoned)

    @rule(seconds=st.sampled_from([0.1, 1.0, 12.0, 70.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    # ---- what never may be

    @invariant()
    def every_end_is_counted_for_what_it_was_at_most_once(self) -> None:
        world, restarts = self.world, self.world.status.get("restarts") or {}
        failed, preempted = restarts.get("failedWorkers", 0), restarts.get("preemptedWorkers", 0)
        assert failed <= len(world.failed)
        assert preempted <= len(world.disturbed)
        assert failed + preempted <= len(world.failed | world.disturbed)
        assert restarts.get("failures", 0) <= failed
        assert restarts.get("preemptions", 0) <= preempted

    @invariant()
    def a_slot_has_one_worker_unless_it_moves(self) -> None:
        slots = self.world.status.get("slots") or {}
        self.moved |= {slot for slot, entry in slots.items() if "moves" in entry}
        count = Counter(pod["metadata"]["labels"][names.LABEL_SLOT] for pod in self.world.workers())
        for slot, there in count.items():
            assert there <= (2 if slot in self.moved else 1), (slot, there)
        assert len(self.world.coordinators()) <= 1

    @invariant()
    def what_has_ended_stays_as_it_ended(self) -> None:
        status = self.world.status
        if "completionTime" not in status:
            assert not self.final
            return
        kept = ("state", "completionTime", "step", "data", "values", "restarts")
        final = {key: status[key] for key in kept if key in status}
        self.final = self.final or final
        assert final == self.final
        if status["state"] == "Succeeded":
            assert self.world.said_finished
            assert (status["step"], status["data"]["totalSeen"]) == (2400, 431100)

    @invariant()
    def every_event_is_told_once(self) -> None:
        told = self.world.told
        assert sum(event.reason in (reasons.SUCCEEDED, reasons.FAILED) for event in told) <= 1
        ended = [event.message for event in told if event.reason in ENDS]
        who = Counter(found[1] for text in ended if (found := re.match(r"worker (digits-[\w-]+)", text)))
        assert all(count == 1 for count in who.values()), who

    # ---- how it ends

    def calm(self, rounds: int) -> bool:
        """Let nothing go wrong for so many rounds, and return whether nothing is left to do."""
        world = self.world
        world.carry_on()
        for _ in range(rounds):
            world.kubelet()
            world.restart_in_vain()
            for pod in world.running_workers() if world.over else []:
                world.end_with_the_job(pod)
            world.train()
            world.deliver()
            world.ask()
            world.hear_answer()
            before = world.status
            world.decide()
            assert world.decided is not None
            later = world.decided.wake_at
            busy = bool(world.left) or world.status != before or any(map(world.deleting, world.pods.values()))
            world.carry_on()
            world.now += 10
            if not busy and (later is None or later <= world.now - 10):
                return True
        return False

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.job["spec"]["suspend"] = False
        for name in NODES:
            world.node(name, cordoned=False, leaving=False)
        assert self.calm(400), f"not settled: {world.status}"
        self.every_end_is_counted_for_what_it_was_at_most_once()
        self.a_slot_has_one_worker_unless_it_moves()
        self.what_has_ended_stays_as_it_ended()
        self.every_event_is_told_once()
        if self.final:
            assert world.workers() == world.coordinators() == []
            assert not world.status["coordinator"]["address"]
            assert world.plan().actions == ()
        else:
            assert not world.over
            assert len(world.workers()) == world.job["spec"]["workers"]["replicas"]
            assert len(world.coordinators()) == 1


TestLife = pytest.mark.slow(Life.TestCase)
TestLife.settings = settings(max_examples=70, stateful_step_count=50)

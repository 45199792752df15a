"""Promises about any history of a job: no mix of histories, no rollback, no name used twice, and it always
goes on.

The invariants are checked by the simulated world itself (tests/support/coordinator_simulation.py). Each rule
of the protocol is taken out in turn, to show that the world notices.
"""

from __future__ import annotations

import pytest
from coordinator_simulation import World
from coordinator_walk import walk
from coordinator_worker_model import BrokenPromise, Storage, Worker
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from membership_rules import without

WHICH = st.integers(0, 7)


class LifeOfAJob(RuleBasedStateMachine):
    """Random joins, crashes, stops and wakes, late messages, and more than one coordinator alive."""

    world: World

    @initialize(
        workers=st.integers(1, 3),
        last_step=st.sampled_from([6, 10_000]),
        rounds=st.integers(0, 12),
        turn=st.sampled_from([1, 2, 5]),
        limits=st.sampled_from([(0,), (2,), (1, 3), (2, 0, 1)]),
        standby=st.sampled_from([0, 0, 1, 2]),
    )
    def begin(
        self,
        workers: int,
        last_step: int,
        rounds: int,
        turn: int,
        limits: tuple[int, ...],
        standby: int = 0,
    ) -> None:
        self.world = World(target=workers, last_step=last_step, turn=turn, limits=limits, standby=standby)
        for _ in range(rounds):
            self.world.round()

    def pick(self, which: int) -> Worker:
        alive = [w for w in self.world.workers.values() if w.alive] or list(self.world.workers.values())
        return alive[which % len(alive)]

    @rule(which=WHICH, unlucky=st.booleans())
    def act(self, which: int, unlucky: bool) -> None:
        self.world.act(self.pick(which), unlucky)

    @rule(which=WHICH)
    def report(self, which: int) -> None:
        self.pick(which).report()

    @rule(which=WHICH)
    def drift(self, which: int) -> None:
        self.world.drift(self.pick(which))

    @rule(which=WHICH, times=st.integers(1, 3))
    def deliver_up(self, which: int, times: int) -> None:
        for _ in range(times):
            self.world.deliver_up(self.pick(which))

    @rule(which=WHICH, times=st.integers(1, 3))
    def deliver_down(self, which: int, times: int) -> None:
        for _ in range(times):
            self.world.deliver_down(self.pick(which))

    @rule(which=WHICH, coordinator=st.integers(0, 3))
    def connect(self, which: int, coordinator: int) -> None:
        self.world.connect(self.pick(which), coordinator % len(self.world.coordinators))

    @rule(seconds=st.sampled_from([0.05, 0.4, 1.0, 3.0, 16.0]))
    def elapse(self, seconds: float) -> None:
        self.world.elapse(seconds)

    @rule()
    def operator(self) -> None:
        self.world.operator()

    @rule(rounds=st.integers(1, 15))
    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.round()

    @rule(which=WHICH)
    def crash(self, which: int) -> None:
        self.world.crash(self.pick(which))

    @rule(which=WHICH)
    def stop(self, which: int) -> None:
        self.world.stop(self.pick(which))

    @rule(which=WHICH)
    def wake(self, which: int) -> None:
        self.world.wake(self.pick(which))

    @rule(seconds=st.floats(0.1, 8.0))
    def coordinators_stand_still(self, seconds: float) -> None:
        self.world.stand_still(seconds)

    @rule(which=WHICH)
    def break_stream(self, which: int) -> None:
        self.world.break_stream(self.pick(which))

    @rule(which=WHICH, dies=st.booleans())
    def end_lifeline(self, which: int, dies: bool) -> None:
        worker = self.pick(which)
        if dies:
            self.world.crash(worker)
        self.world.end_lifeline(worker)

    @rule(which=WHICH, grace=st.sampled_from([1.0, 30.0]))
    def delete_pod(self, which: int, grace: float) -> None:
        self.world.delete_pod(self.world.pods[self.pick(which).info.pod_uid], grace)

    @rule(which=st.integers(0, 20))
    def new_process(self, which: int) -> None:
        pods = list(self.world.pods.values())
        self.world.new_process(pods[which % len(pods)])

    @rule()
    def restart_coordinator(self) -> None:
        self.world.restart_coordinator()

    @rule()
    def second_coordinator(self) -> None:
        self.world.second_coordinator()

    @rule(up=st.booleans())
    def operator_comes_and_goes(self, up: bool) -> None:
        self.world.operator_up = up

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.heal()
            self.world.must_go_on()


LifeOfAJob.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLifeOfAJob = pytest.mark.slow(LifeOfAJob.TestCase)


@pytest.mark.slow
@pytest.mark.parametrize("last_step", [6, 10_000], ids=["ends", "goes on"])
def test_random_walks_break_no_promise(last_step: int) -> None:
    furthest = max(walk(seed, last_step=last_step).top() for seed in range(120))
    assert furthest > 4  # the walks get somewhere


@pytest.mark.slow
def test_walks_with_low_limits_make_no_group_without_room() -> None:
    limits = [(2,), (1, 3), (2, 0, 1), (3, 2, 2, 1)]
    worlds = [walk(seed, limits=limits[seed % len(limits)]) for seed in range(100)]
    assert max(world.top() for world in worlds) > 4


@pytest.mark.slow
def test_walks_with_standbys_fill_seats_and_no_more() -> None:
    stores = [Storage() if seed % 3 == 0 else None for seed in range(120)]
    worlds = [walk(seed, storage=store, standby=1 + seed % 2) for seed, store in enumerate(stores)]
    assert max(world.top() for world in worlds) > 4


@pytest.mark.slow
def test_whoever_is_suspended_or_drained_leaves_nothing_unsaved() -> None:
    """The same with checkpoints, and with jobs that are suspended at any moment."""
    stores = [Storage() for _ in range(100)]
    worlds = [walk(seed, storage=storage) for seed, storage in enumerate(stores)]
    assert max(world.top() for world in worlds) > 4
    assert sum(bool(storage.whole) for storage in stores) > 5  # the walks get that far


@pytest.mark.parametrize(
    ("rule", "known"),
    [
        ("parked_only", 5),
        ("wait_for_survivors", 12),
        ("fresh_needs_word", 11),
        ("own_incarnation", 15),
        ("end_together", 5),
        ("leaver_hands_over", 33),
        ("save_before_leaving", 16),
        ("room_for_all", 0),
        ("seats", 1518),
        ("loop_is_forgotten", 12),
    ],
)
def test_without_the_rule_a_promise_breaks(rule: str, known: int) -> None:
    """known: a walk that found the rule missing once, which comes first; the others may be long to search."""
    for seed in (known, *range(300)):
        try:
            storage = Storage() if rule == "save_before_leaving" else None
            last_step = 6 if rule == "end_together" else 10_000
            with without(rule):
                limits = (2, 1) if rule == "room_for_all" else (0,)
                standby = 1 if rule == "seats" else 0
                walk(seed, last_step=last_step, storage=storage, limits=limits, standby=standby)
        except BrokenPromise:
            return
    pytest.fail(f"300 walks without the rule {rule} broke no promise: the rule or its check does nothing")


def test_older_state_stays_while_the_newer_ones_holder_leaves() -> None:
    """The one that trains is gone before it has handed its state over: the older state is the newest then."""
    job = LifeOfAJob()
    job.begin(workers=1, last_step=6, rounds=1, turn=1, limits=(0,))
    job.delete_pod(grace=30.0, which=0)
    job.go_on(rounds=1)
    job.operator()
    for rounds in (1, 1, 7):
        job.go_on(rounds=rounds)
    job.stop(which=0)
    job.coordinators_stand_still(seconds=1.0)
    job.go_on(rounds=5)
    job.delete_pod(grace=1.0, which=1)
    job.coordinators_stand_still(seconds=1.0)
    job.teardown()

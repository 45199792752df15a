"""Counting ends once; backoff that grows and decays; what is a failure and what is not."""

from __future__ import annotations

import pytest
from operator_world import World, finished_message, job_object

from springtide_operator.api import names, reasons
from springtide_operator.plan.actions import CreateWorker
from springtide_operator.plan.retry import Backoff, decayed, delay
from springtide_operator.plan.values import timestamp


def running_world(replicas: int = 3) -> World:
    world = World(job=job_object(replicas))
    world.settle()
    return world


def counts(world: World) -> tuple[int, int, int]:
    restarts = world.status["restarts"]
    return restarts["failures"], restarts["preemptions"], restarts["total"]


def test_backoff_starts_at_second_failure_doubles_and_is_limited() -> None:
    assert [delay(n) for n in range(6)] == [0, 0, 1, 2, 4, 8]
    assert delay(50) == 300


def test_backoff_decays_by_one_every_five_minutes() -> None:
    assert decayed(5, 1000.0, 1299.0) == 5
    assert decayed(5, 1000.0, 1300.0) == 4
    assert decayed(5, 1000.0, 1000.0 + 300 * 9) == 0
    assert decayed(5, 1000.0, 900.0) == 5  # a clock that went back


def test_one_failure_is_replaced_at_once_under_the_next_attempt() -> None:
    world = running_world()
    pod = world.workers()[1]
    pod["spec"]["nodeName"] = "node-1"
    world.fail(pod)
    decided = world.round()
    made = [a for a in decided.actions if isinstance(a, CreateWorker)]
    assert [(a.slot, a.attempt, a.avoid) for a in made] == [(1, 1, None)]
    assert counts(world) == (1, 0, 1)
    assert world.status["lastFailure"]["pod"] == pod["metadata"]["name"]
    assert [e.reason for e in decided.events][:1] == [reasons.EVENT_WORKER_FAILED]


def test_repeated_failures_wait_longer_and_say_so() -> None:
    world = running_world(1)
    waits = []
    for _ in range(4):
        world.fail(world.workers()[0])
        began = world.now
        world.round()
        if not world.workers():
            condition = next(c for c in world.status["conditions"] if c["type"] == reasons.DEGRADED)
            loop = world.status["restarts"]["failures"] >= 3
            assert condition["reason"] == (reasons.CRASH_LOOP if loop else reasons.BACKING_OFF)
            assert "ValueError" in condition["message"]
        world.round_until(world.workers, "a new worker")
        waits.append(world.now - began)
        world.kubelet()
    assert waits == [0, 1, 2, 4]


def test_a_crash_loop_is_told_once_and_is_over_when_all_train() -> None:
    world = running_world(2)
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 100
    world.reports()
    told: list[str] = []
    for _ in range(2 + 5):  # two that had trained are no part of it
        world.fail(world.workers()[0])
        for _ in range(40):  # the next try comes, runs, and has not trained
            told += [event.reason for event in world.round().events]
            world.now += 0.5
        world.kubelet()
        world.round()
    assert told.count(reasons.CRASH_LOOP) == 1
    degraded = next(c for c in world.status["conditions"] if c["type"] == reasons.DEGRADED)
    assert degraded["reason"] == reasons.CRASH_LOOP
    assert "(5 times of late); last failure: worker digits-worker-" in degraded["message"]
    world.reports()
    world.round()
    world.report = None  # the coordinator's next incarnation has not spoken yet
    world.round()
    degraded = next(c for c in world.status["conditions"] if c["type"] == reasons.DEGRADED)
    assert degraded["reason"] == reasons.HEALTHY


def test_worker_running_a_while_ends_crash_loop_also_unreported() -> None:
    world = running_world(1)
    for _ in range(3):
        world.fail(world.workers()[0])
        world.round_until(world.workers, "a new worker")
        world.kubelet()

    def reason() -> str:
        world.round()
        return str(next(c for c in world.status["conditions"] if c["type"] == reasons.DEGRADED)["reason"])

    assert reason() == reasons.CRASH_LOOP
    world.now += 31
    assert reason() == reasons.HEALTHY


def test_trained_workers_are_replaced_at_once_however_many_die() -> None:
    """Ten minutes in which one of three is killed every 25 s."""
    world = running_world(3)
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 1000
    world.reports()
    for n in range(24):
        world.now += 25
        world.reports()
        world.round()
        world.end(world.workers()[n % 3], 137)
        world.round()
        assert len(world.workers()) == 3
        world.kubelet()
    assert world.status["restarts"]["failures"] == 24
    assert world.status.get("backoff", {}).get("worker", {}).get("count", 0) == 0


def test_successor_of_a_trained_one_waits_for_no_others_loop() -> None:
    world = running_world(2)
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 100
    world.reports()
    looping, other = world.workers()
    slot = looping["metadata"]["labels"][names.LABEL_SLOT]
    for _ in range(5):
        world.fail(next(p for p in world.workers() if p["metadata"]["labels"][names.LABEL_SLOT] == slot))
        world.round()
        while len(world.workers()) < 2:
            world.now += 0.5
            world.round()
        world.kubelet()
    world.fail(next(p for p in world.workers() if p["metadata"]["labels"][names.LABEL_SLOT] == slot))
    world.round()
    assert len(world.workers()) == 1, "the looping one is held back"
    held = world.status["backoff"]["worker"]["count"]
    world.end(other, 137)
    world.round()
    assert [p["metadata"]["labels"][names.LABEL_SLOT] != slot for p in world.workers()] == [True]
    assert world.status["backoff"]["worker"]["count"] == held - 1


@pytest.mark.parametrize(
    ("trained", "lived", "healthy"),
    [(True, 9, False), (True, 11, True), (False, 11, False), (False, 290, False), (False, 301, True)],
)
def test_which_ends_are_no_part_of_a_loop(trained: bool, lived: float, healthy: bool) -> None:
    world = running_world(1)
    world.fail(world.workers()[0])
    world.settle()
    world.now = float(int(world.now))
    world.fail(world.workers()[0])
    world.settle(seconds=0.5)
    before = world.status["backoff"]["worker"]["count"]
    pod = world.workers()[0]
    pod["metadata"]["creationTimestamp"] = timestamp(world.now)
    world.run(pod)
    if trained:
        world.reports()
    world.round()
    world.now += lived
    world.fail(pod)
    world.round()
    after = world.status["backoff"]["worker"]["count"]
    assert after < before if healthy else after == before + 1


def test_the_longer_the_delay_the_longer_a_healthy_life() -> None:
    long = Backoff(count=8, last=1000.0)  # 64 s
    assert not long.healthy(60.0, True, 1000.0)
    assert long.healthy(65.0, True, 1000.0)
    assert long.healthy(33.0, True, 1300.0)  # one is forgotten


def test_scaling_up_does_not_wait_for_another_slots_backoff() -> None:
    world = running_world(3)
    for _ in range(2):
        for pod in world.workers():
            world.fail(pod)
        world.round()
    assert world.workers() == []
    world.scale(5)
    world.round()
    assert sorted(pod["metadata"]["name"] for pod in world.workers()) == [
        "digits-worker-3-0",
        "digits-worker-4-0",
    ]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda w, p: w.evict(p), (0, 1)),
        (lambda w, p: w.ask_deletion(p), (0, 1)),
        (lambda w, p: w.vanish(p), (0, 1)),
        (lambda w, p: w.end(p, 0, '{"outcome": "Left"}'), (0, 1)),
        (lambda w, p: w.end(p, 0, '{"outcome": "Left", "finished": true}'), (0, 0)),
        (lambda w, p: w.fail(p), (1, 0)),
        (lambda w, p: w.end(p, 0), (1, 0)),
    ],
    ids=["evicted", "deleted", "vanished", "left", "came too late", "failed", "exit 0"],
)
def test_what_counts_as_a_failure(what: object, expected: tuple[int, int]) -> None:
    world = running_world()
    what(world, world.workers()[0])  # type: ignore[operator]
    world.round()
    restarts = world.status["restarts"]
    assert (restarts["failures"], restarts["preemptions"]) == expected
    world.settle()
    assert (world.status["restarts"]["failures"], world.status["restarts"]["preemptions"]) == expected
    assert len(world.workers()) == 3


@pytest.mark.parametrize("first", ["newcomer", "finished"])
def test_newcomer_sent_away_by_a_finished_job_is_no_preemption(first: str) -> None:
    """Whichever of the two ends the operator reads first."""
    world = running_world(2)
    lost, kept = world.workers()
    world.vanish(lost)
    world.round()
    newcomer = next(pod for pod in world.workers() if pod is not kept)
    ends = [
        lambda: world.end(newcomer, 0, '{"outcome": "Left", "reason": "late", "finished": true}'),
        lambda: world.end(kept, 0, finished_message(1)),
    ]
    for end in ends if first == "newcomer" else reversed(ends):
        end()
        decided = world.round()
        assert reasons.EVENT_WORKER_PREEMPTED not in [event.reason for event in decided.events]
    world.settle()
    assert world.status["state"] == reasons.STATE_SUCCEEDED
    assert counts(world) == (0, 1, 1)


def test_newcomers_of_finished_job_without_report_slow_down() -> None:
    world = running_world(1)
    made = 0
    for _ in range(8):
        for pod in world.workers():
            made += 1
            world.end(pod, 0, '{"outcome": "Left", "finished": true}')
        world.round()
        world.now += 1.0
    assert 2 <= made <= 5
    assert counts(world) == (0, 0, 0)


def test_scaling_down_counts_nothing() -> None:
    world = running_world(4)
    world.scale(1)
    world.settle()
    assert world.status["restarts"]["total"] == 0


def test_a_failure_before_the_deletion_was_asked_stays_a_failure() -> None:
    world = running_world()
    pod = world.workers()[0]
    world.fail(pod)
    world.now += 5
    world.ask_deletion(pod)  # a user cleans up before any operator looked
    world.round()
    assert world.status["restarts"]["failures"] == 1


def test_an_exit_caused_by_the_deletion_is_no_failure() -> None:
    world = running_world()
    pod = world.workers()[0]
    world.ask_deletion(pod)
    world.now += 5
    world.end(pod, 143)
    world.round()
    assert counts(world) == (0, 1, 1)


def test_the_job_fails_with_the_scripts_error() -> None:
    world = running_world(1)
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 0
    world.fail(world.workers()[0])
    decided = world.round()
    failed = next(c for c in world.status["conditions"] if c["type"] == reasons.FAILED)
    assert failed["status"] == "True"
    assert failed["reason"] == reasons.BACKOFF_LIMIT_EXCEEDED
    assert "ValueError: x" in failed["message"]
    assert "digits-worker-0-0" in failed["message"]
    assert decided.events[-1].warning


def test_newest_failed_pods_are_kept_for_logs_and_no_more() -> None:
    world = running_world(1)
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 100
    for _ in range(8):
        world.fail(world.workers()[0])
        world.settle()
    kept = [pod["metadata"]["name"] for pod in world.workers(live=False) if not world.alive(pod)]
    assert sorted(kept) == [f"digits-worker-0-{attempt}" for attempt in range(3, 8)]


def test_lost_status_takes_the_highest_attempts_that_exist() -> None:
    world = running_world(1)
    world.fail(world.workers()[0])
    world.settle()
    world.job["status"] = {}
    world.die()
    world.settle()
    assert world.status["slots"]["0"]["attempt"] == 1
    assert len(world.workers()) == 1


def test_own_deletions_are_known_by_mark_when_status_was_lost() -> None:
    world = running_world(3)
    world.scale(2)
    world.round()
    world.job["status"] = {}
    world.die()
    world.round()  # sees the pod that is still going
    assert world.status["slots"]["2"]["ended"] == reasons.END_SCALED_DOWN
    world.settle()
    assert world.status["restarts"]["total"] == 0
    assert len(world.workers()) == 2


def test_an_eviction_says_who_evicted() -> None:
    world = running_world(2)
    pod = world.workers()[0]
    pod["status"]["conditions"] = [
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "by drain",
        }
    ]
    world.ask_deletion(pod)
    decided = world.round()
    assert decided.events[0].message == "worker digits-worker-0-0: by drain; not counted as a failure"


def test_worker_repeatedly_dying_young_waits_whoever_ends_it() -> None:
    world = running_world(1)
    made = []
    for _ in range(5):
        world.evict(world.workers()[0])
        began = world.now
        world.round()
        world.round_until(world.workers, "a new worker")
        made.append(world.now - began)
    assert made[0] == 0
    assert made[-1] >= 4
    assert world.status["restarts"]["failures"] == 0

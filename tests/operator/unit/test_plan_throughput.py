"""Policy Throughput: sizes that are measured, and the one that is settled on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_failure_table import unschedulable
from operator_world import World, job_object

from springtide_operator.coordinator_connection import news, to_report
from springtide_operator.plan.actions import Plan
from springtide_operator.plan.observation import RateReport
from springtide_operator.plan.throughput import AGAIN_SECONDS, Scene, Search, Verdict, brings, search, step
from springtide_protocol import coordinator_pb2 as pb

NOW = 1_800_000_000.0


def settle_on(curve: Callable[[int], float], minimum: int, replicas: int, gain: float = 0.5) -> list[int]:
    """The sizes that are measured, in their order; the last one is settled on."""
    table: dict[int, float] = {}
    while True:
        verdict = search(table, minimum, replicas, gain)
        if verdict.settled:
            return [*table, verdict.size]
        assert verdict.size not in table
        table[verdict.size] = curve(verdict.size)


@pytest.mark.parametrize(
    ("curve", "minimum", "replicas", "expected"),
    [
        (lambda n: 100.0 * n, 1, 8, [1, 2, 4, 8, 8]),
        (lambda n: 100.0 * n, 3, 8, [3, 6, 8, 8]),
        (lambda n: 100.0 * n, 4, 4, [4, 4]),
        (lambda n: 100.0, 1, 8, [1, 2, 1]),
        (lambda n: 100.0 * min(n, 5), 1, 8, [1, 2, 4, 8, 6, 7, 5, 5]),
        (lambda n: 100.0 * min(n, 3), 1, 8, [1, 2, 4, 8, 6, 5, 3, 3]),
        (lambda n: 100.0 * min(n, 4), 1, 64, [1, 2, 4, 8, 6, 5, 4]),
        (lambda n: 0.0, 1, 8, [1, 2, 1]),
    ],
)
def test_sizes_are_doubled_and_then_halved(
    curve: Callable[[int], float], minimum: int, replicas: int, expected: list[int]
) -> None:
    assert settle_on(curve, minimum, replicas) == expected


def test_what_the_job_has_needs_a_little_less() -> None:
    table = {1: 100.0, 2: 145.0}
    assert brings(table, 1, 2) == pytest.approx(0.45)
    assert search(table, 1, 2, 0.5) == Verdict(1, True, 1, 2)
    assert search(table, 1, 2, 0.5, kept=2) == Verdict(2, True, 2)


@settings(max_examples=200, deadline=None)
@given(
    rates=st.lists(st.floats(0.0, 1e6), min_size=40, max_size=40),
    minimum=st.integers(1, 10),
    more=st.integers(0, 30),
    gain=st.sampled_from([0.01, 0.5, 1.0]),
)
def test_whatever_the_figures_it_ends_within_the_limits(
    rates: list[float], minimum: int, more: int, gain: float
) -> None:
    measured = settle_on(lambda size: rates[size - 1], minimum, minimum + more, gain)
    assert len(measured) <= 24
    assert all(minimum <= size <= minimum + more for size in measured)


SCENE = Scene(minimum=1, replicas=4, gain=0.5, measure=30.0, patience=60.0, placed=1, active=1)


def rate(workers: int, samples: float, seconds: float = 30.0, steps: int = 300) -> RateReport:
    return RateReport(workers, samples, seconds, steps)


def at(size: int, samples: float, seconds: float = 30.0, **changes: Any) -> Scene:
    """All workers of the size train, and have for so long."""
    return replace(SCENE, placed=size, active=size, rates=(rate(size, samples, seconds),), **changes)


def settled(now: float = NOW) -> Search:
    """Return a search that has settled on two workers: four bring little."""
    state = step(Search(), at(1, 100.0), now)
    state = step(state, at(2, 190.0), now)
    state = step(state, at(4, 230.0), now)
    return step(state, at(3, 220.0), now)


def test_each_size_is_had_until_it_is_measured() -> None:
    first = step(Search(), SCENE, NOW)
    assert (first.target, first.workers, first.reason, first.message) == (
        1,
        0,
        "Measuring",
        "measures 1 worker",
    )
    assert step(first, at(1, 100.0, 29.0), NOW + 40).target == 1
    assert step(first, replace(at(1, 100.0), rates=(rate(1, 100.0, steps=9),)), NOW + 40).target == 1
    second = step(first, at(1, 100.0), NOW + 40)
    assert (second.target, second.since) == (2, NOW + 40)
    assert second.message == "measures 2 workers; 1 worker brings 100 samples/s"
    assert step(second, at(1, 100.0), NOW + 50).target == 2, "the figures are of one worker"


def test_the_decision_is_explained_by_its_figures() -> None:
    state = settled()
    assert (state.workers, state.target, state.reason) == (2, 2, "GainTooSmall")
    assert state.message.startswith(
        "2 workers bring 190 samples/s, 95 each; 3 bring 220, 30 for each one more, 32 % of that"
        " (minGainPercent is 50); measured anew after "
    )
    assert state.wakes(at(2, 190.0), NOW) == [NOW + AGAIN_SECONDS]
    assert step(state, at(2, 250.0, 999.0), NOW + 100) == state, "what moves all the time is not written"
    linear = step(step(step(Search(), at(1, 10.0), NOW), at(2, 20.0), NOW), at(4, 40.0), NOW)
    assert (linear.workers, linear.reason, linear.wakes(at(4, 40.0), NOW)) == (4, "AllWorkersGain", [])
    assert (
        linear.message
        == "4 workers bring 40 samples/s, 10 each: every added worker brings enough (minGainPercent is 50)"
    )


def test_larger_sizes_are_measured_anew_ever_more_seldom() -> None:
    state, now, pauses = settled(), NOW, []
    for _ in range(5):
        pauses.append(state.retry_at - now)
        now = state.retry_at
        state = step(state, at(2, 190.0), now)
        assert (state.target, state.workers, state.reason) == (4, 2, "Measuring")
        state = step(step(state, at(4, 230.0), now), at(3, 220.0), now)
        assert (state.workers, state.target) == (2, 2)
    assert pauses == [600.0, 1200.0, 2400.0, 4800.0, 7200.0]


def test_job_faster_as_a_whole_is_compared_with_own_figures() -> None:
    state = settled()
    again = step(state, at(2, 380.0), state.retry_at)
    assert again.target == 4
    assert {size: one.rate for size, one in again.measured.items()} == {1: 200.0, 2: 380.0}
    grown = step(again, at(4, 700.0), state.retry_at + 60)
    assert (grown.workers, grown.reason, grown.failures) == (4, "AllWorkersGain", 0)


def test_nothing_is_measured_anew_while_job_is_off_its_size() -> None:
    state = settled()
    assert step(state, at(1, 100.0), state.retry_at + 1) == state
    assert step(state, at(2, 190.0, 3.0), state.retry_at + 1) == state


def test_a_size_that_no_node_takes_is_not_waited_for() -> None:
    state = step(Search(), at(1, 100.0), NOW)
    waits = at(1, 100.0)
    assert step(state, waits, NOW + 59).target == 2
    given_up = step(state, waits, NOW + 60)
    assert (given_up.target, given_up.workers, given_up.reason) == (1, 1, "NoRoom")
    assert "no node took 2 within 60 s" in given_up.message
    # It waits for workers of minReplicas as long as it takes.
    assert step(Search(), replace(SCENE, placed=0, active=0), NOW + 1e6).target == 1


def test_limits_that_move_take_the_size_along() -> None:
    state = settled()
    more = step(state, replace(at(2, 190.0), minimum=3), NOW + 1)
    assert (more.target, more.reason) == (3, "Measuring") or more.target >= 3
    fewer = step(state, replace(at(2, 190.0), replicas=1), NOW + 1)
    assert (fewer.target, fewer.workers) == (1, 1)


SCENES = st.builds(
    Scene,
    minimum=st.integers(1, 3),
    replicas=st.integers(3, 6),
    gain=st.sampled_from([0.2, 0.5]),
    measure=st.just(30.0),
    patience=st.just(60.0),
    placed=st.integers(0, 6),
    active=st.integers(0, 6),
    rates=st.lists(
        st.builds(
            RateReport,
            st.integers(1, 7),
            st.floats(0.0, 1e4),
            st.sampled_from([5.0, 30.0]),
            st.sampled_from([3, 20]),
        ),
        max_size=4,
    ).map(tuple),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(SCENES, st.sampled_from([1.0, 90.0, 3000.0])), max_size=30))
def test_under_any_weather(weather: list[tuple[Scene, float]]) -> None:
    """Stay within the limits and survive status; a second look decides the same."""
    state, now = Search(), NOW
    for scene, seconds in weather:
        now += seconds
        state = step(state, scene, now)
        assert scene.minimum <= state.target <= scene.replicas
        assert state.reason
        assert len(state.message) < 1024
        read = Search.from_status(state.to_status())
        assert read.to_status() == state.to_status()
        assert step(read, scene, now).target == step(state, scene, now).target
        assert all(wake > now for wake in state.wakes(scene, now))


# ---- through the whole plan


def live_on(world: World, curve: Callable[[int], float], seconds: float) -> list[Plan]:
    """Rounds two seconds apart; workers run at once, and each size is measured as soon as it trains."""
    plans = []
    for _ in range(int(seconds / 2)):
        world.kubelet()
        if world.status.get("coordinator"):
            size = sum(pod["status"]["phase"] == "Running" for pod in world.workers())
            world.reports(rates=(rate(size, curve(size)),))
        plans.append(world.round())
        world.now += 2.0
    return plans


def test_a_job_grows_while_it_pays_and_says_why_it_stopped() -> None:
    world = World(job=job_object(8, minReplicas=1))
    world.job["spec"]["elasticity"] = {"policy": "Throughput", "patienceSeconds": 30}
    plans = live_on(world, lambda n: 100.0 * min(n, 3), 60)
    assert len(world.workers()) == 3
    assert world.status["workers"]["desired"] == 3
    assert world.status["workers"]["summary"] == "3/3"
    said = world.status["elasticity"]
    assert (said["workers"], said["reason"]) == (3, "GainTooSmall")
    assert [one["workers"] for one in said["measured"]] == [1, 2, 3, 4, 5, 6, 8]
    events = [e.message for decided in plans for e in decided.events if e.reason == "Scaled"]
    assert len(events) == 1
    assert events[0].startswith(
        "from 1 to 3 workers: 3 workers bring 300 samples/s, 100 each; 4 bring 300, 0 "
    )
    assert world.status["restarts"]["total"] == 0
    world.die()
    live_on(world, lambda n: 100.0 * min(n, 3), 6)
    assert len(world.workers()) == 3
    again = world.plan()
    assert again.actions == ()
    assert again.status == world.status


def test_workers_only_tried_do_not_make_the_job_degraded() -> None:
    world = World(job=job_object(4, minReplicas=1))
    world.job["spec"]["elasticity"] = {"policy": "Throughput", "patienceSeconds": 30}
    while world.status.get("elasticity", {}).get("target") != 2:
        live_on(world, lambda n: 100.0 * n, 2)
    world.round()
    unschedulable(world, 1)
    world.reports(rates=(rate(1, 100.0),))
    world.round()
    said = {c["type"]: (c["status"], c["reason"]) for c in world.status["conditions"]}
    assert said["Degraded"][0] == said["Rescaling"][0] == "False"
    world.now += 60
    world.reports(rates=(rate(1, 100.0),))
    world.round()
    assert world.status["elasticity"]["reason"] == "NoRoom"
    assert len(world.workers()) == 1


def test_figures_of_the_coordinator_are_read_and_are_no_news() -> None:
    reply = pb.SyncReply(phase=pb.RUNNING)
    before = to_report(reply, 1.0)
    reply.rates.add(workers=2, samples_per_second=190.5, seconds=31.0, steps=40)
    after = to_report(reply, 2.0)
    assert after.rates == (RateReport(2, 190.5, 31.0, 40),)
    assert not news(before, after)

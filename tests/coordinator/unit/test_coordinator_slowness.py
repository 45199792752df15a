"""Slow members: which one holds the others up, and how much was lost to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator_room import generation, info, state
from prometheus_client import CollectorRegistry

from springtide_coordinator.history import LOST_CAUSES, Commit, History
from springtide_coordinator.hub import Hub
from springtide_coordinator.membership.messages import Start
from springtide_coordinator.metrics import JobCollector
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.settings import Options
from springtide_coordinator.slowness import HALF_LIFE_STEPS, HOLD_SECONDS, Share, Slowness
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import Incarnation


def told(watch: Slowness, now: float, **busy: float) -> None:
    for member, seconds in busy.items():
        watch.note_report(member, 50, 0.2, seconds / 4, seconds * 3 / 4, 0.2 - seconds, now)


def test_slow_worker_is_named_once_it_delayed_others_a_while() -> None:
    watch = Slowness()
    for second in range(12):
        told(watch, 100.0 + second, a=0.05, b=0.06, c=0.15)
        found = watch.slowest("abc", 100.0 + second)
        assert (found is not None) == (second >= HOLD_SECONDS)
    assert found is not None
    assert (found.member, found.since) == ("c", 100.0)
    assert found.busy == pytest.approx(0.15)
    assert found.median == pytest.approx(0.055)


@pytest.mark.parametrize(
    "busy",
    [
        {"a": 0.05, "b": 0.07},  # less than half as long again
        {"a": 0.001, "b": 0.004},  # milliseconds are noise
        {"a": 0.05},  # alone
    ],
)
def test_small_differences_are_nothing(busy: dict[str, float]) -> None:
    watch = Slowness()
    for second in range(30):
        told(watch, 100.0 + second, **busy)
        assert watch.slowest(list(busy), 100.0 + second) is None


def test_a_worker_that_is_given_less_is_not_named_as_slow() -> None:
    """Forget what it took for the larger part; with the smaller one it takes as long as the others."""
    watch = Slowness()
    for second in range(9):
        told(watch, 100.0 + second, a=0.05, b=0.05, c=0.15)
        assert watch.slowest("abc", 100.0 + second) is None
    for second in range(9, 30):
        told(watch, 100.0 + second, a=0.06, b=0.06)
        watch.note_report("c", 50, 0.2, 0.01, 0.05, 0.14, 100.0 + second, Share(12, 0.005, True))
        assert watch.slowest("abc", 100.0 + second) is None
    for second in range(30, 60):  # it waits for data, which is not cured by this
        told(watch, 100.0 + second, a=0.06, b=0.06)
        watch.note_report("c", 50, 0.2, 0.2, 0.05, 0.14, 100.0 + second, Share(12, 0.005, True))
        found = watch.slowest("abc", 100.0 + second)
    assert found is not None


def test_members_of_whom_nothing_is_known_make_it_wait() -> None:
    """Name nobody for a joiner's first steps, or for the others' silence after a join."""
    watch = Slowness()
    for second in range(30):
        told(watch, 100.0 + second, a=0.05, b=0.2)
    assert watch.slowest("ab", 130.0) is None  # asked for the first time: since now
    assert watch.slowest("ab", 141.0) is not None
    assert watch.slowest("abc", 142.0) is None
    assert watch.slowest("ab", 143.0) is None, "it begins anew"
    assert watch.slowest("ab", 200.0) is None, "what it knows is old"


def test_a_worker_that_recovers_is_forgotten_within_some_steps() -> None:
    watch = Slowness()
    told(watch, 100.0, a=0.05, b=0.2)
    watch.note_report("b", int(4 * HALF_LIFE_STEPS), 0.2, 0.0, 0.05, 0.1, 101.0)
    assert watch.times["b"].busy == pytest.approx(0.05, abs=0.011)
    watch.note_report("b", 0, 9.0, 9.0, 9.0, 9.0, 102.0)
    assert watch.times["b"].busy == pytest.approx(0.05, abs=0.011), "no steps say nothing"
    watch.keep(["a"])
    assert set(watch.times) == {"a"}


def commit(step: int, at: float, number: int = 1, data: float = 0.0, checkpoint: float = 0.0) -> Commit:
    return Commit(state(step, number), at, 0.1, 10, data_seconds=data, checkpoint_seconds=checkpoint)


def begin(number: int, step: int) -> Start:
    return Start(generation(number), (info("w0"),), state(step), (), fresh=False, reason="because")


def test_lost_time_has_causes() -> None:
    history = History()
    history.generation_made(
        Start(generation(1), (info("w0"),), state(0), (), fresh=True, reason="x"), "start", 99
    )
    history.add([commit(1, 100.0), commit(2, 100.1)], 0.2, now=100.2)
    assert history.lost_seconds == dict.fromkeys(LOST_CAUSES, 0.0), "the start is no loss"
    history.generation_made(begin(2, 2), "failure", now=101)
    history.add([commit(3, 103.1, 2)], 0.3, now=104)
    assert history.lost_seconds["failure"] == pytest.approx(2.9)  # 3 s between commits, 0.1 s of them a step
    history.generation_made(begin(3, 3), "join", now=104)
    history.add([commit(4, 104.1, 3)], 0.4, now=105)
    history.generation_made(begin(4, 4), "leave", now=105)
    history.add([commit(5, 105.1, 4)], 0.5, now=106)
    assert history.lost_seconds["rescale"] == pytest.approx(1.8)
    history.add([commit(6, 105.2, 4, data=0.03, checkpoint=0.5)], 0.6, now=107)
    assert (history.lost_seconds["data"], history.lost_seconds["checkpoint"]) == (0.03, 0.5)
    history.held_up = 0.04
    history.add([commit(7, 105.3, 4), commit(7, 105.3, 4)], 0.7, now=108)
    assert history.lost_seconds["straggler"] == pytest.approx(0.04), "a commit counts once"
    history.held_up = 9.0
    history.add([commit(8, 105.4, 4)], 0.8, now=109)
    assert history.lost_seconds["straggler"] == pytest.approx(0.14), "a step loses no more than it took"


def test_workers_tell_and_the_operator_hears_who_is_slow(tmp_path: Path) -> None:
    now = [1000.0]
    options = Options(token="t", number=1, state_dir=tmp_path, target=2, minimum=2, job="j", namespace="n")
    hub = Hub(options, Incarnation(1), lambda: now[0])
    streams = {}
    for name in ("w0", "w1"):
        streams[name] = hub.new_stream()
        member = pb.Member(id=name, pod_uid=name, pod_name=f"pod-{name}")
        hub.hello(streams[name], pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
        hub.receive(streams[name], pb.WorkerMessage(parked=pb.Parked(reason=pb.STANDBY)))
    living = [pb.Pod(uid=name, name=f"pod-{name}", started=True) for name in streams]
    word = pb.SyncRequest(target=2, minimum=2, maximum=2, living=living, observed=True, incarnation_number=1)
    assert not answer_sync(hub, word).HasField("slow")
    assert hub.membership.current is not None
    for _ in range(12):
        now[0] += 1
        for name, compute in (("w0", 0.1), ("w1", 0.3)):
            times = pb.Times(
                steps=5, step_seconds=0.35, data_seconds=0.02, compute_seconds=compute, wait_seconds=0.03,
                share_samples=int(compute * 10), sample_seconds=compute, by_speed=name == "w1",
            )  # fmt: skip
            hub.receive(streams[name], pb.WorkerMessage(times=times))
    reply = answer_sync(hub, word)
    assert (reply.slow.pod_name, reply.slow.since_unix) == ("pod-w1", 1001.0)
    assert (reply.slow.busy_seconds, reply.slow.median_seconds) == pytest.approx((0.32, 0.12))
    told = {
        m.member.id: (m.step_seconds, m.data_seconds, m.compute_seconds, m.wait_seconds)
        for m in reply.members
    }
    shares = [(m.share_samples, m.sample_seconds, m.by_speed) for m in reply.members]
    assert shares == [(1, 0.1, False), (3, 0.3, True)]
    assert told["w0"] == pytest.approx((0.35, 0.02, 0.1, 0.03))
    assert hub.history.held_up == pytest.approx(0.2)
    registry = CollectorRegistry()
    registry.register(JobCollector(hub))
    labels = {"training_job": "j", "job_namespace": "n"}
    ratio = registry.get_sample_value("springtide_coordinator_slowest_worker_ratio", labels)
    assert ratio == pytest.approx(0.32 / 0.12)
    # Nonsense is not added up, and a stranger is not heard.
    wrong = pb.Times(steps=5, step_seconds=float("nan"), data_seconds=-1, compute_seconds=float("inf"))
    hub.receive(streams["w0"], pb.WorkerMessage(times=wrong))
    hub.receive(hub.new_stream(), pb.WorkerMessage(times=pb.Times(steps=1, compute_seconds=9)))
    assert set(hub.slowness.times) == {"w0", "w1"}
    assert hub.slowness.times["w0"].busy < 0.13

"""Learned heartbeat limits: whoever stands still is found, and nobody else is ever blamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from coordinator_room import Room
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_coordinator.heartbeats import ENOUGH, MEMORY_SECONDS, Heartbeats
from springtide_coordinator.hub import Hub
from springtide_coordinator.membership import Disconnected, Event, FellSilent, ProcessEnded
from springtide_coordinator.membership import messages as say
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.settings import Options, read_options
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import generation_to_proto
from springtide_protocol.heartbeat import BEAT_SECONDS, GAPS, LEAST_LIMIT, LIMIT, MOST_PINGS, beat_every
from springtide_protocol.names import Incarnation

TICK = 0.05
GAP = st.floats(0.02, 0.4)


class Watch:
    """Heartbeats with a clock that ticks as the coordinator does."""

    def __init__(self, pods: dict[int, str]) -> None:
        self.beats, self.pods, self.now = Heartbeats(most=2 * TICK), pods, 100.0
        self.beats.look(self.now)

    def pass_time(self, seconds: float) -> dict[int, float]:
        """Tick until then; return who was found silent first."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + TICK)
            self.beats.look(self.now)
            if found := self.beats.silent(self.pods, self.now):
                return found
        return {}

    def beat(self, *sessions: int) -> None:
        for session in sessions:
            self.beats.beat(session, self.now)

    def train(self, *sessions: int, gaps: list[float]) -> None:
        for gap in gaps:
            assert not self.pass_time(gap)
            self.beat(*sessions)


def three() -> Watch:
    watch = Watch({1: "a", 2: "b", 3: "c"})
    watch.beat(1, 2, 3)
    return watch


@settings(max_examples=40, deadline=None)
@given(st.lists(GAP, min_size=ENOUGH, max_size=40))
def test_one_that_stops_is_found_within_its_own_limit(gaps: list[float]) -> None:
    watch = three()
    watch.train(1, 2, 3, gaps=gaps)
    limit = max(LEAST_LIMIT, GAPS * max(gaps))
    stopped = watch.now
    found: dict[int, float] = {}
    while not found:
        assert watch.now - stopped < limit + 2 * TICK + BEAT_SECONDS
        found = watch.pass_time(BEAT_SECONDS)
        watch.beat(1, 2)
    assert set(found) == {3}
    assert found[3] == pytest.approx(watch.now - stopped)
    assert found[3] > limit - 1e-6


@settings(max_examples=40, deadline=None)
@given(st.lists(GAP, min_size=ENOUGH, max_size=40), st.floats(1.0, 2.9))
def test_one_that_is_later_than_ever_is_not_blamed(gaps: list[float], times: float) -> None:
    watch = three()
    watch.train(1, 2, 3, gaps=gaps)
    watch.beat(1, 2)
    for _ in range(10):
        assert not watch.pass_time(times * max(gaps) / 10)
        watch.beat(1, 2)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.2, 1000.0))
def test_standstill_of_the_coordinator_counts_against_nobody(seconds: float) -> None:
    watch = three()
    watch.train(1, 2, 3, gaps=[BEAT_SECONDS] * ENOUGH)
    watch.now += seconds
    watch.beats.look(watch.now)
    assert not watch.beats.silent(watch.pods, watch.now)
    assert not watch.pass_time(LEAST_LIMIT - 3 * TICK)
    watch.beat(1, 2, 3)
    assert watch.beats.rhythms[1].limit < LIMIT, "nor does it make anybody's limit long"


def test_a_process_with_few_heartbeats_has_no_limit() -> None:
    watch = three()
    watch.train(1, 2, 3, gaps=[BEAT_SECONDS] * (ENOUGH - 2))
    for _ in range(100):
        assert not watch.pass_time(BEAT_SECONDS)
        watch.beat(1, 2)
    watch.beat(3)
    watch.beats.forget(3)
    assert not watch.pass_time(LEAST_LIMIT / 3), "a stream that is gone is nobody's silence"


def test_pauses_between_generations_are_no_silence() -> None:
    watch = three()
    watch.train(1, 2, 3, gaps=[BEAT_SECONDS] * ENOUGH)
    for session in watch.pods:
        watch.beats.pause(session)
    assert not watch.pass_time(20.0)
    for session in watch.pods:
        watch.beats.beat(session, watch.now, watched=False)
    assert not watch.pass_time(5.0), "the first step may compile"
    watch.beat(1, 2, 3)
    assert watch.beats.rhythms[1].limit == LEAST_LIMIT, "at once, without other heartbeats"
    assert not watch.pass_time(LEAST_LIMIT / 3)
    watch.beat(1, 2)
    found: dict[int, float] = {}
    for _ in range(5):
        found = found or watch.pass_time(BEAT_SECONDS)
        watch.beat(1, 2)
    assert set(found) == {3}


def test_many_late_at_once_are_the_machine_not_each_of_them() -> None:
    watch = three()
    watch.train(1, 2, 3, gaps=[BEAT_SECONDS] * ENOUGH)
    for _ in range(30):
        assert not watch.pass_time(BEAT_SECONDS)
        watch.beat(1)
    one_pod = Watch({1: "a", 2: "b", 3: "c", 4: "c"})
    one_pod.beat(1, 2, 3, 4)
    one_pod.train(1, 2, 3, 4, gaps=[BEAT_SECONDS] * ENOUGH)
    found: dict[int, float] = {}
    for _ in range(10):
        found = found or one_pod.pass_time(BEAT_SECONDS)
        one_pod.beat(1, 2)
    assert set(found) == {3, 4}, "two processes of one pod are one machine"


def test_a_long_gap_is_remembered_for_a_while() -> None:
    watch = three()
    watch.train(1, 2, 3, gaps=[BEAT_SECONDS] * ENOUGH + [0.4])
    assert watch.beats.rhythms[1].limit == pytest.approx(1.2)
    spans = int(MEMORY_SECONDS / BEAT_SECONDS)
    watch.train(1, 2, 3, gaps=[BEAT_SECONDS] * spans)
    assert watch.beats.rhythms[1].limit == pytest.approx(1.2)
    watch.train(1, 2, 3, gaps=[BEAT_SECONDS] * (spans + 20))
    assert watch.beats.rhythms[1].limit == LEAST_LIMIT


def test_one_that_computes_without_its_interpreter_has_time() -> None:
    watch = three()
    watch.train(1, 2, 3, gaps=[BEAT_SECONDS] * ENOUGH)
    watch.beats.beat(3, watch.now, held=1.0)
    for _ in range(28):
        assert not watch.pass_time(BEAT_SECONDS)
        watch.beat(1, 2)


def test_silent_member_is_lost_at_once_and_joins_again() -> None:
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.feed(FellSilent(room.sessions["w2"], 0.6))
    assert room.told("w0", say.Prepare) == room.told("w1", say.Prepare) == 1
    assert "it said no heartbeat for 0.6 s" in room.last("w0", say.Prepare).reason
    assert room.last("w2", say.Refused).retry
    first = room.m.current
    assert first is not None
    room.hello("w2", say.Standing.ACTIVE, generation=first.name, members=first.members)
    assert room.told("w2", say.Prepare) == 1, "it is to drop its step, and parks as any joiner"


def test_a_member_whose_process_ended_is_lost_at_once() -> None:
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.feed(ProcessEnded(room.sessions["w2"], "w2"))
    assert room.told("w0", say.Prepare) == room.told("w1", say.Prepare) == 1
    assert "w2" not in room.m.sessions.values()
    assert "is lost: its process ended" in room.last("w0", say.Prepare).reason


def test_an_ended_process_of_no_generation_changes_nothing() -> None:
    room = Room(target=2)
    room.train("w0", "w1")
    room.hello("w2")
    room.feed(ProcessEnded(room.sessions["w2"], "w2"))
    room.feed(ProcessEnded(10_000, "w1"))  # it has another stream since
    room.feed(ProcessEnded(10_001, "w9"))
    assert room.told("w0", say.Prepare) == 0
    assert room.disconnected == [], "its stream tells of it"


def test_an_ended_process_has_no_grace_after_its_stream() -> None:
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    stream = room.sessions["w2"]
    room.feed(Disconnected(stream))
    assert room.told("w0", say.Prepare) == 0, "it may come back"
    room.feed(ProcessEnded(stream, "w2"))
    assert room.told("w0", say.Prepare) == 1
    assert "is lost: its process ended" in room.last("w0", say.Prepare).reason


@pytest.mark.parametrize(
    "event", [lambda number: FellSilent(number, 0.6), lambda number: ProcessEnded(number, "w2")]
)
def test_a_coordinator_without_an_operator_blames_nobody(event: Callable[[int], Event]) -> None:
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.now += room.m.patience + 1
    room.feed(event(room.sessions["w2"]))
    assert room.disconnected == []


def test_limits_of_the_manifest_are_not_learned() -> None:
    env = {"SPRINGTIDE_TOKEN": "t", "SPRINGTIDE_STATE_DIR": "/s"}
    assert read_options(env).learns_heartbeats
    assert not read_options(env | {"SPRINGTIDE_KEEPALIVE_SECONDS": "2"}).learns_heartbeats


def test_large_jobs_leave_it_to_the_transport() -> None:
    assert beat_every(3) == BEAT_SECONDS
    assert beat_every(0) == BEAT_SECONDS
    for processes in range(1, 1000, 37):
        every = beat_every(processes)
        assert every == 0 or (processes / every <= MOST_PINGS + 1e-6 and GAPS * every < LIMIT)
    assert beat_every(1000) == 0


@pytest.mark.parametrize(("learns", "commits"), [(True, True), (True, False), (False, True)])
def test_heartbeats_count_once_a_generation_commits(tmp_path: Path, learns: bool, commits: bool) -> None:
    now = [1000.0]
    options = Options(token="t", number=1, state_dir=tmp_path, target=3, minimum=1, learns_heartbeats=learns)
    hub = Hub(options, Incarnation(1), lambda: now[0])
    names = ("w0", "w1", "w2")
    streams = {name: hub.new_stream() for name in names}
    for name, stream in streams.items():
        member = pb.Member(id=name, pod_uid=name, pod_name=f"pod-{name}")
        hub.hello(stream, pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
        hub.receive(stream, pb.WorkerMessage(parked=pb.Parked(reason=pb.STANDBY)))
    pods = [pb.Pod(uid=name, name=f"pod-{name}", started=True) for name in names]
    answer_sync(hub, pb.SyncRequest(target=3, minimum=1, living=pods, observed=True, incarnation_number=1))
    current = hub.membership.current
    assert current is not None
    generation = generation_to_proto(current.name)
    for stream in streams.values():
        hub.receive(stream, pb.WorkerMessage(formed=pb.Formed(generation=generation)))
    if commits:
        commit = pb.Commit(state=pb.StateName(generation=generation, step=1), unix_time=now[0])
        hub.receive(streams["w0"], pb.WorkerMessage(progress=pb.Progress(commits=[commit])))
    for beat in range(ENOUGH + 10):
        now[0] += BEAT_SECONDS
        for name in names if beat < ENOUGH else names[:2]:
            hub.receive(streams[name], pb.WorkerMessage(heartbeat=pb.Heartbeat()))
        hub.tick(BEAT_SECONDS)
    assert hub.membership.members["w2"].connected == (not (learns and commits))
    assert hub.membership.members["w0"].connected

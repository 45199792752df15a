"""The heartbeat limit: a peer that hangs is lost within it, and one that answers in time never is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_room import Room
from hand_turned_loop import Loop
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_coordinator.hub import Hub
from springtide_coordinator.membership import Phase, Settings
from springtide_coordinator.membership import messages as say
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.settings import Options, read_options
from springtide_coordinator.stall import Motion
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.channel import client_options, server_options
from springtide_protocol.codec import speaks_to_proto
from springtide_protocol.heartbeat import (
    LIMIT,
    MOST_PINGS,
    MOST_RETURN,
    Heartbeat,
    of_coordinator,
    of_members,
)
from springtide_protocol.names import Incarnation
from springtide_protocol.versions import OWN

LIMITS = st.floats(0.1, 300.0)


def broken_at(heartbeat: Heartbeat, last_sign: float, answers_after: float | None) -> float | None:
    """Return when the transport breaks the stream of a peer last heard of at `last_sign`; None: it does not.

    answers_after: seconds that it takes to answer a ping; None: it never does.
    """
    if answers_after is not None and answers_after <= heartbeat.answer_within:
        return None
    return last_sign + heartbeat.ping_every + heartbeat.answer_within


@settings(max_examples=50, deadline=None)
@given(LIMITS)
def test_the_waits_add_up_to_the_limit(limit: float) -> None:
    for heartbeat, whole in ((of_members(limit), limit), (of_coordinator(limit), 1.5 * limit)):
        assert heartbeat.limit == pytest.approx(whole)
        assert heartbeat.patience >= limit / 2, "a process that is slow to answer is not gone"
        assert min(heartbeat.ping_every, heartbeat.answer_within) > 0
    assert of_members(limit).return_within <= MOST_RETURN
    assert of_coordinator(limit).return_within == 0


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 10.0), st.floats(0.0, 1.0))
def test_a_member_that_hangs_is_lost_within_the_limit(limit: float, phase: float) -> None:
    """phase: where between two pings it stops."""
    heartbeat = of_members(limit)
    room = Room(target=3)
    room.m.settings = replace(room.m.settings, grace=heartbeat.return_within)
    room.train("w0", "w1", "w2")
    began = room.now
    stopped = began + phase * heartbeat.ping_every
    broken = broken_at(heartbeat, began, None)
    assert broken is not None
    room.now = broken
    room.lose("w2")
    room.tick(heartbeat.return_within * 0.9)
    assert room.told("w0", say.Prepare) == 0, "it may come back"
    room.tick(heartbeat.return_within * 0.1 + 1e-6)
    assert room.told("w0", say.Prepare) == room.told("w1", say.Prepare) == 1
    assert "pod-w2 is lost" in room.last("w0", say.Prepare).reason
    assert room.now - stopped <= limit + 2e-6
    assert room.now - stopped >= heartbeat.patience - 1e-6


def test_a_larger_job_is_asked_less_often_and_no_less_patiently() -> None:
    small, large = of_members(LIMIT), of_members(LIMIT, 8000)
    assert of_members(LIMIT, MOST_PINGS // 2) == small
    assert 8000 / large.ping_every <= MOST_PINGS
    assert large.patience == small.patience
    env = {"SPRINGTIDE_TOKEN": "t", "SPRINGTIDE_STATE_DIR": "/s", "SPRINGTIDE_TARGET": "8000"}
    options = read_options(env)
    assert options.heartbeat == large
    assert options.membership.standstill == LIMIT / 4, "its own clock is no matter of the job's size"


@pytest.mark.parametrize("processes", [1, 512])
def test_clients_ask_only_a_coordinator_that_is_silent(processes: int) -> None:
    """A coordinator's own pings are signs of life: with them no client asks, so that one side alone pings."""
    assert of_members(LIMIT, processes).ping_every < of_coordinator(LIMIT).ping_every


def test_one_that_answers_in_time_is_not_broken() -> None:
    heartbeat = of_members(LIMIT)
    assert broken_at(heartbeat, 0.0, heartbeat.answer_within) is None
    assert broken_at(heartbeat, 0.0, heartbeat.answer_within + 0.001) is not None


def test_the_transport_is_told_in_milliseconds() -> None:
    of_server, of_client = dict(server_options(of_members(2.0))), dict(client_options(2.0))
    times = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    assert [of_server[name] for name in times] == [500, 1000, 1000]
    assert [of_client[name] for name in times] == [1500, 1500, 1500]
    assert dict(client_options(0.001))[times[0]] == 1


def test_the_limit_comes_from_the_environment() -> None:
    env = {"SPRINGTIDE_TOKEN": "t", "SPRINGTIDE_STATE_DIR": "/s"}
    for text, limit in (("", LIMIT), ("12", 12.0)):
        options = read_options(env | ({"SPRINGTIDE_KEEPALIVE_SECONDS": text} if text else {}))
        assert options.heartbeat == of_members(limit)
        assert options.membership.grace == options.heartbeat.return_within == MOST_RETURN
        assert options.membership.standstill == limit / 4
        assert options.membership.return_after_standstill == 2 * limit


async def test_what_became_due_in_a_coordinator_standstill_is_said(tmp_path: Path) -> None:
    """The wait for a second worker was over then: the first one hears that it starts alone."""
    now = [1000.0]
    options = Options(token="t", number=1, state_dir=tmp_path, target=2, minimum=1)
    hub = Hub(options, Incarnation(1), lambda: now[0])
    stream = hub.new_stream()
    member = pb.Member(id="w0", pod_uid="w0", pod_name="pod-w0")
    hub.hello(stream, pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
    hub.receive(stream, pb.WorkerMessage(parked=pb.Parked(reason=pb.STANDBY)))
    pods = [pb.Pod(uid=name, name=f"pod-{name}", started=True) for name in ("w0", "w1")]
    answer_sync(hub, pb.SyncRequest(target=2, minimum=1, living=pods, observed=True, incarnation_number=1))
    hub.tick(0.05)
    assert hub.membership.current is None
    now[0] += hub.membership.settings.first_start + 1
    hub.tick(0.05)
    assert hub.membership.awake_since == now[0]
    stream.end()
    told = [message.WhichOneof("message") async for message in stream.messages()]
    assert told[-1] == "start"


def test_anything_late_shows_that_the_coordinator_stood_still(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Take in the end of a stream first, and only then the tick, after a standstill."""
    now = [1000.0]
    options = Options(token="t", number=1, state_dir=tmp_path, membership=Settings(standstill=0.5))
    hub = Hub(options, Incarnation(1), lambda: now[0])
    stream = hub.new_stream()
    now[0] += 60
    hub.tick()
    assert hub.membership.awake_since is None, "nobody had said when the tick should come"
    for late in (0.0, 0.5):
        hub.tick(0.05)
        now[0] += 0.05 + late
        hub.tick(0.05)
        assert hub.membership.awake_since is None
    with caplog.at_level("INFO", "springtide.coordinator"):
        now[0] += 3.05
        hub.closed(stream)
        hub.tick(0.05)
    assert (hub.membership.asleep_since, hub.membership.awake_since) == pytest.approx((now[0] - 3, now[0]))
    assert [r.getMessage() for r in caplog.records if "stood still" in r.getMessage()] == [
        "this process stood still for 3.0 s: broken streams may return"
    ]


def test_a_coordinator_that_stood_still_within_a_tick_is_noticed(tmp_path: Path) -> None:
    now = [1000.0]
    options = Options(token="t", number=1, state_dir=tmp_path, membership=Settings(standstill=0.5))
    hub = Hub(options, Incarnation(1), lambda: now[0])
    stream, look = hub.new_stream(), Motion.look
    hub.tick(0.05)

    def look_and_stand_still(motion: Motion, phase: Phase, at: float) -> None:
        look(motion, phase, at)
        now[0] += 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Motion, "look", look_and_stand_still)
        hub.tick(0.05)
    hub.closed(stream)
    assert hub.membership.awake_since == now[0]


def test_standstill_while_it_decides_puts_nothing_off_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decide again a second after a round in which the machine stood still for minutes."""
    loop = Loop()
    hub = Hub(Options(token="t", number=1, state_dir=tmp_path), Incarnation(1), lambda: loop.now, loop.later)
    rounds = []
    look = Motion.look

    def look_and_stand_still(motion: Motion, phase: Phase, at: float) -> None:
        look(motion, phase, at)
        rounds.append(at)
        loop.now += 300.0 if len(rounds) == 1 else 0.0

    monkeypatch.setattr(Motion, "look", look_and_stand_still)
    member = pb.Member(id="w0", pod_uid="w0", pod_name="pod-w0")
    hello = pb.Hello(speaks=speaks_to_proto(OWN), member=member, standing=pb.STARTING)
    hub.hello(hub.new_stream(), hello)
    loop.turn()
    assert len(rounds) == 1
    hub.closed(hub.new_stream())
    stream = hub.new_stream()
    hub.hello(stream, pb.Hello(speaks=speaks_to_proto(OWN), member=pb.Member(id="w1"), standing=pb.STARTING))
    loop.turn(1.0)
    assert len(rounds) == 2

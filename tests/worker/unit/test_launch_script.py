"""Scripts that know nothing of the library: their environment, whose failure counts, and torchrun alone."""

from __future__ import annotations

import math
import signal
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import pytest
from coordinator_room import Room, info
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.errors import SpringtideError, UsageError
from springtide.launch.gang import Gang
from springtide.launch.options import parse
from springtide.launch.script import Attempts, Failure, Rendezvous, culprit, variables
from springtide.launch.supervision import Action, End, Policy, Signal, Spawn
from springtide.settings import read_settings
from springtide_coordinator.membership.messages import Boundary, Leave, ParkReason, Prepare, Refused
from springtide_coordinator.stall import Motion
from springtide_operator.plan.observation import Report
from springtide_operator.plan.progress import numbers


class Peer(NamedTuple):
    id: str
    pod_uid: str


def test_the_names_of_torchrun() -> None:
    members = [Peer("a", "p0"), Peer("b", "p0"), Peer("c", "p2"), Peer("d", "p2"), Peer("e", "p2")]
    ours = {"HOME": "/h", "SPRINGTIDE_TOKEN": "t", "SPRINGTIDE_COORDINATOR": "x:1", "RANK": "7"}
    rendezvous = Rendezvous("run", "10.0.0.1", 4321, 3)
    found = variables(ours, members, "d", rendezvous)
    expected = {
        "HOME": "/h",
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4321",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert not {"SPRINGTIDE_TOKEN", "SPRINGTIDE_COORDINATOR"} & set(found)
    with pytest.raises(ValueError, match="not in list"):
        variables(ours, members, "z", rendezvous)
    # A script that does use the library is told so, instead of training alone on every rank.
    with pytest.raises(SpringtideError, match="leave --torchrun-env out"):
        read_settings(found)


def test_the_first_failure_is_the_cause_unless_a_member_is_gone() -> None:
    together = ("a", "b", "c")
    first, second = Failure(10.0, together), Failure(10.4, together)
    assert culprit({"a": second, "b": first, "c": Failure()}, together) == "b"
    assert culprit({"a": second, "b": first, "new": Failure()}, ("a", "b", "new")) == ""
    assert culprit({"a": first, "b": second}, ("a", "b", "c", "new")) == "a"
    assert culprit({"a": Failure()}, ("a",)) == ""
    for failure in (first, Failure()):
        assert Failure.from_json(failure.to_json()) == failure
    for bad in (b"[]", b"x", b'{"at": "soon"}'):
        with pytest.raises(ValueError, match=r"not a failure|Expecting|convert"):
            Failure.from_json(bad)


def test_attempts_run_out_and_come_back() -> None:
    attempts = Attempts(2, calm=100.0)
    assert [attempts.failed(now) for now in (0.0, 50.0, 99.0)] == [False, False, True]
    assert [attempts.failed(now) for now in (300.0, 301.0, 302.0)] == [False, False, True]
    assert Attempts(0).failed(5.0)


def test_script_on_this_machine_alone_may_take_any_time() -> None:
    assert parse(["--torchrun-env", "--grace", "900", "--", "x"], {}).grace == 900.0


def test_a_gang_begins_again_as_a_whole() -> None:
    gang = Gang(3, Policy(restarts=1, backoff=1.0, grace=5.0))
    assert len(gang.begin(0.0)) == 3
    assert [(a.rank, a.number) for a in gang.ended(1, End(7), 1.0) if isinstance(a, Signal)] == [
        (0, signal.SIGTERM),
        (2, signal.SIGTERM),
    ]
    gang.ended(0, End(-15), 1.1)
    assert [(a.rank, a.number) for a in gang.tick(6.0) if isinstance(a, Signal)] == [(2, signal.SIGKILL)]
    gang.ended(2, End(-9), 6.1)
    assert gang.tick(7.0) == []
    assert gang.tick(7.1) == [Spawn(rank, "round 2: restart 1 of 1") for rank in range(3)]
    assert gang.restart == 1
    for rank in range(3):
        gang.ended(rank, End(3 if rank == 0 else -15), 8.0)
    assert (gang.over, gang.code) == (True, 3)
    good = Gang(2)
    good.begin(0.0)
    good.ended(0, End(0), 1.0)
    good.ended(1, End(0), 2.0)
    assert (good.over, good.code) == (True, 0)
    told = Gang(2)
    told.begin(0.0)
    assert len(told.asked(signal.SIGINT, 1.0)) == 2
    told.ended(0, End(-2), 1.0)
    told.ended(1, End(0), 1.0)
    assert (told.over, told.code) == (True, 130)


@settings(deadline=None, max_examples=200)
@given(
    count=st.integers(1, 3),
    moves=st.lists(
        st.tuples(st.integers(0, 4), st.floats(0, 20), st.sampled_from([0, 1, -9, -15])), max_size=30
    ),
)
def test_a_gang_never_mixes_two_rounds(count: int, moves: list[tuple[int, float, int]]) -> None:
    gang = Gang(count, Policy(restarts=2, grace=5.0, calm=math.inf))
    running: dict[int, int] = {}
    now = 0.0

    def act(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Spawn):
                assert not gang.stopping
                assert action.rank not in running
                running[action.rank] = gang.restart
            else:
                assert action.rank in running

    act(gang.begin(now))
    for which, pause, code in moves:
        now += pause
        act(gang.tick(now))
        if which == 4:
            act(gang.asked(signal.SIGTERM, now))
        elif which in running:
            del running[which]
            act(gang.ended(which, End(code), now))
        assert len(set(running.values())) <= 1
        assert set(running) == gang.running
        assert gang.over <= (not running)
    act(gang.asked(signal.SIGTERM, now))
    for rank in sorted(running):
        gang.ended(rank, End(-9), now)
    assert gang.over
    assert gang.restart <= 2


def test_no_state_of_ours_is_lost_with_members_that_hold_none() -> None:
    room = Room(target=1)
    for number, opaque in enumerate((True, True, False)):
        name = f"w{number}"
        if number:
            room.lose(f"w{number - 1}")
        room.sync(name)
        room.hello(name, as_info=replace(info(name), slot=0), opaque=opaque)
        room.park(name, ParkReason.STANDBY)
        assert room.members == (name,)
        room.form()
    # The first two came and went without a loss; the third one trains, and what was before it is lost.
    assert room.m.states_lost == 1


def test_members_without_our_state_leave_when_job_wants_none() -> None:
    room = Room(target=2)
    for name in ("w0", "w1"):
        room.hello(name, opaque=True)
    for name in ("w0", "w1"):
        room.park(name)
    held = room.form()
    room.sync("w0", "w1", target=0)
    room.leaving = {"w0": room.now + 60, "w1": room.now + 60}
    room.sync("w0", "w1", target=0)
    for name in ("w0", "w1"):
        assert room.told(name, Boundary)
        room.park(name, ParkReason.BOUNDARY, at=held)
    for name in ("w0", "w1"):
        assert room.last(name, Leave).reason == "its pod is going away"


@pytest.mark.parametrize(("stop_seconds", "limit"), [(0.0, 30.0), (15.0, 30.0), (300.0, 310.0)])
def test_others_wait_as_long_as_a_script_may_take_to_end(stop_seconds: float, limit: float) -> None:
    room = Room()
    for name in ("w0", "w1"):
        room.hello(name, opaque=True, stop_seconds=stop_seconds)
    for name in ("w0", "w1"):
        room.park(name)
    room.form()
    room.park("w0", ParkReason.DROPPED)  # its script has failed, so the generation is over
    began = room.now
    while not room.told("w1", Prepare):
        assert room.now < began + limit, "w1 is not told that the generation is over"
        room.tick(0.4)
    told_at = room.now
    while room.now < told_at + limit - 1.0:
        room.tick(0.4)
    assert room.disconnected == []
    while room.now < told_at + limit + 1.0:
        room.tick(0.4)
    assert room.disconnected == ["w1"]
    assert f"did not park within {limit:g} s" in room.last("w1", Refused).reason


@pytest.mark.parametrize(
    ("told", "grace", "says"),
    [
        ("600", "595", ""),
        (
            "600",
            "596",
            r"at most 595 .* killed 600 s after .* raise spec\.workers\.template\.spec\.terminationG",
        ),
        ("3", "1", "at most 0 "),
        ("", "20", ""),
        ("", "21", "at most 20 .* the operator of this job does not tell"),
    ],
)
def test_script_may_take_as_long_as_its_pod_has(told: str, grace: str, says: str) -> None:
    environ = {"SPRINGTIDE_COORDINATOR": "a:7070", "SPRINGTIDE_GRACE_SECONDS": told}
    with pytest.raises(UsageError, match=says) if says else nullcontext():
        assert parse(["--torchrun-env", "--grace", grace, "--", "x"], environ).grace == float(grace)


def test_scripts_that_commit_nothing_do_not_hang() -> None:
    room = Room(target=1)
    room.hello("w0", opaque=True)
    room.park("w0")
    room.form()
    still = Motion(moved_at=room.now)
    assert still.stall(room.m, None, 10.0, room.now + 1e6) is None
    room.m.members["w0"].opaque = False
    assert still.stall(room.m, None, 10.0, room.now + 1e6) is not None


def test_status_has_no_numbers_of_steps_that_nobody_tells() -> None:
    report = Report(incarnation=1, restart=0, at=0.0, phase="RUNNING", generation=2, opaque=True)
    assert not {"goodput", "samplesPerSecond", "step"} & set(numbers(report, {}))
    assert "goodput" in numbers(replace(report, opaque=False), {})

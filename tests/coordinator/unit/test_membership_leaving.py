"""Leaving: who is asked to go, when it goes, and who keeps the state."""

from __future__ import annotations

from coordinator_room import Room, state

from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.messages import ParkReason, Standing


def test_a_leaver_goes_at_the_boundary_and_the_others_stay() -> None:
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.tell("w2", say.Leaving("SIGTERM"))
    assert room.told("w0", say.Boundary) == 1
    for member in ("w0", "w1", "w2"):
        room.park(member, ParkReason.BOUNDARY, state(9))
    assert room.told("w2", say.Leave) == 1
    assert room.members == ("w0", "w1")
    assert room.last("w0", say.Start).transfers == ()


def test_the_operators_word_makes_a_leaver() -> None:
    room = Room()
    room.train("w0", "w1")
    room.leaving["w1"] = room.now + 30
    room.sync("w0", "w1")
    assert "pod-w1 leaves" in room.last("w0", say.Boundary).reason


def leaver_in_a_lost_generation() -> Room:
    """Three of which one is lost while another leaves; each holds parts of the state."""
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.sync("w0", "w1", "w2")
    room.leaving["w1"] = room.now + 30
    room.tell("w1", say.Leaving("SIGTERM"))
    room.lose("w2")
    room.sync("w0", "w1")
    for member in ("w0", "w1"):
        room.park(member, ParkReason.REDUCTION_FAILED, state(9), hands_over=True)
    return room


def test_leaver_that_holds_parts_hands_them_over_first() -> None:
    room = leaver_in_a_lost_generation()
    assert room.told("w1", say.Leave) == 0
    assert room.members == ("w0", "w1")
    formed = room.form()
    assert room.told("w0", say.Boundary) >= 1
    for member in ("w0", "w1"):
        room.park(member, ParkReason.BOUNDARY, state(10, number=formed.generation.number))
    assert room.told("w1", say.Leave) == 1
    assert room.members == ("w0",)


def test_leaver_with_parts_goes_when_its_time_is_over() -> None:
    """Let a leaver go that took part once more and failed to hand over: its pod is killed in any case."""
    room = leaver_in_a_lost_generation()
    room.form()
    room.now += 31
    for member in ("w0", "w1"):
        room.park(member, ParkReason.DROPPED, state(9), hands_over=True)
    assert room.told("w1", say.Leave) == 1
    room.lose("w1")
    room.tick(5)
    assert room.members == ("w0",)


def test_process_held_for_gone_hands_over_what_it_alone_holds() -> None:
    room = Room(target=2)
    room.sync("w0", "w1")
    name = room.train("w0", "w1").generation
    room.lose("w1")
    room.sync("w0", "w2")
    room.park("w0", ParkReason.REDUCTION_FAILED, state(5))
    room.form()
    assert room.members == ("w0",)
    room.hello("w1", Standing.PARKED, generation=name, state=state(5))
    room.tick(5)
    assert room.told("w0", say.Boundary) == 0
    assert room.last("w1", say.Leave).reason == "its pod is held for gone"

    alone = Room(target=1)
    alone.sync("w0")
    name = alone.train("w0").generation
    alone.lose("w0")
    alone.sync("w1")
    alone.hello("w0", Standing.PARKED, generation=name, state=state(5))
    alone.form()
    alone.hello("w1")
    alone.park("w1")
    alone.tick(2)
    assert alone.told("w0", say.Boundary) == 1
    alone.park("w0", ParkReason.BOUNDARY, state(6, number=2))
    assert alone.last("w1", say.Start).state == state(6, number=2)


def test_a_leaver_that_alone_holds_the_state_hands_it_over_first() -> None:
    room = Room(target=1, maximum=1)
    room.train("w0")
    room.leaving["w0"] = room.now + 100
    room.sync("w0")
    assert room.told("w0", say.Boundary) == 0  # nobody could take over
    room.hello("w1")
    room.park("w1")
    room.park("w0", ParkReason.BOUNDARY, state(9))
    assert room.members == ("w0", "w1")
    assert room.told("w0", say.Leave) == 0
    room.form()
    for member in ("w0", "w1"):
        room.park(member, ParkReason.BOUNDARY, state(10, 2))
    assert room.told("w0", say.Leave) == 1
    assert room.members == ("w1",)


def test_the_last_leaver_goes_shortly_before_its_end() -> None:
    room = Room(target=1)
    room.train("w0")
    room.leaving["w0"] = room.now + 100
    room.sync("w0")
    room.tick(94)
    room.sync("w0")
    assert room.told("w0", say.Boundary) == 0
    room.tick(1)
    room.park("w0", ParkReason.BOUNDARY, state(9))
    assert room.told("w0", say.Leave) == 1


def test_a_job_that_shall_have_no_workers_lets_all_go_at_once() -> None:
    room = Room()
    room.train("w0", "w1")
    room.leaving |= {"w0": room.now + 100, "w1": room.now + 100}
    room.sync("w0", "w1", target=0)
    for member in ("w0", "w1"):
        room.park(member, ParkReason.BOUNDARY, state(9))
    assert room.told("w0", say.Leave) == room.told("w1", say.Leave) == 1


def test_a_standby_that_is_asked_to_leave_goes_when_it_parks() -> None:
    room = Room()
    room.train("w0", "w1")
    room.hello("w2")
    room.tell("w2", say.Leaving("SIGTERM"))
    room.park("w2")
    assert room.told("w2", say.Leave) == 1
    assert room.told("w0", say.Boundary) == 0

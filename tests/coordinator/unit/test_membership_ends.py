"""Ends of a loop and of the job, told step by step."""

from __future__ import annotations

from coordinator_room import Room, generation, state

from springtide_coordinator.membership import Phase
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.messages import ParkReason, Standing


def test_the_loop_ends_when_all_have_ended() -> None:
    room = Room()
    room.train("w0", "w1")
    room.tell("w0", say.Ended(generation(1), state(9), 0))
    assert (room.phase, room.status.waiting_for) == (Phase.ENDING, ("pod-w1",))
    assert room.told("w0", say.EndOk) == 0
    room.tell("w1", say.Ended(generation(1), state(9), 0))
    assert room.told("w0", say.EndOk) == room.told("w1", say.EndOk) == 1
    assert room.phase is Phase.AFTER_LOOP
    assert room.m.ended_stages == 1


def test_who_missed_the_end_hears_it_again() -> None:
    room = Room()
    room.train("w0", "w1")
    for member in ("w0", "w1"):
        room.tell(member, say.Ended(generation(1), state(9), 0))
    room.lose("w1")
    room.hello("w1", Standing.ENDED, generation=generation(1), state=state(9))
    assert room.told("w1", say.EndOk) == 2


def test_member_lost_before_the_end_sends_waiting_ones_back() -> None:
    room = Room()
    room.train("w0", "w1")
    room.tell("w0", say.Ended(generation(1), state(9), 0))
    room.lose("w1")
    room.tick(0.5)
    assert room.told("w0", say.Prepare) == 1
    room.park("w0", ParkReason.DROPPED, state(9))
    assert room.members == ("w0",)


def test_finished_process_sends_standbys_away_disturbing_nobody() -> None:
    room = Room()
    room.train("w0", "w1")
    for member in ("w0", "w1"):
        room.tell(member, say.Ended(generation(1), state(9), 0))
    room.hello("w2")
    room.park("w2")
    room.tick(5)
    assert room.told("w2", say.Leave) == 0
    room.tell("w0", say.Bye("Finished"))
    room.lose("w0")
    room.tick(5)
    assert room.told("w2", say.Leave) == 1
    assert room.last("w2", say.Leave) == say.Leave("the job is finished", finished=True)
    room.hello("w2", standing=say.Standing.PARKED)  # its stream broke before it heard that
    room.tick(5)
    assert room.last("w2", say.Leave).finished
    assert room.told("w1", say.Prepare) == 0


def test_untaken_finish_is_forgotten_and_the_job_restarts() -> None:
    room = Room()
    room.sync("w0", "w1")
    room.train("w0", "w1")
    for member in ("w0", "w1"):
        room.tell(member, say.Ended(generation(1), state(9), 0))
    for member in ("w0", "w1"):
        room.tell(member, say.Bye("Finished"))
        room.lose(member)
    room.sync("w2", "w1")  # w1's pod may still hold its word
    room.tick(40)
    room.sync("w2", "w1")
    room.hello("w2")
    room.park("w2")
    assert room.told("w2", say.Leave) == 1
    room.lose("w2")
    room.sync("w3", "w4")
    for member in ("w3", "w4"):
        room.hello(member)
        room.park(member)
    assert room.told("w3", say.Leave) == 0
    start = room.last("w3", say.Start)
    assert start.fresh
    assert "StateLost" in start.reason
    assert room.m.states_lost == 1


def test_finish_is_believed_while_operator_may_take_it() -> None:
    room = Room(target=1)
    room.sync("w0")
    room.train("w0")
    room.tell("w0", say.Ended(generation(1), state(9), 0))
    room.tell("w0", say.Bye("Finished"))
    room.lose("w0")
    room.sync("w1")
    room.tick(29)
    room.sync("w1")
    room.tick(100)  # nothing was heard since: the job may have ended
    room.hello("w1")
    room.park("w1")
    assert room.told("w1", say.Leave) == 1
    assert room.told("w1", say.Start) == 0


def test_death_after_the_loop_stops_the_others_next_loop() -> None:
    room = Room()
    room.train("w0", "w1")
    for member in ("w0", "w1"):
        room.tell(member, say.Ended(generation(1), state(9), 0))
    room.lose("w1")
    room.tick(1)
    assert room.told("w0", say.Prepare) == 1  # it may wait for w1 in the next loop's first reduction
    assert room.phase is Phase.AFTER_LOOP
    room.park("w0", ParkReason.DROPPED, state(9))
    assert room.members == ("w0",)


def test_the_next_loop_is_noticed_by_its_commits() -> None:
    room = Room()
    room.train("w0", "w1")
    for member in ("w0", "w1"):
        room.tell(member, say.Ended(generation(1), state(9), 0))
    room.tell("w0", say.Progressed(state(10)))
    assert room.phase is Phase.RUNNING
    room.hello("w2")
    room.park("w2")
    room.tick(1)
    assert room.told("w1", say.Boundary) == 1

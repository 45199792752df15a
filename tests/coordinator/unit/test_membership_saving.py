"""The last holders of the state save it before they leave; a job that was put away so has lost nothing."""

from __future__ import annotations

import pytest
from coordinator_room import Room, info, state

from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.events import PodSeen, Synced
from springtide_coordinator.membership.saving import TRIES, put_away
from springtide_protocol.names import StateName


def members(room: Room, *names: str, checkpoints: bool = True) -> StateName:
    """Have members train that can save."""
    for name in names:
        room.hello(name, checkpoints=checkpoints)
    for name in names:
        room.park(name)
    return room.form()


def suspend(room: Room, *living: str, seconds: float = 600.0, saved: str = "") -> None:
    pods = tuple(PodSeen(uid, f"pod-{uid}", leave_by=room.leaving.get(uid, 0.0)) for uid in living)
    room.feed(Synced(0, 1, 8, pods, suspend=True, suspend_by=room.now + seconds, saved=saved))


def park_at(room: Room, at: StateName, *names: str) -> None:
    for name in names:
        room.park(name, say.ParkReason.BOUNDARY, at)


def wrote(
    room: Room, name: str, at: StateName, error: str = "", reason: str = "leaving", seconds: float = 1.0
) -> None:
    room.tell(name, say.Checkpointed(at, error, seconds, reason))


def said(room: Room, name: str, kind: type) -> int:
    return sum(isinstance(message, kind) for message in room.said.get(name, []))


def suspended(room: Room) -> StateName:
    """Two members have stopped for the suspension, and are asked to save."""
    members(room, "w0", "w1")
    room.sync("w0", "w1")
    suspend(room, "w0", "w1")
    assert "saved first" in room.last("w0", say.Boundary).reason
    park_at(room, state(30), "w0")
    assert said(room, "w0", say.Save) == 0
    park_at(room, state(30), "w1")
    return state(30)


def test_members_of_a_suspended_job_stop_save_and_leave() -> None:
    room = Room()
    at = suspended(room)
    assert room.m.blocked is not None
    assert room.m.blocked.reason == "Saving"
    for name in ("w0", "w1"):
        assert room.last(name, say.Save) == say.Save(at, ("w0", "w1"), 1)
        assert said(room, name, say.Leave) == 0
    assert not put_away(room.m).done
    wrote(room, "w0", at)
    for name in ("w0", "w1"):
        assert said(room, name, say.Leave) == 1
        assert not put_away(room.m).done
        room.tell(name, say.Bye("Left"))
        room.lose(name)
    assert put_away(room.m).done
    assert put_away(room.m).all_saved


def test_without_a_place_to_save_they_leave_at_once() -> None:
    room = Room()
    members(room, "w0", "w1", checkpoints=False)
    room.sync("w0", "w1")
    suspend(room, "w0", "w1")
    park_at(room, state(30), "w0", "w1")
    assert said(room, "w0", say.Save) == 0
    assert said(room, "w0", say.Leave) == said(room, "w1", say.Leave) == 1
    assert not put_away(room.m).all_saved


def test_a_state_that_is_saved_already_is_not_saved_again() -> None:
    room = Room(target=1)
    members(room, "w0")
    room.sync("w0")
    wrote(room, "w0", state(30), reason="interval")
    suspend(room, "w0")
    park_at(room, state(30), "w0")
    assert said(room, "w0", say.Save) == 0
    assert said(room, "w0", say.Leave) == 1


def test_an_older_checkpoint_is_not_enough() -> None:
    room = Room(target=1)
    members(room, "w0")
    room.sync("w0")
    wrote(room, "w0", state(29), reason="interval")
    suspend(room, "w0")
    park_at(room, state(30), "w0")
    assert said(room, "w0", say.Save) == 1
    assert said(room, "w0", say.Leave) == 0


def test_a_failed_attempt_is_tried_again_a_few_times() -> None:
    room = Room()
    at = suspended(room)
    for attempt in range(1, TRIES + 1):
        assert room.last("w1", say.Save).attempt == attempt
        assert said(room, "w1", say.Leave) == 0
        wrote(room, "w1", at, "disk full")
    assert said(room, "w1", say.Leave) == 1
    assert not put_away(room.m).all_saved


def test_a_failure_of_another_checkpoint_is_no_failed_attempt() -> None:
    room = Room()
    at = suspended(room)
    wrote(room, "w0", state(25), "too late", reason="interval")
    wrote(room, "w0", at, "too late", reason="interval")
    assert room.last("w0", say.Save).attempt == 1


def test_when_a_writer_dies_the_others_save_alone() -> None:
    room = Room()
    at = suspended(room)
    room.lose("w1")
    room.tick(1.0)
    assert room.last("w0", say.Save) == say.Save(at, ("w0",), 2)
    wrote(room, "w0", at)
    assert said(room, "w0", say.Leave) == 1


def test_a_writer_that_lost_its_stream_is_asked_again() -> None:
    room = Room()
    at = suspended(room)
    room.lose("w0")
    current = room.m.members["w0"].generation
    room.hello("w0", say.Standing.PARKED, generation=current, state=at, leaving=True, checkpoints=True)
    wanted = [message for message in room.said["w0"] if isinstance(message, say.Save)]
    assert wanted[-1].writers[0] == "w0"


def test_time_that_is_over_ends_the_waiting() -> None:
    room = Room(target=1)
    members(room, "w0")
    room.sync("w0")
    suspend(room, "w0", seconds=30.0)
    park_at(room, state(30), "w0")
    assert said(room, "w0", say.Save) == 1
    room.tick(24.0)
    assert said(room, "w0", say.Leave) == 0
    room.tick(2.0)
    assert said(room, "w0", say.Leave) == 1


@pytest.mark.parametrize("took", [0.0, 20.0])
def test_when_all_pods_go_the_state_is_saved_in_time(took: float) -> None:
    """Train on, since another worker may take over, until the members need the rest of their time."""
    room = Room()
    members(room, "w0", "w1")
    room.m.save_seconds = took
    room.leaving = {"w0": room.now + 120, "w1": room.now + 120}
    room.sync("w0", "w1")
    room.tick(120 - 15 - 3 * took - 1)
    assert said(room, "w0", say.Boundary) == 0
    room.tick(2.0)
    assert "saved first" in room.last("w0", say.Boundary).reason
    park_at(room, state(9), "w0", "w1")
    wrote(room, "w0", state(9), seconds=took)
    assert said(room, "w0", say.Leave) == said(room, "w1", say.Leave) == 1


def test_who_can_hand_over_does_not_save() -> None:
    room = Room(target=1)
    members(room, "w0")
    room.leaving = {"w0": room.now + 120}
    room.sync("w0", "w1")
    room.hello("w1", checkpoints=True)
    room.park("w1")
    assert "hands its state over" in room.last("w0", say.Boundary).reason
    park_at(room, state(9), "w0")
    start = room.last("w1", say.Start)
    assert start.state == state(9)
    assert said(room, "w0", say.Save) == 0


def test_one_of_several_leaves_without_saving() -> None:
    room = Room()
    members(room, "w0", "w1")
    room.leaving = {"w0": room.now + 5}
    room.sync("w0", "w1")
    park_at(room, state(9), "w0", "w1")
    assert said(room, "w0", say.Leave) == 1
    assert said(room, "w0", say.Save) == said(room, "w1", say.Save) == 0


def test_a_new_coordinator_does_not_say_that_nothing_is_left() -> None:
    room = Room(incarnation=(2, 0))
    suspend(room, "w0", "w1")
    assert not put_away(room.m).done
    old = state(30).generation
    for name in ("w0", "w1"):
        known = {"generation": old, "members": (info("w0"), info("w1")), "state": state(30)}
        room.hello(name, say.Standing.ACTIVE, **known, checkpoints=True)
    assert not put_away(room.m).done
    park_at(room, state(30), "w0", "w1")
    assert room.last("w0", say.Save).state == state(30)


def resumed(saved: str) -> Room:
    room = Room(incarnation=(2, 0), target=1)
    room.feed(Synced(1, 1, 8, (PodSeen("w0", "pod-w0"),), trained=True, saved=saved))
    room.hello("w0", checkpoints=True)
    room.park("w0")
    return room


def formed(room: Room, restored: str) -> None:
    assert room.m.current is not None
    room.tell("w0", say.Formed(room.m.current.name, restored=restored))


def test_a_job_that_was_put_away_whole_has_lost_nothing() -> None:
    room = resumed("step-30")
    start = room.last("w0", say.Start)
    assert start.fresh
    assert start.had_state
    assert start.reason == "the job goes on from checkpoint step-30"
    assert room.m.states_lost == 0
    formed(room, "step-30")
    assert room.m.states_lost == 0
    assert put_away(room.m).all_saved
    room.tell("w0", say.Progressed(StateName(start.generation, 31)))
    assert not put_away(room.m).all_saved


@pytest.mark.parametrize("found", ["", "step-20"])
def test_if_something_older_was_restored_the_difference_is_lost(found: str) -> None:
    room = resumed("step-30")
    formed(room, found)
    assert room.m.states_lost == 1


def test_without_that_word_state_is_lost_whatever_is_restored() -> None:
    room = resumed("")
    assert room.m.states_lost == 1
    assert "StateLost" in room.last("w0", say.Start).reason
    formed(room, "step-20")
    assert room.m.states_lost == 1


def test_what_was_restored_need_not_be_saved_again() -> None:
    room = resumed("step-30")
    formed(room, "step-30")
    suspend(room, "w0")
    assert room.m.current is not None
    park_at(room, room.m.current.name and StateName(room.m.current.name, 0), "w0")
    assert said(room, "w0", say.Save) == 0
    assert said(room, "w0", say.Leave) == 1

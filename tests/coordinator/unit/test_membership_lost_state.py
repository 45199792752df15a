"""A state that the servers do not hold any more: who goes back, who begins again, and who leaves."""

from __future__ import annotations

import pytest
from coordinator_room import Room, generation
from coordinator_servers import dropped, everybody, trains

from springtide_coordinator.membership import messages as say


def lacking(room: Room) -> None:
    """A server is replaced by an empty one, and the workers find that the state is gone."""
    room.lose("s1")
    room.tick(1)
    dropped(room)
    room.serve("s1x", pod="s1")
    assert room.number == 2
    for worker in room.members:
        room.park(worker, say.ParkReason.SERVERS_LACK_STATE, at=room.m.members[worker].state)


def test_state_lost_by_servers_is_held_by_none_and_all_restart() -> None:
    room = trains()
    lacking(room)
    for worker in ("w0", "w1"):
        assert room.last(worker, say.Leave).reason == (
            "StateLost: parameter server pod-s1 took its parameters with it"
        )
    assert room.number == 2
    for worker in ("w0", "w1"):
        room.tell(worker, say.Bye("Left"))
        room.lose(worker)
    everybody(room, "s0", "s1")
    room.sync("v0", "v1", serving=("s0", "s1"))
    for worker in ("v0", "v1"):
        room.hello(worker)
        room.park(worker)
    start = room.last("v0", say.Start)
    assert start.fresh
    assert start.reason.startswith("StateLost: parameter server pod-s1 took its parameters with it")
    assert room.m.states_lost == 1


def test_never_trained_processes_go_on_without_trained_ones() -> None:
    room = trains()
    room.hello("w2")
    room.park("w2")
    everybody(room)
    room.sync("w0", "w1", "w2", serving=("s0", "s1"))
    lacking(room)
    for worker in ("w0", "w1"):
        room.tell(worker, say.Bye("Left"))
        room.lose(worker)
    room.sync("w2", serving=("s0", "s1"), target=1)
    assert not room.told("w2", say.Leave)
    assert room.last("w2", say.Start).fresh


def with_checkpoints(room: Room, keeps_applied_batches: bool = False) -> None:
    for record in room.m.members.values():
        record.checkpoints, record.storage, record.keeps_applied_batches = (
            not keeps_applied_batches,
            True,
            keeps_applied_batches,
        )


@pytest.mark.parametrize("keeps_applied_batches", [False, True])
def test_with_checkpoints_holders_of_the_state_stay_and_go_back(keeps_applied_batches: bool) -> None:
    """Go back also without common steps, where a state between two epochs' ends cannot be saved."""
    room = trains()
    with_checkpoints(room, keeps_applied_batches)
    lacking(room)
    assert room.number == 3
    for worker in ("w0", "w1"):
        assert room.told(worker, say.Leave) == 0
        start = room.last(worker, say.Start)
        assert start.fresh
        assert start.had_state
        assert "the job goes back to its newest checkpoint" in start.reason
    assert room.m.states_lost == 1


def test_one_that_has_no_checkpoint_to_go_back_to_leaves() -> None:
    room = trains()
    with_checkpoints(room)
    lacking(room)
    stuck = say.Parked(say.ParkReason.FORMATION_FAILED, room.m.members["w0"].generation, cannot_go_back=True)
    room.tell("w0", stuck)
    room.park("w1", say.ParkReason.DROPPED)
    assert room.told("w0", say.Leave) == 1
    assert room.told("w1", say.Leave) == 0


def test_one_worker_that_finds_it_out_is_enough() -> None:
    room = trains()
    room.lose("s1")
    room.tick(1)
    dropped(room)
    room.serve("s1x", pod="s1")
    room.park("w0", say.ParkReason.SERVERS_LACK_STATE, at=room.m.members["w0"].state)
    assert room.told("w1", say.Prepare) == 2
    room.park("w1", say.ParkReason.DROPPED, at=room.m.members["w1"].state)
    assert room.told("w1", say.Leave) == 1


def test_a_report_of_an_older_generation_voids_nothing() -> None:
    room = trains()
    dropped_at = room.m.members["w0"].state
    room.lose("s1")
    room.tick(1)
    room.tell(
        "w0", say.Parked(say.ParkReason.SERVERS_LACK_STATE, generation(7), dropped_at, "layout", "", ())
    )
    assert room.m.void is None

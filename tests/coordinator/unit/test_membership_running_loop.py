"""Which loop the job is in, and who is told: those that come to it, never of a later one than there is."""

from __future__ import annotations

import pytest
from coordinator_room import Room, generation, state

from springtide_coordinator import wire
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.messages import Standing
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import MalformedError, state_to_proto
from springtide_protocol.limits import MAX_COUNT
from springtide_protocol.versions import OWN, RUNNING_LOOP, Agreement, may_send


def trained(loop: int | None = 2, standby: int = 0) -> Room:
    """Return a job of two whose newest commit is of a loop."""
    room = Room(target=2, standby=standby)
    room.train("w0", "w1")
    commit(room, 9, loop)
    return room


def commit(room: Room, step: int, loop: int | None) -> None:
    room.tell("w0", say.Progressed(state(step, room.number), loop))


def test_newcomer_is_told_the_loop_of_the_newest_commit() -> None:
    room = trained()
    room.hello("w2")
    assert room.last("w2", say.Welcome).running_loop == 2
    commit(room, 10, 2)
    assert room.told("w2", say.RunningLoop) == 0, "no news"
    commit(room, 13, 3)
    commit(room, 14, 3)
    assert room.told("w2", say.RunningLoop) == 1
    assert room.last("w2", say.RunningLoop).stage == 3
    assert room.told("w0", say.RunningLoop) == room.told("w1", say.RunningLoop) == 0, "members know"


def test_standby_hears_of_each_loop_while_it_waits() -> None:
    room = trained(loop=0, standby=1)
    room.hello("w2")
    room.park("w2")
    for loop in (1, 2, 3):
        commit(room, 20 + loop, loop)
        assert room.last("w2", say.RunningLoop).stage == loop
    assert room.members == ("w0", "w1")


def test_loop_that_has_ended_is_not_told_as_gone_through() -> None:
    room = trained(loop=2)
    room.hello("w2")
    for member in ("w0", "w1"):
        room.tell(member, say.Ended(generation(1), state(12), 2))
    assert room.told("w0", say.EndOk) == 1
    assert room.told("w2", say.RunningLoop) == 0, "it may be the last one"
    assert room.m.running_loop == 2


def test_nobody_is_told_before_the_first_commit() -> None:
    room = Room(target=2)
    room.train("w0", "w1")
    room.hello("w2")
    assert room.last("w2", say.Welcome).running_loop is None
    commit(room, 1, 0)
    assert room.last("w2", say.RunningLoop).stage == 0


def test_workers_of_a_release_without_the_number_tell_nothing() -> None:
    room = trained(loop=None)
    room.hello("w2")
    assert room.last("w2", say.Welcome).running_loop is None


def test_fresh_start_forgets_the_loop() -> None:
    room = trained(loop=2)
    room.sync("w0", "w1")
    for member in ("w0", "w1"):
        room.lose(member)
    room.sync()
    room.hello("w2")
    room.hello("w3")
    room.sync("w2", "w3")
    room.park("w2")
    room.park("w3")
    assert room.members == ("w2", "w3"), room.status
    room.hello("w4")
    assert room.last("w4", say.Welcome).running_loop is None, "a checkpoint may be of an earlier loop"
    room.form()
    room.tell("w2", say.Progressed(state(5, room.number), 1))
    assert room.last("w4", say.RunningLoop).stage == 1


def test_nobody_is_told_while_no_member_is_left() -> None:
    """A job that was lost may begin at a checkpoint of an earlier loop."""
    room = trained(loop=2)
    for member in ("w0", "w1"):
        room.lose(member)
    room.hello("w2")
    assert room.last("w2", say.Welcome).running_loop is None
    room.hello("w1", Standing.ACTIVE, generation=generation(1), state=state(9), ended_stage=2)
    assert room.last("w2", say.RunningLoop).stage == 2, "one has come back"


def test_commit_of_an_older_generation_says_nothing() -> None:
    room = trained(loop=None)
    room.lose("w1")
    room.sync("w0")
    room.park("w0", say.ParkReason.DROPPED, at=state(9))
    assert room.number == 2
    room.tell("w0", say.Progressed(state(9, 1), 4))
    assert room.m.running_loop is None


@pytest.mark.parametrize(
    ("standing", "ended", "loop"),
    [
        (Standing.ACTIVE, 3, 3),
        (Standing.ENDED, 3, 3),
        (Standing.AFTER, 3, 2),
        (Standing.PARKED, 3, None),
        (Standing.STARTING, 3, None),
    ],
)
def test_later_coordinator_learns_the_loop_from_members(
    standing: Standing, ended: int, loop: int | None
) -> None:
    room = Room(incarnation=(2, 0))
    held = {"generation": generation(7), "members": (), "state": state(9, 7), "ended_stage": ended}
    room.hello("w0", standing, **held)
    assert room.m.running_loop == loop


def test_process_of_another_generation_is_not_believed() -> None:
    room = trained(loop=1)
    room.hello("w7", Standing.ACTIVE, generation=generation(1), state=state(50), ended_stage=9)
    assert room.m.running_loop == 1


def test_messages_of_the_loop_on_the_wire() -> None:
    agreed = say.Welcome(incarnation := Room().m.incarnation, Agreement(2), 0)
    welcome = wire.from_outgoing(agreed, None).welcome
    assert welcome.HasField("running_loop")
    assert welcome.running_loop.stage == 0
    unknown = wire.from_outgoing(say.Welcome(incarnation, Agreement(2)), None).welcome
    assert not unknown.HasField("running_loop")
    message = wire.from_outgoing(say.RunningLoop(4), None)
    assert message.running_loop.stage == 4
    assert may_send(message.WhichOneof("message"), OWN.capabilities)
    assert not may_send(message.WhichOneof("message"), OWN.capabilities - {RUNNING_LOOP})
    commits = [pb.Commit(state=state_to_proto(state(3)))]
    told = pb.WorkerMessage(progress=pb.Progress(commits=commits, data=pb.Data(stage=2)))
    assert wire.to_incoming(told) == say.Progressed(state(3), 2)
    silent = pb.WorkerMessage(progress=pb.Progress(commits=commits))
    assert wire.to_incoming(silent) == say.Progressed(state(3), None)
    told.progress.data.stage = MAX_COUNT + 1
    with pytest.raises(MalformedError, match="the loop's number is"):
        wire.to_incoming(told)

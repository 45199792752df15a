"""Standbys: they wait outside of the group at no cost, and are in it as soon as a seat is free."""

from __future__ import annotations

from coordinator_room import Room, state
from hypothesis import given
from hypothesis import strategies as st

from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.seats import MOST_FORMER, former_members, most, seated, seats, waiting
from springtide_coordinator.membership.succession import why_held_back
from springtide_protocol.names import StateName


def trained(standby: int = 1, target: int = 3) -> tuple[Room, StateName]:
    """Return a room in which w0, w1, ... train, without the standbys that it has seats besides."""
    room = Room(target=target, standby=standby)
    base = room.train(*(f"w{number}" for number in range(target)))
    return room, base


def come(room: Room, *members: str) -> None:
    for member in members:
        room.hello(member)
        room.park(member)


def die(room: Room, member: str, at: StateName) -> None:
    """A member dies; a peer's sum fails, and the others park."""
    others = [one for one in room.members if one != member]
    room.lose(member)
    room.park(others[0], say.ParkReason.REDUCTION_FAILED, at=at)
    for other in others[1:]:
        room.park(other, say.ParkReason.DROPPED, at=at)


def test_standby_that_is_ready_disturbs_nobody() -> None:
    room, _ = trained()
    come(room, "w3")
    room.tick(60)
    assert room.members == ("w0", "w1", "w2")
    assert all(room.told(member, say.Boundary) == 0 for member in room.members)
    assert [record.info.id for record in waiting(room.m)] == ["w3"]
    assert why_held_back(room.m) == "", "a standby that waits is no trouble"


def test_standby_is_in_the_generation_after_a_loss() -> None:
    room, base = trained()
    come(room, "w3")
    die(room, "w1", base)
    assert room.members == ("w0", "w2", "w3")
    start = room.last("w0", say.Start)
    assert start.reason.endswith("; standby pod-w3 takes the place of pod-w1")
    assert [transfer.receiver for transfer in start.transfers] == ["w3"]
    assert waiting(room.m) == []


def test_pods_that_were_members_are_told_of() -> None:
    room, base = trained()
    come(room, "w3")
    assert former_members(room.m) == ()
    die(room, "w1", base)
    assert room.members == ("w0", "w2", "w3")
    assert former_members(room.m) == ("w1",)
    room.lose("w3")
    assert former_members(room.m) == ("w1", "w3"), "it was let in, and is gone before its first step"
    room.m.standby = 0
    assert former_members(room.m) == (), "who asks has no standbys"


def test_former_members_are_bounded_and_may_return() -> None:
    room, base = trained(target=2)
    for number in range(2, MOST_FORMER + 6):
        come(room, f"w{number}")
        die(room, room.members[-1], base)
        base = room.form()
    told = former_members(room.m)
    assert len(told) == MOST_FORMER
    assert told[-1] == f"w{MOST_FORMER + 4}"
    assert not {record.pod_uid for record in room.m.current.members} & set(told)


def test_standby_that_waited_longest_steps_in() -> None:
    room, base = trained(standby=2)
    come(room, "w4")
    room.tick(1)
    come(room, "w3")
    die(room, "w2", base)
    assert room.members == ("w0", "w1", "w4")


def test_several_standbys_step_in_for_several() -> None:
    room, base = trained(standby=2)
    come(room, "w3", "w4")
    room.lose("w1")
    die(room, "w2", base)
    room.tick(2)
    assert room.members == ("w0", "w3", "w4")
    assert "standbys pod-w3, pod-w4 take the place of pod-w1, pod-w2" in room.last("w0", say.Start).reason


def test_loss_before_the_standby_is_ready_waits_for_nobody() -> None:
    room, base = trained()
    room.hello("w3")
    die(room, "w1", base)
    assert room.members == ("w0", "w2")
    held = room.form()
    room.park("w3")
    for member in ("w0", "w2"):
        room.park(member, say.ParkReason.BOUNDARY, at=held)
    assert room.members == ("w0", "w2", "w3")


def test_member_that_leaves_and_its_standby_change_at_once() -> None:
    room, base = trained()
    come(room, "w3")
    room.leaving["w1"] = room.now + 30
    room.sync("w0", "w1", "w2", "w3")
    assert room.last("w0", say.Boundary).reason.startswith("pod-w1 leaves")
    for member in ("w0", "w1", "w2"):
        room.park(member, say.ParkReason.BOUNDARY, at=base)
    assert room.members == ("w0", "w2", "w3")
    assert room.told("w1", say.Leave) == 1
    assert "standby pod-w3 takes the place of pod-w1" in room.last("w0", say.Start).reason


def test_only_member_hands_its_state_to_the_standby_first() -> None:
    room, base = trained(target=1)
    come(room, "w3")
    room.leaving["w0"] = room.now + 60
    room.sync("w0", "w3")
    room.park("w0", say.ParkReason.BOUNDARY, at=base)
    assert room.members == ("w0", "w3")
    held = room.form()
    for member in ("w0", "w3"):
        room.park(member, say.ParkReason.BOUNDARY, at=held)
    assert room.members == ("w3",)


def test_more_wanted_workers_are_taken_from_the_standbys() -> None:
    room, _ = trained()
    come(room, "w3")
    room.sync("w0", "w1", "w2", "w3", target=4)
    room.tick(2)
    assert "pod-w3 joins" in room.last("w0", say.Boundary).reason


def test_member_that_was_cut_off_waits_when_it_comes_back() -> None:
    room, base = trained()
    come(room, "w3")
    die(room, "w1", base)
    room.form()
    room.hello("w1", say.Standing.PARKED, generation=base.generation, state=base)
    room.tick(60)
    assert room.members == ("w0", "w2", "w3")
    assert room.told("w0", say.Boundary) == 0


def test_old_state_of_a_standby_gives_way_to_a_checkpoint() -> None:
    room, base = trained()
    come(room, "w3")
    die(room, "w1", base)
    held = room.form()
    room.hello("w1", say.Standing.PARKED, generation=base.generation, state=base, storage=True)
    newest = StateName(held.generation, 40)
    room.tell("w0", say.Checkpointed(StateName(held.generation, 30), seconds=1.0))
    room.tell("w0", say.Progressed(newest))
    for member in ("w0", "w2", "w3"):
        room.lose(member)
    room.sync("w1")
    room.tick(20)
    start = room.last("w1", say.Start)
    assert room.members == ("w1",)
    assert start.fresh, "it begins from the checkpoint, not from what it held at first"


def test_old_state_of_a_standby_is_better_than_none() -> None:
    room, base = trained()
    come(room, "w3")
    die(room, "w1", base)
    room.form()
    room.hello("w1", say.Standing.PARKED, generation=base.generation, state=base)
    for member in ("w0", "w2", "w3"):
        room.lose(member)
    room.sync("w1")
    room.tick(20)
    assert not room.last("w1", say.Start).fresh


def test_fresh_start_takes_those_that_are_ready_first() -> None:
    room = Room(target=2, standby=1)
    for member in ("w0", "w1", "w2"):
        room.hello(member)
    room.park("w2")
    room.tick(1)
    room.park("w0")
    assert room.members == ("w0", "w2")
    room.form()
    room.park("w1")
    room.tick(60)
    assert room.told("w0", say.Boundary) == 0


def test_standbys_leave_when_the_job_is_finished() -> None:
    room, _ = trained()
    come(room, "w3")
    room.tell("w0", say.Bye("Finished"))
    assert room.last("w3", say.Leave).finished


# ---- pods of two processes


def process(name: str) -> say.MemberInfo:
    """`a1` is the process with local rank 1 of pod `a`, in the slot of its letter."""
    return say.MemberInfo(
        name, pod_uid=name[0], pod_name=f"pod-{name[0]}", local_rank=int(name[1]), slot=ord(name[0])
    )


def pods_of_two() -> tuple[Room, StateName]:
    """Return a room in which pods a and b train, and pod c is there."""
    room = Room(target=4, minimum=2, standby=2, processes_per_pod=2)
    for name in ("a0", "a1", "b0", "b1"):
        room.hello(name, as_info=process(name))
    for name in ("a0", "a1", "b0", "b1"):
        room.park(name)
    base = room.form()
    for name in ("c0", "c1"):
        room.hello(name, as_info=process(name))
    return room, base


def test_pod_of_two_processes_steps_in_whole() -> None:
    room, base = pods_of_two()
    room.park("c0")
    room.park("c1")
    room.lose("b1")
    die(room, "b0", base)
    room.tick(2)
    assert room.members == ("a0", "a1", "c0", "c1")


def test_half_a_standby_pod_does_not_step_in() -> None:
    room, base = pods_of_two()
    room.park("c0")
    room.lose("b1")
    die(room, "b0", base)
    room.tick(2)
    assert room.members == ("a0", "a1")


def test_pod_with_one_process_down_keeps_its_seat() -> None:
    room, base = pods_of_two()
    room.park("c0")
    room.park("c1")
    die(room, "b1", base)
    assert room.members == ("a0", "a1", "b0")
    held = room.form()
    room.hello("b1x", as_info=say.MemberInfo("b1x", "b", pod_name="pod-b", local_rank=1, slot=ord("b")))
    room.park("b1x")
    for name in ("a0", "a1", "b0"):
        room.park(name, say.ParkReason.BOUNDARY, at=held)
    assert room.members == ("a0", "a1", "b0", "b1x")


# ---- seats alone

POOL = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=10)


@given(POOL, st.integers(0, 4), st.integers(0, 3), st.integers(1, 2), st.sets(st.integers(0, 9), max_size=3))
def test_no_more_pods_have_seats_than_are_wanted(
    pool: list[tuple[int, bool]], target: int, standby: int, each: int, held: set[int]
) -> None:
    room = Room(target=target * each, standby=standby, processes_per_pod=each)
    records = [
        Record(say.MemberInfo(f"m{index}", pod_uid=f"p{pod}"), order=index)
        for index, (pod, _) in enumerate(pool)
    ]
    holders = {f"m{index}" for index in held}
    found = seated(room.m, records, holders)
    limit = seats(room.m)
    assert found == [record for record in records if record in found], "the order stays"
    if not standby or not target:
        assert found == records
        return
    pods = {record.info.pod_uid for record in found}
    assert limit == target
    assert len(pods) == min(limit, len({record.info.pod_uid for record in records}))
    assert most(room.m) == min(target * each, room.m.maximum)


@given(st.integers(1, 5), st.integers(1, 3), st.sets(st.integers(0, 7)))
def test_any_loss_is_made_up_for_by_those_who_wait(target: int, standby: int, lost: set[int]) -> None:
    room, base = trained(standby=standby, target=target)
    come(room, *(f"s{number}" for number in range(10, 10 + standby)))
    gone = {f"w{number}" for number in lost if number < target}
    if len(gone) == target:
        gone.pop()
    for member in gone:
        room.lose(member)
    for member in set(room.members) - gone if gone else ():
        room.park(member, say.ParkReason.REDUCTION_FAILED, at=base)
    room.tick(2)
    assert len(room.members) == min(target, target - len(gone) + standby)
    assert not gone & set(room.members)


def test_seats_are_of_no_concern_without_standbys() -> None:
    room = Room(target=1, maximum=3)
    room.train("w0")
    come(room, "w1", "w2", "w3")
    room.tick(2)
    room.park("w0", say.ParkReason.BOUNDARY, at=state(1))
    assert room.members == ("w0", "w1", "w2")
    assert waiting(room.m) == []

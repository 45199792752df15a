"""A generation is no larger than its members have room for; who is left out, and what is said of it."""

from __future__ import annotations

import itertools

from coordinator_room import Room, info, state
from hypothesis import given
from hypothesis import strategies as st

from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.group_size import choose_members, why_smaller
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.succession import why_held_back

LIMITS = st.lists(st.integers(0, 7), max_size=6)


def records(limits: list[int]) -> list[Record]:
    return [Record(info(f"w{index}"), order=index, largest_group=limit) for index, limit in enumerate(limits)]


def has_room(group: tuple[Record, ...]) -> bool:
    return all(record.largest_group in (0, *range(len(group), 8)) for record in group)


@given(LIMITS, st.integers(0, 6), st.sets(st.integers(0, 5)))
def test_chosen_group_has_room_and_no_larger_one_does(limits: list[int], most: int, held: set[int]) -> None:
    pool = records(limits)
    holders = [pool[index] for index in sorted(held) if index < len(pool)]
    needed = {record.info.id for record in holders}
    chosen = choose_members(pool, holders, most)

    def valid(group: tuple[Record, ...]) -> bool:
        within = not most or len(group) <= most
        return within and has_room(group) and (not needed or any(r.info.id in needed for r in group))

    assert valid(chosen)
    larger = (g for size in range(len(chosen) + 1, 7) for g in itertools.combinations(pool, size))
    assert not any(valid(group) for group in larger)


@given(LIMITS, st.integers(0, 6))
def test_a_reason_is_given_exactly_where_some_are_left_out(limits: list[int], most: int) -> None:
    pool = records(limits)
    wanted = min(len(pool), most or len(pool))
    assert bool(why_smaller(pool, most)) == (len(choose_members(pool, (), most)) < wanted)


def arrive(room: Room, limits: dict[str, int]) -> None:
    for member in limits:
        room.hello(member)
    for member, limit in limits.items():
        room.tell(member, say.Parked(say.ParkReason.STANDBY, layout_hash="layout", largest_group=limit))


def test_a_low_limit_of_all_caps_the_generation_and_is_said() -> None:
    room = Room(target=4)
    arrive(room, {"w0": 3, "w1": 3, "w2": 3, "w3": 3})
    assert room.members == ("w0", "w1", "w2")
    said = why_held_back(room.m)
    assert "room on pod-w0 for generations of 3, pod-w1 for generations of 3" in said
    assert "Raise the container runtime's limit" in said
    room.form()
    room.tick(60)
    assert room.told("w0", say.Boundary) == 0, "a generation of the same size is no gain"


def test_one_low_limit_is_left_out_for_the_others() -> None:
    room = Room(target=4)
    arrive(room, {"w0": 2, "w1": 100, "w2": 100, "w3": 100})
    assert room.members == ("w1", "w2", "w3")
    assert "room on pod-w0 for generations of 2." in why_held_back(room.m)


def test_a_spare_takes_the_place_of_a_member_that_dies() -> None:
    room = Room(target=3)
    arrive(room, {"w0": 2, "w1": 2, "w2": 2})
    base = room.form()
    room.lose("w1")
    room.sync("w0", "w2")
    room.park("w0", say.ParkReason.DROPPED, at=base)
    assert room.members == ("w0", "w2")
    assert why_held_back(room.m) == ""


def test_state_leaves_a_holder_with_a_low_limit_in_two_steps() -> None:
    room = Room(target=1, maximum=4)
    arrive(room, {"w0": 2})
    base = room.form()
    arrive(room, {"w1": 9, "w2": 9})
    room.tick(2)
    room.park("w0", say.ParkReason.BOUNDARY, at=base)
    assert room.members == ("w0", "w1"), "the state goes to another one first"
    held = room.form()
    room.tick(2)
    assert room.told("w1", say.Boundary) == 0, "without w0 there are no more than two, either"
    arrive(room, {"w3": 9})
    room.tick(2)
    for member in ("w0", "w1"):
        assert "pod-w2, pod-w3 joins" in room.last(member, say.Boundary).reason
        room.park(member, say.ParkReason.BOUNDARY, at=held)
    assert room.members == ("w1", "w2", "w3")
    assert "pod-w0 for generations of 2" in why_held_back(room.m)


def test_limits_below_the_minimum_are_the_reason_to_wait() -> None:
    room = Room(target=3, minimum=3)
    arrive(room, {"w0": 2, "w1": 2, "w2": 2})
    assert room.number == 0
    assert room.status.reason == "BelowMinimum"
    assert "the job needs at least 3 processes, and not all" in room.status.message
    assert "pod-w0 for generations of 2" in room.status.message


def test_new_coordinator_learns_limits_from_hello() -> None:
    room = Room(target=3, incarnation=(2, 0))
    for member in ("w0", "w1"):
        room.hello(
            member,
            say.Standing.ACTIVE,
            generation=state(5, 3).generation,
            members=(info("w0"), info("w1")),
            state=state(5, 3),
            largest_group=2,
        )
    room.sync("w0", "w1", "w2")
    arrive(room, {"w2": 2})
    room.tick(5)
    assert room.told("w0", say.Boundary) == 0
    assert "generations of 2" in why_held_back(room.m)


def test_members_that_tell_no_limit_are_not_limited() -> None:
    room = Room(target=4)
    arrive(room, {"w0": 0, "w1": 0, "w2": 0, "w3": 0})
    assert room.members == ("w0", "w1", "w2", "w3")
    assert why_held_back(room.m) == ""

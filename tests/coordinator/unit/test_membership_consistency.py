"""A job's consistency changes at a boundary, for all members at once, whatever their environments say."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
from coordinator_room import Room
from coordinator_servers import everybody
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_coordinator import wire
from springtide_coordinator.membership import boundary, succession
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.consistency import why_epoch_end, why_refused
from springtide_coordinator.membership.messages import Consistency
from springtide_coordinator.settings import BadEnvironmentError, read_options
from springtide_protocol import codec
from springtide_protocol import coordinator_pb2 as pb

SYNCHRONOUS, FREE = Consistency("Synchronous"), Consistency("Asynchronous")
FOUR, NINE = Consistency("BoundedStaleness", 4), Consistency("BoundedStaleness", 9)
ALL = (SYNCHRONOUS, FREE, FOUR, NINE)


def starts_in(first: Consistency) -> Room:
    room = Room(servers=2, target=2)
    room.m.consistency_at_first = first
    room.serve("s0", "s1")
    room.train("w0", "w1")
    everybody(room, consistency=first)
    return room


def stop_at_boundary(room: Room) -> None:
    """All members do what they are asked, until nobody is asked for anything."""
    for _ in range(4):
        asked = [w for w in room.members if current(room).boundary and not room.m.members[w].parked]
        if not asked:
            return
        for worker in asked:
            room.park(worker, say.ParkReason.BOUNDARY, at=room.m.members[worker].state)
        room.form()
    raise AssertionError(f"it never comes to rest: {room.status}")


def current(room: Room):  # type: ignore[no-untyped-def]
    assert room.m.current is not None
    return room.m.current


def in_force(room: Room) -> set[Consistency | None]:
    """Return the consistencies that members of the generation were started with."""
    return {room.last(worker, say.Start).consistency for worker in room.members}


def test_first_word_is_taken_and_a_change_is_a_common_boundary() -> None:
    room = Room(target=2)
    room.m.consistency_at_first = FOUR
    room.train("w0", "w1")
    assert in_force(room) == {FOUR}
    everybody(room, consistency=FOUR)
    assert room.told("w0", say.Boundary) == 0
    everybody(room, consistency=FREE)
    text = "consistency BoundedStaleness (4 steps) becomes Asynchronous"
    assert {room.last(worker, say.Boundary).reason for worker in room.members} == {text}
    assert (room.status.reason, room.status.message) == ("Rescaling", text)
    room.park("w0", say.ParkReason.BOUNDARY, at=room.m.members["w0"].state)
    assert room.number == 1  # nobody goes over alone
    room.park("w1", say.ParkReason.BOUNDARY, at=room.m.members["w1"].state)
    assert (room.number, in_force(room), room.last("w0", say.Start).reason) == (2, {FREE}, text)
    room.form()
    assert room.told("w0", say.Boundary) == 1


def test_change_taken_back_early_costs_at_most_one_generation() -> None:
    room = starts_in(FREE)
    number = room.number
    everybody(room, consistency=NINE)
    everybody(room, consistency=FREE)
    stop_at_boundary(room)
    assert room.number == number + 1
    assert in_force(room) == {FREE}
    stop_at_boundary(room)
    assert room.number == number + 1


def test_one_that_joins_is_told_what_the_others_train_in() -> None:
    room = starts_in(NINE)
    room.hello("w2")
    room.park("w2")
    room.tick(2.0)
    stop_at_boundary(room)
    assert room.members == ("w0", "w1", "w2")
    assert in_force(room) == {NINE}


def test_common_steps_end_at_a_boundary() -> None:
    room = starts_in(SYNCHRONOUS)
    everybody(room, consistency=NINE)
    assert room.last("w0", say.Boundary).reason == (
        "consistency Synchronous becomes BoundedStaleness (9 steps)"
    )
    stop_at_boundary(room)
    assert in_force(room) == {NINE}
    assert why_refused(room.m) == ""


def test_scripts_needing_common_steps_keep_the_job_in_them() -> None:
    room = starts_in(SYNCHRONOUS)
    room.tell("w1", say.BoundToSteps("its average would differ"))
    everybody(room, consistency=FREE)
    assert room.told("w1", say.Boundary) == 0
    assert why_refused(room.m) == "pod-w1: its average would differ"
    room.lose("w0")
    room.tick(5.0)
    room.park("w1", say.ParkReason.DROPPED, at=room.m.members["w1"].state)
    assert in_force(room) == {SYNCHRONOUS}  # a loss is no way around it
    room.form()
    name, members, state = current(room).name, current(room).members, room.m.members["w1"].state
    again = Room(target=2, incarnation=(1, 1))
    for info in members:
        again.hello(
            info.id,
            say.Standing.PARKED,
            generation=name,
            members=members,
            state=state,
            consistency=SYNCHRONOUS,
            bound_to_steps="it still would",
        )
    again.sync("w1", consistency=FREE)
    assert in_force(again) == {SYNCHRONOUS}
    assert why_refused(again.m) == "pod-w1: it still would"


def stop_at_the_end(room: Room, step: int) -> None:
    """All meet at the end of an epoch, after `step`, and stop there."""
    name = current(room).name
    for worker in room.members:
        room.tell(
            worker, say.Parked(say.ParkReason.BOUNDARY, name, say.StateName(name, step), at_epoch_end=True)
        )
    room.form()


def test_common_steps_begin_where_all_stop_at_an_epoch_end() -> None:
    room = starts_in(NINE)
    everybody(room, consistency=SYNCHRONOUS)
    asked = room.last("w0", say.Boundary)
    text = "consistency BoundedStaleness (9 steps) becomes Synchronous at the end of the epoch"
    assert (asked.at_epochs_end, asked.reason, why_epoch_end(room.m), why_refused(room.m)) == (
        True,
        text,
        text,
        "",
    )
    everybody(room, consistency=SYNCHRONOUS)
    assert room.told("w0", say.Boundary) == 1
    assert room.status.reason == "Running"
    # A loss, and then one that joins, come first, and are no reason to go over.
    number = room.number
    room.lose("w1")
    everybody_but(room, "w1")
    room.park("w0", say.ParkReason.DROPPED, at=say.StateName(current(room).name, 3))
    room.form()
    room.hello("w2")
    room.park("w2")
    room.tick(2.0)
    room.sync("w0", "w2", serving=room.servers, consistency=SYNCHRONOUS)
    assert not room.last("w0", say.Boundary).at_epochs_end
    room.park("w0", say.ParkReason.BOUNDARY, at=say.StateName(current(room).name, 5))
    room.form()
    assert (room.number, in_force(room)) == (number + 2, {NINE})
    assert room.last("w2", say.Boundary).at_epochs_end  # said to each generation
    stop_at_the_end(room, 8)
    assert in_force(room) == {SYNCHRONOUS}
    start = room.last("w0", say.Start)
    # One of them has what all get, for some things were each worker's own.
    assert start.transfers == (say.Transfer("w2", "w0"),)
    assert start.reason == "consistency BoundedStaleness (9 steps) becomes Synchronous"
    assert why_epoch_end(room.m) == ""
    # From then on all have the same.
    room.hello("w3")
    room.park("w3")
    room.tick(2.0)
    stop_at_boundary(room)
    assert room.last("w0", say.Start).transfers == (say.Transfer("w3", "w0"),)


def test_change_unwanted_once_all_have_stopped_is_not_done() -> None:
    room = starts_in(FREE)
    everybody(room, consistency=SYNCHRONOUS)
    everybody(room, consistency=FREE)
    assert why_epoch_end(room.m) == ""
    stop_at_the_end(room, 8)
    assert in_force(room) == {FREE}


def test_first_giver_fails_and_another_member_gives_the_values() -> None:
    room = starts_in(FREE)
    room.hello("w2")
    room.park("w2")
    room.tick(2.0)
    stop_at_boundary(room)
    everybody(room, consistency=SYNCHRONOUS)
    name = current(room).name
    for worker in room.members:
        room.tell(
            worker, say.Parked(say.ParkReason.BOUNDARY, name, say.StateName(name, 8), at_epoch_end=True)
        )
    room.tell("w1", say.Formed(current(room).name))
    room.lose("w0")
    everybody_but(room, "w0")
    for worker, cut in (("w1", False), ("w2", True)):
        failed = say.ParkReason.FORMATION_FAILED
        room.tell(worker, say.Parked(failed, current(room).name, say.StateName(name, 8), at_epoch_end=cut))
    assert in_force(room) == {SYNCHRONOUS}
    # w1 has what w0 gave, and w2 may not.
    assert room.last("w1", say.Start).transfers == (say.Transfer("w2", "w1"),)


def test_an_end_that_others_went_on_from_is_none() -> None:
    """w1 has stopped at an epoch's end and is away, while the others go on in ranges."""
    room = starts_in(FREE)
    name = current(room).name
    room.tell("w1", say.Parked(say.ParkReason.BOUNDARY, name, say.StateName(name, 8), at_epoch_end=True))
    room.lose("w1")
    everybody_but(room, "w1")
    room.tell("w0", say.Parked(say.ParkReason.DROPPED, name, say.StateName(name, 8)))
    room.form()
    room.lose("w0")
    room.hello(
        "w1",
        say.Standing.PARKED,
        generation=name,
        state=say.StateName(name, 8),
        at_epoch_end=True,
        keeps_applied_batches=True,
    )
    room.sync("w1", serving=room.servers, consistency=SYNCHRONOUS)
    room.tick(5.0)
    assert room.members == ("w1",)
    assert in_force(room) == {FREE}


def test_new_coordinator_learns_from_members_not_environment() -> None:
    room = starts_in(NINE)
    name, members, state = current(room).name, current(room).members, room.m.members["w0"].state
    again = Room(target=2, incarnation=(1, 1))
    again.m.consistency_at_first = FOUR  # as old as the pod
    for info in members:
        again.hello(
            info.id, say.Standing.ACTIVE, generation=name, members=members, state=state, consistency=NINE
        )
    assert current(again).consistency == NINE
    again.tick(0.1)
    assert again.told("w0", say.Boundary) == 0
    again.lose("w1")
    again.tick(5.0)
    again.sync("w0", consistency=None)
    again.park("w0", say.ParkReason.DROPPED, at=state)
    assert in_force(again) == {NINE}
    again.form()
    again.sync("w0", consistency=FREE)
    stop_at_boundary(again)
    assert in_force(again) == {FREE}


Word = tuple[Consistency, bool, bool, bool]
"""Mode that the operator wants; whether a worker dies then, the others stop, and an epoch ends."""


def live_through(words: list[Word]) -> None:
    room = starts_in(FREE)
    joined = 2
    for wanted, dies, stops, meets in words:
        before = current(room).consistency
        everybody(room, consistency=wanted)
        if dies:
            victim, *others = reversed(room.members)
            everybody_but(room, victim)
            for worker in others:
                room.park(worker, say.ParkReason.DROPPED, at=room.m.members[worker].state)
            room.form()
            room.hello(f"w{joined}")
            room.park(f"w{joined}")
            joined += 1
            room.tick(2.0)
            everybody(room)
            stop_at_boundary(room)
        elif stops:
            stop_at_boundary(room)
            if meets and before != SYNCHRONOUS and wanted == SYNCHRONOUS:
                stop_at_the_end(room, 8)
                assert in_force(room) == {SYNCHRONOUS}
        assert len(in_force(room)) == 1
        assert in_force(room) == {current(room).consistency}
        ends = stops and meets and not dies
        assert before == SYNCHRONOUS or ends or SYNCHRONOUS not in in_force(room)
    stop_at_boundary(room)
    if words and SYNCHRONOUS in (words[-1][0], *in_force(room)):
        stop_at_the_end(room, 16)
    if words:
        assert in_force(room) == {words[-1][0]}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ALL), st.booleans(), st.booleans(), st.booleans()), max_size=8))
def test_what_is_wanted_last_is_what_they_train_in(words: list[Word]) -> None:
    live_through(words)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        (boundary, "why_other_consistency", lambda m, generation: None),
        (succession, "next_consistency", lambda m, members, at_epoch_end: m.consistency_at_first),
        (
            succession,
            "next_consistency",
            lambda m, members, at_epoch_end: m.current and m.current.consistency,
        ),
        (succession, "is_epoch_end", lambda m, members, chosen: True),
        (succession, "is_epoch_end", lambda m, members, chosen: False),
    ],
    ids=[
        "an edit asks for a boundary",
        "not the environment",
        "not what was before",
        "common steps begin from an epoch's end alone",
        "they begin from there",
    ],
)
def test_without_one_of_the_rules_it_goes_wrong(
    module: ModuleType, name: str, instead: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    walk: list[Word] = [
        (NINE, False, True, False),
        (SYNCHRONOUS, True, True, False),
        (FREE, True, True, False),
        (FOUR, False, True, False),
        (SYNCHRONOUS, False, True, True),
        (NINE, True, True, False),
        (FOUR, False, True, False),
    ]
    live_through(walk)
    monkeypatch.setattr(module, name, instead)
    with pytest.raises(AssertionError):
        live_through(walk)


def everybody_but(room: Room, victim: str) -> None:
    """The victim's stream breaks, and the operator says that its pod is gone."""
    room.lose(victim)
    room.sync(*(worker for worker in room.members if worker != victim), serving=room.servers)
    room.tick(1.0)


def test_consistencies_on_the_wire() -> None:
    for known in ALL:
        told = wire.from_consistency(known)
        assert told is not None
        assert wire.to_consistency(told) == known
    assert wire.to_consistency(pb.Consistency()) is None
    # A bound where there is none would be another consistency at each edit of it.
    assert wire.to_consistency(pb.Consistency(mode="Asynchronous", staleness=7)) == FREE
    with pytest.raises(codec.MalformedError, match="'Eventual' is no consistency: Synchronous, Bounded"):
        wire.to_consistency(pb.Consistency(mode="Eventual"))


def test_the_coordinators_environment() -> None:
    env = {"SPRINGTIDE_TOKEN": "t", "SPRINGTIDE_STATE_DIR": "/nowhere"}
    assert read_options(env).consistency is None
    assert read_options({**env, "SPRINGTIDE_CONSISTENCY": "Asynchronous"}).consistency == FREE
    bounded = {**env, "SPRINGTIDE_CONSISTENCY": "BoundedStaleness", "SPRINGTIDE_STALENESS": "9"}
    assert read_options(bounded).consistency == NINE
    with pytest.raises(BadEnvironmentError, match="SPRINGTIDE_CONSISTENCY is 'No'"):
        read_options({**env, "SPRINGTIDE_CONSISTENCY": "No"})

"""Parameter servers that reach the coordinator, and that workers do not reach."""

from __future__ import annotations

from coordinator_room import Room
from coordinator_servers import everybody, trains

from springtide_coordinator.membership import messages as say


def begin(copies: int, workers: int = 3, servers: int = 3) -> Room:
    room = trains(servers=servers, workers=workers)
    assert room.m.current is not None
    for member in room.members:
        room.tell(member, say.Formed(room.m.current.name, server_copies=copies))
    return room


def fails(
    room: Room,
    reached: dict[str, tuple[str, ...]] | None = None,
    late: tuple[str, ...] = (),
    **suspects: tuple[str, ...],
) -> None:
    """The generation ends with complaints, and the next one is made.

    Args:
        room: of the coordinator.
        reached: servers that a member says it reaches, by member.
        late: members that hear of the end before they can complain.
        suspects: whom a member complains of, by member.
    """
    reason = say.ParkReason.FORMATION_FAILED
    for member in room.members:
        complains = member in suspects and member not in late
        room.park(
            member,
            reason if complains else say.ParkReason.DROPPED,
            at=room.m.members[member].state,
            suspects=suspects.get(member, ()),
            reached=(reached or {}).get(member, ()),
        )
    room.tick(0.4)


def test_server_most_complain_of_is_cut_off_if_copies_exist() -> None:
    room = begin(copies=2)
    for _ in range(3):
        fails(room, w0=("s1",), w2=("s1", "s2"))
    assert room.members == ("w0", "w1", "w2")
    assert room.servers == ("s0", "s2")
    refused = room.last("s1", say.Refused)
    assert not refused.retry
    assert "most workers could not reach parameter server pod-s1" in refused.reason
    assert room.number == 4


def test_of_several_the_one_with_most_complaints_is_cut_off() -> None:
    """Let workers complain of the neighbour, or of both, where a server does not reach its neighbour."""
    room = begin(copies=2)
    fails(room, w0=("s0",), w1=("s0",), w2=("s0",))
    for _ in range(2):
        fails(room, w0=("s1",), w1=("s1",))
    assert room.servers == ("s0", "s2")


def test_its_successor_is_taken_in() -> None:
    room = begin(copies=2)
    for _ in range(3):
        fails(room, w0=("s1",), w1=("s1",))
    room.form()
    room.serve("s1x", attempt=1, pod="s1x")
    everybody(room, "s0", "s1x", "s2")
    assert room.told("w0", say.Boundary)


def test_one_of_two_unreached_servers_with_two_copies_stays() -> None:
    room = begin(copies=2)
    for _ in range(3):
        fails(room, w0=("s1", "s2"), w1=("s1", "s2"))
    gone = {"s1", "s2"} - set(room.servers)
    assert len(gone) == 1
    left = ({"s1", "s2"} - gone).pop()
    for _ in range(6):
        fails(room, w0=(left,), w1=(left,))
    assert left in room.servers
    assert room.members == ("w0", "w1", "w2")


def test_without_copies_it_stays_and_so_do_the_workers() -> None:
    room = begin(copies=1)
    for _ in range(9):
        fails(room, w0=("s1",), w1=("s1",), w2=("s1",))
    assert room.members == ("w0", "w1", "w2")
    assert room.servers == ("s0", "s1", "s2")


def test_a_server_of_which_few_complain_is_not_cut_off() -> None:
    room = begin(copies=2)
    for _ in range(3):
        fails(room, w0=("s1",), w1=("s2",))
    assert room.servers == ("s0", "s1", "s2")


def test_silence_of_others_cuts_nobody_off() -> None:
    room = begin(copies=1)
    for _ in range(9):
        fails(room, w0=("s1",))
    assert room.members == ("w0", "w1", "w2")


def test_a_joiner_that_has_not_found_out_contradicts_nobody() -> None:
    """The one worker that holds the state does not reach a server; another joins for the third try."""
    room = begin(copies=1, workers=1)
    fails(room, w0=("s1",))
    fails(room, w0=("s1",))
    room.hello("w1")
    room.park("w1")
    for _ in range(4):
        fails(room, w0=("s1",), reached={"w1": ("s0", "s2")})
    assert "w0" in room.members


def test_member_is_cut_off_if_as_many_others_reach_the_server() -> None:
    room = begin(copies=2)
    for _ in range(2):
        fails(room, w0=("s1",))
    fails(room, w0=("s1",), reached={"w1": ("s0", "s1", "s2")})
    assert room.members == ("w1", "w2")
    assert "complained" in room.last("w0", say.Refused).reason


def test_who_reached_a_server_an_earlier_time_is_no_witness() -> None:
    room = begin(copies=2)
    fails(room, w0=("s1",), reached={"w1": ("s1",), "w2": ("s1",)})
    fails(room, w0=("s1",))
    fails(room, w0=("s1",))
    assert room.members == ("w0", "w1", "w2")


def test_complaint_of_a_member_dropped_before_it_counts() -> None:
    room = begin(copies=2)
    for _ in range(3):
        fails(room, late=("w1", "w2"), w0=("s1",), w1=("s1",), w2=("s1",))
    assert room.members == ("w0", "w1", "w2")
    assert room.servers == ("s0", "s2")


def test_losing_a_member_that_complains_of_a_server_says_nothing() -> None:
    """A member that does not reach a server shuts its group, and the others complain of that."""
    room = begin(copies=1)
    for _ in range(9):
        fails(room, w0=("s1",), w1=("w0",), w2=("w0",))
    assert room.members == ("w0", "w1", "w2")

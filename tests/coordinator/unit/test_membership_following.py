"""A process that is about to join: which members are told to send it the state, and when nobody is."""

from __future__ import annotations

import dataclasses

import pytest
from coordinator_room import Room, info

from springtide_coordinator import wire
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.following import MAX_FEEDS, MAX_FOLLOWERS
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import MalformedError
from springtide_protocol.limits import FOLLOW_SECRET_BYTES
from springtide_protocol.versions import OWN, PEERS, Speaks

SECRET = bytes(range(FOLLOW_SECRET_BYTES))
OF_THE_LAST_RELEASE = Speaks(1, 2, frozenset({"heartbeat", PEERS}))


def come(room: Room, member: str, address: str = "10.0.0.9") -> int:
    """Have a process come and follow; return how many members were told to send it the state."""
    room.hello(member, as_info=dataclasses.replace(info(member), address=address))
    room.tell(member, say.Follow(4000, SECRET))
    return room.last(member, say.Feeding).count


def trained(count: int = 3, **options: int) -> Room:
    room = Room(target=count, maximum=32, **options)
    room.train(*(f"w{number}" for number in range(count)))
    return room


@pytest.mark.parametrize(
    ("address", "endpoint"), [("10.0.0.9", "10.0.0.9:4000"), ("fd00::9", "[fd00::9]:4000")]
)
def test_each_member_is_told_of_its_share(address: str, endpoint: str) -> None:
    room = trained()
    assert come(room, "w9", address) == 3
    feeds = [room.last(member, say.Feed) for member in room.members]
    assert [feed.index for feed in feeds] == [0, 1, 2]
    assert {(feed.follower, feed.address, feed.secret, feed.count) for feed in feeds} == {
        ("w9", endpoint, SECRET, 3)
    }
    assert all(room.told(member, say.Boundary) == 0 for member in room.members), "it is not ready yet"
    room.park("w9")
    assert room.told("w0", say.Boundary) == 1


def test_at_most_eight_members_send() -> None:
    room = trained(MAX_FEEDS + 3)
    assert come(room, "w90") == MAX_FEEDS
    assert sum(room.told(member, say.Feed) for member in room.members) == MAX_FEEDS


def test_members_that_leave_or_do_not_understand_send_nothing() -> None:
    room = Room(target=3)
    room.hello("w0")
    room.hello("w1", speaks=OF_THE_LAST_RELEASE)
    room.hello("w2")
    for member in ("w0", "w1", "w2"):
        room.park(member)
    room.form()
    room.tell("w2", say.Leaving("SIGTERM"))
    assert come(room, "w9") == 1
    assert [room.told(member, say.Feed) for member in ("w0", "w1", "w2")] == [1, 0, 0]


def test_nobody_sends_while_a_generation_forms_or_ends() -> None:
    room = Room(target=2)
    for member in ("w0", "w1"):
        room.hello(member)
    for member in ("w0", "w1"):
        room.park(member)
    assert come(room, "w9") == 0
    base = room.form()
    room.park("w0", say.ParkReason.REDUCTION_FAILED, at=base)
    room.tick(1)
    assert come(room, "w8") == 0
    assert all(room.told(member, say.Feed) == 0 for member in ("w0", "w1"))


def test_first_processes_of_a_job_follow_nobody() -> None:
    room = Room(target=2)
    assert come(room, "w0") == 0


def test_more_than_two_do_not_follow_at_once() -> None:
    room = trained()
    assert [come(room, f"w{number}") for number in (7, 8, 9)] == [3] * MAX_FOLLOWERS + [0]
    room.lose("w7")
    assert come(room, "w6") == 3


def test_one_that_goes_to_stand_by_does_not_follow() -> None:
    room = Room(target=3, standby=1)
    room.train("w0", "w1", "w2")
    assert come(room, "w3") == 0
    room.tell("w2", say.Leaving("SIGTERM"))
    assert come(room, "w4") == 2, "a seat is free"


def test_pods_of_several_processes_do_not_follow() -> None:
    room = Room(target=2, processes_per_pod=2)
    room.train("w0", "w1")
    assert come(room, "w9") == 0


def test_members_and_parked_processes_do_not_follow() -> None:
    room = trained()
    room.tell("w1", say.Follow(4000, SECRET))
    assert room.last("w1", say.Feeding).count == 0
    room.hello("w9", as_info=dataclasses.replace(info("w9"), address="10.0.0.9"))
    room.park("w9")
    room.tell("w9", say.Follow(4000, SECRET))
    assert room.last("w9", say.Feeding).count == 0


@pytest.mark.parametrize(("port", "secret"), [(0, SECRET), (65_536, SECRET), (4000, b""), (4000, b"short")])
def test_follow_without_a_port_or_a_secret_is_refused(port: int, secret: bytes) -> None:
    message = pb.WorkerMessage(follow=pb.Follow(port=port, secret=secret))
    with pytest.raises(MalformedError, match="a port from 1 to 65535 and 32 bytes are wanted"):
        wire.to_incoming(message)


def test_messages_of_following_are_converted() -> None:
    message = pb.WorkerMessage(follow=pb.Follow(port=4000, secret=SECRET))
    assert wire.to_incoming(message) == say.Follow(4000, SECRET)
    feed = wire.from_outgoing(say.Feed("w9", "10.0.0.9:4000", SECRET, 1, 3), None).feed
    assert (feed.follower, feed.address, feed.secret) == ("w9", "10.0.0.9:4000", SECRET)
    assert (feed.index, feed.count) == (1, 3)
    assert wire.from_outgoing(say.Feeding(3), None).feeding.count == 3
    assert OWN.capabilities >= {"follow"}

"""A generation and its parameter servers: when it may begin, what ends it, and what a loss costs."""

from __future__ import annotations

import pytest
from coordinator_room import Room, generation, info, server, state
from coordinator_servers import dropped, everybody, trains
from membership_rules import take_out, without

from springtide_coordinator.membership import Phase
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.failure import MACHINE_SILENT
from springtide_coordinator.membership.servers import settled
from springtide_protocol.versions import Speaks

# ---- the beginning


def test_a_first_generation_waits_for_its_servers_and_names_them() -> None:
    room = Room(servers=2)
    room.sync("w0", "w1", serving=("s0", "s1"))
    room.serve("s0")
    for worker in ("w0", "w1"):
        room.hello(worker)
        room.park(worker)
    assert room.number == 0
    assert room.phase is Phase.WAITING
    assert room.status.reason == "WaitingForServers"
    assert room.status.message == "1 of 2 parameter servers are connected"
    assert room.status.waiting_for == ("pod-s1",)
    room.serve("s1")
    assert room.servers == ("s0", "s1")
    start = room.last("w0", say.Start)
    assert [one.address for one in start.servers] == ["127.0.0.1:7080", "127.0.0.1:7080"]
    assert start.fresh


def test_a_server_that_no_pod_is_known_of_is_named_by_its_slot() -> None:
    room = Room(servers=1, target=1)
    room.hello("w0")
    room.park("w0")
    assert room.status.waiting_for == ("parameter server 0",)


def test_without_servers_wanted_none_is_in_a_generation() -> None:
    room = Room()
    room.serve("s0")
    room.train("w0", "w1")
    assert room.servers == ()


def test_of_two_processes_of_a_slot_the_newest_serves() -> None:
    room = Room(servers=1, target=1)
    room.serve("s0b", attempt=1, pod="s0b")
    room.serve("s0")  # the older pod's process connects last
    room.train("w0")
    assert room.servers == ("s0b",)


def test_one_that_stays_serves_before_one_that_leaves() -> None:
    room = Room(servers=1, target=1)
    room.serve("s0")
    room.serve("s0b", attempt=1, pod="s0b", leaving=True)
    room.train("w0")
    assert room.servers == ("s0",)


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        (say.ServerHello(say.ServerInfo("")), "random id"),
        (say.ServerHello(say.ServerInfo("s0")), "address"),
        (say.ServerHello(server("s0"), Speaks(7, 7)), "protocol version 7"),
    ],
)
def test_a_server_that_cannot_be_right_is_refused_for_good(hello: say.ServerHello, text: str) -> None:
    from springtide_coordinator.membership import ServerConnected

    room = Room(servers=1)
    room.feed(ServerConnected(99, hello))
    refused = room.last(hello.server.id, say.Refused)
    assert text in refused.reason
    assert not refused.retry
    assert not room.m.servers


# ---- losses


def test_a_lost_server_ends_the_generation_at_once() -> None:
    room = trains()
    room.lose("s1")
    assert not room.told("w0", say.Prepare)
    room.tick(0.6)
    assert room.last("w0", say.Prepare).reason == "parameter server pod-s1 is lost: its stream broke"
    dropped(room)
    assert room.number == 1
    assert room.status.reason == "WaitingForServers"
    assert room.status.waiting_for == ("pod-s1",)
    room.serve("s1x", pod="s1")  # the container came back with an empty memory
    assert room.servers == ("s0", "s1x")
    start = room.last("w0", say.Start)
    assert not start.fresh
    assert start.reason == "parameter server pod-s1 is lost: its stream broke"


def test_briefly_broken_stream_moves_nothing_with_copies() -> None:
    room = trains(servers=3)
    assert room.m.current is not None
    for member in room.members:
        room.tell(member, say.Formed(room.m.current.name, server_copies=2))
    room.lose("s1")
    everybody(room, "s0", "s1", "s2")
    assert not room.told("w0", say.Boundary)
    room.serve("s1")
    room.tick(5)
    assert not room.told("w0", say.Boundary)
    assert room.number == 1


@pytest.mark.parametrize("waits_in_vain", [False, True])
def test_lost_server_with_copies_elsewhere_is_not_awaited(
    waits_in_vain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if waits_in_vain:
        take_out(monkeypatch, "copies_suffice")
    room = trains(servers=3)
    assert room.m.current is not None
    for member in room.members:
        room.tell(member, say.Formed(room.m.current.name, server_copies=2))
    room.lose("s1")
    room.tick(0.6)
    dropped(room)
    if waits_in_vain:  # the rule is what does it
        assert room.number == 1
        return
    assert room.servers == ("s0", "s2")
    room.form()
    # It is taken in again when it comes, and until the copies are made no other loss is borne.
    room.serve("s1x", pod="s1")
    everybody(room, "s0", "s1x", "s2")
    assert room.told("w0", say.Boundary)
    room.lose("s2")
    room.tick(0.6)
    dropped(room)
    assert room.number == 2
    assert room.status.reason == "WaitingForServers"


@pytest.mark.parametrize(("copies", "same"), [(2, True), (1, True), (2, False)])
def test_a_worker_may_see_a_death_before_the_coordinator_does(copies: int, same: bool) -> None:
    """A generation begins with the dead server and cannot form: with copies nobody waits for it either."""
    room = trains(servers=3)
    assert room.m.current is not None
    for member in room.members:
        room.tell(member, say.Formed(room.m.current.name, server_copies=copies))
    if not same:
        room.serve("s1x", attempt=1, pod="s1x")
    for member in room.members:
        room.park(member, say.ParkReason.REDUCTION_FAILED, room.m.members[member].state, ("s2",))
    assert (room.number, room.servers) == (2, ("s0", "s1" if same else "s1x", "s2"))
    room.lose("s2")
    for member in room.members:
        room.park(member, say.ParkReason.FORMATION_FAILED, room.m.members[member].state, ("s2",))
    room.tick(0.6)
    if copies == 2 and same:
        assert room.servers == ("s0", "s1")
        room.lose("s1")
        room.tick(0.6)
        dropped(room)
    # Nothing is known of copies where servers changed, or from those of the generation before that.
    assert room.status.reason == "WaitingForServers"


def test_a_stream_that_comes_back_within_the_grace_ends_nothing() -> None:
    room = trains()
    room.lose("s1")
    room.tick(0.3)
    room.serve("s1")
    room.tick(5)
    assert not room.told("w0", say.Prepare)
    assert room.servers == ("s0", "s1")


def test_servers_have_time_to_return_after_a_standstill() -> None:
    room = trains()
    room.lose("s1")
    room.stand_still(3.0)
    room.tick(3.0)
    room.serve("s1")
    room.tick(5)
    assert not room.told("w0", say.Prepare)


def test_a_server_that_was_lost_and_lives_serves_again() -> None:
    room = trains()
    room.lose("s1")
    room.tick(1)
    room.serve("s1")
    dropped(room)
    assert room.number == 2
    assert room.servers == ("s0", "s1")


def test_a_new_process_in_the_same_pod_proves_the_old_one_dead() -> None:
    room = trains()
    room.serve("s1x", pod="s1")  # before the old stream is seen to be broken
    assert "another process took its place" in room.last("w0", say.Prepare).reason
    assert room.last("s1", say.Refused).retry is False
    dropped(room)
    assert room.servers == ("s0", "s1x")


def test_pod_gone_by_operators_word_is_lost_without_grace() -> None:
    room = trains()
    room.lose("s1")
    everybody(room, "s0")
    assert "its pod is gone" in room.last("w0", say.Prepare).reason


def test_a_failed_push_with_a_broken_stream_needs_no_grace() -> None:
    room = trains()
    room.lose("s1")
    room.park("w0", say.ParkReason.REDUCTION_FAILED, at=room.m.members["w0"].state, suspects=("s1",))
    assert "a worker could not reach it" in room.last("w1", say.Prepare).reason


def test_a_silent_loss_waits_where_the_operator_is_not_heard() -> None:
    room = trains()
    room.tick(16)
    room.lose("s1")
    room.tick(2)
    assert not room.told("w0", say.Prepare)
    assert room.status.reason == "OperatorUnreachable"
    assert room.status.waiting_for == ("pod-s1",)
    everybody(room)
    assert room.told("w0", say.Prepare) == 1


def test_slot_of_one_that_may_return_goes_to_no_other_process() -> None:
    """A server alone holds its share: an older process of the slot must not be taken for it."""
    room = trains(servers=1)
    room.serve("s0b", attempt=1, pod="s0b")
    room.lose("s0")
    for worker in ("w0", "w1"):
        room.park(worker, say.ParkReason.BOUNDARY, at=room.m.members[worker].state)
    assert room.status.reason == "WaitingForServers"
    assert room.status.waiting_for == ("pod-s0",)
    room.tick(9)
    assert room.servers == ("s0",)
    room.tick(1)
    assert room.servers == ("s0b",)


def test_server_lost_after_the_last_loop_disturbs_nobody() -> None:
    room = trains()
    assert room.m.current is not None
    name, at = room.m.current.name, room.m.members["w0"].state
    assert at is not None
    for worker in ("w0", "w1"):
        room.tell(worker, say.Ended(name, at, 0))
    room.lose("s1")
    room.tick(5)
    assert room.told("w0", say.EndOk) == 1
    assert not room.told("w0", say.Prepare)


# ---- other sets of servers, at a boundary


def test_a_larger_number_is_waited_for_before_anybody_stops() -> None:
    room = trains()
    everybody(room, "s0", "s1", "s2", servers=3)
    assert not room.told("w0", say.Boundary)
    room.serve("s2")
    assert room.last("w0", say.Boundary).reason == "parameter server pod-s2 joins"
    boundary(room)
    assert room.servers == ("s0", "s1", "s2")
    assert room.last("w0", say.Start).leaving_servers == ()


def test_smaller_number_asks_the_leaver_for_what_it_holds() -> None:
    room = trains(servers=3)
    everybody(room, servers=2)
    assert room.last("w0", say.Boundary).reason == "parameter server pod-s2 leaves"
    boundary(room, form=False)
    start = room.last("w0", say.Start)
    assert [one.id for one in start.servers] == ["s0", "s1"]
    assert [one.id for one in start.leaving_servers] == ["s2"]
    room.leaving["s2"] = room.now + 30
    everybody(room, "s0", "s1", "s2")
    assert not room.told("s2", say.ServerLeave)  # the generation has not formed: it may still be asked
    room.form()
    assert room.told("s2", say.ServerLeave) == 1


def test_leaving_server_is_let_go_after_a_takeover() -> None:
    room = trains()
    room.tell("s1", say.ServerLeaving("SIGTERM"))
    assert not room.told("w0", say.Boundary)
    room.serve("s1b", attempt=1, pod="s1b")
    assert (
        room.last("w0", say.Boundary).reason
        == "parameter server pod-s1 leaves; parameter server pod-s1b joins"
    )
    boundary(room)
    assert room.servers == ("s0", "s1b")
    assert room.last("s1", say.ServerLeave).reason == "SIGTERM"
    room.lose("s1")
    room.tick(5)
    assert not room.told("w0", say.Prepare)


def test_dead_successor_makes_the_leaving_server_asked_again() -> None:
    room = trains()
    room.tell("s1", say.ServerLeaving("SIGTERM"))
    room.serve("s1b", attempt=1, pod="s1b")
    boundary(room, form=False)
    room.lose("s1b")
    room.tick(1)
    dropped(room)
    assert room.servers == ("s0", "s1")  # it still holds the state: the generation without it never formed


def test_a_leaver_that_nobody_needs_goes_at_once() -> None:
    room = Room(servers=1)
    room.serve("s0")
    room.tell("s0", say.ServerLeaving("SIGTERM"))
    assert room.told("s0", say.ServerLeave) == 1


def test_server_leaves_when_job_is_over_or_all_workers_gone() -> None:
    room = trains(workers=1)
    room.tell("s1", say.ServerLeaving("SIGTERM"))
    assert not room.told("s1", say.ServerLeave)
    room.tell("w0", say.Bye("Failed"))
    room.lose("w0")
    assert room.told("s1", say.ServerLeave) == 1


def boundary(room: Room, form: bool = True) -> None:
    for worker in room.members:
        room.park(worker, say.ParkReason.BOUNDARY, at=room.m.members[worker].state)
    if form:
        room.form()


# ---- another coordinator


def test_new_coordinator_adopts_generation_with_its_servers() -> None:
    room = Room(servers=2, incarnation=(2, 0))
    servers = (server("s0"), server("s1"))
    for worker in ("w0", "w1"):
        room.hello(
            worker,
            say.Standing.ACTIVE,
            generation=generation(4),
            members=(info("w0"), info("w1")),
            state=state(9, 4),
            servers=servers,
        )
    assert room.servers == ("s0", "s1")
    assert room.status.reason == "Reconnecting"
    assert room.status.waiting_for == ("pod-s0", "pod-s1")
    room.serve("s0", "s1")
    everybody(room)
    room.tick(5)
    assert room.status.reason == "Running"
    assert not room.told("w0", say.Prepare)
    assert not room.told("w0", say.Boundary)
    room.lose("s0")
    room.tick(1)
    assert "parameter server pod-s0 is lost" in room.last("w0", say.Prepare).reason


def test_new_coordinator_lets_no_server_go_before_workers_report() -> None:
    """A drain takes the coordinator and a server at once: the server is back before the workers."""
    room = Room(servers=1, target=1, incarnation=(2, 0))
    room.serve("s0", leaving=True)
    room.sync("w0", serving=("s0",))
    room.tick(1)
    assert not room.told("s0", say.ServerLeave)
    room.hello(
        "w0",
        say.Standing.ACTIVE,
        generation=generation(4),
        members=(info("w0"),),
        state=state(9, 4),
        servers=(server("s0"),),
    )
    room.tick(1)
    assert room.servers == ("s0",)
    assert not room.told("s0", say.ServerLeave)


def test_new_coordinator_keeps_a_server_of_a_later_generation() -> None:
    """The first worker to report was cut off a generation ago: that one had other servers."""
    room = Room(servers=1, incarnation=(2, 0))
    room.serve("s0b", attempt=1, pod="s0b", leaving=True)
    room.sync("w0", "w1", serving=("s0b",))
    both = (info("w0"), info("w1"))
    room.hello(
        "w0",
        say.Standing.PARKED,
        generation=generation(3),
        members=both,
        state=state(5, 3),
        servers=(server("s0"),),
    )
    room.tick(1)
    assert not room.told("s0b", say.ServerLeave)
    room.hello(
        "w1",
        say.Standing.ACTIVE,
        generation=generation(4),
        members=(info("w1"),),
        state=state(9, 4),
        servers=(server("s0b", attempt=1, pod="s0b"),),
    )
    room.tick(1)
    assert room.servers == ("s0b",)
    assert not room.told("s0b", say.ServerLeave)


def test_server_stays_while_its_workers_are_out_of_sight() -> None:
    room = trains(servers=1, workers=1)
    room.leaving["s0"] = room.now + 60
    everybody(room, "s0")
    room.lose("w0")
    room.tick(3)
    everybody(room, "s0")
    assert room.status.reason != "Running"
    assert not room.told("s0", say.ServerLeave), "w0 may come back, and needs the parameters"
    room.sync(serving=("s0",))
    assert room.told("s0", say.ServerLeave) == 1, "its pod is gone: nobody comes back"


def test_new_coordinator_lets_a_server_without_workers_go() -> None:
    room = Room(servers=1, target=1, incarnation=(2, 0))
    room.serve("s0", leaving=True)
    assert not room.told("s0", say.ServerLeave)
    room.sync(serving=("s0",))
    assert room.told("s0", say.ServerLeave) == 1


def test_a_new_coordinator_learns_what_is_still_being_copied() -> None:
    room = Room(servers=2, incarnation=(2, 0))
    room.serve("s0", "s1")
    for worker in ("w0", "w1"):
        room.hello(
            worker,
            say.Standing.ACTIVE,
            generation=generation(4),
            members=(info("w0"), info("w1")),
            state=state(9, 4),
            servers=(server("s0"), server("s1")),
        )
    everybody(room, "s0", "s1")
    assert not settled(room.m)
    room.tell("w0", say.Formed(generation(4), (), False, 2))
    assert not settled(room.m)
    room.tell("w1", say.Formed(generation(4), (), False, 2))
    assert settled(room.m)
    assert room.m.members["w1"].state == state(9, 4)
    room.tell("w1", say.Formed(generation(4), (), True, 1))
    assert not settled(room.m)


@pytest.mark.parametrize("keeps_applied_batches", [False, True])
def test_older_state_loses_nothing_if_servers_know_the_training(keeps_applied_batches: bool) -> None:
    room = trains()
    for record in room.m.members.values():
        record.keeps_applied_batches = keeps_applied_batches
    room.lose("w1")
    room.sync("w0", serving=("s0", "s1"))
    room.m.current.base = state(5)  # type: ignore[union-attr]
    room.park("w0", say.ParkReason.DROPPED, at=state(3))
    assert room.number == 2
    assert room.m.states_lost == (0 if keeps_applied_batches else 1)
    assert ("StateLost" in room.last("w0", say.Start).reason) is not keeps_applied_batches


def test_adopted_server_whose_pod_has_a_new_process_is_lost() -> None:
    room = Room(servers=1, target=1, incarnation=(2, 0))
    room.hello(
        "w0",
        say.Standing.ACTIVE,
        generation=generation(4),
        members=(info("w0"),),
        state=state(9, 4),
        servers=(server("s0"),),
    )
    room.serve("s0x", pod="s0")
    assert "another process took its place" in room.last("w0", say.Prepare).reason
    room.sync("w0", serving=("s0",))
    room.park("w0", say.ParkReason.DROPPED, at=state(9, 4))
    assert room.servers == ("s0x",)


@pytest.mark.parametrize("copies", [1, 2])
def test_adopted_server_on_a_silent_machine_is_lost(copies: int) -> None:
    room = Room(servers=2, target=1, incarnation=(2, 0))
    room.hello(
        "w0",
        say.Standing.ACTIVE,
        generation=generation(4),
        members=(info("w0"),),
        state=state(9, 4),
        servers=(server("s0"), server("s1")),
    )
    room.tell("w0", say.Formed(generation(4), (), False, copies))
    room.serve("s0")
    room.sync("w0", serving=("s0", "s1"), unheard=("s1",))
    assert not room.told("w0", say.Prepare)
    room.tick(room.m.settings.return_after_standstill)
    assert room.last("w0", say.Prepare).reason == f"parameter server pod-s1 is lost: {MACHINE_SILENT}"
    room.park("w0", say.ParkReason.DROPPED, at=state(9, 4))
    if copies == 2:
        assert room.servers == ("s0",)
        return
    room.serve("s1b", attempt=1, pod="s1b")
    room.tick(60)  # it alone may hold a part of the state: nobody takes its slot before it is proven dead
    assert room.number == 4
    assert room.status.waiting_for == ("pod-s1",)


def test_outdated_coordinator_sends_its_servers_away() -> None:
    room = trains()
    room.serve("s1", newest_incarnation=generation(1, 2).incarnation)
    assert room.last("s0", say.Refused).retry
    assert room.last("w0", say.Refused).retry
    assert room.last("s1", say.Refused).retry


# ---- complaints


def test_worker_alone_not_reaching_a_server_is_cut_off_at_last() -> None:
    room = trains(workers=3)
    for _ in range(3):
        room.park("w2", say.ParkReason.REDUCTION_FAILED, at=room.m.members["w2"].state, suspects=("s0",))
        room.tick(0.4)
        dropped(room, "w0", "w1", reached=("s0", "s1"))
        if "w2" in room.members:
            room.form()
    assert room.members == ("w0", "w1")
    assert "complained" in room.last("w2", say.Refused).reason


def test_a_server_that_nobody_reaches_costs_no_worker() -> None:
    room = trains()
    for _ in range(5):
        for worker in ("w0", "w1"):
            room.park(
                worker, say.ParkReason.REDUCTION_FAILED, at=room.m.members[worker].state, suspects=("s0",)
            )
        room.tick(0.4)
        room.form()
    assert room.members == ("w0", "w1")
    assert room.servers == ("s0", "s1")


def test_rules_that_are_taken_out_hold_no_more() -> None:
    with without("all_servers"):
        room = Room(servers=2)
        room.serve("s0")
        room.train("w0", "w1")
        assert room.servers == ("s0",)
    with without("server_loss_ends"):
        room = trains()
        room.lose("s1")
        room.tick(5)
        assert not room.told("w0", say.Prepare)

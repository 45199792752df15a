"""Starts, joins, leaves, failures, complaints and ends, told step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_room import Room, generation, info, state

from springtide_coordinator.membership import Phase
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.messages import ParkReason, Standing
from springtide_protocol.versions import OWN, PEERS, Agreement, Speaks


def test_target_starts_at_once_by_rank_from_first_state() -> None:
    room = Room(target=3)
    room.train("w2", "w0", "w1")
    start = room.last("w1", say.Start)
    assert [member.id for member in start.members] == ["w0", "w1", "w2"]
    assert start.fresh
    assert start.state == state(0)
    assert start.transfers == (say.Transfer("w1", "w0"), say.Transfer("w2", "w0"))


@pytest.mark.parametrize("late", [True, False], ids=["after all parked", "before the others parked"])
def test_late_commit_makes_no_holder_of_a_drifted_member(late: bool) -> None:
    """A worker that has drifted parks without a state; its reporting thread tells of its last step later."""
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.tell("w0", say.Progressed(state(30)))
    room.park("w0", ParkReason.BOUNDARY)
    if not late:
        room.tell("w0", say.Progressed(state(32)))
    room.park("w1", ParkReason.BOUNDARY, state(32))
    room.decides = not late
    room.park("w2", ParkReason.BOUNDARY, state(32))
    if late:
        room.tell("w0", say.Progressed(state(32)))
        room.decides = True
        room.tick(0.05)
    start = room.last("w0", say.Start)
    assert start.state == state(32)
    assert start.transfers == (say.Transfer("w0", "w1"),)


def test_commit_of_an_older_generation_makes_no_holder() -> None:
    """One that is being sent the state holds none, whatever it tells of steps before."""
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.park("w0", ParkReason.BOUNDARY)
    for member in ("w1", "w2"):
        room.park(member, ParkReason.BOUNDARY, state(32))
    room.tell("w0", say.Progressed(state(32)))
    assert room.m.members["w0"].state is None
    room.form()
    assert room.m.members["w0"].state == state(32)
    room.tell("w0", say.Progressed(state(33, 2)))
    assert room.m.members["w0"].state == state(33, 2)


def test_local_ranks_of_a_slot_stand_together() -> None:
    room = Room(target=3)
    for member, slot, rank in (("c", 0, 1), ("b", 1, 0), ("a", 0, 0)):
        room.hello(member, as_info=say.MemberInfo(member, "pod" + str(slot), "", rank, "", slot))
    for member in "abc":
        room.park(member)
    assert room.members == ("a", "c", "b")


def test_below_target_it_waits_for_expected_members_by_name() -> None:
    room = Room(target=3)
    room.sync("w0", "w1")
    room.hello("w0")
    room.park("w0")
    assert room.status.reason == "WaitingForWorkers"
    assert room.status.waiting_for == ("pod-w1",)
    room.tick(9.9)
    assert room.number == 0
    room.tick(0.1)
    assert room.members == ("w0",)


def test_a_pending_pod_holds_nobody() -> None:
    room = Room(target=3)
    room.sync("w0", "w1", unstarted=("w2",))
    room.train("w0", "w1")
    assert room.members == ("w0", "w1")


def test_below_the_minimum_it_never_starts() -> None:
    room = Room(target=3, minimum=2)
    room.sync("w0")
    room.hello("w0")
    room.park("w0")
    room.tick(1000)
    assert room.number == 0


def test_joiner_asks_for_one_boundary_and_gets_holders_state() -> None:
    room = Room()
    room.train("w0", "w1")
    room.hello("w2")
    assert room.told("w0", say.Boundary) == 0  # not before its model is ready
    room.park("w2")
    room.tick(5)
    assert room.told("w0", say.Boundary) == room.told("w1", say.Boundary) == 1
    room.park("w0", ParkReason.BOUNDARY, state(7))
    assert room.number == 1
    assert room.status.waiting_for == ("pod-w1",)
    room.park("w1", ParkReason.BOUNDARY, state(7))
    start = room.last("w2", say.Start)
    assert (start.state, start.fresh) == (state(7), False)
    assert start.transfers == (say.Transfer("w2", "w0"),)
    assert room.members == ("w0", "w1", "w2")


def test_member_stopping_at_own_boundary_takes_others_along() -> None:
    room = Room()
    room.train("w0", "w1")
    room.park("w1", ParkReason.BOUNDARY, state(4))
    room.tick(5)
    assert (room.number, room.told("w0", say.Boundary), room.told("w1", say.Boundary)) == (1, 1, 0)
    assert room.last("w0", say.Boundary).reason == "pod-w1 has stopped at a step boundary"
    room.park("w0", ParkReason.BOUNDARY, state(6))
    assert room.number == 2
    assert room.last("w1", say.Start).state == state(6)


def test_receivers_are_spread_over_the_holders() -> None:
    room = Room()
    room.train("w0", "w1")
    for joiner in ("w2", "w3", "w4"):
        room.hello(joiner)
    for joiner in ("w2", "w3", "w4"):
        room.park(joiner)
    for member in ("w0", "w1"):
        room.park(member, ParkReason.BOUNDARY, state(3))
    holders = [transfer.holder for transfer in room.last("w0", say.Start).transfers]
    assert holders == ["w0", "w1", "w0"]


def test_a_joiner_waits_a_second_for_others_that_are_starting() -> None:
    room = Room()
    room.train("w0", "w1")
    room.hello("w2")
    room.hello("w3")
    room.park("w2")
    room.tick(0.9)
    assert room.told("w0", say.Boundary) == 0
    room.tick(0.1)
    assert room.told("w0", say.Boundary) == 1


def test_never_more_than_the_maximum() -> None:
    room = Room(maximum=2)
    room.train("w0", "w1")
    room.hello("w2")
    room.park("w2")
    room.tick(60)
    assert room.told("w0", say.Boundary) == 0
    assert room.members == ("w0", "w1")


def test_reconnected_member_is_asked_for_the_boundary_again() -> None:
    room = Room()
    room.train("w0", "w1")
    room.hello("w2")
    room.park("w2")
    room.lose("w1")
    room.hello("w1", Standing.ACTIVE, generation=generation(1), state=state(2))
    assert room.told("w1", say.Boundary) == 2
    assert room.number == 1


def test_a_reconnection_within_the_grace_changes_nothing() -> None:
    room = Room()
    room.train("w0", "w1")
    room.lose("w1")
    room.tick(0.4)
    room.hello("w1", Standing.ACTIVE, generation=generation(1), state=state(2))
    room.tick(5)
    assert (room.number, room.told("w0", say.Prepare)) == (1, 0)


def test_member_with_broken_stream_is_lost_after_the_grace() -> None:
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.lose("w2")
    room.tick(0.4)
    assert room.told("w0", say.Prepare) == 0
    room.tick(0.11)
    assert room.told("w0", say.Prepare) == room.told("w1", say.Prepare) == 1
    room.park("w0", ParkReason.DROPPED, state(4))
    room.park("w1", ParkReason.DROPPED, state(5))
    start = room.last("w0", say.Start)
    assert start.state == state(5)
    assert start.transfers == (say.Transfer("w0", "w1"),)
    assert "pod-w2 is lost" in start.reason


def test_a_coordinator_that_stood_still_gives_all_time_to_return() -> None:
    """Let streams break at the moment that the coordinator goes on, or shortly before it stood still."""
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.lose("w2")
    room.stand_still(3.0)
    room.lose("w0")
    room.lose("w1")
    room.tick(3.9)
    assert room.status.reason == "Reconnecting"
    for member in ("w0", "w1", "w2"):
        room.hello(member, Standing.ACTIVE, generation=generation(1), state=state(2))
    room.tick(5)
    assert (room.number, room.told("w0", say.Prepare)) == (1, 0)
    # Who does not return is lost all the same, and what breaks later has the usual grace.
    room.lose("w2")
    room.tick(0.6)
    assert room.told("w0", say.Prepare) == 1


def test_who_does_not_return_after_a_standstill_is_lost() -> None:
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.lose("w2")
    room.stand_still(3.0)
    room.tick(3.9)
    assert room.told("w0", say.Prepare) == 0
    room.tick(0.11)
    assert room.told("w0", say.Prepare) == room.told("w1", say.Prepare) == 1


def test_who_was_lost_before_the_standstill_stays_lost() -> None:
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.lose("w2")
    room.now += 0.6
    room.stand_still(3.0)
    assert room.told("w0", say.Prepare) == 1


def test_a_failed_reduction_ends_the_grace() -> None:
    room = Room()
    room.train("w0", "w1")
    room.lose("w1")
    room.park("w0", ParkReason.REDUCTION_FAILED, state(4))
    assert room.members == ("w0",)


def test_the_operators_word_ends_the_grace() -> None:
    room = Room()
    room.sync("w0", "w1")
    room.train("w0", "w1")
    room.lose("w1")
    room.sync("w0")
    assert room.told("w0", say.Prepare) == 1


def test_another_process_in_the_same_place_ends_the_grace() -> None:
    room = Room()
    room.train("w0", "w1")
    room.lose("w1")
    room.hello("again", as_info=replace(info("w1"), id="again"))
    assert room.told("w0", say.Prepare) == 1


def test_members_with_live_streams_go_on_after_a_complaint() -> None:
    room = Room()
    room.train("w0", "w1")
    room.park("w0", ParkReason.REDUCTION_FAILED, state(4))
    assert room.told("w1", say.Prepare) == 0
    room.tick(0.31)
    assert room.told("w1", say.Prepare) == 1
    room.park("w1", ParkReason.DROPPED, state(4))
    assert (room.number, room.members) == (2, ("w0", "w1"))


def test_third_complaint_in_a_row_cuts_off_the_most_accused() -> None:
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    for _ in range(3):
        room.park("w0", ParkReason.FORMATION_FAILED, state(0), suspects=("w1",))
        room.park("w2", ParkReason.FORMATION_FAILED, state(0), suspects=("w1",))
        room.tick(0.31)
        room.park("w1", ParkReason.FORMATION_FAILED, state(0), suspects=("w0",))
    refused = room.last("w1", say.Refused)
    assert not refused.retry
    assert "complained of 6 times" in refused.reason
    assert room.members == ("w0", "w2")


@pytest.mark.parametrize(
    ("detail", "advice"),
    [
        ("RuntimeError: [/gloo/pair.cc] Connection closed by peer", "Check that pods can reach each other"),
        ("TimeoutError: timed out", "Check that pods can reach each other"),
        ("", "Check that pods can reach each other"),
        ("ValueError: the checksum of piece 3 is wrong", "That is what to mend"),
    ],
)
def test_advice_is_about_the_network_if_complaints_are(detail: str, advice: str) -> None:
    room = Room()
    room.train("w0", "w1")
    for _ in range(3):
        name = room.m.members["w0"].generation
        reason = ParkReason.FORMATION_FAILED
        room.tell("w0", say.Parked(reason, name, state(0), "layout", detail, ("w1",)))
        room.tick(0.31)
        room.park("w1", ParkReason.DROPPED, state(0))
    said = room.last("w1", say.Refused).reason
    assert advice in said
    assert ("network policy" in said) == advice.startswith("Check")


def test_complaints_without_a_name_cut_off_the_youngest() -> None:
    room = Room()
    room.train("w0", "w1")
    for _ in range(3):
        room.park("w0", ParkReason.REDUCTION_FAILED, state(0))
        room.tick(0.31)
        room.park("w1", ParkReason.DROPPED, state(0))
    assert room.members == ("w0",)


def test_a_healthy_generation_between_complaints_cuts_nobody_off() -> None:
    room = Room()
    room.train("w0", "w1")
    for _ in range(6):
        room.tick(31)
        room.park("w0", ParkReason.REDUCTION_FAILED, state(0))
        room.tick(0.31)
        room.park("w1", ParkReason.DROPPED, state(0))
    assert room.members == ("w0", "w1")


def test_a_member_that_does_not_park_is_cut_off_with_its_name() -> None:
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.lose("w2")
    room.tick(1)
    room.park("w0", ParkReason.DROPPED, state(4))
    assert room.status.waiting_for == ("pod-w1",)
    room.tick(31)
    assert room.last("w1", say.Refused).retry
    room.tick(1)
    assert room.members == ("w0",)


def test_below_the_minimum_survivors_wait_for_a_replacement() -> None:
    room = Room(minimum=2)
    room.train("w0", "w1")
    room.lose("w1")
    room.park("w0", ParkReason.REDUCTION_FAILED, state(4))
    assert room.status.reason == "BelowMinimum"
    room.hello("w2")
    room.park("w2")
    assert (room.members, room.last("w2", say.Start).state) == (("w0", "w2"), state(4))


def test_a_goodbye_is_a_loss_without_grace() -> None:
    room = Room()
    room.train("w0", "w1")
    room.tell("w1", say.Bye("Failed", "ValueError"))
    assert "it ended (Failed)" in room.last("w0", say.Prepare).reason


def test_another_layout_is_refused_with_both_hashes() -> None:
    room = Room()
    room.train("w0", "w1")
    room.hello("w2")
    room.park("w2", layout="other")
    refused = room.last("w2", say.Refused)
    assert not refused.retry
    assert "other" in refused.reason
    assert "layout" in refused.reason
    assert "check" in refused.reason
    room.hello("w2", Standing.PARKED, layout_hash="other")
    assert room.told("w2", say.Refused) == 2
    room.tick(5)
    assert room.told("w0", say.Boundary) == 0


def test_protocol_version_too_far_away_is_refused() -> None:
    room = Room()
    room.hello("w0", speaks=Speaks(7, 8))
    refused = room.last("w0", say.Refused)
    assert not refused.retry
    assert f"protocol versions 7 to 8, the coordinator {OWN}" in refused.reason
    assert "upgrade the coordinator" in refused.reason
    assert room.disconnected == ["w0"]


def test_workers_of_two_releases_train_together() -> None:
    room = Room()
    room.hello("w0", speaks=Speaks(1, 1))
    room.hello("w1", speaks=Speaks(2, 3, frozenset({"tides"})))
    assert room.last("w0", say.Welcome).agreement == Agreement(1)
    assert room.last("w1", say.Welcome).agreement == Agreement(2)
    room.park("w0")
    room.park("w1")
    room.form()
    assert room.phase is Phase.RUNNING
    assert [room.m.members[name].speaks.newest for name in ("w0", "w1")] == [1, 3]


OTHERS = Speaks(1, 2, frozenset({"heartbeat"}))
"""A release whose workers exchange otherwise with each other."""


def test_worker_that_cannot_train_with_the_others_is_refused() -> None:
    room = Room()
    room.train("w0", "w1")
    room.hello("w2", speaks=OTHERS)
    refused = room.last("w2", say.Refused)
    assert not refused.retry
    assert f"exchanges gradients and state as peers-1 or older, that of pod-w0 as {PEERS}" in refused.reason
    assert "give this pod the others' image" in refused.reason
    assert room.disconnected == ["w2"]
    room.hello("w3")
    assert room.told("w3", say.Refused) == 0


@pytest.mark.parametrize("mine", [OWN, OTHERS], ids=["older joiner", "newer joiner"])
def test_members_that_train_come_before_a_joiner_that_cannot(mine: Speaks) -> None:
    """A new coordinator hears first of a joiner of another release, and then of those that train."""
    room, theirs = Room(target=3, incarnation=(2, 0)), OTHERS if mine is OWN else OWN
    room.hello("w2", speaks=theirs)
    room.park("w2")
    for member in ("w0", "w1"):
        room.hello(member, say.Standing.ACTIVE, generation=generation(1), state=state(7), speaks=mine)
    assert room.told("w0", say.Refused) == room.told("w1", say.Refused) == 0
    assert "that of pod-w0 as" in room.last("w2", say.Refused).reason
    assert room.disconnected == ["w2"]
    room.hello("w3", speaks=mine)
    assert room.told("w3", say.Refused) == 0


def test_messages_of_an_older_generation_are_ignored() -> None:
    room = Room()
    room.train("w0", "w1")
    room.tell("w0", say.Parked(ParkReason.STANDBY))
    room.tell("w0", say.Ended(generation(7), state(9), 0))
    room.tick(5)
    assert (room.number, room.phase) == (1, Phase.RUNNING)
    assert room.told("w1", say.Prepare) == 0


def test_a_start_that_was_lost_with_the_stream_is_said_again() -> None:
    room = Room()
    for member in ("w0", "w1"):
        room.hello(member)
        room.park(member)
    room.lose("w1")
    room.hello("w1", Standing.PARKED, layout_hash="layout")
    assert room.told("w1", say.Start) == 2
    assert room.number == 1


def test_lone_process_unable_to_begin_is_refused_in_its_words() -> None:
    room = Room(target=1)
    room.hello("w0")
    room.park("w0")
    room.sync("w0")
    for _ in range(3):
        room.park("w0", ParkReason.FORMATION_FAILED)
        room.tick(0.31)
    refused = room.last("w0", say.Refused)
    assert not refused.retry
    assert refused.reason == "pod-w0 alone failed 3 times in a row to begin; pod-w0 says: it failed"


def test_a_process_alone_that_holds_the_state_is_never_cut_off() -> None:
    room = Room(target=1)
    room.train("w0")
    for _ in range(6):
        room.park("w0", ParkReason.FORMATION_FAILED, state(4))
        room.tick(0.31)
    assert room.disconnected == []
    assert room.members == ("w0",)


def test_member_cut_off_unnamed_hears_what_was_said() -> None:
    room = Room()
    room.train("w0", "w1")
    for _ in range(3):
        room.park("w0", ParkReason.REDUCTION_FAILED, state(0))
        room.tick(0.31)
        room.park("w1", ParkReason.DROPPED, state(0))
    assert "it is the youngest; pod-w0 says: it failed" in room.last("w1", say.Refused).reason


def test_lost_state_counts_once_however_often_successor_forms() -> None:
    room = Room()
    room.train("w0", "w1")
    room.sync("w0", "w1")
    for member in ("w0", "w1"):
        room.lose(member)
    room.sync("w2", "w3")
    for member in ("w2", "w3"):
        room.hello(member)
        room.park(member)
    assert (room.m.states_lost, room.members) == (1, ("w2", "w3"))
    for _ in range(2):
        for member in ("w2", "w3"):
            room.park(member, ParkReason.FORMATION_FAILED)
        room.tick(0.31)
    assert room.m.states_lost == 1
    for member in ("w2", "w3"):
        room.tell(member, say.Formed(room.m.members[member].generation))
    room.sync("w2", "w3")
    for member in ("w2", "w3"):
        room.lose(member)
    room.sync("w4")
    room.hello("w4")
    room.park("w4")
    assert room.m.states_lost == 2


def test_first_coordinator_loses_no_state_by_operators_word() -> None:
    for incarnation, lost in (((1, 0), 0), ((1, 1), 1), ((2, 0), 1)):
        room = Room(target=1, incarnation=incarnation)
        room.sync("w0", trained=True)
        room.hello("w0")
        room.park("w0")
        room.tick(60)
        assert room.members == ("w0",)
        assert room.m.states_lost == lost

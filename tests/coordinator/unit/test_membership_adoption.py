"""A later incarnation, two at once, a deaf one: what it takes over, and what it dares.

Where a test takes a rule, it shows both: what the rule does, and that without it something else happens.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_room import Room, generation, info, state
from membership_rules import take_out

from springtide_coordinator.membership import Synced
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.events import PodSeen
from springtide_coordinator.membership.failure import MACHINE_SILENT, VANISHED_SECONDS, vanished_pods
from springtide_coordinator.membership.messages import ParkReason, Standing
from springtide_protocol.names import Incarnation

TWO = (info("w0"), info("w1"))


def active(
    room: Room, member: str, step: int, members: tuple[say.MemberInfo, ...] = TWO, number: int = 7
) -> None:
    room.hello(
        member,
        Standing.ACTIVE,
        generation=generation(number),
        members=members,
        state=state(step, number),
        newest_incarnation=Incarnation(1, 0),
        layout_hash="layout",
    )


def test_a_restarted_coordinator_goes_on_with_what_it_finds() -> None:
    room = Room(incarnation=(1, 1))
    active(room, "w0", 30)
    active(room, "w1", 31)
    room.tick(60)
    assert room.m.current is not None
    assert room.m.current.name == generation(7)
    assert room.told("w0", say.Prepare) == room.told("w0", say.Start) == room.told("w0", say.Boundary) == 0


def test_adopted_generation_admits_joiners_under_new_incarnation() -> None:
    room = Room(incarnation=(1, 1))
    active(room, "w0", 30)
    active(room, "w1", 31)
    room.hello("w2")
    room.park("w2")
    assert room.told("w0", say.Boundary) == 1
    for member in ("w0", "w1"):
        room.park(member, ParkReason.BOUNDARY, state(32, 7))
    assert room.last("w2", say.Start).generation == generation(8, 1, 1)
    assert room.last("w2", say.Start).state == state(32, 7)


@pytest.mark.parametrize("on", [True, False])
def test_no_generation_before_everybody_named_has_reported(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on:
        take_out(monkeypatch, "wait_for_reports")
    room = Room(incarnation=(1, 1))
    active(room, "w0", 30)
    room.park("w0", ParkReason.REDUCTION_FAILED, state(30, 7))
    room.tick(30)
    if on:
        assert room.told("w0", say.Start) == 0
        assert "pod-w1" in room.status.waiting_for
        active(room, "w1", 31)
        assert room.last("w1", say.Prepare).generation == generation(7)
        room.park("w1", ParkReason.DROPPED, state(31, 7))
        assert room.last("w0", say.Start).state == state(31, 7)
    else:
        assert room.last("w0", say.Start).state == state(30, 7)  # one step back, though w1 lives


def test_the_operators_word_replaces_a_missing_report() -> None:
    room = Room(incarnation=(1, 1))
    active(room, "w0", 30)
    room.park("w0", ParkReason.REDUCTION_FAILED, state(30, 7))
    room.tick(30)
    room.sync("w0")
    assert room.members == ("w0",)


def test_started_silent_pod_may_hold_a_newer_generation() -> None:
    room = Room(incarnation=(1, 1))
    active(room, "w0", 30)
    room.park("w0", ParkReason.REDUCTION_FAILED, state(30, 7))
    room.sync("w0", "w5")
    assert room.told("w0", say.Start) == 0
    assert room.status.waiting_for == ("pod-w5",)
    active(room, "w5", 40, members=(info("w0"), info("w5")), number=8)
    room.tick(1)
    room.park("w5", ParkReason.DROPPED, state(40, 8))
    assert room.last("w0", say.Start).state == state(40, 8)


def successor(*members: str, unheard: tuple[str, ...] = ()) -> Room:
    """A second coordinator: these members of generation 7, and nobody of the others, have come to it."""
    room = Room(incarnation=(2, 0))
    for member in members:
        active(room, member, 30)
    room.sync("w0", "w1", unheard=unheard)
    return room


def test_member_whose_machine_nobody_hears_is_not_awaited() -> None:
    room = successor("w0", unheard=("w1",))
    assert room.told("w0", say.Prepare) == 0  # it may still be looking for this coordinator
    assert "pod-w1" in room.status.waiting_for
    room.tick(room.m.settings.return_after_standstill)
    assert room.last("w0", say.Prepare).reason.endswith(MACHINE_SILENT)
    room.park("w0", ParkReason.REDUCTION_FAILED, state(30, 7))
    start = room.last("w0", say.Start)
    assert (start.generation, start.state) == (generation(8, 2), state(30, 7))
    assert room.members == ("w0",)


def test_failed_reduction_halves_the_wait_for_silent_machines() -> None:
    room = successor("w0", unheard=("w1",))
    room.park("w0", ParkReason.REDUCTION_FAILED, state(30, 7))
    half = room.m.settings.return_after_standstill / 2
    room.tick(half - 0.1)
    assert room.told("w0", say.Start) == 0
    room.tick(0.1)
    assert room.members == ("w0",)


def test_member_that_the_operator_hears_is_awaited() -> None:
    room = successor("w0")
    room.park("w0", ParkReason.REDUCTION_FAILED, state(30, 7))
    room.tick(60)
    assert room.told("w0", say.Start) == 0
    room.sync("w0", "w1")
    assert "pod-w1" in room.status.waiting_for


def test_silent_machine_counts_only_while_the_operator_speaks() -> None:
    room = successor("w0", unheard=("w1",))
    room.park("w0", ParkReason.REDUCTION_FAILED, state(30, 7))
    room.now += room.m.patience + 1
    room.tick(0)
    assert room.told("w0", say.Start) == 0
    room.sync("w0", "w1", unheard=("w1",))
    assert room.told("w0", say.Start) == 1


def test_silent_machines_alone_begin_nothing_anew() -> None:
    room = Room(target=1, incarnation=(2, 0))
    room.sync("w1", "w2", trained=True, unheard=("w1",))
    room.hello("w2")
    room.park("w2")
    room.tick(120)
    room.sync("w1", "w2", trained=True, unheard=("w1",))
    assert room.told("w2", say.Start) == 0
    assert room.status.waiting_for == ("pod-w1",)


def test_member_back_from_a_silent_machine_joins_again() -> None:
    room = successor("w0", unheard=("w1",))
    room.tick(room.m.settings.return_after_standstill)
    room.park("w0", ParkReason.REDUCTION_FAILED, state(30, 7))
    room.form()
    # It went on beyond the broken network, in a generation of the coordinator that was there.
    active(room, "w1", 40, members=(info("w1"),), number=8)
    assert room.last("w1", say.Prepare).generation == generation(8)
    room.park("w1", ParkReason.DROPPED, state(40, 8))
    room.tick(2)
    room.park("w0", ParkReason.BOUNDARY, state(33, 8, 2))
    start = room.last("w1", say.Start)
    assert start.state == state(33, 8, 2)
    assert say.Transfer("w1", "w0") in start.transfers


def test_member_of_older_generation_is_parked_and_joins_again() -> None:
    room = Room(incarnation=(1, 1))
    active(room, "w0", 30)
    active(room, "w1", 31)
    active(room, "w9", 12, members=(info("w9"),), number=3)
    assert room.last("w9", say.Prepare).generation == generation(3)
    room.park("w9", ParkReason.DROPPED, state(12, 3))
    room.tick(2)
    for member in ("w0", "w1"):
        room.park(member, ParkReason.BOUNDARY, state(32, 7))
    assert say.Transfer("w9", "w0") in room.last("w9", say.Start).transfers


def test_the_end_said_by_the_last_incarnation_is_said_again() -> None:
    room = Room(incarnation=(1, 1))
    room.hello("w0", Standing.AFTER, generation=generation(7), members=TWO, state=state(9, 7), ended_stage=1)
    room.hello("w1", Standing.ENDED, generation=generation(7), members=TWO, state=state(9, 7))
    assert room.told("w1", say.EndOk) == 1


@pytest.mark.parametrize("on", [True, False])
def test_fresh_start_of_later_incarnation_needs_operators_word(
    on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on:
        take_out(monkeypatch, "fresh_needs_word", "wait_for_reports")
    room = Room(target=1, incarnation=(2, 0))
    room.hello("w0")
    room.park("w0")
    room.tick(30)
    assert room.told("w0", say.Start) == (0 if on else 1)
    if on:
        assert "the operator" in room.status.waiting_for
        room.sync("w0", "w1")
        assert room.status.waiting_for == ("pod-w1",)
        room.sync("w0")
        assert room.last("w0", say.Start).fresh


def test_all_holders_gone_restarts_the_job_saying_so() -> None:
    room = Room()
    room.sync("w0", "w1")
    room.train("w0", "w1")
    room.tell("w0", say.Progressed(state(5)))
    for member in ("w0", "w1"):
        room.lose(member)
    room.hello("w2")
    room.park("w2")
    room.tick(30)
    assert room.told("w2", say.Start) == 0
    assert set(room.status.waiting_for) == {"pod-w0", "pod-w1"}
    room.sync("w2", target=1)
    start = room.last("w2", say.Start)
    assert start.fresh
    assert start.generation == generation(2)
    assert "StateLost" in start.reason
    assert room.m.states_lost == 1


def test_coordinator_finding_nobody_trained_reports_lost_state() -> None:
    for trained in (True, False):
        room = Room(target=1, incarnation=(2, 0))
        room.sync("w3", trained=trained)
        room.hello("w3")
        room.park("w3")
        start = room.last("w3", say.Start)
        assert start.fresh
        assert ("StateLost" in start.reason) is trained
        assert room.m.states_lost == trained


def test_with_two_processes_in_a_pod_both_must_have_spoken() -> None:
    room = Room(target=1, incarnation=(2, 0))
    room.hello("w0")
    room.park("w0")
    room.feed(Synced(1, 1, 8, (PodSeen("w0", "pod-w0"),), processes_per_pod=2))
    assert room.told("w0", say.Start) == 0
    assert room.status.waiting_for == ("pod-w0",)
    room.hello("other", as_info=replace(info("w0"), id="other", local_rank=1))
    assert room.told("w0", say.Start) == 1


@pytest.mark.parametrize("on", [True, False])
def test_older_state_needs_proof_of_newer_holders_deaths(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on:
        take_out(monkeypatch, "guard_rollback")
    room = Room(target=1)
    room.train("w0")
    room.hello("w1", Standing.PARKED, generation=generation(1), state=state(0), layout_hash="layout")
    room.park("w0", ParkReason.BOUNDARY, state(5))
    room.form()
    room.lose("w1")
    room.tick(1)  # w1 is lost, w0 goes on alone
    room.park("w0", ParkReason.DROPPED, state(50, 2))
    room.form()
    room.hello("w1", Standing.PARKED, generation=generation(2), state=state(5), layout_hash="layout")
    room.lose("w0")  # stopped, perhaps: it may hold the steps after 50
    room.tick(5)
    if not on:
        assert room.last("w1", say.Start).generation == generation(4)
        return
    assert room.number == 3
    assert room.status.waiting_for == ("pod-w0",)
    room.sync("w1")
    assert "StateLost" in room.last("w1", say.Start).reason


@pytest.mark.parametrize("on", [True, False])
def test_a_silent_loss_without_the_operator_pauses(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on:
        take_out(monkeypatch, "pause_when_deaf")
    room = Room()
    room.train("w0", "w1")
    room.tick(20)
    room.lose("w1")
    room.tick(5)
    assert room.told("w0", say.Prepare) == (0 if on else 1)
    if on:
        assert room.status.reason == "OperatorUnreachable"
        room.sync("w0", "w1")
        assert room.told("w0", say.Prepare) == 1


def test_absent_member_of_a_running_pod_is_named_until_back() -> None:
    def vanished() -> list[str]:
        return vanished_pods(room.m, room.now)

    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.sync("w0", "w1", "w2")
    room.lose("w2")
    room.tick(1)
    for member in ("w0", "w1"):
        room.park(member, ParkReason.DROPPED, state(4))
    room.form()
    room.tick(VANISHED_SECONDS - 1.1)
    assert vanished() == []
    room.tick(0.2)
    assert vanished() == ["w2"]
    room.sync("w0", "w1", unstarted=("w2",))
    assert vanished() == []  # another container of the pod is being started
    room.sync("w0", "w1", "w2")
    assert vanished() == ["w2"]
    room.hello("w2", Standing.PARKED, generation=generation(1), state=state(4), layout_hash="layout")
    assert vanished() == []
    room.lose("w2")
    room.tick(VANISHED_SECONDS)
    assert vanished() == ["w2"]
    room.sync("w0", "w1")
    assert vanished() == []


def test_who_has_said_why_it_goes_has_not_vanished() -> None:
    room = Room(target=2)
    room.train("w0", "w1")
    room.sync("w0", "w1")
    room.tell("w1", say.Bye("Finished"))
    room.lose("w1")
    room.tick(2 * VANISHED_SECONDS)
    assert vanished_pods(room.m, room.now) == []


def test_member_cut_off_one_step_ahead_holds_nobody_up() -> None:
    room = Room(target=3)
    room.train("w0", "w1", "w2")
    room.lose("w2")
    room.tick(1)
    for member in ("w0", "w1"):
        room.park(member, ParkReason.DROPPED, state(4))
    room.form()
    room.hello("w2", Standing.PARKED, generation=generation(1), state=state(5), layout_hash="layout")
    room.lose("w1")
    room.park("w0", ParkReason.REDUCTION_FAILED, state(4))
    assert room.last("w0", say.Start).state == state(5)
    assert room.last("w0", say.Start).transfers == (say.Transfer("w0", "w2"),)


def test_leaver_keeps_its_state_while_no_member_is_connected() -> None:
    room = Room(target=1)
    room.train("w0")
    room.hello("w1", Standing.PARKED, generation=generation(1), state=state(0), layout_hash="layout")
    room.lose("w0")
    room.tell("w1", say.Leaving("SIGTERM"))
    assert room.told("w1", say.Leave) == 0
    room.hello("w0", Standing.ACTIVE, generation=generation(1), state=state(2), layout_hash="layout")
    assert room.told("w1", say.Leave) == 1


def test_a_complaint_is_no_silent_loss() -> None:
    room = Room()
    room.train("w0", "w1")
    room.tick(20)
    room.lose("w1")
    room.park("w0", ParkReason.REDUCTION_FAILED, state(3))
    assert room.members == ("w0",)


@pytest.mark.parametrize("on", [True, False])
def test_coordinator_hearing_of_a_newer_makes_no_generations(
    on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on:
        take_out(monkeypatch, "supersede")
    room = Room(target=1)
    room.train("w0")
    room.hello("w1", newest_incarnation=Incarnation(2, 0))
    if on:
        assert room.last("w1", say.Refused).retry
        assert room.last("w0", say.Refused).retry
        assert sorted(room.disconnected) == ["w0", "w1"]
        room.hello("w2")
        assert room.last("w2", say.Refused).retry
        assert room.status.reason == "Superseded"
    else:
        room.park("w1")
        assert room.told("w0", say.Boundary) == 1


def test_the_operators_newer_number_makes_it_step_down() -> None:
    room = Room(target=1)
    room.train("w0")
    room.sync("w0", number=1)
    assert room.status.reason == "Running"
    room.sync("w0", number=2)
    assert room.last("w0", say.Refused).retry
    assert room.status.reason == "Superseded"


@pytest.mark.parametrize("on", [True, False])
def test_the_greatest_state_wins(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on:
        take_out(monkeypatch, "greatest_state")
    room = Room()
    room.train("w0", "w1")
    room.park("w0", ParkReason.REDUCTION_FAILED, state(4))
    room.tick(1)
    room.park("w1", ParkReason.DROPPED, state(5))
    assert room.last("w0", say.Start).state == state(5 if on else 4)


def test_name_of_own_incarnation_never_made_is_refused() -> None:
    room = Room(incarnation=(1, 0))
    active(room, "w0", 3)
    refused = room.last("w0", say.Refused)
    assert not refused.retry
    assert "used twice" in refused.reason

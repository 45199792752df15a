"""The worker's side of the session: promises, stale messages, waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from springtide.comm import descriptors
from springtide.coordination.membership import Membership
from springtide.coordination.newcomer import Move
from springtide.coordination.park_reply import Leave, MoveOn, Start
from springtide.errors import SpringtideError
from springtide.settings import Settings
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import generation_from_proto, generation_to_proto, state_from_proto
from springtide_protocol.names import GenerationName, StateName
from springtide_protocol.store_entries import pack


class Session:
    """A membership with everything it says and does written down."""

    def __init__(self) -> None:
        self.sent: list[pb.WorkerMessage] = []
        self.over: list[str] = []
        self.boundaries = 0
        settings = Settings(pod_name="worker-0", pod_uid="uid", process_id="me", formation_seconds=1.0)
        self.membership = Membership(settings, self.sent.append, self.over.append, self._boundary)

    def _boundary(self) -> None:
        self.boundaries += 1

    def hear(self, **message: Any) -> None:
        self.membership.receive(pb.CoordinatorMessage(**message))

    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("message") for message in self.sent]

    def start(
        self,
        number: int,
        incarnation: int = 1,
        members: tuple[str, ...] = ("me", "you"),
        consistency: str = "",
    ) -> None:
        self.hear(
            start=pb.Start(
                generation=name(number, incarnation),
                members=[pb.Member(id=member, address=f"ip-{member}") for member in members],
                state=pb.StateName(generation=name(number, incarnation)),
                consistency=pb.Consistency(mode=consistency),
            )
        )

    def join(self, number: int = 1) -> Start:
        self.membership.park(pb.STANDBY)
        self.start(number)
        answer = self.membership.await_start()
        assert isinstance(answer, Start)
        return answer


def name(number: int, incarnation: int = 1) -> pb.GenerationName:
    return generation_to_proto(GenerationName.of(incarnation, 0, number))


def state(number: int, step: int) -> StateName:
    return StateName(GenerationName.of(1, 0, number), step)


def test_layout_set_before_the_stream_is_in_hello() -> None:
    session = Session()
    session.membership.set_layout("abc")
    assert session.membership.hello().layout_hash == "abc"


def test_hello_says_what_the_process_is() -> None:
    session = Session()
    hello = session.membership.hello()
    assert (hello.standing, hello.member.id, hello.HasField("generation")) == (pb.STARTING, "me", False)
    session.join()
    session.membership.hold(state(1, 7))
    hello = session.membership.hello()
    assert hello.standing == pb.ACTIVE
    assert state_from_proto(hello.state) == state(1, 7)
    assert [member.id for member in hello.members] == ["me", "you"]


def test_promise_lasts_until_the_start_also_over_a_new_stream() -> None:
    session = Session()
    session.join()
    session.membership.park(pb.REDUCTION_FAILED, "reset", ["ip-you", "ip-me"], reached=["ps-0"])
    parked = session.sent[-1].parked
    assert list(parked.suspects) == ["you"]
    assert list(parked.reached) == ["ps-0"]
    assert generation_from_proto(parked.generation) == GenerationName.of(1, 0, 1)
    assert session.membership.hello().standing == pb.PARKED
    session.hear(welcome=pb.Welcome(incarnation=pb.Incarnation(number=1)))
    assert session.sent[-1].parked == parked
    session.start(2)
    assert session.membership.hello().standing == pb.ACTIVE


@pytest.mark.parametrize(("number", "incarnation"), [(1, 1), (5, 0)])
def test_start_that_is_not_newer_is_ignored(number: int, incarnation: int) -> None:
    session = Session()
    session.join()
    session.membership.park(pb.DROPPED)
    session.start(number, incarnation)
    assert session.membership.hello().standing == pb.PARKED


def test_start_of_incarnation_older_than_newest_is_ignored() -> None:
    session = Session()
    session.hear(welcome=pb.Welcome(incarnation=pb.Incarnation(number=3)))
    session.membership.park(pb.STANDBY)
    session.start(9, incarnation=2)
    assert session.membership.hello().standing == pb.PARKED
    session.start(9, incarnation=3)
    assert session.membership.hello().standing == pb.ACTIVE


def test_start_without_promise_or_this_process_is_ignored() -> None:
    session = Session()
    session.start(1)
    assert session.membership.hello().standing == pb.STARTING
    session.membership.park(pb.STANDBY)
    session.start(1, members=("you",))
    assert session.membership.hello().standing == pb.PARKED


def test_prepare_ends_the_present_generation_only() -> None:
    session = Session()
    begin = session.join(2)
    session.hear(prepare=pb.Prepare(generation=name(1), reason="old"))
    assert (session.over, session.membership.over) == ([], "")
    session.hear(prepare=pb.Prepare(generation=name(2), reason="worker-1 died"))
    session.hear(prepare=pb.Prepare(generation=name(2), reason="again"))
    assert (session.over, session.membership.over) == (["worker-1 died"], "worker-1 died")
    with pytest.raises(RuntimeError, match="worker-1 died"):
        begin.store.wait(["0/1"])
    session.membership.park(pb.DROPPED)
    session.hear(prepare=pb.Prepare(generation=name(2), reason="late"))
    session.start(3)
    assert session.membership.over == ""


def test_boundary_of_the_present_generation_only() -> None:
    session = Session()
    session.join(2)
    session.hear(boundary=pb.Boundary(generation=name(1)))
    assert session.boundaries == 0
    session.hear(boundary=pb.Boundary(generation=name(2)))
    assert session.boundaries == 1


def test_epoch_end_stop_is_no_boundary_until_leases_resume() -> None:
    session = Session()
    session.join(2)
    asked: list[str] = []
    session.membership.call_at_epochs_end(lambda: asked.append("stop"))
    session.hear(boundary=pb.Boundary(generation=name(2), at_epochs_end=True))
    assert (asked, session.boundaries) == (["stop"], 0)
    session.membership.mark_epoch_end()
    session.membership.park(pb.BOUNDARY)
    assert session.membership.hello().at_epoch_end
    session.start(3, consistency="Synchronous")
    assert session.membership.hello().at_epoch_end
    session.membership.park(pb.FORMATION_FAILED)
    session.start(4, consistency="Asynchronous")
    assert not session.membership.hello().at_epoch_end
    session.membership.mark_epoch_end()
    session.membership.park(pb.BOUNDARY)
    session.start(5, consistency="Synchronous")
    session.membership.use_storage(True, keeps_applied_batches=True)
    session.membership.formed(0.0, 0.0, 0)
    said = session.membership.hello()
    assert (said.at_epoch_end, said.keeps_applied_batches, said.checkpoints, said.storage) == (
        False,
        False,
        True,
        True,
    )


def test_leave_goes_to_parked_processes_only() -> None:
    session = Session()
    session.join()
    session.hear(leave=pb.Leave(reason="scaled down"))
    session.membership.park(pb.BOUNDARY)
    session.hear(leave=pb.Leave(reason="scaled down"))
    assert session.membership.await_start() == Leave("scaled down")


def test_entries_that_come_before_the_group_asks_for_them() -> None:
    session = Session()
    session.membership.park(pb.STANDBY)
    session.hear(store_entries=entries(1, "0/1", b"early"))
    session.hear(store_entries=entries(7, "0/0", b"other"))
    session.start(1)
    answer = session.membership.await_start()
    assert isinstance(answer, Start)
    assert answer.store.get("0/1") == b"early"
    assert not answer.store.check(["0/0"])
    session.hear(store_entries=entries(1, "0/0", b"later"))
    assert answer.store.get("0/0") == b"later"
    answer.store.set("0/9", b"mine")
    assert session.sent[-1].store_set == pb.StoreEntry(generation=name(1), key="0/9", value=b"mine")


def test_single_entries_of_the_last_release_are_taken() -> None:
    session = Session()
    session.membership.park(pb.STANDBY)
    session.hear(store_entry=pb.StoreEntry(generation=name(1), key="0/1", value=b"early"))
    session.hear(store_entry=pb.StoreEntry(generation=name(1), key="0/2", value=b"too"))
    session.start(1)
    answer = session.membership.await_start()
    assert isinstance(answer, Start)
    session.hear(store_entry=pb.StoreEntry(generation=name(1), key="0/0", value=b"later"))
    assert [answer.store.get(f"0/{rank}") for rank in range(3)] == [b"later", b"early", b"too"]


def after(seconds: float, call: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer


def test_end_of_a_loop() -> None:
    session = Session()
    session.join()
    session.membership.hold(state(1, 9))
    timer = after(0.05, lambda: session.hear(end_ok=pb.EndOk(generation=name(1), stage=0)))
    assert session.membership.await_end(0)
    timer.join()
    assert session.sent[-1].ended.stage == 0
    hello = session.membership.hello()
    assert (hello.standing, hello.ended_stage) == (pb.AFTER, 1)
    session.membership.train()
    assert session.membership.hello().standing == pb.ACTIVE


def test_new_generation_at_the_end_of_a_loop() -> None:
    session = Session()
    session.join()
    session.membership.hold(state(1, 9))
    timer = after(0.05, lambda: session.hear(prepare=pb.Prepare(generation=name(1), reason="lost")))
    assert not session.membership.await_end(0)
    timer.join()
    assert session.membership.over == "lost"


def test_end_that_a_peer_knows_of_needs_no_word() -> None:
    session = Session()
    session.join()
    session.membership.stages_ended(2)
    assert session.membership.await_end(1)
    assert "ended" not in session.kinds()


def test_refusal_for_good_ends_every_wait_and_says_why() -> None:
    session = Session()
    session.membership.park(pb.STANDBY)
    timer = after(0.05, lambda: session.hear(refused=pb.Refused(reason="another layout")))
    with pytest.raises(SpringtideError, match="the coordinator refused this worker: another layout"):
        session.membership.await_start()
    timer.join()
    assert session.over == ["the coordinator refused this worker: another layout"]
    with pytest.raises(SpringtideError, match="another layout"):
        session.membership.check()


def test_refusal_for_now_changes_nothing() -> None:
    session = Session()
    session.join()
    session.hear(refused=pb.Refused(reason="a newer coordinator lives", retry=True))
    session.membership.check()
    assert session.over == []


def test_wish_to_leave_is_said_again_to_a_new_coordinator() -> None:
    session = Session()
    session.membership.leave("SIGTERM")
    session.membership.leave("asked")
    assert session.membership.hello().leaving
    session.hear(welcome=pb.Welcome(incarnation=pb.Incarnation(number=2)))
    assert [message.leaving.reason for message in session.sent] == ["SIGTERM"] * 3


def entries(number: int, key: str, value: bytes = b"v") -> pb.StoreEntries:
    return pb.StoreEntries(generation=name(number), packed=pack({key: value})[0])


def test_entries_after_formed_leave_room_for_the_next_ones() -> None:
    session = Session()
    session.join(1)
    session.membership.formed(0.0, 0.0, 0)
    for late in range(3000):  # of a member that is slow, and of a generation that is long over
        session.hear(store_entries=entries(1, f"late/{late}"))
        session.hear(store_entries=entries(0, f"older/{late}"))
    session.membership.park(pb.BOUNDARY)
    session.hear(store_entries=entries(2, "early"))  # its Start is on another way
    session.start(2)
    answer = session.membership.await_start()
    assert isinstance(answer, Start)
    assert answer.store.get("early") == b"v"


def test_room_for_a_group_is_told_as_before_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = 10
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: 1000)
    monkeypatch.setattr(descriptors, "open_descriptors", lambda: opened)
    session = Session()
    room = descriptors.largest_group(1000, 10)
    assert session.membership.hello().largest_group == room
    opened = 110  # the script has its data now
    session.join(1)
    assert session.sent[0].parked.largest_group == room - 50
    opened = 500  # a group has its connections
    session.membership.formed(0.0, 0.0, 0)
    assert session.membership.hello().largest_group == room - 50
    session.membership.park(pb.BOUNDARY)
    assert session.sent[-1].parked.largest_group == room - 50


def test_limit_of_files_below_what_the_job_wants_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: 1024)
    session = Session()
    for wanted in (2, 600, 600):  # the last one after a reconnection
        session.hear(welcome=pb.Welcome(incarnation=pb.Incarnation(number=1), wanted=wanted))
    said = [record.getMessage() for record in caplog.records if "RLIMIT_NOFILE" in record.getMessage()]
    assert len(said) == 1
    assert "the job wants 600" in said[0]


def test_newcomer_to_a_full_job_stands_by() -> None:
    session = Session()
    assert not session.membership.stands_by
    for training, wanted, stands_by in [
        (2, 3, False),
        (3, 3, True),
        (0, 3, False),
        (4, 3, True),
        (2, 0, False),
    ]:
        session.hear(
            welcome=pb.Welcome(incarnation=pb.Incarnation(number=1), training=training, wanted=wanted)
        )
        assert session.membership.stands_by is stands_by


def test_newcomer_goes_on_with_the_loop_of_the_job() -> None:
    session = Session()
    membership = session.membership
    assert membership.newcomers_move(0) is Move.ASK
    session.hear(welcome=pb.Welcome(running_loop=pb.RunningLoop(stage=1)))
    assert membership.newcomers_move(0) is Move.PASS
    assert membership.newcomers_move(1) is Move.ASK
    membership.park(pb.STANDBY)
    assert membership.newcomers_move(1) is Move.WAIT
    session.hear(running_loop=pb.RunningLoop(stage=2))
    assert membership.await_start(newcomer_at=1) == MoveOn(2)
    assert membership.newcomers_move(2) is Move.WAIT
    session.hear(welcome=pb.Welcome())  # a new coordinator, that does not know yet
    assert session.kinds() == ["parked", "parked"], "the wish stands, and is said again"
    assert membership.newcomers_move(1) is Move.PASS
    session.start(1)
    assert membership.newcomers_move(0) is Move.ENTER, "the others wait"
    answer = membership.await_start(newcomer_at=0)
    assert isinstance(answer, Start)
    assert membership.newcomers_move(0) is None


def test_newcomer_that_is_to_leave_goes_through_no_more_loops() -> None:
    session = Session()
    session.membership.park(pb.STANDBY)
    session.hear(leave=pb.Leave(reason="scaled down"))
    session.hear(running_loop=pb.RunningLoop(stage=5))
    assert session.membership.newcomers_move(0) is Move.ENTER
    assert session.membership.await_start(newcomer_at=0) == Leave("scaled down")


def test_member_and_holder_of_state_wait_for_a_reply() -> None:
    session = Session()
    session.join()
    session.membership.hold(state(1, 3))
    session.hear(running_loop=pb.RunningLoop(stage=5))
    assert session.membership.newcomers_move(0) is None
    session.membership.park(pb.BOUNDARY)
    session.start(2)
    assert isinstance(session.membership.await_start(newcomer_at=0), Start)


def test_failed_formation_makes_no_newcomer_again() -> None:
    session = Session()
    session.join()
    session.hear(running_loop=pb.RunningLoop(stage=5))
    session.membership.park(pb.FORMATION_FAILED, "a peer is gone")
    assert session.membership.newcomers_move(0) is None

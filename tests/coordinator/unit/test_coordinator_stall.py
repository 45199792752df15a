"""Stalls: when a job has stopped moving, and whom the others wait for."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator_room import Room, generation, state

from springtide_coordinator.hub import Hub
from springtide_coordinator.membership import Phase, describe
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.events import Synced
from springtide_coordinator.membership.messages import ParkReason, Standing
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.settings import Options
from springtide_coordinator.stall import Motion, Stall
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import Incarnation

LIMIT = 60.0


class Watched(Room):
    """A room whose motion is looked at after every event, as the hub does."""

    def __init__(self, target: int = 2) -> None:
        self.motion = Motion()
        super().__init__(target=target)

    def look(self) -> None:
        self.motion.look(self.phase, self.now)

    def does(self, member: str, step: int, doing: pb.Doing, seconds: float = 1.0, where: str = "") -> None:
        said = pb.Activity(step=step, doing=doing, seconds=seconds, where=where)
        self.motion.note_report(member, said, self.now)

    def stalled(self, step: int = 0) -> Stall | None:
        self.look()
        known = state(step) if step else None
        return self.motion.stall(self.m, known, LIMIT, self.now)


def three() -> Watched:
    room = Watched(target=3)
    room.train("w0", "w1", "w2")
    room.look()
    return room


def test_late_one_is_the_one_not_waiting_for_gradients() -> None:
    room = three()
    room.now += 1
    room.motion.moved(room.now)
    room.does("w0", 6, pb.DOING_REDUCING)
    room.does("w1", 6, pb.DOING_FETCHING, seconds=1.0)
    room.does("w2", 6, pb.DOING_REDUCING)
    began = room.now
    room.now += LIMIT - 0.5
    assert room.stalled(5) is None
    room.does("w1", 6, pb.DOING_FETCHING, seconds=10.0, where="train.py:31 in load")
    room.now += 0.5
    found = room.stalled(5)
    assert found is not None
    assert (found.since, found.step, found.waiting) == (began, 6, 2)
    assert [late.member for late in found.late] == ["w1"]
    activity = found.late[0].activity
    assert activity is not None
    assert (activity.doing, activity.where) == (pb.DOING_FETCHING, "train.py:31 in load")
    assert activity.since == pytest.approx(began + LIMIT - 0.5 - 10)


def test_what_was_said_of_an_earlier_step_is_stale() -> None:
    room = three()
    for member in ("w0", "w1"):
        room.does(member, 6, pb.DOING_REDUCING)
    room.does("w2", 5, pb.DOING_REDUCING)
    room.now += LIMIT
    found = room.stalled(5)
    assert found is not None
    assert [(late.member, late.activity) for late in found.late] == [("w2", None)]


def test_hang_in_optimizer_is_late_with_others_a_step_ahead() -> None:
    room = three()
    room.does("w0", 6, pb.DOING_STEPPING)
    for member in ("w1", "w2"):
        room.does(member, 7, pb.DOING_REDUCING)
    room.now += LIMIT
    found = room.stalled(5)
    assert found is not None
    assert [late.member for late in found.late] == ["w0"]


def test_hang_after_reductions_is_reported_when_others_commit() -> None:
    room = three()
    room.does("w1", 6, pb.DOING_FETCHING)  # of the same step, and over: the job moved after that
    room.now += 1
    room.motion.moved(room.now)
    for member in ("w0", "w2"):
        room.does(member, 7, pb.DOING_REDUCING)
    room.now += LIMIT
    found = room.stalled(6)
    assert found is not None
    assert [(late.member, late.activity) for late in found.late] == [("w1", None)]
    room.does("w1", 6, pb.DOING_STEPPING, seconds=10.0, where="train.py:40 in log")
    found = room.stalled(6)
    assert found is not None
    assert found.late[0].activity is not None
    assert found.late[0].activity.where == "train.py:40 in log"


def test_when_all_wait_for_each_other_nobody_is_late() -> None:
    room = three()
    for member in ("w0", "w1", "w2"):
        room.does(member, 6, pb.DOING_REDUCING)
    room.now += LIMIT
    found = room.stalled(5)
    assert found is not None
    assert (found.late, found.waiting) == ((), 3)


def test_whoever_does_not_come_to_the_loop_s_end_is_late() -> None:
    room = three()
    for member in ("w0", "w2"):
        room.tell(member, say.Ended(generation(1), state(9), 0))
    room.now += LIMIT
    found = room.stalled(9)
    assert room.phase is Phase.ENDING
    assert found is not None
    assert (found.step, found.waiting) == (0, 2)
    assert [late.member for late in found.late] == ["w1"]


def test_starting_recovering_or_ended_job_does_not_stall() -> None:
    room = Watched()
    room.hello("w0")
    room.look()
    room.now += 10 * LIMIT
    assert room.stalled() is None, "it starts"
    room.hello("w1")
    for member in ("w0", "w1"):
        room.park(member)
    room.look()
    room.now += 10 * LIMIT
    assert room.phase is Phase.FORMING
    assert room.stalled() is None, "its group forms"
    room.form()
    room.look()
    room.now += LIMIT - 1
    assert room.stalled() is None
    room.now += 1
    assert room.stalled() is not None, "its first step does not come"
    room.lose("w1")
    room.park("w0", ParkReason.REDUCTION_FAILED, state(0))
    assert room.stalled() is None, "it recovers"
    room.form()
    assert room.stalled() is None, "the clock begins anew with the generation"
    room.tell("w0", say.Ended(generation(2), state(9, number=2), 0))
    assert describe(room.m, room.now)[0] is Phase.AFTER_LOOP
    room.now += 10 * LIMIT
    assert room.stalled() is None, "the script runs after its loop"


def test_in_an_evaluation_who_holds_a_range_is_late() -> None:
    room = three()
    room.does("w0", 6, pb.DOING_ASKING)
    room.does("w1", 6, pb.DOING_EVALUATING)
    room.does("w2", 6, pb.DOING_ASKING)
    room.now += LIMIT
    found = room.stalled(5)
    assert found is not None
    assert ([late.member for late in found.late], found.waiting) == (["w1"], 2)


def test_without_a_limit_nothing_is_told() -> None:
    room = three()
    room.now += 1e6
    room.look()
    assert room.motion.stall(room.m, None, 0.0, room.now) is None


def test_member_of_a_hanging_pod_is_cut_off_and_others_go_on() -> None:
    room = Room(target=3)
    room.sync("w0", "w1", "w2")
    room.train("w0", "w1", "w2")

    def hung(*uids: str) -> None:
        living = tuple(pod for pod in room.m.living.values() if pod.uid not in uids)
        room.feed(Synced(3, 1, 8, living, hung=frozenset(uids)))

    hung("w1")
    assert room.disconnected == ["w1"]
    assert room.last("w1", say.Refused).retry
    assert "pod-w1 is lost: it hangs, and its pod is replaced" in room.last("w0", say.Prepare).reason
    room.hello("w1", Standing.ACTIVE, generation=generation(1), state=state(4))
    for member in ("w0", "w2"):
        room.park(member, ParkReason.DROPPED, state(5))
    assert room.members == ("w0", "w2")
    room.form()
    hung("w1")
    assert room.disconnected == ["w1"], "a process outside of the generation disturbs nobody"
    room.park("w1", ParkReason.DROPPED, state(4))
    assert room.last("w1", say.Leave).reason == "its pod is held for gone"


def test_the_operator_hears_who_is_late(tmp_path: Path) -> None:
    now = [1000.0]
    options = Options(token="t", number=1, state_dir=tmp_path, target=2, minimum=2, job="j", namespace="n")
    hub = Hub(options, Incarnation(1), lambda: now[0])
    streams = {}
    for name in ("w0", "w1"):
        streams[name] = hub.new_stream()
        member = pb.Member(id=name, pod_uid=name, pod_name=f"pod-{name}")
        hub.hello(streams[name], pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
        hub.receive(streams[name], pb.WorkerMessage(parked=pb.Parked(reason=pb.STANDBY)))
    living = [pb.Pod(uid=name, name=f"pod-{name}", started=True) for name in streams]
    word = pb.SyncRequest(
        target=2, minimum=2, maximum=2, living=living, observed=True, incarnation_number=1, hang_seconds=30
    )
    answer_sync(hub, word)
    current = hub.membership.current
    assert current is not None
    name = pb.GenerationName(incarnation=pb.Incarnation(number=1), number=current.name.number)
    for stream in streams.values():
        hub.receive(stream, pb.WorkerMessage(formed=pb.Formed(generation=name)))
    now[0] += 20
    commit = pb.Commit(state=pb.StateName(generation=name, step=3), unix_time=now[0], samples=8)
    hub.receive(streams["w0"], pb.WorkerMessage(progress=pb.Progress(commits=[commit])))
    assert hub.motion.moved_at == 1020.0
    stuck = pb.Activity(step=4, doing=pb.DOING_COMPUTING, seconds=10, where="train.py:7")
    now[0] += 11
    hub.receive(
        streams["w0"],
        pb.WorkerMessage(activity=pb.Activity(step=4, doing=pb.DOING_REDUCING, seconds=1)),
    )
    hub.receive(streams["w1"], pb.WorkerMessage(activity=stuck))
    hub.receive(hub.new_stream(), pb.WorkerMessage(activity=stuck))
    assert set(hub.motion.activities) == {"w0", "w1"}, "a stranger is not heard"
    assert not answer_sync(hub, word).HasField("stall")
    now[0] += 19
    found = answer_sync(hub, word).stall
    assert (found.seconds, found.since_unix, found.step, found.waiting) == (30.0, 1020.0, 4, 1)
    assert [(late.pod_uid, late.pod_name, late.since_unix) for late in found.late] == [
        ("w1", "pod-w1", 1021.0)
    ]
    assert found.late[0].activity.where == "train.py:7"
    # A commit of a generation that is over is no motion of this one.
    old = pb.Commit(state=pb.StateName(generation=pb.GenerationName(number=9), step=4), unix_time=now[0])
    hub.receive(streams["w0"], pb.WorkerMessage(progress=pb.Progress(commits=[old])))
    assert answer_sync(hub, word).HasField("stall")
    answer_sync(
        hub, pb.SyncRequest(target=2, minimum=2, maximum=2, living=living[:1], observed=True, hung=["w1"])
    )
    assert streams["w1"].ended

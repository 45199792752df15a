"""The coordinator's work for a change of members is linear in their number: it is counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hand_turned_loop import Loop

from springtide_coordinator.hub import Hub, WorkerStream
from springtide_coordinator.service import Serializer
from springtide_coordinator.settings import Options
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import speaks_to_proto
from springtide_protocol.names import Incarnation
from springtide_protocol.versions import OWN

FAMILIES = ("place", "listener", "0", "loops")
MANY = 8000  # 1,000 pods of 8 processes


class Job:
    """A hub and its members, whose messages come many at a time."""

    def __init__(self, folder: Path, target: int) -> None:
        self.loop = Loop()
        options = Options(token="t", number=1, state_dir=folder, target=target, minimum=1)
        self.hub = Hub(options, Incarnation(1), lambda: self.loop.now, self.loop.later)
        self.streams: dict[str, WorkerStream] = {}
        self.told: Counter[str] = Counter()
        self.decisions = 0
        decide = self.hub.decide

        def counted() -> None:
            self.decisions += 1
            decide()

        self.hub.decide = counted  # type: ignore[method-assign]

    def join(self, count: int) -> None:
        """Let processes come, and park them."""
        for number in range(len(self.streams), len(self.streams) + count):
            name = f"w{number:05}"
            stream = self.streams[name] = self.hub.new_stream()
            member = pb.Member(id=name, pod_uid=f"uid-{number // 8}", local_rank=number % 8, slot=number // 8)
            self.hub.hello(stream, pb.Hello(speaks=speaks_to_proto(OWN), member=member, standing=pb.STARTING))
            self.say(name, parked=pb.Parked(reason=pb.STANDBY, layout_hash="layout"))

    def say(self, name: str, **message: Any) -> None:
        self.hub.receive(self.streams[name], pb.WorkerMessage(**message))

    def form(self) -> None:
        """Exchange all entries in the present generation, and say Formed."""
        current = self.hub.membership.current
        assert current is not None
        generation = pb.GenerationName(incarnation=pb.Incarnation(number=1), number=current.name.number)
        for family in FAMILIES:
            for rank, name in enumerate(current.order):
                entry = pb.StoreEntry(generation=generation, key=f"{family}/{rank}", value=b"x" * 30)
                self.say(name, store_set=entry)
            self.loop.turn()
        for name in current.order:
            self.say(name, formed=pb.Formed(generation=generation))
        self.loop.turn()
        assert current.complete

    def park(self) -> None:
        """All members stop, as they are asked to."""
        current = self.hub.membership.current
        assert current is not None
        generation = pb.GenerationName(incarnation=pb.Incarnation(number=1), number=current.name.number)
        state = pb.StateName(generation=generation, step=1)
        for name in current.order:
            parked = pb.Parked(reason=pb.BOUNDARY, layout_hash="layout", generation=generation, state=state)
            self.say(name, parked=parked)
        self.loop.turn()

    async def read(self) -> Counter[str]:
        """Return how many messages of each kind all members were sent; it ends their streams."""
        told: Counter[str] = Counter()
        for stream in self.streams.values():
            stream.end()
            async for message in stream.messages():
                told[message.WhichOneof("message") or ""] += 1
        return told


def join_one(folder: Path, members: int) -> Job:
    """A job in which one more process has joined the others."""
    job = Job(folder, members - 1)
    job.join(members - 1)
    job.loop.turn()
    job.form()
    job.join(1)
    job.loop.turn()
    job.park()
    job.form()
    assert job.hub.membership.current is not None
    assert len(job.hub.membership.current.ids) == members
    return job


@pytest.mark.parametrize("members", [8, 64, 256])
async def test_a_join_sends_few_messages_to_each_member(tmp_path: Path, members: int) -> None:
    told = await join_one(tmp_path, members).read()
    others = members - 1
    generations = others + members
    assert told["start"] == generations
    assert told["boundary"] == others
    assert told["store_entries"] == len(FAMILIES) * generations, "one message of each family"
    assert told.total() == told["welcome"] + told["start"] + told["boundary"] + told["store_entries"]


async def test_events_of_a_turn_are_decided_on_once(tmp_path: Path) -> None:
    job = Job(tmp_path, 64)
    job.join(64)
    assert job.decisions == 0
    job.loop.turn()
    assert job.decisions == 1
    job.form()
    assert job.decisions == 2, "entries decide nothing, and all Formed came in one turn"


async def test_a_tick_costs_nothing_while_a_generation_trains(tmp_path: Path) -> None:
    job = Job(tmp_path, 64)
    job.join(64)
    job.loop.turn()
    job.form()
    before = job.decisions
    for step in range(1, 100):
        generation = pb.GenerationName(incarnation=pb.Incarnation(number=1), number=1)
        commit = pb.Commit(state=pb.StateName(generation=generation, step=step), unix_time=job.loop.now)
        job.say("w00000", progress=pb.Progress(commits=[commit]))
        job.hub.tick(0.05)
        job.loop.turn(0.05)
    assert job.decisions == before
    job.hub.closed(job.streams["w00001"])
    job.loop.turn(0.1)
    assert job.decisions == before + 1
    for _ in range(20):
        job.hub.tick(0.05)
        job.loop.turn(0.05)
    current = job.hub.membership.current
    assert current is not None
    assert "w00001" in current.lost, "its grace ends by time alone"


def lines_of(run: Callable[[], object]) -> int:
    """Return how many lines of the coordinator's own code are executed."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if "springtide_coordinator" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.slow
def test_work_of_a_join_grows_as_the_members_do(tmp_path: Path) -> None:
    small, large = (lines_of(lambda n=n: join_one(tmp_path, n)) for n in (128, 512))  # type: ignore[misc]
    assert large <= 4.4 * small


def test_silence_of_all_members_costs_linear_work(tmp_path: Path) -> None:
    """All streams break at once, as in a partition, and the operator is not heard either."""

    def silence(members: int) -> int:
        job = Job(tmp_path, members)
        job.join(members)
        job.loop.turn()
        job.form()
        for stream in list(job.streams.values()):
            job.hub.closed(stream)

        def decide() -> None:
            job.loop.now += 60
            job.hub.tick()
            job.loop.turn()

        return lines_of(decide)

    assert silence(256) <= 4.4 * silence(64)


@pytest.mark.slow
async def test_eight_thousand_members_form_a_generation(tmp_path: Path) -> None:
    job = join_one(tmp_path, MANY)
    told = await job.read()
    assert job.decisions < 10
    assert told.total() < 15 * MANY


def test_a_large_message_is_written_once_for_all() -> None:
    class Counted:
        written = 0

        def SerializeToString(self) -> bytes:
            self.written += 1
            return bytes(10_000)

    serializer, start, other = Serializer(), Counted(), pb.CoordinatorMessage(known=pb.Known())
    assert [len(serializer(message)) for message in (start, other, start, start)] == [
        10_000,
        2,
        10_000,
        10_000,
    ]
    assert start.written == 1

"""Members tell of their memory: the tightest is told on, and the smallest size goes with a Start."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator_room import Room

from springtide_coordinator import wire
from springtide_coordinator.hub import Hub
from springtide_coordinator.membership import messages as say
from springtide_coordinator.memory import Memories
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.settings import Options
from springtide_operator.coordinator_connection import to_report
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import MalformedError, memory_to_proto
from springtide_protocol.memory import ModelMemory
from springtide_protocol.names import Incarnation


def told(limit: int, state: int = 4) -> pb.Memory:
    return memory_to_proto(ModelMemory(10, 10, 2, state, "Optimizer", limit))


def test_the_member_with_least_room_counts() -> None:
    memories = Memories()
    assert memories.tightest() is None
    for member, limit in (("w0", 0), ("w1", 100), ("w2", 30), ("w3", 50)):
        memories.note_report(member, told(limit))
    found = memories.tightest()
    assert found is not None
    assert (found.limit, found.shard) == (30, "Optimizer")
    memories.keep({"w0", "w1", "w3"})
    assert (memories.tightest() or found).limit == 50
    memories.note_report("w1", told(100, state=200))  # its first step has shown more
    assert (memories.tightest() or found).limit == 100
    memories.keep(())  # all have ended: what is known stays
    assert (memories.tightest() or found).limit == 100


def test_a_word_without_parameters_is_malformed() -> None:
    with pytest.raises(MalformedError, match="parameter_bytes is not set"):
        Memories().note_report("w0", pb.Memory())


def test_the_operator_reads_what_the_tightest_member_told(tmp_path: Path) -> None:
    hub = Hub(Options(token="t", number=1, state_dir=tmp_path), Incarnation(1), lambda: 1000.0)
    request = pb.SyncRequest(target=2, minimum=1, maximum=2, observed=True)
    assert to_report(answer_sync(hub, request), at=1000.0).memory is None
    for slot, limit in enumerate((50, 30)):
        stream = hub.new_stream()
        member = pb.Member(id=f"m{slot}", pod_uid=f"u{slot}", pod_name=f"w{slot}", slot=slot)
        hub.hello(stream, pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
        hub.receive(stream, pb.WorkerMessage(memory=told(limit)))
    found = to_report(answer_sync(hub, request), at=1000.0).memory
    assert found == ModelMemory(10, 10, 2, 4, "Optimizer", 30)
    hub.receive(stream, pb.WorkerMessage(memory=pb.Memory(shard="None")))
    assert stream.ended  # refused: it has no parameters


def test_members_are_told_the_smallest_size_with_the_start() -> None:
    room = Room(target=2, minimum=2)
    room.train("w0", "w1")
    start = room.last("w0", say.Start)
    assert start.minimum == 2
    assert wire.from_outgoing(start, None).start.minimum == 2

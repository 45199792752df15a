"""gRPC messages of workers, servers and the operator, well-formed and hostile, at the coordinator's hub."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import fuzzing
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from springtide_coordinator.hub import Hub
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.settings import Options
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import MalformedError
from springtide_protocol.names import Incarnation
from springtide_protocol.versions import IncompatibleError

WHOLE = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2, 3, 2**53, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 4, 5, 99),
}
TEXTS = ("", "w0", "w1", "s0", "a" * 2000, "\0", "Failed", "Finished", "Synchronous", "BoundedStaleness")
FLOATS = (0.0, 1.0, -1.0, 1e300, float("inf"), float("-inf"), float("nan"))


def one(chance: Random, field: FieldDescriptor) -> object:
    """A value of a field that is no message."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = chance.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return chance.choice(FLOATS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
    return chance.choice(WHOLE[field.cpp_type])


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def fill(chance: Random, message: Message, depth: int = 4) -> Message:
    """Set some fields of a message."""
    described: Descriptor = message.DESCRIPTOR
    for field in described.fields:
        if chance.random() < 0.4:
            continue
        if is_map(field):
            for _ in range(chance.randrange(3)):
                getattr(message, field.name)[chance.choice(TEXTS)] = chance.choice(FLOATS)
        elif field.message_type is not None and field.is_repeated:
            for _ in range(chance.randrange(3) if depth else 0):
                fill(chance, getattr(message, field.name).add(), depth - 1)
        elif field.message_type is not None:
            if depth:
                inner = getattr(message, field.name)
                inner.SetInParent()
                fill(chance, inner, depth - 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(one(chance, field) for _ in range(chance.randrange(3)))
        else:
            setattr(message, field.name, one(chance, field))
    return message


def made(chance: Random) -> list[Message]:
    """A conversation: Syncs, Hellos and what follows them, of workers and servers."""
    kinds = (pb.SyncRequest, pb.Hello, pb.WorkerMessage, pb.ServerHello, pb.ServerMessage)
    return [fill(chance, chance.choice(kinds)()) for _ in range(chance.randrange(2, 12))]


NAME = pb.GenerationName(incarnation=pb.Incarnation(number=1), number=1)
MEMBER = pb.Member(id="w0", pod_uid="w0", pod_name="w0")
HELLO = pb.Hello(protocol_version=1, member=MEMBER, standing=pb.PARKED)
SEEDS: tuple[list[Message], ...] = (
    [HELLO, pb.SyncRequest(servers=2147483647, target=1)],  # finding 19
    [HELLO, pb.SyncRequest(servers=4096, target=1_000_000, maximum=1_000_000)],
    [pb.SyncRequest(consistency=pb.Consistency(mode="Never"))],  # finding 20
    [pb.SyncRequest(pause_seconds=float("inf"), suspend_by=float("nan"), suspend=True)],
    [HELLO, pb.WorkerMessage(values=pb.Values(values={f"n{i}": 1.0 for i in range(20_000)}))],  # finding 14
    [pb.Hello(standing=pb.ACTIVE, member=MEMBER, newest_incarnation=pb.Incarnation(number=2**64 - 1))],
    [pb.Hello(standing=pb.ACTIVE, member=MEMBER, generation=NAME, members=[MEMBER] * 500)],
    [
        HELLO,
        pb.WorkerMessage(
            evaluate=pb.Evaluate(
                state=pb.StateName(generation=NAME, step=1), samples=2**64 - 1, unit=1, stop=2**64 - 1
            )
        ),
    ],
)


@pytest.mark.slow
def test_any_message_leaves_the_coordinator_serving(tmp_path: Path) -> None:
    def check(messages: list[Message]) -> None:
        hub = Hub(Options(token="t", number=1, state_dir=tmp_path), Incarnation(1, 0))
        began = time.monotonic()
        stream, server = hub.new_stream(), hub.new_server_stream()
        hub.hello(stream, HELLO)
        for message in messages:
            match message:
                case pb.SyncRequest():
                    try:
                        answer_sync(hub, message)
                    except (MalformedError, IncompatibleError):
                        continue
                case pb.Hello():
                    hub.closed(stream)
                    stream = hub.new_stream()
                    hub.hello(stream, message)
                case pb.WorkerMessage():
                    hub.receive(stream, message)
                case pb.ServerHello():
                    hub.closed(server)
                    server = hub.new_server_stream()
                    hub.server_hello(server, message)
                case pb.ServerMessage():
                    hub.server_receive(server, message)
            hub.tick()
        reply = answer_sync(hub, pb.SyncRequest(target=1, observed=True))
        assert reply.ByteSize() < 1 << 20
        assert time.monotonic() - began < 5.0

    assert fuzzing.run("serving", SEEDS, made, check, 1500, show=str) >= len(SEEDS)


def test_damaged_bytes_are_a_message_or_refused() -> None:
    whole = [message.SerializeToString() for seed in SEEDS[:4] for message in seed]

    def check(data: bytes) -> None:
        for kind in (pb.SyncRequest, pb.WorkerMessage, pb.ServerMessage):
            try:
                kind.FromString(data)
            except DecodeError:
                continue

    def damaged(chance: Random) -> bytes:
        return fuzzing.damaged(chance, chance.choice(whole))

    assert fuzzing.run("refused", whole, damaged, check, 1000) >= len(whole)

"""The small parts of the coordinator's process: restarts, environment, store, log lines, reply."""

from __future__ import annotations

import ast
import itertools
import logging
import os
import zlib
from pathlib import Path

import pytest
from coordinator_room import generation, info, state
from hypothesis import given
from hypothesis import strategies as st
from later_messages import later

from springtide_coordinator import membership
from springtide_coordinator.history import Commit
from springtide_coordinator.hub import Hub
from springtide_coordinator.logs import KeyValueFormatter
from springtide_coordinator.membership import messages as say
from springtide_coordinator.rendezvous import PAUSE_SECONDS_PER_MEMBER, Rendezvous, TooMuchError
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.restarts import FILE, next_incarnation
from springtide_coordinator.settings import (
    BadEnvironmentError,
    Options,
    read_options,
)
from springtide_coordinator.streams import MAX_WAITING
from springtide_operator.coordinator_connection import to_report
from springtide_operator.plan.observation import FailureReport
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import MalformedError, speaks_to_proto
from springtide_protocol.limits import MAX_MESSAGE_BYTES, MAX_STORE_VALUE_BYTES
from springtide_protocol.names import Incarnation
from springtide_protocol.store_entries import MAX_UNPACKED_BYTES, pack, unpack
from springtide_protocol.versions import OWN, IncompatibleError


def test_each_start_takes_another_incarnation(tmp_path: Path) -> None:
    names = [next_incarnation(tmp_path / "new", 3) for _ in range(3)]
    assert names == [Incarnation(3, 0), Incarnation(3, 1), Incarnation(3, 2)]
    assert next_incarnation(tmp_path / "new", 4) == Incarnation(4, 0)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE]


@pytest.mark.parametrize("content", ["", "{}", '{"number": "x", "restart": 1}', "[1]"])
def test_a_spoiled_count_is_an_error_that_says_what_to_do(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match="Delete the coordinator's pod"):
        next_incarnation(tmp_path, 1)


def test_the_environment_is_read() -> None:
    options = read_options(
        {
            "SPRINGTIDE_TOKEN": "t",
            "SPRINGTIDE_STATE_DIR": "/state",
            "SPRINGTIDE_INCARNATION": "4",
            "SPRINGTIDE_TARGET": "3",
            "SPRINGTIDE_MINIMUM": "2",
            "SPRINGTIDE_MAXIMUM": "5",
            "SPRINGTIDE_OPERATOR_SILENCE_SECONDS": "60",
        }
    )
    assert (options.number, options.port, options.metrics_port) == (4, 7070, 9401)
    assert (options.target, options.minimum, options.maximum) == (3, 2, 5)
    assert options.membership.operator_silence == 60.0


@pytest.mark.parametrize("value", ["-1", "x", "0", "nan"])
def test_seconds_must_be_positive(value: str) -> None:
    env = {"SPRINGTIDE_TOKEN": "t", "SPRINGTIDE_STATE_DIR": "/s", "SPRINGTIDE_KEEPALIVE_SECONDS": value}
    with pytest.raises(BadEnvironmentError, match="SPRINGTIDE_KEEPALIVE_SECONDS"):
        read_options(env)


def test_the_store_keeps_one_generation_within_its_limits() -> None:
    store = Rendezvous()
    store.begin(generation(1), 2)
    assert store.put("a", b"1", "w0", 1.0)
    assert not store.put("a", b"1", "w0", 1.0)
    assert store.put("a", b"22", "w0", 1.0)
    assert store.size == 3
    with pytest.raises(TooMuchError, match="1048577 bytes"):
        store.put("b", b"x" * (MAX_STORE_VALUE_BYTES + 1), "w0", 1.0)
    for number in range(63):
        store.put(f"k{number}", b"x" * MAX_STORE_VALUE_BYTES, "w0", 1.0)
    with pytest.raises(TooMuchError, match="is full"):
        store.put("last", b"x" * MAX_STORE_VALUE_BYTES, "w0", 1.0)
    store.begin(generation(2), 2)
    assert (store.entries, store.size) == ({}, 0)


def test_entries_wait_until_each_member_has_told_its_own() -> None:
    store = Rendezvous()
    store.begin(generation(1), 3)
    store.put("listener/0", b"a", "w0", 10.0)
    store.put("0/0", b"b", "w0", 10.0)
    store.put("listener/1", b"c", "w1", 10.0)
    assert store.pause(10.0) == pytest.approx(3 * PAUSE_SECONDS_PER_MEMBER)
    store.put("listener/2", b"d", "w2", 10.0)
    assert store.pause(10.0) > 0, "one family is not whole"
    store.put("0/1", b"e", "w1", 10.0)
    store.put("0/2", b"f", "w2", 10.0)
    assert store.pause(10.0) == 0
    packed, only = store.take()
    assert only == ""
    assert dict(unpack(packed[0])) == store.entries
    assert store.pause(99.0) is None


def test_entries_of_a_family_that_stays_small_wait_shortly() -> None:
    store = Rendezvous()
    store.begin(generation(1), 3)
    store.put("servers/0", b"a", "w0", 10.0)
    assert store.pause(11.0) == 0
    assert store.take()[1] == "w0", "it need not be told its own"
    store.put("place/0", b"b", "w0", 20.0)
    store.take()
    for late in (1, 2):
        store.put(f"place/{late}", b"b", f"w{late}", 30.0)
    assert store.pause(30.0) == 0, "those that were sent before belong to it"
    assert dict(unpack(store.all_packed()[0])) == store.entries


def test_packed_entries_stay_within_a_message() -> None:
    entries = {f"0/{rank}": os.urandom(MAX_STORE_VALUE_BYTES) for rank in range(5)}
    parts = pack(entries)
    assert max(map(len, parts)) < MAX_MESSAGE_BYTES
    assert dict(itertools.chain.from_iterable(map(unpack, parts))) == entries
    assert pack({}) == []


@given(st.lists(st.lists(st.sampled_from([b"", b"a", b"ab", bytes(300)]), max_size=5).map(b"".join)))
def test_entries_are_unpacked_as_they_were_packed(values: list[bytes]) -> None:
    entries = {f"0/{rank}": value for rank, value in enumerate(values)}
    assert dict(itertools.chain.from_iterable(map(unpack, pack(entries)))) == entries


def test_packed_entries_of_gloo_grow_as_the_members_do() -> None:
    """Each of its values has 8 bytes for each member, the same ones in all."""

    def packed(members: int) -> int:
        numbers = b"".join(number.to_bytes(8, "little") for number in range(members))
        head = [bytes(16) + os.urandom(8) + bytes(112) + os.urandom(8) + bytes(10) for _ in range(members)]
        [part] = pack({f"0/{rank}": head[rank] + numbers for rank in range(members)})
        return len(part)

    assert packed(1024) < 4.5 * packed(256)
    assert packed(1024) < 40 * 1024, "40 bytes for each"


def entry_list(*entries: pb.EntryList.Entry) -> bytes:
    return zlib.compress(pb.EntryList(entries=entries).SerializeToString())


@pytest.mark.parametrize(
    "packed",
    [
        entry_list(pb.EntryList.Entry(key="a", before=1)),
        entry_list(pb.EntryList.Entry(key="a", value=b"12"), pb.EntryList.Entry(key="b", before=2, after=1)),
        entry_list(
            pb.EntryList.Entry(key="a", value=bytes(1 << 20)),
            *(pb.EntryList.Entry(key=str(number), before=1 << 20) for number in range(64)),
        ),
        b"",
        b"no zlib",
        pack({"a": b"1"})[0][:-3],
        zlib.compress(b"\xff\xff"),
        zlib.compress(bytes(MAX_UNPACKED_BYTES + 1)),
    ],
)
def test_bytes_that_are_no_entries_are_refused(packed: bytes) -> None:
    with pytest.raises(MalformedError, match=r"StoreEntries\.packed"):
        unpack(packed)


def test_a_log_line_is_one_line_of_keys_and_values() -> None:
    record = logging.LogRecord("n", logging.INFO, "f", 1, "two\nlines of %s", ("text",), None)
    record.fields = {"generation": "1.0/3"}
    line = KeyValueFormatter(job="digits").format(record)
    assert "\n" not in line
    assert 'level=info job=digits generation=1.0/3 message="two\\nlines of text"' in line


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    clock = iter(float(n) for n in range(1000, 1_000_000))
    return Hub(
        Options(token="t", number=1, state_dir=tmp_path, target=1), Incarnation(1), lambda: next(clock)
    )


def hello(name: str = "w0") -> pb.Hello:
    return pb.Hello(protocol_version=1, member=pb.Member(id=name, pod_uid=name), standing=pb.STARTING)


async def test_a_message_that_cannot_be_right_ends_the_stream(hub: Hub) -> None:
    for wrong in (
        pb.WorkerMessage(),
        pb.WorkerMessage(hello=hello()),
        pb.WorkerMessage(formed=pb.Formed()),
        pb.WorkerMessage(progress=pb.Progress(commits=[pb.Commit()])),
    ):
        stream = hub.new_stream()
        hub.hello(stream, hello())
        hub.receive(stream, wrong)
        assert stream.ended
        told = [message async for message in stream.messages()]
        assert told[-1].refused.reason
        hub.closed(stream)
    assert hub.streams == {}


async def test_message_of_a_later_release_is_ignored(hub: Hub) -> None:
    stream, server = hub.new_stream(), hub.new_server_stream()
    hub.hello(stream, hello())
    named = pb.Server(id="s", address="127.0.0.1:1")
    hub.server_hello(server, pb.ServerHello(protocol_version=1, server=named))
    hub.receive(stream, pb.WorkerMessage.FromString(later(99)))
    hub.server_receive(server, pb.ServerMessage.FromString(later(99)))
    assert not stream.ended
    assert not server.ended
    hub.receive(stream, pb.WorkerMessage(parked=pb.Parked(reason=pb.STANDBY)))
    assert hub.membership.members["w0"].standing is not say.Standing.STARTING


async def test_hello_of_a_later_release_is_let_in(hub: Hub) -> None:
    stream = hub.new_stream()
    told = hello()
    newer = pb.Speaks(oldest_version=OWN.newest, newest_version=OWN.newest + 1, capabilities=["tides"])
    told.speaks.CopyFrom(newer)
    hub.hello(stream, pb.Hello.FromString(told.SerializeToString() + later(99)))
    stream.end()
    [welcome] = [message.welcome async for message in stream.messages()]
    assert (welcome.protocol_version, welcome.speaks.newest_version) == (OWN.newest, OWN.newest)
    reply = answer_sync(hub, pb.SyncRequest(target=1, minimum=1, maximum=1, observed=True))
    assert reply.members[0].speaks == newer
    assert reply.speaks == speaks_to_proto(OWN)


def test_operator_too_far_away_is_told_what_to_upgrade(hub: Hub) -> None:
    request = pb.SyncRequest(target=9, speaks=pb.Speaks(oldest_version=7, newest_version=8))
    with pytest.raises(IncompatibleError, match="upgrade the coordinator"):
        answer_sync(hub, request)
    assert hub.membership.target == 1  # nothing of it was taken in


async def test_a_hello_without_a_standing_is_refused(hub: Hub) -> None:
    stream = hub.new_stream()
    hub.hello(stream, pb.Hello(protocol_version=1, member=pb.Member(id="a")))
    assert [m.refused.reason async for m in stream.messages()] == ["Hello.standing is not set"]


async def test_a_process_that_reads_nothing_is_cut_off(hub: Hub) -> None:
    stream = hub.new_stream()
    for _ in range(MAX_WAITING + 1):
        stream.put(pb.CoordinatorMessage())
    assert stream.ended


async def test_entries_and_progress_of_strangers_are_ignored(hub: Hub) -> None:
    stream = hub.new_stream()
    hub.hello(stream, hello())
    hub.receive(stream, pb.WorkerMessage(parked=pb.Parked(reason=pb.STANDBY)))
    assert hub.membership.current is not None
    other = hub.new_stream()
    hub.hello(other, hello("w1"))
    name = pb.GenerationName(incarnation=pb.Incarnation(number=1), number=1)
    hub.receive(other, pb.WorkerMessage(store_set=pb.StoreEntry(generation=name, key="k", value=b"v")))
    assert hub.rendezvous.entries == {}
    hub.receive(stream, pb.WorkerMessage(store_set=pb.StoreEntry(generation=name, key="k", value=b"v")))
    assert hub.rendezvous.entries == {"k": b"v"}


@pytest.mark.parametrize("able", [True, False])
async def test_store_entries_go_out_as_the_worker_understands(hub: Hub, able: bool) -> None:
    stream = hub.new_stream()
    told = hello()
    if able:
        told.speaks.CopyFrom(speaks_to_proto(OWN))
    hub.hello(stream, told)
    hub.receive(stream, pb.WorkerMessage(parked=pb.Parked(reason=pb.STANDBY)))
    name = pb.GenerationName(incarnation=pb.Incarnation(number=1), number=1)
    for key in ("a/0", "b/0"):
        hub.receive(stream, pb.WorkerMessage(store_set=pb.StoreEntry(generation=name, key=key, value=b"v")))
    hub.closed(stream)
    again = hub.new_stream()
    told.standing = pb.ACTIVE
    told.generation.CopyFrom(name)
    hub.hello(again, told)
    again.end()
    heard = [message async for message in again.messages()]
    packed = [entry for m in heard if m.HasField("store_entries") for entry in unpack(m.store_entries.packed)]
    single = [(m.store_entry.key, m.store_entry.value) for m in heard if m.HasField("store_entry")]
    entries = [("a/0", b"v"), ("b/0", b"v")]
    assert (packed, single) == ((entries, []) if able else ([], entries))


async def test_the_reply_names_who_is_waited_for(hub: Hub) -> None:
    request = pb.SyncRequest(target=2, minimum=2, maximum=2, observed=True)
    request.living.add(uid="w0", name="digits-worker-0-0", started=True)
    reply = answer_sync(hub, request)
    assert reply.phase == pb.WAITING
    assert reply.reason == "WaitingForWorkers"
    assert list(reply.waiting_for) == ["digits-worker-0-0"]
    assert list(reply.silent) == ["w0"]
    assert not reply.HasField("generation")


async def test_the_reply_tells_of_failures_and_the_operator_reads_them(hub: Hub) -> None:
    def begin(number: int, reason: str, cause: str) -> None:
        start = say.Start(generation(number), (info("w0"),), state(1), (), fresh=False, reason=reason)
        hub.history.generation_made(start, cause, 100.0 + number)

    hub.history.add([Commit(state(1), 100.0, 0.1, 10)], 0.1, now=100)
    begin(2, "w1 is lost: its stream broke", "failure")
    hub.history.add([Commit(state(2, 2), 102.5, 0.1, 10)], 0.2, now=103)
    begin(3, "w1 joins", "join")
    hub.history.add([Commit(state(3, 3), 103.5, 0.1, 10)], 0.3, now=104)
    report = to_report(
        answer_sync(hub, pb.SyncRequest(target=2, minimum=2, maximum=2, observed=True)), at=105.0
    )
    assert report.recoveries == 2
    assert report.failures == (FailureReport(1, 2, 2.5, "w1 is lost: its stream broke"),)


def test_operator_is_answered_in_one_order_whoever_came_first(hub: Hub) -> None:
    for slot in (2, 0, 1):
        stream = hub.new_stream()
        member = pb.Member(id=f"m{slot}", pod_uid=f"u{slot}", pod_name=f"w{slot}", slot=slot)
        hub.hello(stream, pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
    pods = [pb.Pod(uid=f"u{slot}", name=f"w{slot}", slot=slot, started=True) for slot in (9, 2, 0, 1)]
    reply = answer_sync(hub, pb.SyncRequest(target=4, minimum=1, maximum=4, living=pods, observed=True))
    assert [one.member.slot for one in reply.members] == [0, 1, 2]
    assert list(reply.waiting_for) == ["w0", "w1", "w2", "w9"]


def test_membership_is_pure() -> None:
    folder = Path(membership.__file__).parent
    impure = {"grpc", "asyncio", "os", "time", "torch", "random", "threading", "socket", "datetime"}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = ["..." if node.level > 1 else (node.module or "") if not node.level else ""]
            found = {name.split(".")[0] for name in names} & (impure | {"..."})
            assert not found, f"{path.name} imports {found}"

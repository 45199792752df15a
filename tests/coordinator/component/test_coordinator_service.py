"""The real coordinator process and real sessions: kills, stops, tokens, sizes, many members, web pages."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import standstill
from coordinator_process import ROOT, TOKEN, CoordinatorProcess, Member, until
from cut_proxy import CutProxy

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc
from springtide_protocol.channel import client_options, token_metadata
from springtide_protocol.session_client import MessageTooLargeError, SessionClosedError
from springtide_protocol.store_entries import unpack
from springtide_protocol.sync_client import SyncClient, SyncError


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


KEEPALIVE = 30.0  # s: a loaded machine is no lost one; but for the test of that, what ends closes its sockets


def coordinator(
    stack: ExitStack, path: Path, keepalive: float = KEEPALIVE, grace: float | None = None, **env: str
) -> CoordinatorProcess:
    env = {"SPRINGTIDE_KEEPALIVE_SECONDS": str(keepalive), **env}
    return stack.enter_context(CoordinatorProcess(path, grace, **env))


def member(stack: ExitStack, server: CoordinatorProcess, name: str, slot: int = 0) -> Member:
    made = Member(server.address, name, slot=slot, keepalive=KEEPALIVE)
    stack.callback(made.close)
    return made


def far_member(stack: ExitStack, server: CoordinatorProcess, name: str, slot: int) -> tuple[Member, CutProxy]:
    """A member, and the line that its stream takes."""
    line = CutProxy(("127.0.0.1", int(server.env["SPRINGTIDE_PORT"])))
    stack.callback(line.close)
    made = Member(line.address, name, slot=slot, keepalive=KEEPALIVE)
    stack.callback(made.close)
    return made, line


def break_for_a_moment(line: CutProxy) -> None:
    line.cut(reset=True)
    line.heal()


def training_pair(
    stack: ExitStack, server: CoordinatorProcess, second: Member | None = None
) -> tuple[Member, Member]:
    first, second = member(stack, server, "w0"), second or member(stack, server, "w1", 1)
    for one in (first, second):
        one.client.wait_connected(10)
        one.park()
    for one in (first, second):
        one.wait("start")
    return first, second


def get(port: int, path: str, token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=5) as answer:
        return str(answer.read().decode())


def test_little_is_done_before_it_listens() -> None:
    code = (
        "import sys, time, asyncio, grpc.aio; began = time.process_time();"
        "import springtide_coordinator.service as service, springtide_coordinator.__main__;"
        "print(began, time.process_time(), *({'aiohttp', 'prometheus_client', 'torch'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "operator")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    before, after, *modules = done.stdout.split()
    assert modules == []  # they would double the time
    # Of the processor: about as much again as Python and gRPC take on the same machine.
    assert float(after) < 4 * float(before)


def test_training_goes_on_over_a_killed_coordinator(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, SPRINGTIDE_TARGET="2")
    first, second = training_pair(stack, server)
    first.commit(5)
    first.wait("known")
    server.kill()
    until(lambda: not first.client.connected, "the client notices")
    server.start()
    welcome = first.wait("welcome", 2).welcome
    second.wait("welcome", 2)
    assert (welcome.incarnation.number, welcome.incarnation.restart) == (1, 1)
    assert welcome.wanted == 2
    assert not welcome.HasField("known")
    first.commit(6)
    assert first.wait("known", 2).known.state.step == 6
    assert [len(one.all("start")) for one in (first, second)] == [1, 1]
    assert not first.all("prepare")
    joiner = member(stack, server, "w2", 2)
    joiner.client.wait_connected(10)
    joiner.park()
    first.wait("boundary")
    for one in (first, second):
        one.park(pb.BOUNDARY)
    start = joiner.wait("start").start
    assert (start.generation.number, start.generation.incarnation.restart) == (2, 1)
    assert [one.id for one in start.members] == ["w0", "w1", "w2"]


def test_a_short_break_of_a_stream_changes_nothing(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, grace=30.0, SPRINGTIDE_TARGET="2")
    second, line = far_member(stack, server, "w1", 1)
    first, _ = training_pair(stack, server, second)
    break_for_a_moment(line)
    second.wait("welcome", 2)
    first.commit(1)
    first.wait("known")
    assert not first.all("prepare")
    assert len(second.all("start")) == 1


def test_a_stopped_process_is_cut_off(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, keepalive=2.0, SPRINGTIDE_TARGET="2")
    first = member(stack, server, "w0")
    first.client.wait_connected(10)
    first.park()
    script = Path(__file__).parents[2] / "support" / "coordinator_stopped_client.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "operator"), str(script.parent)])}
    with subprocess.Popen(
        [sys.executable, str(script), server.address, TOKEN, "w1"], env=env, stdout=subprocess.PIPE, text=True
    ) as other:
        stack.callback(other.kill)
        assert other.stdout is not None
        assert other.stdout.readline() == "parked\n"
        first.wait("start")
        standstill.stop(other.pid)
        # Without a heartbeat it would be for ever.
        until(lambda: bool(first.all("prepare")), "w1 is cut off")
        assert "w1 is lost" in first.all("prepare")[0].prepare.reason
        first.park(pb.DROPPED)
        first.wait("start", 2)
        other.send_signal(signal.SIGCONT)
        # Awake, it says Hello with the old generation and is told to park; it does not answer here.
        assert other.stdout.readline() == "prepare\n"
        other.kill()


def test_a_wrong_token_is_refused(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path)
    stranger = Member(server.address, "x", token="wrong")
    with pytest.raises(SessionClosedError, match=r"UNAUTHENTICATED.*SPRINGTIDE_TOKEN"):
        stranger.client.wait_connected(10)
    stranger.close()
    assert stranger.messages == []


async def test_the_operator_is_answered_with_the_right_token_only(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, SPRINGTIDE_TARGET="2")
    async with SyncClient(server.address, "wrong") as stranger:
        with pytest.raises(SyncError, match="UNAUTHENTICATED") as caught:
            await stranger.sync(pb.SyncRequest(), timeout=20)
        assert not caught.value.retry
    first, _ = training_pair(stack, server)
    for step in range(1, 4):
        first.commit(step)
    first.wait("known", 3)
    async with SyncClient(server.address, TOKEN) as client:
        pods = [pb.Pod(uid="w0", name="w0", started=True), pb.Pod(uid="w9", name="w9", started=True)]
        reply = await client.sync(
            pb.SyncRequest(target=2, minimum=1, maximum=4, living=pods, observed=True), 20
        )
    assert reply.phase == pb.RUNNING
    assert reply.state.step == 3
    assert [one.member.id for one in reply.members] == ["w0", "w1"]
    assert reply.silent == ["w9"]
    assert reply.data.seen == 3
    assert reply.values["loss"] == pytest.approx(1 / 3)
    assert reply.message


async def test_no_more_train_than_have_room_and_operator_is_told(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, SPRINGTIDE_TARGET="3", SPRINGTIDE_MAXIMUM="4")
    members = [member(stack, server, f"w{i}", i) for i in range(3)]
    for one in members:
        one.hello.largest_group = 2
        one.client.wait_connected(10)
        one.park(largest_group=2)
    start = members[0].wait("start").start
    assert [one.id for one in start.members] == ["w0", "w1"]
    request = pb.SyncRequest(
        target=3, minimum=1, maximum=4, living=[pb.Pod(uid=f"w{i}") for i in range(3)], observed=True
    )
    async with SyncClient(server.address, TOKEN) as client:
        reply = await client.sync(request, 20)
    assert "room on w0 for generations of 2, w1 for generations of 2" in reply.held_back
    assert not members[2].all("start")
    members[0].close()  # it dies: the spare has its place
    members[1].wait("prepare")
    members[1].park(pb.DROPPED)
    assert [one.id for one in members[2].wait("start").start.members] == ["w1", "w2"]
    async with SyncClient(server.address, TOKEN) as client:
        del request.living[0]
        reply = await client.sync(request, 20)
    assert not reply.held_back


async def test_an_absent_coordinator_is_worth_a_retry() -> None:
    async with SyncClient("127.0.0.1:9", TOKEN) as client:
        with pytest.raises(SyncError, match=r"127\.0\.0\.1:9") as caught:
            await client.sync(pb.SyncRequest(), timeout=1)
        assert caught.value.retry


def test_messages_beyond_the_limit_break_one_stream_only(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, SPRINGTIDE_TARGET="2")
    first, second = training_pair(stack, server)
    huge = pb.WorkerMessage(bye=pb.Bye(outcome="Failed", detail="x" * (5 << 20)))
    with pytest.raises(MessageTooLargeError, match=r"5242[0-9]+ bytes"):
        first.client.send(huge)
    with grpc.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = pb_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Session(iter([huge]), metadata=token_metadata(TOKEN), timeout=10)
        with pytest.raises(grpc.RpcError):
            list(call)
    generation = first.hello.generation
    entry = pb.StoreEntry(generation=generation, key="k", value=b"v" * (2 << 20))
    with grpc.insecure_channel(server.address, options=client_options(1)) as channel:
        stub = pb_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        messages = [pb.WorkerMessage(hello=second.hello), pb.WorkerMessage(store_set=entry)]
        refused: list[pb.Refused] = []
        for _ in range(20):
            # The member's own client comes back, and may take this stream's place before the entry is read.
            call = stub.Session(iter(messages), metadata=token_metadata(TOKEN), timeout=10)
            refused += [m.refused for m in call if m.WhichOneof("message") == "refused"]
            if refused:
                break
    assert "1048576" in refused[0].reason
    first.commit(1)
    first.wait("known")


def test_store_entries_reach_others_and_a_reconnected_member(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, SPRINGTIDE_TARGET="2")
    first = member(stack, server, "w0")
    second, line = far_member(stack, server, "w1", 1)
    formed = second.client.send

    def send_without_formed(message: pb.WorkerMessage) -> bool:
        return message.WhichOneof("message") == "formed" or formed(message)

    second.client.send = send_without_formed  # type: ignore[method-assign]
    for one in (first, second):
        one.client.wait_connected(10)
        one.park()
    start = first.wait("start").start
    second.wait("start")
    entry = pb.StoreEntry(generation=start.generation, key="address/0", value=b"127.0.0.1:1")
    first.client.send(pb.WorkerMessage(store_set=entry))
    told = second.wait("store_entries").store_entries
    assert told.generation == entry.generation
    assert dict(unpack(told.packed)) == {"address/0": b"127.0.0.1:1"}
    break_for_a_moment(line)
    assert second.wait("store_entries", 2).store_entries == told
    assert not first.all("store_entries")


def test_late_entry_of_an_older_group_displaces_no_newer_ones(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, SPRINGTIDE_TARGET="2")
    first = member(stack, server, "w0")
    second, line = far_member(stack, server, "w1", 1)
    for one in (first, second):
        one.client.wait_connected(10)
        one.park()
    generation = first.wait("start").start.generation
    second.wait("start")
    line.cut(reset=True)
    until(lambda: not second.client.connected, "the end of the stream")
    older = pb.GenerationName(number=generation.number)  # of no incarnation: before all others
    for name, key in ((generation, "place/1"), (older, "0/1")):
        entry = pb.StoreEntry(generation=name, key=key, value=b"1")
        assert not second.client.send(pb.WorkerMessage(store_set=entry))
    line.heal()
    first.wait("store_entries", timeout=10)
    assert entries_of(first) == {"place/1": b"1"}


def test_entries_reach_others_after_a_member_said_them_again(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, SPRINGTIDE_TARGET="2")
    first = member(stack, server, "w0")
    second, line = far_member(stack, server, "w1", 1)
    for one in (first, second):
        one.client.wait_connected(10)
        one.park()
    generation = first.wait("start").start.generation
    second.wait("start")

    def set_entry(key: str) -> None:
        entry = pb.StoreEntry(generation=generation, key=key, value=b"1")
        second.client.send(pb.WorkerMessage(store_set=entry))

    set_entry("place/1")
    first.wait("store_entries")
    break_for_a_moment(line)
    second.wait("welcome", 2)
    set_entry("loops/1")
    first.wait("store_entries", 2)
    assert entries_of(first) == {"place/1": b"1", "loops/1": b"1"}


def entries_of(one: Member) -> dict[str, bytes]:
    """All store entries that a member was told."""
    told = [message.store_entries.packed for message in one.all("store_entries")]
    return dict(itertools.chain.from_iterable(map(unpack, told)))


def test_fifty_members(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, SPRINGTIDE_TARGET="50", SPRINGTIDE_MINIMUM="50")
    members = [member(stack, server, f"w{i:02}", i) for i in range(50)]
    for one in members:
        one.client.wait_connected(30)
        one.park()
    start = members[0].wait("start", timeout=30).start
    assert [one.slot for one in start.members] == list(range(50))
    for one in members:
        one.wait("start", timeout=30)
        one.client.send(
            pb.WorkerMessage(
                store_set=pb.StoreEntry(
                    generation=start.generation, key=f"0/{one.hello.member.slot}", value=b"x" * 1000
                )
            )
        )
    for one in members:
        until(lambda one=one: len(entries_of(one)) == 50, "all entries", 30)  # type: ignore[misc]
        assert len(one.all("store_entries")) < 10
    members[0].commit(1)
    members[0].wait("known", timeout=30)


def test_metrics_health_and_timeline(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, SPRINGTIDE_TARGET="2")
    first, _ = training_pair(stack, server)
    for step in (1, 2, 3):
        first.commit(step)
    first.wait("known", 3)
    until(lambda: bool(server.metrics_port), "the metrics port is told")
    text = get(server.metrics_port, "/metrics")
    labels = 'job_namespace="tests",training_job="digits"'
    assert f"springtide_coordinator_step{{{labels}}} 3.0" in text
    assert f"springtide_coordinator_samples_total{{{labels}}} 192.0" in text
    assert f'springtide_coordinator_members{{{labels},standing="active"}} 2.0' in text or (
        'standing="active",training_job="digits"} 2.0' in text
    )
    assert get(server.metrics_port, "/healthz") == "ok\n"
    timeline = json.loads(get(server.metrics_port, "/timeline?since=1", TOKEN))
    assert [commit["step"] for commit in timeline["commits"]] == [2, 3]
    assert timeline["commits"][0]["incarnation"] == [1, 0]
    assert timeline["generations"][0]["members"] == ["w0", "w1"]
    assert (timeline["more"], timeline["next"]) == (False, {"since": 3, "generations_since": 1})
    again = json.loads(get(server.metrics_port, "/timeline?since=3&generations_since=1", TOKEN))
    assert (again["commits"], again["generations"]) == ([], [])
    with pytest.raises(urllib.error.HTTPError, match="400"):
        get(server.metrics_port, "/timeline?since=soon", TOKEN)


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", "\xff\xfe"])
def test_the_timeline_asks_for_the_token(token: str, stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, SPRINGTIDE_TARGET="2")
    until(lambda: bool(server.metrics_port), "the metrics port is told")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(server.metrics_port, "/timeline", token)


def test_sigterm_ends_it_quickly_and_with_success(stack: ExitStack, tmp_path: Path) -> None:
    server = coordinator(stack, tmp_path, SPRINGTIDE_TARGET="2")
    training_pair(stack, server)
    assert server.kill(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SPRINGTIDE_TOKEN", "", "SPRINGTIDE_TOKEN is not set"),
        ("SPRINGTIDE_STATE_DIR", "", "SPRINGTIDE_STATE_DIR is not set"),
        ("SPRINGTIDE_PORT", "seven", "SPRINGTIDE_PORT is 'seven'"),
        ("SPRINGTIDE_INCARNATION", "0", "at least 1"),
        ("SPRINGTIDE_BIND", "192.0.2.1", "cannot listen on 192.0.2.1"),
    ],
)
def test_a_wrong_environment_is_one_clear_line(name: str, value: str, message: str, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "operator"),
        "SPRINGTIDE_TOKEN": "t",
        "SPRINGTIDE_STATE_DIR": str(tmp_path),
        "SPRINGTIDE_PORT": "0",
        name: value,
    }
    done = subprocess.run(
        [sys.executable, "-m", "springtide_coordinator"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "level=error" in line]
    assert len(lines) == 1, done.stderr
    assert message in lines[0]
    assert "Traceback" not in done.stderr


def test_coordinator_that_may_open_few_files_says_so(tmp_path: Path) -> None:
    environment = os.environ | {
        "SPRINGTIDE_TOKEN": "t",
        "SPRINGTIDE_STATE_DIR": str(tmp_path),
        "SPRINGTIDE_BIND": "203.0.113.1",  # not ours, so that it ends
        "SPRINGTIDE_TARGET": "512",
        "SPRINGTIDE_SERVERS": "4",
    }
    command = ["sh", "-c", 'ulimit -n 300; exec "$0" -m springtide_coordinator', sys.executable]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    said = "may open 300 files (its hard limit, RLIMIT_NOFILE), and needs 1288 for a job of 512 processes"
    assert said in ended.stderr

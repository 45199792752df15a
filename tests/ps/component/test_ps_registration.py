"""Real parameter servers and a real coordinator: how they find each other, and how one goes."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from coordinator_process import TOKEN, CoordinatorProcess, Member, until
from ps_servers import RealServer

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.serve_client import ServeClient
from springtide_protocol.sync_client import SyncClient, SyncError
from springtide_ps.server import registration

KEEPALIVE = 30.0  # s: a loaded machine is no lost one; what ends here closes its sockets


class Job:
    """One coordinator, and servers of its slots: real ones, and streams that stand for one."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder, self._count = stack, folder, 0
        env = {"SPRINGTIDE_SERVERS": "2", "SPRINGTIDE_KEEPALIVE_SECONDS": str(KEEPALIVE)}
        self.coordinator = stack.enter_context(CoordinatorProcess(folder / "state", **env))
        self.ends: list[tuple[str, bool]] = []

    def sync(self, *servers: str) -> pb.SyncReply:
        """The operator's word: the worker lives, and pods with servers of these names."""
        request = pb.SyncRequest(target=1, minimum=1, maximum=2, observed=True, servers=2)
        request.living.add(uid="w0", name="w0", started=True)
        for name in servers:
            request.living_servers.add(uid=name, name=name, slot=int(name.split("-")[1]), started=True)

        async def call() -> pb.SyncReply:
            async with SyncClient(self.coordinator.address, TOKEN) as client:
                while True:  # as the operator does
                    try:
                        return await client.sync(request, 30.0)
                    except SyncError as error:
                        if not error.retry or time.monotonic() > deadline:
                            raise

        deadline = time.monotonic() + 30.0
        return asyncio.run(call())

    def real(self, slot: int) -> RealServer:
        folder = self._folder / f"server-{slot}"
        folder.mkdir()
        server = RealServer(
            folder,
            SPRINGTIDE_COORDINATOR=self.coordinator.address,
            SPRINGTIDE_TOKEN=TOKEN,
            SPRINGTIDE_POD_IP="127.0.0.1",
            SPRINGTIDE_POD_UID=f"ps-{slot}-0",
            SPRINGTIDE_POD_NAME=f"ps-{slot}-0",
            SPRINGTIDE_SLOT=str(slot),
            SPRINGTIDE_ATTEMPT="0",
            SPRINGTIDE_KEEPALIVE_SECONDS=str(KEEPALIVE),
        )
        self._stack.callback(server.end)
        return server

    def stream(self, slot: int, attempt: int = 0, token: str = TOKEN) -> ServeClient:
        self._count += 1
        pod = f"ps-{slot}-{attempt}"
        server = pb.Server(
            id=f"s{self._count}", pod_uid=pod, pod_name=pod, slot=slot, address="127.0.0.1:1", attempt=attempt
        )
        client = ServeClient(
            self.coordinator.address,
            token,
            server,
            lambda why, well: self.ends.append((why, well)),
            keepalive=KEEPALIVE,
        )
        client.start()
        self._stack.callback(client.close)
        return client


@pytest.mark.slow
def test_life_of_a_generation_with_real_servers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = Job(stack, tmp_path)
        real, brief, stranger = job.real(0), job.stream(1), job.stream(1, token="not the job's")
        member = Member(job.coordinator.address, "w0", keepalive=KEEPALIVE)
        stack.callback(member.close)
        member.client.wait_connected(40)
        member.park()
        start = member.wait("start").start
        assert [server.pod_name for server in start.servers] == ["ps-0-0", "ps-1-0"]
        assert start.servers[0].address == f"127.0.0.1:{real.ports()[0]}"

        # Another token never gets in, and the process is told to end.
        until(lambda: bool(job.ends), "the stranger is refused")
        assert "UNAUTHENTICATED" in job.ends[0][0]
        assert not job.ends[0][1]
        assert not stranger.connected

        # A process that is gone ends the generation; the next one of its pod serves in its place.
        brief.close()
        assert "parameter server ps-1-0 is lost: its stream broke" in member.wait("prepare").prepare.reason
        member.park(pb.DROPPED)
        other = job.real(1)
        start = member.wait("start", 2).start
        assert start.servers[1].address == f"127.0.0.1:{other.ports()[0]}"

        # The coordinator dies: the servers serve on, and its successor finds them and the generation.
        job.coordinator.kill()
        job.coordinator.start()

        def serving() -> list[str]:
            reply = job.sync("ps-0-0", "ps-1-0")
            return [one.server.pod_name for one in reply.servers if one.serving and one.connected]

        until(lambda: serving() == ["ps-0-0", "ps-1-0"], "both servers are adopted")
        until(lambda: job.sync("ps-0-0", "ps-1-0").servers_settled, "the member says what it has formed")
        assert len(member.all("start")) == 2

        # SIGTERM: it serves until another process has its slot and the generation without it has formed.
        other.process.send_signal(signal.SIGTERM)
        until(lambda: "serves on" in other.log.read_text(), "the server hears SIGTERM")
        job.stream(1, attempt=1)
        assert "ps-1-1 joins" in member.wait("boundary").boundary.reason
        member.forms = False
        member.park(pb.BOUNDARY)
        start = member.wait("start", 3).start
        assert [server.pod_name for server in start.servers] == ["ps-0-0", "ps-1-1"]
        assert [server.pod_name for server in start.leaving_servers] == ["ps-1-0"]
        reply = job.sync("ps-0-0", "ps-1-0", "ps-1-1")
        assert not reply.servers_settled
        assert {one.server.pod_name for one in reply.servers if one.serving} == {"ps-0-0", "ps-1-0", "ps-1-1"}
        assert [one.server.pod_name for one in reply.servers if one.leaving] == ["ps-1-0"]
        assert other.process.poll() is None
        member.form()
        assert other.process.wait(180) == 0
        assert "lets it go" in other.log.read_text()

        # Without a coordinator nobody can let it go.
        job.coordinator.kill()
        real.process.send_signal(signal.SIGTERM)
        assert real.process.wait(180) == 0
        assert "the coordinator is not there" in real.log.read_text()


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"SPRINGTIDE_SLOT": "one"}, "SPRINGTIDE_SLOT: 'one'"),
        ({}, "SPRINGTIDE_SLOT"),
        ({"SPRINGTIDE_SLOT": "1", "SPRINGTIDE_POD_IP": ""}, "SPRINGTIDE_POD_IP"),
        ({"SPRINGTIDE_SLOT": "1", "SPRINGTIDE_PS_LEAVE_SECONDS": "soon"}, "SPRINGTIDE_PS_LEAVE_SECONDS"),
    ],
)
def test_a_wrong_environment_is_named(env: dict[str, str], text: str) -> None:
    base = {"SPRINGTIDE_COORDINATOR": "10.0.0.1:7070", "SPRINGTIDE_POD_IP": "10.0.0.2"}
    with pytest.raises(ValueError, match=text):
        registration.read({**base, **env}, 7080)


def test_the_address_is_the_pods() -> None:
    assert registration.read({}, 7080) is None
    base = {"SPRINGTIDE_COORDINATOR": "c:7070", "SPRINGTIDE_SLOT": "3"}
    one, other = (registration.read({**base, "SPRINGTIDE_POD_IP": "fd00::1"}, 7080) for _ in range(2))
    assert one is not None
    assert other is not None
    assert one.server.address == "[fd00::1]:7080"
    assert (one.server.slot, one.server.attempt) == (3, 0)
    assert one.server.id != other.server.id

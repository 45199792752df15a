"""A thousand processes are connected to one server, come at once, and a few of them make steps."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from ps_servers import TOKEN, RealServer, servers

from springtide.ps.connections import Connections, ServerError
from springtide_protocol.lobby import raise_descriptor_limit
from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.server.server import Server
from springtide_ps.wire.client import ServerClient
from springtide_ps.wire.frames import Frame, Kind
from springtide_ps.wire.stream import Stream, connect

SIZE = 256
GROUPS = ({"lr": 0.1, "momentum": 0.9},)
SPEC = StepSpec(0.5, False, GROUPS)
TOKEN_OF_GENERATION = (1, 0, 1)


@pytest.fixture
def clients() -> int:
    """How many clients there can be: both ends of each are in this process."""
    return min(1000, (raise_descriptor_limit() - 400) // 3)


def ask(stream: Stream, number: int) -> None:
    """Ask for the server's status, and await the answer."""
    stream.send(Frame(Kind.STATUS, number))
    header, _ = stream.receive()
    while header.kind is Kind.KEEPALIVE:  # it took a while
        header, _ = stream.receive()
    stream.skip(header.payload_bytes)
    assert (header.kind, header.request) == (Kind.DONE, number)


class Members:
    """Members that make the steps of one chunk."""

    def __init__(self, server: Server, count: int, stack: ExitStack) -> None:
        self.names = [f"m{number}" for number in range(count)]
        self.links = [
            stack.enter_context(closing(ServerClient(("127.0.0.1", server.port), TOKEN))) for _ in self.names
        ]
        self.chunk = Chunk(torch.zeros(SIZE), [(0, 0, 0, SIZE)], "sgd", GROUPS)
        self.ask(0, Kind.ENTER, {"me": "m0", "members": self.names, "s": 0, "lineage": "one"})
        about, payload = self.chunk.dump()
        self.ask(0, Kind.LOAD, {**about, "k": "0.0", "s": 0}, payload)

    def ask(
        self, member: int, kind: Kind, about: dict[str, Any], payload: Any = None, out: Any = None
    ) -> Any:
        return self.links[member].ask_step(kind, TOKEN_OF_GENERATION, about, payload, out).result(60)

    def step(self, step: int) -> None:
        gradient = torch.full((SIZE,), float(step))
        for name, link in zip(self.names, self.links, strict=True):
            link.stage(TOKEN_OF_GENERATION, step, name, "0.0", gradient)
        for kind, more in ((Kind.PREPARE, {"count": 1, "norm": True}), (Kind.COMMIT, {"recipe": SPEC})):
            asked = [
                link.ask_step(kind, TOKEN_OF_GENERATION, {"s": step, "me": name, **more})
                for name, link in zip(self.names, self.links, strict=True)
            ]
            for future in asked:
                future.result(60)
        self.chunk.apply(gradient * len(self.names), SPEC)
        out = torch.empty(SIZE)
        self.ask(0, Kind.FETCH, {"s": step, "k": "0.0"}, out=out)
        torch.testing.assert_close(out, self.chunk.values)


@pytest.mark.slow
def test_steps_go_on_beside_a_thousand_clients(clients: int) -> None:
    assert clients >= 300, "too few files can be opened here (ulimit -n) for this test to mean anything"
    before = threading.active_count()
    with ExitStack() as stack:
        [server] = stack.enter_context(servers(1))
        with ThreadPoolExecutor(8) as threads:
            made = threads.map(lambda _: connect(("127.0.0.1", server.port), TOKEN, 60)[0], range(clients))
            idle = [stack.enter_context(closing(stream)) for stream in made]
        members = Members(server, 3, stack)
        for step in range(1, 6):
            members.step(step)
        assert server.clients == clients + 3
        for number, stream in enumerate(idle, 1):
            ask(stream, number)
        members.step(6)
        for stream in idle[1:]:
            stream.close()
        deadline = time.monotonic() + 60
        while server.clients > 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.clients == 4
        members.step(7)
        ask(idle[0], 1)
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_clients_that_come_at_once_drop_nobody() -> None:
    count = 300
    together = threading.Barrier(count, timeout=60)

    def come(server: Server) -> Stream:
        together.wait()
        return connect(("127.0.0.1", server.port), TOKEN, 60)[0]

    with ExitStack() as stack:
        [server] = stack.enter_context(servers(1))
        server.lobby.most = 4
        with ThreadPoolExecutor(count) as threads:
            coming = [threads.submit(come, server) for _ in range(count)]
            for future in coming:
                stack.enter_context(closing(future.result(60)))
        deadline = time.monotonic() + 30
        while server.clients < count and time.monotonic() < deadline:  # it answers a client, then counts it
            time.sleep(0.01)
        assert server.clients == count
        assert server.lobby.dropped == 0


@pytest.mark.slow
def test_server_that_may_open_few_files_says_so(tmp_path: Path) -> None:
    server = RealServer(tmp_path, before="ulimit -n 900")
    try:
        port, _ = server.ports()
        connect(("127.0.0.1", port), TOKEN, 30)[0].close()
    finally:
        server.end()
    assert "may open 900 files (its hard limit, RLIMIT_NOFILE), so fewer than 8192" in server.log.read_text()


class Rude:
    """A port that closes its first connections without a word, as a server does that has too many."""

    def __init__(self, server: Server, times: int) -> None:
        self.left, self.lobby, self._enter = times, server.lobby, server.lobby.enter

    def enter(self, sock: Any, address: str) -> Any:
        guest = self._enter(sock, address)
        if self.left and guest is not None:
            self.left -= 1
            guest.drop()
        return guest


def test_worker_connects_again_where_it_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(1) as [server]:
        rude = Rude(server, 3)
        monkeypatch.setattr(server.lobby, "enter", rude.enter)
        connections = Connections(TOKEN, 20.0, 20.0)
        connections.connect({"s0": f"127.0.0.1:{server.port}"})
        assert rude.left == 0
        assert connections["s0"].broken is None
        connections.close()


def test_worker_that_is_always_dropped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(1) as [server]:
        monkeypatch.setattr(server.lobby, "enter", Rude(server, 1 << 30).enter)
        connections = Connections(TOKEN, 0.5, 20.0)
        with pytest.raises(ServerError, match=rf"127.0.0.1:{server.port} cannot be reached"):
            connections.connect({"s0": f"127.0.0.1:{server.port}"})
        connections.close()

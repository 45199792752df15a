"""A parameter server before it knows who speaks: bounded connections, bytes and time."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from ps_servers import TOKEN, names, servers

from springtide import kv
from springtide_ps.params.embedding import TableError, TableSpec
from springtide_ps.server.kv_store import Store, StoreError
from springtide_ps.server.server import Quiet, Server
from springtide_ps.wire.frames import MAGIC, VERSION, Frame, FrameError, Kind, pack, unpack_header
from springtide_ps.wire.stream import RejectedError, connect


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def strange(stack: ExitStack, server: Server, sent: bytes = b"") -> socket.socket:
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
    sock.sendall(sent)
    return sock


def header(kind: Kind, meta: int, payload: int = 0) -> bytes:
    return struct.pack("<4sBBHQIQQ", MAGIC, VERSION, kind, 0, 0, meta, payload, 0)


def ended(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    return True


def test_silent_strangers_keep_no_client_out(stack: ExitStack) -> None:
    with servers(1) as running:
        silent = [strange(stack, running[0], header(Kind.PROOF, 900)) for _ in range(300)]
        with kv.connect(names(running), TOKEN, timeout=10) as store:
            store.init("w", torch.zeros(4))
            assert store.pull("w", torch.ones(4)).tolist() == [0.0] * 4
        assert len(running[0].lobby) <= 64
        assert ended(silent[0])


def test_first_comers_of_a_new_server_have_time(stack: ExitStack) -> None:
    with servers(1) as running:
        server = running[0]
        server.lobby.most = 2
        began = time.monotonic()
        silent = [strange(stack, server, header(Kind.PROOF, 900)) for _ in range(4)]
        assert ended(silent[0])
        first = time.monotonic() - began
        assert ended(silent[1])
        assert first >= 0.45  # at once, many workers of a first generation would drop each other
        assert server.lobby.dropped == 2


def test_a_dripping_handshake_ends_as_a_whole(stack: ExitStack) -> None:
    server = Server(Store(), TOKEN, "127.0.0.1", handshake=0.8)
    stack.callback(server.close)
    sock = strange(stack, server, header(Kind.PROOF, 1000))
    sock.settimeout(0.1)
    began, gone = time.monotonic(), False
    while not gone:
        assert time.monotonic() - began < 15, "one byte after another kept it open"
        try:
            sock.sendall(b" ")
            gone = sock.recv(65536) == b""
        except TimeoutError:
            continue
        except ConnectionError:
            gone = True


@pytest.mark.parametrize(
    "sent",
    [
        header(Kind.PROOF, 1025) + b" " * 1025,
        header(Kind.PROOF, 2, 1 << 20) + b"{}",
        header(Kind.STATUS, 0),
        header(Kind.PROOF, 18) + b'{"nonce":"\\ud800"}',
        header(Kind.PROOF, 18) + b'{"proof":"\\ud800"}',
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100,
    ],
)
def test_a_stranger_is_refused_without_a_traceback(
    sent: bytes, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    with servers(1) as running:
        assert ended(strange(stack, running[0], sent))
    assert running[0].counters.refused == 1
    assert not [record for record in caplog.records if record.exc_info]


def test_a_hundred_refusals_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    quiet = Quiet(clock=lambda: now[0])
    caplog.set_level(logging.WARNING, "springtide.ps")
    for number in range(100):
        quiet.warn("refused %d", number)
    assert len(caplog.records) == 5
    now[0] = 11.0
    quiet.warn("refused again")
    assert [record.getMessage() for record in caplog.records[5:]] == [
        "95 more warnings about connections were left out",
        "refused again",
    ]


def false_server(stack: ExitStack, nonce: str) -> socket.socket:
    """Listen, and challenge the first client with that nonce."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(pack(Frame(Kind.CHALLENGE, meta={"nonce": nonce})))
            connection.recv(65536)

    import threading

    thread = threading.Thread(target=serve)
    thread.start()
    stack.callback(thread.join)
    return listener


@pytest.mark.parametrize("nonce", ["\ud800", "00", "", "0" * 65])
def test_a_client_believes_no_odd_nonce(nonce: str, stack: ExitStack) -> None:
    listener = false_server(stack, nonce)
    with pytest.raises(RejectedError, match="does not speak as a parameter server"):
        connect(("127.0.0.1", listener.getsockname()[1]), TOKEN, 10)


def test_a_server_that_hangs_up_may_be_tried_again(stack: ExitStack) -> None:
    listener = false_server(stack, "0" * 64)
    with pytest.raises(ConnectionError) as caught:
        connect(("127.0.0.1", listener.getsockname()[1]), TOKEN, 10)
    assert not isinstance(caught.value, RejectedError)


def test_a_header_is_measured_by_the_limits_of_its_place() -> None:
    raw = header(Kind.PROOF, 2000)
    assert unpack_header(raw).meta_bytes == 2000
    with pytest.raises(FrameError, match="over the limits"):
        unpack_header(raw, 1024, 0)


def test_all_tables_share_one_limit() -> None:
    store = Store(memory_limit=50_000)
    ids = torch.arange(500).numpy()
    for key in ("a", "b"):
        store.create_table(key, TableSpec(16))
    store.table("a").lookup(ids)
    with pytest.raises(TableError, match=r"beside \d+ of others"):
        store.table("b").lookup(ids)
    assert store.held_bytes <= 50_000
    with pytest.raises(StoreError, match="no room"):
        store.create("w", torch.zeros(5000))


def test_a_job_and_keys_by_hand_share_one_limit(stack: ExitStack) -> None:
    with servers(1, memory_limit=1000) as running, kv.connect(names(running), TOKEN) as store:
        store.init("w", torch.zeros(200))
        with pytest.raises(ValueError, match="800 of 1000 bytes are taken"):
            running[0].sync_handler.check_room("chunk", 300)


def test_a_sum_of_nobodys_chunk_is_refused(stack: ExitStack) -> None:
    with servers(1) as running:
        stream, _ = connect(("127.0.0.1", running[0].port), TOKEN, 10)
        stack.callback(stream.close)
        meta = {"t": [1, 0, 1], "me": "a", "members": ["a"], "s": 0, "lineage": "x"}
        stream.send(Frame(Kind.ENTER, 1, meta))
        assert stream.receive()[0].kind is Kind.DONE
        values = torch.zeros(1 << 18)
        about = {"t": [1, 0, 1], "s": 1, "k": "nobody's", "d": "float32"}
        stream.send(Frame(Kind.SUM, 2, about, values.nbytes), memoryview(values.numpy()).cast("B"))
        answer, said = stream.receive()
        assert answer.kind is Kind.REFUSED
        assert "is not held here" in said["message"]


def test_a_burst_of_a_large_job_waits_in_the_queue(stack: ExitStack) -> None:
    made = stack.enter_context(contextlib.closing(Server(Store(), TOKEN, "127.0.0.1")))
    burst = [stack.enter_context(socket.socket()) for _ in range(300)]
    for sock in burst:
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", made.port))
    # One that finds no place is not told so: its system tries again after a second, and after two, and four.
    assert [sock for sock in burst if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\2"] == []

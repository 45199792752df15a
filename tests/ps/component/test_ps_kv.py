"""springtide.kv over real sockets: what comes back, and what happens to those who misbehave."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import standstill
import torch
from ps_servers import TOKEN, RealServer, names, servers

from springtide import kv
from springtide_ps.wire import auth, frames
from springtide_ps.wire.client import ServerClient
from springtide_ps.wire.stream import Stream, connect


def test_push_and_pull_over_several_servers_equal_torch() -> None:
    torch.manual_seed(1)
    with servers(3) as running, kv.connect(names(running), TOKEN, chunk_bytes=4096) as store:
        store.set_update("adam", lr=0.01)
        values = torch.randn(70, 99)
        assert store.init("w", values)
        assert not store.init("w", torch.zeros(70, 99))
        mine = torch.nn.Parameter(values.clone())
        optimizer = torch.optim.Adam([mine], lr=0.01)
        out = torch.empty(70, 99)
        for _ in range(3):
            gradient = torch.randn(99, 70).t()  # not contiguous
            store.push("w", gradient).wait()
            mine.grad = gradient.clone()
            optimizer.step()
        torch.testing.assert_close(store.pull("w", out), mine.detach())
        gradient = torch.ones(70, 99)
        store.push_pull("w", gradient, out).wait()
        mine.grad = gradient
        optimizer.step()
        torch.testing.assert_close(out, mine.detach())
        said = store.status()
        assert {server["keys"] for server in said} == {2, 3}
        assert sum(server["bytes"] for server in said) == values.nbytes


def test_many_workers_sum_and_no_push_is_lost() -> None:
    with servers(2) as running:

        def work(number: int) -> None:
            with kv.connect(names(running), TOKEN, chunk_bytes=1024) as store:
                store.init("count", torch.zeros(1000, dtype=torch.int64))
                handles = [store.push("count", torch.full((1000,), number)) for _ in range(50)]
                for handle in handles:
                    handle.wait()

        with kv.connect(names(running), TOKEN, chunk_bytes=1024) as store:
            store.set_update("sum")
            threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            store.init("count", torch.zeros(1000, dtype=torch.int64))
            assert store.pull("count", torch.empty(1000, dtype=torch.int64)).unique().tolist() == [500]


def test_bad_requests_are_named_and_leave_the_connection_usable() -> None:
    with servers(1) as running, kv.connect(names(running), TOKEN) as store:
        store.init("w", torch.zeros(4))
        with pytest.raises(kv.RefusedError, match="is there with shape"):
            store.init("w", torch.zeros(5))
        with pytest.raises(kv.RefusedError, match="there is no update 'lion'"):
            store.set_update("lion")
        with pytest.raises(KeyError, match="did not init"):
            store.push("v", torch.zeros(4))
        with pytest.raises(ValueError, match="has 4 elements"):
            store.push("w", torch.zeros(3))
        with pytest.raises(ValueError, match=r"'w' is of torch.float32, this tensor of torch.float64"):
            store.push("w", torch.zeros(4, dtype=torch.float64))
        with pytest.raises(ValueError, match="out must be contiguous"):
            store.pull("w", torch.zeros(4, 4).t()[0])
        assert store.pull("w", torch.ones(4)).tolist() == [0, 0, 0, 0]
    with (
        servers(1, memory_limit=64) as running,
        kv.connect(names(running), TOKEN) as store,
        pytest.raises(kv.RefusedError, match="use more servers"),
    ):
        store.init("large", torch.zeros(100))


@pytest.mark.parametrize(
    ("held", "given"),
    [(torch.float32, torch.int32), (torch.float16, torch.bfloat16), (torch.int64, torch.float64)],
)
def test_numbers_of_another_type_but_same_size_are_refused(held: torch.dtype, given: torch.dtype) -> None:
    with servers(2) as running, kv.connect(names(running), TOKEN, chunk_bytes=16) as store:
        values = torch.arange(40).to(held)
        store.init("w", values)
        others = torch.ones(40, dtype=given)
        with pytest.raises(ValueError, match="push: 'w' is of"):
            store.push("w", others)
        with pytest.raises(ValueError, match="pull: 'w' is of"):
            store.pull("w", others)
        for pushed, out in ((others, values), (values, others), (others, others)):
            with pytest.raises(ValueError, match="push_pull: 'w' is of"):
                store.push_pull("w", pushed, out)
        assert others.unique().tolist() == [1]
        assert torch.equal(store.pull("w", torch.empty(40, dtype=held)), torch.arange(40).to(held))


@pytest.mark.parametrize("other", [(4, 8), (48,), (16,), (33,)])
def test_a_key_has_one_shape_for_all(other: tuple[int, ...]) -> None:
    """Also where the chunks of both are alike."""
    with (
        servers(2) as running,
        kv.connect(names(running), TOKEN, chunk_bytes=64) as first,
        kv.connect(names(running), TOKEN, chunk_bytes=64) as second,
    ):
        first.init("w", torch.zeros(32))
        with pytest.raises(kv.RefusedError, match=r"is there with shape \(32,\)"):
            second.init("w", torch.ones(other))
        assert not second.init("w", torch.ones(32))
        assert second.pull("w", torch.ones(32)).unique().tolist() == [0]
        with (
            kv.connect(names(running), TOKEN, chunk_bytes=128) as third,
            pytest.raises(kv.RefusedError, match="give the same servers and chunk_bytes everywhere"),
        ):
            third.init("w", torch.zeros(32))


def test_what_is_no_tensor_and_what_are_no_ids_are_named() -> None:
    with servers(1) as running, kv.connect(names(running), TOKEN) as store:
        store.init("w", torch.zeros(2))
        table = store.table("t", 3)
        wrong: list[tuple[Callable[[], object], str]] = [
            (lambda: store.init("v", [1.0, 2.0]), "not a list"),  # type: ignore[arg-type]
            (lambda: store.push("w", 1.0), "not a float"),  # type: ignore[arg-type]
            (lambda: store.pull("w", torch.zeros(2).numpy()), "not a ndarray"),  # type: ignore[arg-type]
            (lambda: table.lookup([1]), "not list"),  # type: ignore[arg-type]
            (lambda: table.lookup(torch.tensor([1.5])), "not torch.float32"),
            (lambda: table.push(torch.tensor([True]), torch.zeros(1, 3)), "not torch.bool"),
        ]
        for call, named in wrong:
            with pytest.raises(TypeError, match=named):
                call()
        assert table.lookup(torch.tensor([1], dtype=torch.int32)).shape == (1, 3)


def test_who_does_not_know_the_token_is_refused() -> None:
    with servers(1) as running:
        with pytest.raises(kv.RejectedError, match="refused this process's token"):
            kv.connect(names(running), "another")
        deadline = time.monotonic() + 30
        while running[0].counters.refused != 1:  # counted after the client has been told
            assert time.monotonic() < deadline
            time.sleep(0.01)
    # Whoever goes before it has said anything may be a worker that was killed.
    with servers(1) as running:
        with socket.create_connection(("127.0.0.1", running[0].port), timeout=30) as gone:
            assert gone.recv(1)
        with pytest.raises(kv.RejectedError):
            kv.connect(names(running), "another")
        server = running[0]
    assert server.counters.refused == 1  # of two that the server has seen the end of
    # Nor does a client talk to a server that does not know it.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        false = threading.Thread(target=_false_server, args=(listener,))
        false.start()
        with pytest.raises(kv.RejectedError, match="does not know this job's token"):
            connect(("127.0.0.1", listener.getsockname()[1]), TOKEN, 30)
        false.join()
    with pytest.raises(ConnectionError, match=r"127.0.0.1:1 cannot be reached"):
        kv.connect(["127.0.0.1:1"], TOKEN, timeout=5)
    with pytest.raises(ValueError, match="write host:port"):
        kv.connect(["nowhere"], TOKEN)


def _false_server(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(frames.pack(frames.Frame(frames.Kind.CHALLENGE, meta={"nonce": "00" * 32})))
        connection.recv(1 << 16)
        connection.sendall(frames.pack(frames.Frame(frames.Kind.ACCEPTED, meta={"proof": "00"})))


def _until_closed(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass


def test_rubbish_ends_its_own_connection_only() -> None:
    with servers(1) as running, kv.connect(names(running), TOKEN) as store:
        store.init("w", torch.zeros(4))
        address = ("127.0.0.1", running[0].port)
        with socket.create_connection(address, timeout=30) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
            _until_closed(stranger)
        for rubbish in (
            b"\0" * 200,
            frames.pack(frames.Frame(frames.Kind.VALUES, 1)),
            frames.pack(frames.Frame(frames.Kind.PUSH, 1, {"key": "w"}))[:20],
            struct.pack("<4sBBHQIQQ", frames.MAGIC, frames.VERSION, 11, 0, 1, 5, 0, 0) + b"[[[[[",
            struct.pack("<4sBBHQIQQ", frames.MAGIC, frames.VERSION, 11, 0, 1, 2**31, 2**62, 0),
        ):
            stream, _ = connect(address, TOKEN, 30)
            with contextlib.closing(stream):
                stream.socket.sendall(rubbish)
                with contextlib.suppress(OSError):  # the server may have ended it already
                    stream.socket.shutdown(socket.SHUT_WR)
                stream.socket.settimeout(30)
                _until_closed(stream.socket)
        for meta in (
            {"key": "big", "shape": [2**39], "dtype": "float32"},
            {"key": "w", "shape": 3, "dtype": "x"},
        ):
            stream, _ = connect(address, TOKEN, 30)
            stream.send(frames.Frame(frames.Kind.INIT, 1, meta))
            header, answer = stream.receive()
            assert header.kind is frames.Kind.REFUSED, json.dumps(answer)
            stream.close()
        assert store.pull("w", torch.ones(4)).tolist() == [0, 0, 0, 0]


def test_request_of_a_later_release_is_refused_alone() -> None:
    with servers(1) as running, kv.connect(names(running), TOKEN) as store:
        store.init("w", torch.zeros(4))
        stream, _ = connect(("127.0.0.1", running[0].port), TOKEN, 30)
        with contextlib.closing(stream):
            assert stream.version == frames.VERSION
            later = bytearray(frames.pack(frames.Frame(frames.Kind.PUSH, 7, {"tide": "high"}, 70_000)))
            later[5] = 255
            stream.socket.sendall(later + bytes(70_000))
            header, meta = stream.receive()
            assert (header.kind, header.request) == (frames.Kind.REFUSED, 7)
            assert "release does not know" in meta["message"]
            stream.send(frames.Frame(frames.Kind.STATUS, 8))
            assert stream.receive()[0].request == 8


def test_client_of_the_last_release_is_served_in_its_version() -> None:
    with servers(1) as running:
        stream = Stream(socket.create_connection(("127.0.0.1", running[0].port), timeout=30))
        with contextlib.closing(stream):
            _, told = stream.receive()
            proof = auth.proof(TOKEN, "client", told["nonce"], "11" * 32)
            stream.send(frames.Frame(frames.Kind.PROOF, meta={"nonce": "11" * 32, "proof": proof}))
            assert stream.receive()[0].kind is frames.Kind.ACCEPTED
            stream.send(frames.Frame(frames.Kind.STATUS, 1))
            raw = stream.socket.recv(frames.HEADER_BYTES)
            assert raw[4] == frames.OLDEST_VERSION


def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    with servers(1) as running, kv.connect(names(running), TOKEN) as store:
        store.set_update("sum")
        store.init("w", torch.zeros(1 << 20))
        stream, _ = connect(("127.0.0.1", running[0].port), TOKEN, 30)
        for number in range(1, 60):
            stream.send(frames.Frame(frames.Kind.PULL, number, {"key": "w#0"}))
        for _ in range(5):
            store.push("w", torch.ones(1 << 20)).wait()
        assert store.pull("w", torch.empty(1 << 20)).unique().tolist() == [5]
        stream.close()


def test_a_killed_server_is_named_and_a_stopped_one_times_out(tmp_path: Path) -> None:
    server = RealServer(tmp_path)
    try:
        port, metrics = server.ports()
        with kv.connect([f"127.0.0.1:{port}"], TOKEN) as store:
            store.init("w", torch.zeros(8))
            store.push("w", torch.ones(8)).wait()
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
            assert "springtide_ps_pushes_total 1.0" in lines
            assert "springtide_ps_value_bytes 32.0" in lines
            standstill.stop(server.process.pid)
            with pytest.raises(
                TimeoutError, match=rf"pull\('w'\): no answer within 0.2 s from 127.0.0.1:{port}"
            ):
                store.pull("w", torch.zeros(8), timeout=0.2)
            server.process.send_signal(signal.SIGCONT)
            handle = store.start_pull("w", torch.zeros(8))
            handle.wait()
            assert handle.done()
            server.process.kill()
            with pytest.raises(kv.ServerLostError, match=f"parameter server 127.0.0.1:{port}"):
                _push_for_ever(store)
    finally:
        server.end()


def test_forked_process_connects_anew_leaving_the_other_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks: list[Any] = []

    def make_lock() -> Any:
        locks.append(threading.Lock())
        return locks[-1]

    noted = SimpleNamespace(**{**vars(threading), "Lock": make_lock})
    monkeypatch.setattr("springtide_ps.wire.client.threading", noted)
    with servers(1) as running, kv.connect(names(running), TOKEN) as store:
        store.init("w", torch.zeros(2))
        report = tmp_path / "report"
        # Whatever its threads hold then, as all locks here, nobody gives back in the child.
        assert locks
        with contextlib.ExitStack() as held, warnings.catch_warnings():
            for lock in locks:
                held.enter_context(lock)
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                try:
                    store.pull("w", torch.zeros(2))
                except Exception as error:
                    store.close()
                    report.write_text(f"{type(error).__name__}: {error}")
                finally:
                    os._exit(0)
        os.waitpid(child, 0)
        assert "ServerLostError" in report.read_text()
        assert "connect anew in each process" in report.read_text()
        assert store.pull("w", torch.ones(2)).tolist() == [0, 0]


@contextlib.contextmanager
def sends_until(lost: threading.Event, port: int) -> Iterator[None]:
    """Let nothing leave for the server with this port; every connection to it breaks when it is lost."""
    send = Stream.send

    def stuck(stream: Stream, *arguments: Any) -> None:
        if stream.socket.getpeername()[1] != port:
            send(stream, *arguments)
            return
        assert lost.wait(60)
        raise ConnectionResetError("by the test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "send", stuck)
        yield


def until_full(asked: Callable[[], int]) -> None:
    """Wait until as many requests were made as a connection keeps, besides the one that is being sent."""
    deadline = time.monotonic() + 60
    while asked() < 4096 + 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_server_lost_under_a_full_queue_fails_all_that_wait() -> None:
    """A thread that waits for room in a full send queue fails when the server is lost.

    Only the sending thread makes room in the queue, and only that thread learns of the loss.
    """
    with servers(1) as running, kv.connect(names(running), TOKEN) as store:
        store.init("w", torch.zeros(1))
        lost, handles, ended = threading.Event(), list[kv.Handle](), list[Exception]()

        def push() -> None:
            try:
                while True:
                    handles.append(store.push("w", torch.ones(1)))
            except kv.ServerLostError as error:
                ended.append(error)

        with sends_until(lost, running[0].port):
            pushing = threading.Thread(target=push, daemon=True)
            pushing.start()
            until_full(lambda: len(handles))
            lost.set()
            pushing.join(60)
            assert [str(error) for error in ended] == [
                f"parameter server 127.0.0.1:{running[0].port}: the connection broke: by the test"
            ]
        for handle in handles:
            with pytest.raises(kv.ServerLostError, match="by the test"):
                handle.wait()


@pytest.mark.slow
def test_server_that_takes_nothing_is_named_at_a_full_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide.kv.client.SEND_SECONDS", 0.2)
    server = RealServer(tmp_path)
    try:
        port, _ = server.ports()
        with kv.connect([f"127.0.0.1:{port}"], TOKEN) as store:
            store.init("w", torch.zeros(1 << 16))
            standstill.stop(server.process.pid)
            gradient, handles = torch.zeros(1 << 16), list[kv.Handle]()
            with pytest.raises(
                TimeoutError, match=f"parameter server 127.0.0.1:{port}: 4096 requests wait to be sent"
            ):
                _push_and_keep(store, gradient, handles)
            server.process.send_signal(signal.SIGCONT)
            for handle in handles:
                handle.wait()
            assert store.pull("w", torch.ones(1 << 16)).unique().tolist() == [0]
    finally:
        server.end()


def _push_and_keep(store: kv.KVStore, gradient: torch.Tensor, handles: list[kv.Handle]) -> None:
    while True:
        handles.append(store.push("w", gradient))


def test_loss_callback_may_need_a_lock_held_by_a_waiting_sender() -> None:
    """A loss callback may take a lock that a thread waiting to send holds.

    A server that passes sums on sends them under the lock in which it learns that a peer is there.
    """
    with (
        servers(1) as running,
        contextlib.closing(ServerClient(("127.0.0.1", running[0].port), TOKEN)) as client,
    ):
        lost, told, lock = threading.Event(), threading.Event(), threading.Lock()
        made = 0

        def hear(_: object) -> None:
            if lock.acquire(timeout=60):
                lock.release()
                told.set()

        def ask() -> None:
            nonlocal made
            client.status().add_done_callback(hear)
            with lock, contextlib.suppress(kv.ServerLostError):
                for made in itertools.count(1):  # noqa: B007
                    client.status()

        with sends_until(lost, running[0].port):
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            until_full(lambda: made)
            lost.set()
            asking.join(30)
            assert not asking.is_alive()
            assert told.wait(30)


def _push_for_ever(store: kv.KVStore) -> None:
    while True:
        store.push("w", torch.ones(8)).wait()


def _ask_for_ever(store: kv.KVStore) -> None:
    while True:
        store.status()


@pytest.mark.slow
def test_a_server_ends_politely_and_refuses_a_bad_environment(tmp_path: Path) -> None:
    server = RealServer(tmp_path)
    try:
        port, _ = server.ports()
        client = ServerClient(("127.0.0.1", port), TOKEN, 30)
        server.process.terminate()
        assert server.process.wait(180) == 0
        with pytest.raises(kv.ServerLostError):
            _ask_for_ever(kv.KVStore([client]))
        assert client.broken
        client.close()
    finally:
        server.end()
    refused = RealServer(tmp_path, SPRINGTIDE_TOKEN="")
    assert refused.process.wait(180) == 2
    assert "SPRINGTIDE_TOKEN: not set" in refused.log.read_text()

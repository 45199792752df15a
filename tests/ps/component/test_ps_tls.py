"""Parameter servers over TLS: numbers arrive, and nothing goes on in the clear."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from job_tls import job_tls

import springtide.kv
from springtide_ps.server.kv_store import Store
from springtide_ps.server.server import Server
from springtide_ps.wire.stream import connect
from springtide_ps.wire.tls import TlsSocket, client_context, server_context

TOKEN = "t" * 32


AUTHORITY, CERTIFICATE, KEY = job_tls("uid")


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS context of a server, and that of clients which trust only its certificate."""
    return server_context(CERTIFICATE, KEY), client_context(AUTHORITY)


@pytest.fixture
def server(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Iterator[Server]:
    made = Server(Store(0), TOKEN, "127.0.0.1", tls=contexts[0])
    yield made
    made.close()


def test_values_go_there_and_back(server: Server, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    store = springtide.kv.connect([f"127.0.0.1:{server.port}"], TOKEN, tls=contexts[1])
    try:
        store.init("w", torch.arange(100_000.0))
        out = torch.empty(100_000)
        store.pull("w", out)
        assert torch.equal(out, torch.arange(100_000.0))
    finally:
        store.close()


def test_both_directions_at_once_lose_no_byte(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """One thread sends while another receives, on both sides, through buffers that are always full."""
    one, other = pair(contexts)
    size = 24 * 1024 * 1024
    sent = torch.randint(0, 256, (size,), dtype=torch.uint8)
    got = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]

    def receive(sock: TlsSocket, into: torch.Tensor) -> None:
        memory = memoryview(into.numpy())
        while memory:
            count = sock.recv_into(memory)
            assert count > 0
            memory = memory[count:]

    threads = [
        threading.Thread(target=sock.sendall, args=(memoryview(sent.numpy()),)) for sock in (one, other)
    ]
    threads += [threading.Thread(target=receive, args=each) for each in zip((one, other), got, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    try:
        assert torch.equal(got[0], sent)
        assert torch.equal(got[1], sent)
    finally:
        one.close()
        other.close()


def pair(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> tuple[TlsSocket, TlsSocket]:
    """Return both ends of a TLS connection after the handshake."""
    ours, theirs = socket.socketpair()
    made: list[TlsSocket] = []
    thread = threading.Thread(
        target=lambda: made.append(TlsSocket(contexts[0].wrap_socket(theirs, server_side=True)))
    )
    thread.start()
    client = TlsSocket(contexts[1].wrap_socket(ours, server_hostname="any"))
    thread.join(20)
    return client, made[0]


def test_wait_has_its_time_and_ends_at_connection_shutdown(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    one, other = pair(contexts)
    try:
        one.settimeout(0.05)
        with pytest.raises(TimeoutError):
            one.recv_into(memoryview(bytearray(1)))
        one.settimeout(None)
        threading.Timer(0.1, lambda: one.shutdown(socket.SHUT_RDWR)).start()
        with contextlib.suppress(OSError):
            assert one.recv_into(memoryview(bytearray(1))) == 0
        with pytest.raises(OSError):  # noqa: PT011
            one.sendall(bytes(1 << 20))
    finally:
        one.close()
        other.close()
    with pytest.raises(OSError):  # noqa: PT011
        one.recv_into(memoryview(bytearray(1)))


def test_what_is_sent_after_the_end_is_not_in_the_clear(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    """A thread that still sends when another ends the connection must find TLS there, not a bare socket."""
    ours, theirs = socket.socketpair()
    served: list[ssl.SSLSocket] = []
    thread = threading.Thread(target=lambda: served.append(contexts[0].wrap_socket(theirs, server_side=True)))
    thread.start()
    wrapped = contexts[1].wrap_socket(ours, server_hostname="any")
    thread.join(20)
    client = TlsSocket(wrapped)
    client.shutdown(socket.SHUT_RDWR)
    assert wrapped.version() is not None
    client.close()
    served[0].close()


@pytest.mark.parametrize("pem", [True, False], ids=["text", "files"])
def test_certificates_come_as_text_or_as_files(tmp_path: Path, pem: bool) -> None:
    (tmp_path / "crt").write_text(CERTIFICATE)
    (tmp_path / "key").write_text(KEY)
    given = (CERTIFICATE, KEY) if pem else (str(tmp_path / "crt"), str(tmp_path / "key"))
    assert server_context(*given).get_ca_certs() == []
    with pytest.raises(ValueError, match="cannot be read"):
        server_context(CERTIFICATE, CERTIFICATE)
    with pytest.raises(ValueError, match="cannot be read"):
        client_context("-----BEGIN NONSENSE-----")


def test_a_client_in_the_clear_is_not_served(server: Server) -> None:
    with pytest.raises((OSError, ValueError)):
        connect(("127.0.0.1", server.port), TOKEN, 0.5)

"""Parameter servers over TLS: numbers arrive, and nothing goes on in the clear."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import springtide.kv
from springtide_operator.certificate import job_certificate
from springtide_ps.frames import Frame, Kind
from springtide_ps.server import Server
from springtide_ps.store import Store
from springtide_ps.stream import connect

TOKEN = "t" * 32


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server, and of clients that trust its certificate and no other."""
    folder: Path = tmp_path_factory.mktemp("tls")
    certificate, key = job_certificate(b"r" * 32, "uid")
    (folder / "crt").write_text(certificate)
    (folder / "key").write_text(key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "crt", folder / "key")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cadata=certificate)
    return server, client


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


def test_a_connection_that_is_aborted_never_goes_on_in_the_clear(
    server: Server, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    stream, _ = connect(("127.0.0.1", server.port), TOKEN, 20.0, contexts[1])
    try:
        assert isinstance(stream.socket, ssl.SSLSocket)
        stream.abort()
        assert stream.socket.version() is not None  # what is still sent by another thread is encrypted
        with pytest.raises(OSError):  # noqa: PT011
            stream.send(Frame(Kind.PROOF, meta={}), memoryview(bytes(1 << 20)))
    finally:
        stream.close()


def test_a_client_in_the_clear_is_not_served(server: Server) -> None:
    with pytest.raises((OSError, ValueError)):
        connect(("127.0.0.1", server.port), TOKEN, 0.5)

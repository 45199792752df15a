"""Frames at a parameter server: without the token nothing gets in, and with it nothing does harm."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import fuzzing
import pytest
import torch
from ps_servers import TOKEN, servers

from springtide_ps.server.server import Server
from springtide_ps.wire.frames import HEADER_BYTES, MAGIC, META_LIMIT, VERSION, Frame, Kind, joined, pack
from springtide_ps.wire.stream import Stream, connect

GROUP = {"lr": 0.1}
STEP_SPEC = {"scale": 1.0, "skip": False, "groups": [GROUP], "unused": []}
CHUNK = {"dtype": "float32", "elements": 4, "pieces": 1, "optimizer": "sgd", "state": []}
SPEC = {"dim": 4, "optimizer": "adam"}
SLICE = {"table": SPEC, "parameter": 0, "group": 0, "groups": 1, "options": GROUP, "pushes": 0, "evicted": 0}
T = [1, 0, 1]
RANGE = {"r": 0, "recipe": STEP_SPEC}
APPLIED_BATCHES = {"lineage": "x", "books": True, "skipped": 0}

Request = tuple[Kind, dict[str, Any], bytes]


def floats(count: int) -> bytes:
    return bytes(4 * count)


OPTIONS = json.dumps([[GROUP, [0]]]).encode()
CHUNK |= {"groups": 1, "options": len(OPTIONS)}
LOADED = joined(torch.zeros(4), torch.tensor([[0, 0, 0, 4]], dtype=torch.int64)).numpy().tobytes() + OPTIONS

# One rightful request of each kind; cases are made from them.
RIGHTFUL: tuple[Request, ...] = (
    (Kind.STATUS, {}, b""),
    (Kind.OPTIONS, {"n": 1}, json.dumps([GROUP]).encode()),
    (Kind.OPTIONS, {"n": 2, "base": 1, "drop": [1]}, json.dumps({"0": {"lr": 0.2}}).encode()),
    (Kind.RESOLVE, {"t": T, "recipe": {**STEP_SPEC, "groups": 1}}, b""),
    (Kind.UPDATE, {"name": "sgd", "lr": 0.1}, b""),
    (Kind.INIT, {"key": "w", "shape": [4], "dtype": "float32", "whole": [4]}, floats(4)),
    (Kind.PUSH, {"key": "w"}, floats(4)),
    (Kind.PULL, {"key": "w"}, b""),
    (Kind.PUSH_PULL, {"key": "w"}, floats(4)),
    (Kind.TABLE, {"key": "e", **SPEC, "options": {"lr": 0.1}}, b""),
    (Kind.LOOKUP, {"key": "e", "count": 2}, bytes(16)),
    (Kind.TABLE_PUSH, {"key": "e", "count": 1}, bytes(24)),
    (Kind.PAGE, {"key": "e", "start": 0, "count": 5}, b""),
    (Kind.ENTER, {"t": T, "me": "a", "members": ["a"], "s": 0, "lineage": "x"}, b""),
    (Kind.LOAD, {"t": T, "k": "c", "s": 0, **CHUNK}, LOADED),
    (Kind.LOAD, {"t": T, "k": "e.0", "s": 0, **SLICE}, b""),
    (Kind.LOAD, {"t": T, "k": "e.1", "s": 0, **SLICE, "rows": 1, "at": 0, "of": 64}, bytes(64)),
    (Kind.INVENTORY, {"t": T}, b""),
    (Kind.RESOLVE, {"t": T, "recipe": None}, b""),
    (Kind.ARRANGE, {"t": T, "forward": {}, "fill": {}, "drop": []}, b""),
    (Kind.STAGE, {"t": T, "s": 1, "k": "c", "me": "a"}, floats(4)),
    (Kind.STAGE_SPECULATIVE, {"t": T, "s": 1, "k": "c", "me": "a", "d": "float32"}, floats(4)),
    (Kind.STAGE_SPARSE, {"t": T, "s": 1, "k": "c", "me": "a", "d": "float32"}, bytes(8)),
    (Kind.STAGE_ROWS, {"t": T, "s": 1, "k": "e", "p": [0], "n": [1], "me": "a", "d": "float32"}, bytes(24)),
    (Kind.ROWS, {"t": T, "s": 0, "k": "e", "p": [0], "n": [2]}, bytes(16)),
    (Kind.PREPARE, {"t": T, "s": 1, "me": "a", "count": 1, "norm": True}, b""),
    (Kind.EXPECT, {"t": T, "s": 1, "me": "a", "recipe": STEP_SPEC}, b""),
    (Kind.REPORT_SUBSTEPS, {"t": T, "s": 1, "me": "a", "recipe": STEP_SPEC}, b""),
    (Kind.COMMIT, {"t": T, "s": 1, "me": "a", "recipe": STEP_SPEC}, b""),
    (Kind.TRY, {"t": T, "s": 1, "me": "a"}, b""),
    (Kind.FETCH, {"t": T, "s": 0, "k": "c"}, b""),
    (Kind.FETCH_INTERMEDIATE, {"t": T, "s": 1, "k": "c", "parts": 1}, b""),
    (Kind.SUM, {"t": T, "s": 1, "k": "c", "d": "float32"}, floats(4)),
    (Kind.DUMP, {"t": T, "k": "c", "at": 0, "most": 16}, b""),
    (Kind.SNAPSHOT, {"t": T, "s": 0, "name": "f", "readers": 1}, b""),
    (Kind.READ_SNAPSHOT, {"t": T, "name": "f", "me": "a"}, b""),
    (Kind.READ_SNAPSHOT, {"t": T, "name": "f", "me": "a", "k": "c"}, b""),
    (Kind.RELEASE_SNAPSHOT, {"t": T, "name": "f", "me": "a"}, b""),
    (Kind.PUSH_BATCH, {"t": T, "k": "c", "r": 0, "d": "float32", "recipe": STEP_SPEC}, floats(4)),
    (Kind.PULL_CHUNK, {"t": T, "k": "c"}, b""),
    (Kind.APPLIED_BATCHES, {"t": T}, b""),
    (Kind.COPY_BATCH, {"t": T, "k": "c", "r": 0, "d": "float32", "recipe": STEP_SPEC, "me": "a"}, floats(4)),
    (Kind.OPEN, {"t": T, "ranges": [], "clocks": {"a": 0}, "bound": 2}, b""),
    (Kind.LEASE, {"t": T, "me": "a", "first": 0, "stop": 9, "sent": []}, b""),
    (Kind.EARLY_PUSH, {"t": T, "me": "a", "k": "c", "o": 1, "d": "float32"}, floats(4)),
    (Kind.SPECULATIVE_PUSH, {"t": T, "me": "a", "k": "c", "o": 1, "d": "float32", **RANGE}, floats(4)),
    (Kind.COPY_EARLY_PUSH, {"t": T, "me": "a", "k": "c", "o": 1, "d": "float32"}, floats(4)),
    (Kind.FINISHED, {"t": T, "me": "a", "done": [0]}, b""),
)  # fmt: skip
BOOKED = (Kind.ENTER, {"t": [1, 0, 2], "me": "a", "members": ["a"], "s": 0, **APPLIED_BATCHES}, b"")

# What was found by attacks: findings 16, 17 and 18, and what fell to them.
EVIL: tuple[Request, ...] = (
    (Kind.SUM, {"t": T, "s": 1, "k": "nobody's", "d": "float32"}, bytes(1 << 20)),
    (Kind.SUM, {"t": T, "s": 2**61, "k": "c", "d": "float32"}, floats(4)),
    (Kind.SUM, {"t": T, "s": 1, "k": "c"}, floats(4)),
    (Kind.SUM, {"t": T, "s": 1, "k": "c", "d": "\ud800"}, floats(4)),
    (Kind.STAGE, {"t": T, "s": 1, "k": "c", "me": "a", "d": ["x"]}, floats(4)),
    (Kind.INIT, {"key": "big", "shape": [2**39, 0, 2**39], "dtype": "float32"}, b""),
    (Kind.INIT, {"key": "\ud800", "shape": [1], "dtype": "float32"}, floats(1)),
    (Kind.INIT, {"key": "whole", "shape": [1], "dtype": "float32", "whole": {"a": 1}}, floats(1)),
    (Kind.TABLE, {"key": "t", "dim": 1, "optimizer": []}, b""),
    (Kind.TABLE, {"key": "t", "dim": 1, "options": {"betas": [1]}}, b""),
    (Kind.TABLE, {"key": "t", "dim": 1, "init": {}}, b""),
    (Kind.UPDATE, {"name": {}}, b""),
    (Kind.UPDATE, {"name": "adam", "betas": [10**400, 1]}, b""),
    (Kind.RESOLVE, {"t": T, "recipe": {**STEP_SPEC, "unused": [float("inf")]}}, b""),
    (Kind.RESOLVE, {"t": T, "recipe": {**STEP_SPEC, "scale": 10**400}}, b""),
    (Kind.LOAD, {"t": T, "k": "z", "s": 0, **CHUNK, "pieces": 2**40}, LOADED),
    (Kind.LOAD, {"t": T, "k": "z", "s": 0, **CHUNK, "elements": -4}, LOADED),
    (Kind.LOAD, {"t": T, "k": "z", "s": 0, **CHUNK, "groups": 2**40}, LOADED),
    (Kind.LOAD, {"t": T, "k": "z", "s": 0, **CHUNK, "options": -1}, LOADED),
    (Kind.LOAD, {"t": T, "k": "z", "s": 0, **CHUNK}, LOADED[:-2] + b"2]"),
    (Kind.OPTIONS, {"n": 3, "base": 9}, b"{}"),
    (Kind.OPTIONS, {"n": 3}, b"[" * 100_000),
    (Kind.OPTIONS, {"n": 3, "drop": 4}, b"[7]"),
    (Kind.RESOLVE, {"t": T, "recipe": {**STEP_SPEC, "unused": [0, 2**60]}}, b""),
    (Kind.RESOLVE, {"t": T, "recipe": {**STEP_SPEC, "factors": [[2**60, 1.0]]}}, b""),
    (Kind.LOAD, {"t": T, "k": "z", "s": 0, **CHUNK, "state": [["a", "float32", 1]]}, LOADED),
    (Kind.LOAD, {"t": T, "k": "z", "s": 0, **SLICE, "rows": 2**39, "at": 0, "of": 2**40}, bytes(64)),
    (Kind.OPEN, {"t": T, "ranges": [[5, 2]], "clocks": {"a": 0}}, b""),
    (Kind.OPEN, {"t": T, "ranges": {"a": 1}, "clocks": {"a": 0}}, b""),
    (Kind.ROWS, {"t": T, "s": 0, "k": "e", "p": [0], "n": [0]}, b""),
)  # fmt: skip


def made(chance: Random) -> list[Request]:
    """A few requests, of which each is a rightful one with something wrong."""
    requests = []
    for _ in range(chance.randrange(1, 4)):
        kind, meta, payload = chance.choice(RIGHTFUL)
        if chance.random() < 0.8:
            meta = fuzzing.mutated(chance, meta)
        if not isinstance(meta, dict) or len(json.dumps(meta)) > META_LIMIT:
            meta = {"k": 1}
        if chance.random() < 0.3:
            payload = chance.randbytes(chance.randrange(200)) if chance.random() < 0.5 else payload * 2
        if chance.random() < 0.1:
            kind = chance.choice(list(Kind))
        requests.append((kind, meta, payload))
    return requests


class Errors(logging.Handler):
    """Keeps log records that carry a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@pytest.fixture
def errors() -> Iterator[Errors]:
    handler = Errors()
    logging.getLogger("springtide.ps").addHandler(handler)
    yield handler
    logging.getLogger("springtide.ps").removeHandler(handler)


def talk(stream: Stream, requests: list[Request]) -> None:
    """Send the requests, then one that must be answered: the connection has come through them."""
    for number, (kind, meta, payload) in enumerate(requests, 1):
        head = json.dumps(meta).encode()
        raw = struct.pack("<4sBBHQIQQ", MAGIC, VERSION, kind, 0, number, len(head), len(payload), 0)
        stream.socket.sendall(raw + head + payload)
    stream.send(Frame(Kind.STATUS, 99))


MAKING = (Kind.INIT, Kind.TABLE, Kind.ENTER, Kind.LOAD)


def settle(server: Server) -> None:
    """Bring a server to where the rightful requests find what they are about."""
    stream, _ = connect(("127.0.0.1", server.port), TOKEN, 30)
    with contextlib.closing(stream):
        talk(
            stream,
            [request for request in RIGHTFUL if request[0] in (Kind.INIT, Kind.TABLE, Kind.ENTER, Kind.LOAD)],
        )
        await_answer(stream)


def await_answer(stream: Stream) -> None:
    """Read until the last question is answered."""
    stream.socket.settimeout(20)
    while True:
        header, _ = stream.receive()
        stream.skip(header.payload_bytes)
        if header.request == 99:
            return


@pytest.mark.slow
def test_requests_with_the_token_are_answered(errors: Errors) -> None:
    with servers(1, memory_limit=1 << 20) as running:
        settle(running[0])

        def check(requests: list[Request]) -> None:
            stream, _ = connect(("127.0.0.1", running[0].port), TOKEN, 30)
            try:
                with contextlib.closing(stream):
                    talk(stream, requests)
                    await_answer(stream)
            except ConnectionError:
                raise AssertionError(f"the connection ended: {errors.found}") from None
            assert not errors.found

        seeds = [[request] for request in (*EVIL, *RIGHTFUL, BOOKED, *RIGHTFUL)]
        assert fuzzing.run("answered", seeds, made, check, 1500) >= len(seeds)
        settled(running[0])


def settled(server: Server) -> None:
    """Check that the server holds the state made by hand and nothing more, and still answers."""
    stream, _ = connect(("127.0.0.1", server.port), TOKEN, 30)
    with contextlib.closing(stream):
        stream.send(Frame(Kind.STATUS, 99))
        await_answer(stream)
    assert server.status()["bytes"] <= 1 << 20


PROOF = {"nonce": "0" * 64, "proof": "0" * 64, "pulse": True}
UNAUTHENTICATED: tuple[bytes, ...] = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    pack(Frame(Kind.PROOF, meta=PROOF)),
    pack(Frame(Kind.PROOF, meta={**PROOF, "nonce": "x"})),
    struct.pack("<4sBBHQIQQ", MAGIC, VERSION, 2, 0, 0, 18, 0, 0) + b'{"nonce":"\\ud800"}',
    struct.pack("<4sBBHQIQQ", MAGIC, VERSION, 2, 0, 0, 18, 0, 0) + b'{"proof":"\\ud800"}',
    struct.pack("<4sBBHQIQQ", MAGIC, VERSION, 2, 0, 0, 60_000, 0, 0) + b"[" * 60_000,
    struct.pack("<4sBBHQIQQ", MAGIC, VERSION, 2, 0, 0, 1000, 0, 0) + b"[" * 1000,
    struct.pack("<4sBBHQIQQ", MAGIC, VERSION, 2, 0, 0, 1000, 0, 0) + b"9" * 1000,
    struct.pack("<4sBBHQIQQ", MAGIC, VERSION, 2, 0, 0, 2, 2**62, 0) + b"{}",
    struct.pack("<4sBBHQIQQ", MAGIC, VERSION, 2, 0, 0, 2**32 - 1, 2**64 - 1, 0),
    pack(Frame(Kind.STATUS, 1)) * 3,
)


def stranger(chance: Random) -> bytes:
    """Bytes of somebody without the token."""
    if chance.random() < 0.2:
        return chance.randbytes(chance.randrange(200))
    if chance.random() < 0.5:
        return fuzzing.damaged(chance, chance.choice(UNAUTHENTICATED))
    meta = json.dumps(fuzzing.mutated(chance, dict(PROOF))).encode()[:1000]
    return struct.pack("<4sBBHQIQQ", MAGIC, VERSION, Kind.PROOF, 0, 0, len(meta), 0, 0) + meta


def test_strangers_get_nothing_but_a_challenge(errors: Errors) -> None:
    with servers(1) as running:
        server = running[0]

        def check(sent: bytes) -> None:
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
                with contextlib.suppress(OSError):
                    sock.sendall(sent)
                    sock.shutdown(socket.SHUT_WR)
                answer = bytearray()
                with contextlib.suppress(ConnectionError):
                    while part := sock.recv(65536):
                        answer += part
            kinds = [answer[at + 5] for at in frames_in(bytes(answer))]
            assert kinds[:1] in ([], [Kind.CHALLENGE])
            assert kinds[1:] in ([], [Kind.REFUSED])
            assert not errors.found
            assert server.clients == 0

        assert fuzzing.run("challenge", UNAUTHENTICATED, stranger, check, 800) >= len(UNAUTHENTICATED)
        end = time.monotonic() + 20
        while len(server.lobby) and time.monotonic() < end:
            time.sleep(0.01)
        assert len(server.lobby) == 0


def frames_in(data: bytes) -> Iterator[int]:
    """Yield the offset at which each frame begins."""
    at = 0
    while at + HEADER_BYTES <= len(data):
        yield at
        _, _, _, _, _, meta, payload, _ = struct.unpack("<4sBBHQIQQ", data[at : at + HEADER_BYTES])
        at += HEADER_BYTES + meta + payload

"""Frames come out of a stream as they went in, however the network cuts them; how a line is paced."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_protocol.versions import PROTOCOL_VERSION
from springtide_ps.wire import stream as streams
from springtide_ps.wire.frames import VERSION, Frame, FrameError, Kind, pack
from springtide_ps.wire.stream import PeerClosedError, Stream


@contextmanager
def pair() -> Iterator[tuple[socket.socket, Stream]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    theirs.settimeout(30)
    stream = Stream(theirs)
    try:
        yield ours, stream
    finally:
        ours.close()
        stream.close()


Message = tuple[str, bytes, bool]
"""(what the JSON says, payload, whether it is skipped)."""
MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["", "x", "é" * 40, "y" * 4000, "z" * 4096, "w" * 20_000]),
        st.binary(max_size=9000) | st.sampled_from([b"", b"p" * 4096, b"q" * 60_000]),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@given(MESSAGES, st.lists(st.integers(0, 200_000), max_size=12))
@settings(deadline=None, max_examples=150)
def test_frames_come_as_they_were_sent_however_they_are_cut(messages: list[Message], cuts: list[int]) -> None:
    raw = b"".join(
        pack(Frame(Kind.PUSH, number, {"key": text} if text else {}, len(payload))) + payload
        for number, (text, payload, _) in enumerate(messages, start=1)
    )
    parts = [raw[a:b] for a, b in pairwise(sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)}))]
    with pair() as (ours, stream):

        def send() -> None:
            for part in parts:
                ours.sendall(part)
            ours.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        for number, (text, payload, skipped) in enumerate(messages, start=1):
            header, meta = stream.receive()
            assert (header.request, header.payload_bytes) == (number, len(payload))
            assert meta == ({"key": text} if text else {})
            if skipped:
                stream.skip(len(payload))
                continue
            got = bytearray(len(payload))
            stream.receive_into(memoryview(got))
            assert got == payload
        with pytest.raises(PeerClosedError, match=r"^the peer closed the connection$"):
            stream.receive()
        sender.join(30)


@pytest.mark.parametrize("left", [1, 39, 41, 60, 5000])
def test_an_end_in_the_middle_of_a_frame_is_called_that(left: int) -> None:
    raw = pack(Frame(Kind.PUSH, 1, {"key": "x" * 30}, 8000)) + bytes(8000)
    with pair() as (ours, stream):
        ours.sendall(raw + raw[:left])
        ours.shutdown(socket.SHUT_WR)
        stream.receive()
        stream.skip(8000)

        def second() -> None:
            stream.skip(stream.receive()[0].payload_bytes)

        with pytest.raises(PeerClosedError, match="in the middle of a frame"):
            second()


def test_a_frame_whose_json_goes_on_is_refused() -> None:
    meta = b'{"key":"w"}'
    frame = pack(Frame(Kind.PULL, 1, {"key": "w"})).replace(meta, meta + b"{}").replace(b"\x0b", b"\x0d", 1)
    with pair() as (ours, stream):
        ours.sendall(frame)
        with pytest.raises(FrameError, match="2 characters follow"):
            stream.receive()


class Clock:
    """A process that sleeps a tenth longer than it asks for, and needs a moment for everything it sends."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1.1 * seconds


@contextmanager
def paced(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[Callable[..., float]]:
    """How to send 500 bytes on a line of 1000 bytes per second; returns when they have left."""
    monkeypatch.setenv("SPRINGTIDE_PS_PACE", "1000")
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))

    with pair() as (_, stream):

        def send(since: float = math.inf) -> float:
            stream.send(Frame(Kind.PUSH, 1, {}, 500), memoryview(bytes(500)), since)
            arrived, clock.now = clock.now, clock.now + 0.01
            return arrived

        yield send


def test_what_waits_for_a_paced_line_follows_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with paced(monkeypatch, clock) as send:
        arrived = [send(since=100.0) for _ in range(20)]
    # 500 bytes at 1000 bytes per second: as late as it sleeps too long, once and not each time.
    assert all(0.5 * n <= at - 100.0 <= 0.5 * n + 0.05 for n, at in enumerate(arrived, start=1))


def test_a_paced_line_that_is_free_begins_when_something_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with paced(monkeypatch, clock) as send:
        send(since=100.0)
        clock.now = 110.0
        # It could have left earlier than it did, when the line was free: that is not made up for.
        assert send(since=109.0) >= 110.5
        begins = clock.now
        assert send() >= begins + 0.5


def test_version_of_frames_changes_with_the_protocols() -> None:
    """The operator knows of pods only the protocol's, and gives servers another release's image by it."""
    assert {2: 3}[PROTOCOL_VERSION] == VERSION, "raise PROTOCOL_VERSION, too, and write the pair here"

"""Lifelines at the coordinator: only the orderly end of a claimed one means that a process has ended."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from springtide_coordinator import lifelines
from springtide_coordinator.lifelines import Lifelines
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.lifeline import KEY_BYTES

SECONDS = 30.0


class Room:
    """Lifelines that listen, and the streams whose processes have ended."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self._seen = asyncio.Event()
        self.lines = Lifelines(self._see, "127.0.0.1")
        self._open: list[asyncio.StreamWriter] = []

    def _see(self, session: int, member: str) -> None:
        assert member == f"w{session}"
        self.ended.append(session)
        self._seen.set()

    async def until_one_ends(self) -> list[int]:
        """Return the streams whose processes have ended, once there is one, and a moment later."""
        async with asyncio.timeout(SECONDS):
            await self._seen.wait()
        await asyncio.sleep(0.05)
        return self.ended

    def announce(self, session: int) -> pb.Lifeline:
        told = self.lines.announce(session, f"w{session}")
        assert told is not None
        return told

    async def connect(
        self, port: int, says: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self._open.append(writer)
        writer.write(says)
        await writer.drain()
        return reader, writer

    def close(self) -> None:
        self.lines.close()
        for writer in self._open:
            writer.close()


@asynccontextmanager
async def listening() -> AsyncIterator[Room]:
    room = Room()
    await room.lines.listen("127.0.0.1")
    try:
        yield room
    finally:
        room.close()


async def is_cut(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(SECONDS):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a broken network does, with RST."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def test_only_an_orderly_end_means_that_a_process_ended() -> None:
    async def run() -> None:
        async with listening() as room:
            told = [room.announce(session) for session in (1, 2, 3)]
            lines = [await room.connect(each.port, each.key) for each in told]
            await asyncio.sleep(0.05)
            assert room.ended == []
            reset(lines[0][1])
            lines[1][1].close()
            assert await room.until_one_ends() == [2]

    asyncio.run(run())


def test_a_key_counts_once_and_in_pieces() -> None:
    async def run() -> None:
        async with listening() as room:
            told = room.announce(1)
            _, writer = await room.connect(told.port, told.key[:5])
            await asyncio.sleep(0.05)
            writer.write(told.key[5:])
            await asyncio.sleep(0.05)
            again, _ = await room.connect(told.port, told.key)
            assert await is_cut(again)
            assert room.ended == []
            writer.close()
            assert await room.until_one_ends() == [1]

    asyncio.run(run())


@pytest.mark.parametrize("says", [b"x" * KEY_BYTES, b"GET / HTTP/1.1\r\n\r\n", b""])
def test_strangers_are_cut_off_and_end_nobody(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines, "GUEST_SECONDS", 0.1)

    async def run() -> None:
        async with listening() as room:
            reader, _ = await room.connect(room.announce(1).port, says)
            assert await is_cut(reader)
            assert room.ended == []

    asyncio.run(run())


def test_whoever_says_more_than_the_key_is_cut_off() -> None:
    async def run() -> None:
        async with listening() as room:
            told = room.announce(1)
            reader, writer = await room.connect(told.port, told.key)
            await asyncio.sleep(0.05)
            writer.write(b"more")
            assert await is_cut(reader)
            assert room.ended == [], "it may be anybody's, and the stream tells of the process"

    asyncio.run(run())


def test_the_oldest_guest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines, "MAX_GUESTS", 4)

    async def run() -> None:
        async with listening() as room:
            told = room.announce(1)
            guests = [await room.connect(told.port) for _ in range(5)]
            assert await is_cut(guests[0][0])
            _, writer = await room.connect(told.port, told.key)
            await asyncio.sleep(0.05)
            writer.close()
            assert await room.until_one_ends() == [1]

    asyncio.run(run())


def test_a_stream_that_ended_has_no_lifeline() -> None:
    async def run() -> None:
        async with listening() as room:
            first, second = room.announce(1), room.announce(2)
            reader, _ = await room.connect(first.port, first.key)
            await asyncio.sleep(0.05)
            for session in (1, 2, 3):
                room.lines.drop(session)
            assert await is_cut(reader)
            late, _ = await room.connect(second.port, second.key)
            assert await is_cut(late)
            assert room.ended == []

    asyncio.run(run())


def test_none_is_announced_while_nobody_listens() -> None:
    assert Lifelines(print).announce(1, "w1") is None

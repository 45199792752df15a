"""Chunks that are read in parts, each as it was at one moment, while they change. PURE.

A reading begins with what a chunk is then. Before the chunk changes, what nobody has read of it yet is
copied; the parts that follow come from the copy. Readings that begin between the same two changes share it.

Threads and locks: threads that send copies or answer readers begin and take; any thread that changes a chunk
calls `before` first. The caller holds the lock of the chunk that it hands in, which orders the reads of that
chunk against its changes; `_lock` is taken inside of it, and guards which reads there are.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from springtide_ps.params.chunk import Chunk
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.server.step_protocol import StepProtocolError
from springtide_ps.wire.frames import PAYLOAD_LIMIT

READER_SECONDS: Final = 900.0
CHUNK_READS_LIMIT: Final = 1024


@dataclass(frozen=True, slots=True)
class CopyOnWriteBlock:
    """Hold a copy of a chunk's dump from byte `first` on; `about` is the dump's JSON."""

    about: dict[str, Any]
    block: torch.Tensor
    first: int = 0

    @property
    def total(self) -> int:
        """Return the bytes of the whole dump."""
        return self.first + self.block.nbytes

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes of the dump.

        Args:
            start: number of the first byte, which is not before `first`.
            stop: number of the byte after the last.

        Returns:
            uint8 [stop - start].
        """
        return self.block[start - self.first : stop - self.first]


def keep(chunk: Chunk | Slice, first: int = 0) -> CopyOnWriteBlock:
    """Return a copy of a chunk's dump from a byte on.

    Args:
        chunk: to be copied.
        first: number of the first byte.
    """
    if isinstance(chunk, Slice):
        return CopyOnWriteBlock(chunk.about(), chunk.memory(first, chunk.dumped_bytes), first)
    about, block = chunk.dump()
    return CopyOnWriteBlock(about, block[first:], first)


def part_of(chunk: Chunk | Slice, start: int, most: int | None) -> tuple[dict[str, Any], torch.Tensor, int]:
    """Return a part of a chunk's dump.

    Args:
        chunk: the chunk or slice.
        start: number of the first byte.
        most: bytes at most; None: all that follow.

    Returns:
        The dump's JSON, the bytes, and how many bytes the whole dump has.

    Raises:
        StepProtocolError: the dump ends before `start`, or more is asked for than fits an answer.
    """
    if not isinstance(chunk, Slice):
        kept = keep(chunk)
        return kept.about, kept.part(start, _stop(start, most, kept.total)), kept.total
    total = chunk.dumped_bytes
    return chunk.about(), chunk.memory(start, _stop(start, most, total)), total


def part_of_block(
    kept: CopyOnWriteBlock, start: int, most: int | None
) -> tuple[dict[str, Any], torch.Tensor, int]:
    """Return a part of a dump that was copied; errors are those of `part_of`.

    Args:
        kept: the copy.
        start: number of the first byte.
        most: bytes at most; None: all that follow.

    Returns:
        The dump's JSON, the bytes, and how many bytes the whole dump has.
    """
    return kept.about, kept.part(start, _stop(start, most, kept.total)), kept.total


def _stop(start: int, most: int | None, total: int) -> int:
    if start > total:
        raise StepProtocolError(f"a chunk has {total} bytes, and those from {start} on are asked for")
    if most is None and total - start > PAYLOAD_LIMIT:
        raise StepProtocolError(
            f"a chunk has {total} bytes, and {PAYLOAD_LIMIT} fit an answer: ask for it in parts"
        )
    return total if most is None else min(total, start + most)


@dataclass(slots=True, eq=False)
class _Moment:
    """Keep what a chunk was at one moment, for the readings that began then.

    Attributes:
        since: when it was last read, in seconds on the reader's clock.
        read: by reading, how many bytes it has.
        copied: the copy; None while the chunk has not changed.
    """

    since: float
    read: dict[int, int] = field(default_factory=dict)
    copied: CopyOnWriteBlock | None = None


class SnapshotReader:
    """Read chunks in parts, each as it was when its reading began.

    The caller holds the lock that keeps a chunk from changing when it hands it in.

    Args:
        clock: seconds, to forget readings that nobody goes on with.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._moments: dict[str, list[_Moment]] = {}

    @property
    def nbytes(self) -> int:
        """Return the memory of all copies."""
        with self._lock:
            every = [moment for moments in self._moments.values() for moment in moments]
        return sum(moment.copied.block.nbytes for moment in every if moment.copied is not None)

    def begin(self, key: str) -> int:
        """Begin to read a chunk as it is now, and return the reading's number.

        Raises:
            StepProtocolError: there are too many readings.
        """
        with self._lock:
            self._forget_old()
            if sum(len(m.read) for moments in self._moments.values() for m in moments) >= CHUNK_READS_LIMIT:
                raise StepProtocolError(f"{CHUNK_READS_LIMIT} chunks are being read already")
            moments, number = self._moments.setdefault(key, []), next(self._numbers)
            if not moments or moments[-1].copied is not None:
                moments.append(_Moment(self._clock()))
            moments[-1].read[number] = 0
            return number

    def take(
        self, number: int, key: str, chunk: Chunk | Slice | None, at: int, most: int
    ) -> tuple[dict[str, Any], torch.Tensor, int]:
        """Return the next part of the chunk as it was; after the last one the reading is over.

        Args:
            number: of the reading.
            key: of the chunk.
            chunk: as it is now; None: it is not here any more.
            at: number of the first byte, which the reading must have come to.
            most: bytes at most.

        Returns:
            The dump's JSON, the bytes, and how many bytes the whole dump has.

        Raises:
            StepProtocolError: the reading is not kept, or has not come to `at`.
        """
        with self._lock:
            moment = next((m for m in self._moments.get(key, []) if number in m.read), None)
            if moment is None or (chunk is None and moment.copied is None):
                raise StepProtocolError(f"what was begun to be read of {key!r} is not kept here any more")
            if moment.read[number] != at:
                raise StepProtocolError(
                    f"{key!r} is read in order: byte {moment.read[number]} is next, not {at}"
                )
            kept = moment.copied
        if kept is not None:
            found = part_of_block(kept, at, most)
        else:
            assert chunk is not None
            found = part_of(chunk, at, most)
        with self._lock:
            moment.read[number] = at + found[1].nbytes
            moment.since = self._clock()
        if moment.read[number] == found[2]:
            self.end(number)
        return found

    def before(self, key: str, chunk: Chunk | Slice) -> None:
        """Copy the unread rest of a chunk that is about to change, or to go.

        Args:
            key: the chunk's.
            chunk: as it is now.
        """
        with self._lock:
            self._forget_old()
            moments = self._moments.get(key)
            if not moments or moments[-1].copied is not None:
                return
            newest, first = moments[-1], min(moments[-1].read.values())
        newest.copied = keep(chunk, first)

    def end(self, number: int) -> None:
        """End a reading, and forget its copy if no other one needs it."""
        with self._lock:
            for moments in self._moments.values():
                for moment in moments:
                    moment.read.pop(number, None)
            self._forget_old()

    def clear(self) -> None:
        """End all readings."""
        with self._lock:
            self._moments = {}

    def _forget_old(self) -> None:
        oldest = self._clock() - READER_SECONDS
        for key, moments in list(self._moments.items()):
            self._moments[key] = [m for m in moments if m.read and m.since >= oldest]
            if not self._moments[key]:
                del self._moments[key]

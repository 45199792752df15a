"""The bytes of a state as pieces: how they are cut, who sends which, and where they lie in memory.

Both ends compute the plan from the header alone. A piece is one stretch of a large tensor, which travels out
of the sender's memory and into the receiver's without a copy between, or several small tensors, which are
gathered in a room of a few MiB. So are the pieces of tensors on a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from springtide.comm import codec

MOST_PIECE_BYTES = 16 << 20
LEAST_PIECE_BYTES = 64 << 10
_PIECES = 32
"""Bounds of the number of pieces that a state is cut into: members pass pieces on while the next ones come.
"""
MOST_GATHERED_BYTES = 4 << 20
_SMALL = 8
"""A tensor of less than this part of a piece travels together with others."""
_GLANCE_BYTES = 4096
_COLUMNS = 1024
_ROW_BYTES = 8 * _COLUMNS
_BLOCK_ROWS = 64  # half a MiB
_STEP = 64
"""Large tensors are cut at multiples of it, in bytes, so that each part is aligned."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes start..stop-1 of a tensor, by its number."""

    tensor: int
    start: int
    stop: int


Piece = tuple[Part, ...]


def piece_size(total: int) -> int:
    """Return the most bytes of a piece of `total` bytes."""
    wanted = -(-total // (_PIECES * _STEP)) * _STEP
    return max(LEAST_PIECE_BYTES, min(MOST_PIECE_BYTES, wanted))


def length(piece: Piece) -> int:
    """Return the bytes of a piece."""
    return sum(part.stop - part.start for part in piece)


def into_pieces(sizes: Sequence[int], spread: Sequence[bool], most: int) -> tuple[list[Piece], list[bool]]:
    """Cut the bytes of tensors into pieces.

    Args:
        sizes: bytes of each tensor.
        spread: by tensor, whether any holder may send it.
        most: bytes of a piece, at most.

    Returns:
        The pieces, each byte in one of them; and by piece, whether any holder may send it.
    """
    pieces: list[Piece] = []
    free: list[bool] = []
    gathered: dict[bool, list[Part]] = {True: [], False: []}

    def close(anybody: bool) -> None:
        if gathered[anybody]:
            pieces.append(tuple(gathered[anybody]))
            free.append(anybody)
            gathered[anybody] = []

    for number, (size, anybody) in enumerate(zip(sizes, spread, strict=True)):
        if size * _SMALL >= most:
            count = -(-size // most)
            step = -(-size // (count * _STEP)) * _STEP
            for start in range(0, size, step):
                pieces.append((Part(number, start, min(size, start + step)),))
                free.append(anybody)
        elif size:
            if length(tuple(gathered[anybody])) + size > min(most, MOST_GATHERED_BYTES):
                close(anybody)
            gathered[anybody].append(Part(number, 0, size))
    close(True)
    close(False)
    return pieces, free


def assign(lengths: Sequence[int], free: Sequence[bool], senders: int) -> list[int]:
    """Return by piece which sender has it, from 0: about as many bytes each.

    Args:
        lengths: bytes of each piece.
        free: by piece, whether any may send it; the first one sends the others.
        senders: their number.
    """
    loads = [0] * senders
    loads[0] = sum(size for size, anybody in zip(lengths, free, strict=True) if not anybody)
    owners = []
    for size, anybody in zip(lengths, free, strict=True):
        owner = min(range(senders), key=loads.__getitem__) if anybody else 0
        loads[owner] += size if anybody else 0
        owners.append(owner)
    return owners


def schedule(owners: Sequence[int]) -> list[int]:
    """Return the numbers of the pieces in the order in which all members handle them.

    Each sender's pieces are spread over the whole time, so that all send from the first to the last moment.
    """
    counts: dict[int, int] = {}
    for owner in owners:
        counts[owner] = counts.get(owner, 0) + 1
    seen = dict.fromkeys(counts, 0)
    places = []
    for number, owner in enumerate(owners):
        seen[owner] += 1
        places.append((seen[owner] / counts[owner], owner, number))
    return [number for *_, number in sorted(places)]


def checksum(data: torch.Tensor) -> int:
    """Return 64 bits that tell bytes apart: of sums over the rows and the columns of a matrix of its words.

    Sums run at the speed of memory, three times as fast as CRC-32. Rows and columns together see words that
    were exchanged; a difference of one word always shows.

    Args:
        data: contiguous uint8 on the CPU.
    """
    whole = data.numel() // _ROW_BYTES * _ROW_BYTES
    digest = hashlib.blake2b(data[whole:].numpy().tobytes(), digest_size=8)
    if whole:
        if data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0:
            columns, rows = _word_sums(data[:whole].view(torch.int64).view(-1, _COLUMNS))
        else:
            words = data[:whole].numpy().view(np.uint64).reshape(-1, _COLUMNS)
            columns, rows = (words.sum(axis=axis, dtype=np.uint64) for axis in (0, 1))
        digest.update(columns.tobytes())
        digest.update(rows.tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def _word_sums(words: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of a matrix's columns and of its rows, int64, which wrap around.

    Block by block, so that the second reading of a word finds it in the processor's cache.

    Args:
        words: int64 [n, _COLUMNS], contiguous, on the CPU.
    """
    if len(words) <= _BLOCK_ROWS:
        return words.sum(0).numpy(), words.sum(1).numpy()
    columns = torch.zeros(_COLUMNS, dtype=torch.int64)
    rows = torch.empty(len(words), dtype=torch.int64)
    for begin in range(0, len(words), _BLOCK_ROWS):
        block = words[begin : begin + _BLOCK_ROWS]
        columns += block.sum(0)
        torch.sum(block, 1, out=rows[begin : begin + _BLOCK_ROWS])
    return columns.numpy(), rows.numpy()


class PieceMemory:
    """Pieces in the memory of tensors, on whatever device each is."""

    def __init__(self, tensors: Sequence[torch.Tensor | None], pieces: Sequence[Piece]) -> None:
        """Make it for one side of a transfer.

        Args:
            tensors: contiguous; None where there is no such tensor here.
            pieces: of `into_pieces`.
        """
        self._bytes = [None if item is None else codec.as_bytes(item.detach()) for item in tensors]
        self._pieces = pieces

    def has(self, number: int) -> bool:
        """Whether there is memory for the whole piece."""
        return all(self._bytes[part.tensor] is not None for part in self._pieces[number])

    def direct(self, number: int) -> torch.Tensor | None:
        """Return the piece's own memory, if it is one stretch of the host's; uint8."""
        if len(self._pieces[number]) > 1:
            return None
        data = self._part(self._pieces[number][0])
        return data if data.device.type == "cpu" else None

    def gather(self, number: int, room: torch.Tensor) -> torch.Tensor:
        """Copy a piece into a room.

        Args:
            number: of the piece.
            room: uint8, one-dimensional, of the host's, at least as long as the piece.

        Returns:
            The part of the room that the piece takes.
        """
        end = 0
        for part in self._pieces[number]:
            room[end : end + part.stop - part.start].copy_(self._part(part))
            end += part.stop - part.start
        return room[:end]

    def scatter(self, number: int, data: torch.Tensor) -> None:
        """Copy a piece from the host's memory to where it belongs.

        Args:
            number: of the piece.
            data: uint8, one-dimensional, as long as the piece.
        """
        end = 0
        for part in self._pieces[number]:
            self._part(part).copy_(data[end : end + part.stop - part.start])
            end += part.stop - part.start

    def glance(self, number: int) -> int:
        """Return 64 bits of the piece's first bytes: where they differ, the piece does."""
        first = self._pieces[number][0]
        some = self._part(Part(first.tensor, first.start, min(first.stop, first.start + _GLANCE_BYTES)))
        digest = hashlib.blake2b(some.cpu().numpy().tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def checksum(self, number: int, rooms: Rooms) -> int:
        """Return the checksum of a piece as it is in memory now.

        Args:
            number: of the piece.
            rooms: lend memory for a piece that does not lie there in one stretch.
        """
        if (data := self.direct(number)) is not None:
            return checksum(data)
        room = rooms.take(length(self._pieces[number]))
        try:
            return checksum(self.gather(number, room))
        finally:
            rooms.give(room)

    def parts(self, numbers: Sequence[int]) -> Iterator[Part]:
        """Yield the parts of these pieces."""
        for number in numbers:
            yield from self._pieces[number]

    def _part(self, part: Part) -> torch.Tensor:
        found = self._bytes[part.tensor]
        assert found is not None
        return found[part.start : part.stop]


class Rooms:
    """Memory of the host's for pieces that are gathered: a few rooms, made when they are first needed."""

    def __init__(self, pinned: bool, make: Callable[..., torch.Tensor] = torch.empty) -> None:
        """pinned: a device copies from and to them."""
        self._pinned, self._make = pinned, make
        self._free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """Return a room of at least `size` bytes that nobody else uses until `give`."""
        for at, room in enumerate(self._free):
            if room.numel() >= size:
                return self._free.pop(at)
        return self._make(size, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, room: torch.Tensor) -> None:
        """Let others use the room."""
        self._free.append(room)

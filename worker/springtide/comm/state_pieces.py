"""The committed state as pieces of bytes: cut where it is sent, kept where it comes in.

The packed stream of `codec` is cut into pieces of one size, each with a CRC-32. What has come of a state
outlives the generation in which it came: the next one, which may have another sender, asks only for the
pieces that are missing or whose checksums differ from the new sender's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch

from springtide.comm import codec

MOST_PIECE_BYTES = 8 << 20
LEAST_PIECE_BYTES = 64 << 10
_PIECES = 32
"""As many pieces a state is cut into within these bounds: members pass pieces on while the next ones come."""


def piece_size(total: int) -> int:
    """Bytes of each piece (the last one: at most) of `total` bytes."""
    return max(LEAST_PIECE_BYTES, min(MOST_PIECE_BYTES, -(-total // _PIECES)))


def checksum(piece: torch.Tensor) -> int:
    """CRC-32 of contiguous uint8 memory."""
    return zlib.crc32(piece.numpy().data)


class OutgoingState:
    """The packed bytes of a tree, without a copy of it.

    tensors: of `codec.flatten`; they do not change while this is used.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        stream = list(_packed(tensors))
        self.total = sum(part.numel() for part in stream)
        self.size = piece_size(self.total)
        self._pieces = list(_cut(stream, self.size))

    def __len__(self) -> int:
        return len(self._pieces)

    def length(self, number: int) -> int:
        """Bytes of a piece."""
        return sum(part.numel() for part in self._pieces[number])

    def gather(self, number: int, target: torch.Tensor) -> torch.Tensor:
        """Copy a piece into `target` (uint8, at least `size`); return the part of it that it takes."""
        offset = 0
        for part in self._pieces[number]:
            target[offset : offset + part.numel()] = part
            offset += part.numel()
        return target[:offset]

    def checksums(self, count: int) -> list[int]:
        """Of the first `count` pieces."""
        room = torch.empty(self.size, dtype=torch.uint8)
        return [checksum(self.gather(number, room)) for number in range(min(count, len(self)))]


class Incoming:
    """The pieces of one state that are here, checked or not, in a buffer of their own."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._layout: list[codec.TensorSpec] | None = None
        self._size = 0
        self._sums: list[int | None] = []

    def __len__(self) -> int:
        return len(self._sums)

    @property
    def reach(self) -> int:
        """How many pieces from the front hold all that are here."""
        return max((number + 1 for number, known in enumerate(self._sums) if known is not None), default=0)

    @property
    def missing(self) -> list[int]:
        return [number for number, known in enumerate(self._sums) if known is None]

    def bytes_here(self) -> int:
        return sum(self.piece(n).numel() for n, known in enumerate(self._sums) if known is not None)

    def open(self, layout: list[codec.TensorSpec], size: int) -> None:
        """A sender announces tensors of this layout in pieces of `size` bytes.

        What is here stays if it is of the same layout and size.
        """
        if (layout, size) == (self._layout, self._size):
            return
        total = codec.packed_size(layout)
        self._layout, self._size = layout, size
        self.buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
        self.buffer = torch.empty(total, dtype=torch.uint8)
        self._sums = [None] * -(-total // size)

    def move(self) -> None:
        """Take other memory: something may still write into the pieces that are missing."""
        self.buffer = self.buffer.clone()

    def compare(self, theirs: Sequence[int]) -> None:
        """Keep of what is here the pieces with the sender's checksums; theirs: of the first pieces."""
        for number, mine in enumerate(self._sums):
            if number >= len(theirs) or mine != theirs[number]:
                self._sums[number] = None

    def piece(self, number: int) -> torch.Tensor:
        """Where the piece is, or comes to."""
        return self.buffer[number * self._size : (number + 1) * self._size]

    def arrived(self, number: int) -> None:
        """The piece has been filled."""
        self._sums[number] = checksum(self.piece(number))

    def check(self, theirs: Sequence[int]) -> None:
        """Raise ValueError unless all pieces have the sender's checksums; those that differ are forgotten."""
        wrong = [number for number, mine in enumerate(self._sums) if mine != theirs[number]]
        for number in wrong:
            self._sums[number] = None
        if wrong:
            raise ValueError(
                f"state transfer: the checksum of piece {wrong[0]} is wrong ({len(wrong)} of {len(self)} "
                "are); it is sent again"
            )


def _packed(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of `codec.pack` without the copy: the tensors' own memory, with padding between."""
    padding = torch.zeros(codec.ALIGNMENT, dtype=torch.uint8)
    end = 0
    for tensor in tensors:
        if gap := -end % codec.ALIGNMENT:
            yield padding[:gap]
        raw = codec.as_bytes(tensor)
        yield raw
        end += gap + raw.numel()


def _cut(stream: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Cut the concatenation of byte tensors into pieces of `size` (the last one shorter), as lists of
    views.
    """
    piece: list[torch.Tensor] = []
    room = size
    for part in stream:
        offset = 0
        while offset < part.numel():
            taken = min(room, part.numel() - offset)
            piece.append(part[offset : offset + taken])
            offset += taken
            room -= taken
            if room == 0:
                yield piece
                piece, room = [], size
    if piece:
        yield piece

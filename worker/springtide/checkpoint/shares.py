"""Division of a checkpoint's writing: the tensors of a state, split into shares of equal size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The launcher reads of shares, too, and imports no torch.
    from springtide.comm.codec import TensorSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements start..stop-1 of tensor number `tensor`, in memory order."""

    tensor: int
    start: int
    stop: int

    @property
    def key(self) -> str:
        """The piece's name in a file: TENSOR.START."""
        return f"{self.tensor:06d}.{self.start}"


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of the state a member writes. attempt: part of the files' names, "" or begins with a dash.

    members: who writes the shares, in their order, for people.
    """

    index: int
    members: tuple[str, ...]
    attempt: str = ""

    @property
    def count(self) -> int:
        return len(self.members)


def split(
    specs: Sequence[TensorSpec], index: int, count: int, numbers: Sequence[int] | None = None
) -> list[Piece]:
    """Return share `index` of `count`: together they are every element once.

    Sizes differ by less than an element of the widest type.

    Args:
        specs: of all tensors.
        index: of the share, from 0.
        count: of shares.
        numbers: of the tensors that are cut; None: all of them.

    Raises:
        ValueError: there is no such share.
    """
    if not 0 <= index < count:
        raise ValueError(f"share {index} of {count}")
    numbers = range(len(specs)) if numbers is None else numbers
    total = sum(specs[number].nbytes for number in numbers)
    begin, end = total * index // count, total * (index + 1) // count
    pieces, offset = [], 0
    for number in numbers:
        spec = specs[number]
        size = spec.dtype.itemsize
        start = min(max(begin - offset, 0), spec.nbytes) // size
        stop = min(max(end - offset, 0), spec.nbytes) // size
        if start < stop:
            pieces.append(Piece(number, start, stop))
        offset += spec.nbytes
    # The widest first, so that every piece of a file is aligned.
    return sorted(pieces, key=lambda piece: (-specs[piece.tensor].dtype.itemsize, piece.tensor))


def parse_key(key: str) -> tuple[int, int]:
    """(tensor, start) of a piece's name. Raise ValueError."""
    number, dot, start = key.partition(".")
    if not (dot and number.isdecimal() and start.isdecimal()):
        raise ValueError(f"{key!r} is no name of a piece")
    return int(number), int(start)


def missing(specs: Sequence[TensorSpec], pieces: Sequence[Piece]) -> str:
    """Return which tensor is not there exactly once.

    Args:
        specs: shape and dtype of the state's tensors, by their numbers.
        pieces: of all shares, in any order.

    Returns:
        The first problem as a text; "" when the pieces are the whole state.
    """
    by_tensor: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    for number, spec in enumerate(specs):
        elements, at = spec.nbytes // spec.dtype.itemsize, 0
        for piece in sorted(by_tensor.pop(number, []), key=lambda piece: piece.start):
            if piece.start != at or piece.stop > elements:
                break
            at = piece.stop
        else:
            if at == elements:
                continue
        return f"tensor {number} is not whole: elements from {at} on are missing or there twice"
    return f"there are pieces of unknown tensors: {sorted(by_tensor)[:5]}" if by_tensor else ""


def layout(specs: Sequence[TensorSpec], frozen: Sequence[int] = ()) -> str:
    """Return what members must agree on before their shares fit together, as 16 hex digits.

    Args:
        specs: types and shapes of all tensors.
        frozen: numbers of those that do not train.
    """
    text = ";".join(f"{spec.dtype}{tuple(spec.shape)}" for spec in specs)
    if frozen:
        text += f" without {list(frozen)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]

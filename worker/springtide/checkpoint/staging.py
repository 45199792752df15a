"""The copy that a step waits for: a member's share of the state, in memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from springtide.checkpoint import shares
from springtide.checkpoint.shares import Piece, Share
from springtide.comm import codec
from springtide_protocol.names import StateName


class GoneError(Exception):
    """A part of the state cannot be had any more; the text says which, and why."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A share of a tree. header: of the tree (codec); memory: uint8, the pieces one by one."""

    header: bytes
    specs: list[codec.TensorSpec]
    pieces: list[Piece]
    memory: torch.Tensor


class Elsewhere(Protocol):
    """A part of the state that is not in this process, as it was when it was asked for. For the writing
    thread.

    kind: of the processes that hold it.
    """

    kind: str

    def collect(self, index: int, count: int) -> Collected:
        """Share `index` of `count`. Raise GoneError."""
        ...

    def close(self) -> None:
        """It is not needed any more."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What the writing thread needs. own: this member's share of the workers' state. elsewhere: what others
    hold.
    """

    state: StateName
    share: Share
    reason: str
    own: Collected
    elsewhere: Elsewhere | None = None
    seconds: float = 0.0


class Stage:
    """The memory, kept from one checkpoint to the next: one staged share at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, tree: Any, share: Share) -> Collected:
        """Copy the own share. Raise TypeError for a state that cannot be encoded, with the place."""
        header, tensors = codec.flatten(tree, move=False)
        specs = specs_of(tensors)
        pieces = shares.cut(specs, share.index, share.count)
        sizes = [(piece.stop - piece.start) * specs[piece.tensor].dtype.itemsize for piece in pieces]
        total = sum(sizes)
        if self._memory.numel() < total:
            self._memory = torch.empty(total, dtype=torch.uint8)
        offset = 0
        for piece, size in zip(pieces, sizes, strict=True):
            part = tensors[piece.tensor].reshape(-1)[piece.start : piece.stop]
            self._memory[offset : offset + size].copy_(part.view(torch.uint8))
            offset += size
        return Collected(header, specs, pieces, self._memory[:total])


def specs_of(tensors: Sequence[torch.Tensor]) -> list[codec.TensorSpec]:
    """Types and shapes; offsets are not used."""
    return [
        codec.TensorSpec(tensor.dtype, tuple(tensor.shape), 0, tensor.numel() * tensor.element_size())
        for tensor in tensors
    ]

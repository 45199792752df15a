"""Parameters that do not train, in blocks: each is written once, and later checkpoints refer to its file.

Blocks are cut by the state's layout alone, so that they are the same for any number of members, and a file's
name is the hash of what is in it: whoever has to save a block that a file is there for saves nothing. Whether
a block is what it was is asked of its bytes each time, on the device where they lie. A tensor's version would
say nothing: changes through `.data`, as scripts make them for averaged teachers, do not count in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from springtide.checkpoint import files, shares
from springtide.checkpoint.manifest import File
from springtide.checkpoint.shares import Piece, Share
from springtide.comm.codec import TensorSpec
from springtide.data.mixing import MASK_64, mix, mix_tensor

BLOCK_BYTES = 64 << 20
MAX_BLOCKS = 4096
_ROW = 1 << 16


@dataclass(frozen=True, slots=True)
class Block:
    """A block as a checkpoint takes it. head: of its file.

    memory: its bytes, where they have to be saved. file: where they are already. note: takes the file when it
    is whole, and None when there is none after all.
    """

    head: bytes
    memory: torch.Tensor | None
    file: File | None
    note: Callable[[File | None], None]


class FrozenBlocks:
    """The blocks that this member has to save, and what is known of their files."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[int, File]] = {}

    def take(
        self,
        specs: Sequence[TensorSpec],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[int],
        share: Share,
    ) -> list[Block]:
        """Return this member's blocks, with a copy of those that are not known to be saved.

        Args:
            specs: of all tensors of the state.
            tensors: the same, contiguous, on any device.
            numbers: of those that do not train.
            share: whose blocks.
        """
        found: list[Block] = []
        known: dict[bytes, tuple[int, File]] = {}
        for pieces in blocks_of(specs, numbers, share):
            head = files.header(pieces, specs)
            parts = [
                tensors[piece.tensor].reshape(-1)[piece.start : piece.stop].view(torch.uint8)
                for piece in pieces
            ]
            value = fingerprint(parts)
            note = partial(self._note, head, value)
            if head in self._known and self._known[head][0] == value:
                known[head] = self._known[head]
                found.append(Block(head, None, known[head][1], note))
            else:
                memory = torch.cat([part.cpu() for part in parts])
                found.append(Block(head, memory, None, note))
        self._known = known  # blocks of other members are none of ours any more
        return found

    def _note(self, head: bytes, value: int, file: File | None) -> None:
        if file is None:
            self._known.pop(head, None)
        else:
            self._known[head] = value, file


def blocks_of(specs: Sequence[TensorSpec], numbers: Sequence[int], share: Share) -> list[list[Piece]]:
    """Return the blocks of a member, as pieces of tensors.

    Args:
        specs: of all tensors.
        numbers: of those that do not train; all members together have each of their elements in one block.
        share: of the member.
    """
    total = sum(specs[number].nbytes for number in numbers)
    count = min(MAX_BLOCKS, -(-total // BLOCK_BYTES))
    own = range(count * share.index // share.count, count * (share.index + 1) // share.count)
    cut = [shares.split(specs, index, count, numbers) for index in own]
    return [pieces for pieces in cut if pieces]


def fingerprint(parts: Sequence[torch.Tensor]) -> int:
    """Return a hash of 64 bits of contiguous byte tensors, equal only by a rare chance.

    It is made where they lie, as fast as they can be copied. Each word is multiplied by a number of its own,
    and wraps around: multilinear hashing, Carter and Wegman 1979.
    """
    total = sum(part.numel() for part in parts)
    for part in parts:
        total = (total * 0x9E3779B97F4A7C15 + _hash(part)) & MASK_64
    return total


def _hash(part: torch.Tensor) -> int:
    whole = part.numel() // 8 * 8
    words, rest = part[:whole], part[whole:]
    if words.storage_offset() % 8:
        words = words.clone()  # as words of 8 bytes it cannot be looked at where it lies
    words = words.view(torch.int64)
    rows = words.numel() // _ROW
    factors = _factors(_ROW, part.device)
    sums = [_product(words[: rows * _ROW].view(rows, _ROW), factors) * _factors(rows, part.device)]
    last = words[rows * _ROW :]
    sums.append(_product(last.view(1, -1), factors[: last.numel()]) * -3)
    value = int(torch.cat(sums).sum())
    return value ^ mix(int.from_bytes(bytes(rest.tolist()), "little"), part.numel())


def _product(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return rows @ factors; int64, which the device's own product may not know."""
    if rows.device.type == "cpu":
        return torch.from_numpy(rows.numpy() @ factors.numpy())  # needs no memory for the products
    return (rows * factors).sum(1)


@functools.lru_cache(maxsize=16)
def _factors(count: int, device: torch.device) -> torch.Tensor:
    return mix_tensor(torch.arange(count, device=device)) | 1  # odd: no change of one word is lost

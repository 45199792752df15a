"""The part of a checkpoint that is in shards: the optimizer's state, each element from one worker.

It looks like what parameter servers save, so that a checkpoint is that of a job which shards nothing, and can
be restored by any number of workers, sharded or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from springtide.checkpoint.shares import Piece
from springtide.checkpoint.staging import Collected, specs_of
from springtide.comm import codec
from springtide.comm.layout import Layout
from springtide.sharding.pieces import HeldPieces, Stretch, is_by_element
from springtide.sharding.shard_map import Shard, ShardMap

Description = dict[str, list[Any]]
"""Form of one parameter's state by name: [dtype, "cut" or "one", None] or ["", "plain", the value]."""


@dataclass(frozen=True, slots=True)
class ShardSnapshot:
    """A member's part, in memory of its own.

    Attributes:
        collected: The part, which `collect` returns.
        kind: The name of this part of a checkpoint: releases that know of no shards can read it.
    """

    collected: Collected
    kind: str = "servers"

    def collect(self, index: int, count: int) -> Collected:
        """Return the part, whichever share is asked for: holders write what they hold.

        Args:
            index: Of the share; not used.
            count: Of the shares; not used.
        """
        return self.collected

    def close(self) -> None:
        """Do nothing: the memory goes with the object."""


@dataclass(frozen=True, slots=True)
class WritingPlan:
    """Say which member writes which part.

    Attributes:
        rank: Of this member, in the generation that the state is of.
        writers: Ranks of all that write a part.
        assigned: The holders of each shard.
        positions: By parameter: the place of its state in the checkpoint's tree.
    """

    rank: int
    writers: Collection[int]
    assigned: ShardMap
    positions: Mapping[int, int]

    def writer_of(self, shard: int) -> int:
        """Return the rank that writes a shard: its owner, or its buddy where the owner does not write.

        Raise RuntimeError when neither does.
        """
        for rank in self.assigned.holders(shard):
            if rank in self.writers:
                return rank
        raise RuntimeError(
            f"shard {shard} of the optimizer's state is only at workers that do not write this checkpoint "
            f"(rank {self.assigned.owners[shard]} and {self.assigned.buddies[shard]})"
        )


def describe(held: HeldPieces) -> dict[int, Description]:
    """Return what the state of each parameter looks like whose first element this member holds."""
    found: dict[int, Description] = {}
    for piece in held.pieces:
        if piece.stretch.start or not piece.state:
            continue
        found[piece.stretch.index] = {
            name: _described(value, is_by_element(value, piece.stretch))
            for name, value in piece.state.items()
        }
    return found


def _described(value: Any, by_element: bool) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return ["", "plain", value]
    return [str(value.dtype).removeprefix("torch."), "cut" if by_element else "one", None]


def take_snapshot(
    held: HeldPieces,
    shards: Sequence[Shard],
    layout: Layout,
    writing: WritingPlan,
    described: Mapping[int, Description],
) -> ShardSnapshot:
    """Copy what this member writes of the optimizer's state.

    Args:
        held: The pieces that are here.
        shards: Of the layout.
        layout: Of the parameters.
        writing: Says which member writes which part.
        described: The form of all states, the same at all members that write.

    Returns:
        The part.

    Raises:
        RuntimeError: A shard is held by no member that writes.
    """
    tree, tensors = _outline(layout, writing.positions, described)
    header, flat = codec.flatten(tree, "the optimizer's state in shards", move=False)
    specs, numbers = specs_of(flat), {id(tensor): number for number, tensor in enumerate(flat)}
    mine: list[tuple[Piece, torch.Tensor]] = []
    for number in range(len(shards)):
        if writing.writer_of(number) != writing.rank:
            continue
        for part in held.shard_parts(shards, number):
            mine += [
                (Piece(numbers[id(tensors[part.stretch.index, name])], *span), value)
                for name, value in part.state.items()
                if (span := _span(value, part.stretch)) is not None
            ]
    # The widest first, so that every piece of a file is aligned.
    mine.sort(key=lambda item: (-specs[item[0].tensor].dtype.itemsize, item[0].tensor, item[0].start))
    sizes = [value.nbytes for _, value in mine]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    for (_, value), size, end in zip(mine, sizes, accumulate(sizes), strict=True):
        memory[end - size : end].copy_(value.reshape(-1).view(torch.uint8))
    return ShardSnapshot(Collected(header, specs, [piece for piece, _ in mine], memory))


def _outline(
    layout: Layout, positions: Mapping[int, int], described: Mapping[int, Description]
) -> tuple[dict[str, Any], dict[tuple[int, str], torch.Tensor]]:
    """Return the tree without its numbers, and its tensors by parameter and name. PURE."""
    optimizer: dict[int, dict[str, Any]] = {}
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    for index in sorted(described):
        own: dict[str, Any] = {}
        for name, (dtype, form, value) in described[index].items():
            if form == "plain":
                own[name] = value
                continue
            shape = layout.fields[index].shape if form == "cut" else ()
            own[name] = tensors[index, name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        optimizer[positions[index]] = own
    return {"optimizer": optimizer, "tables": {}}, tensors


def _span(value: Any, stretch: Stretch) -> tuple[int, int] | None:
    """Return the elements of a parameter's tensor that a value is; None where this stretch does not write it.

    A number of the whole parameter is written with its first element.
    """
    if is_by_element(value, stretch):
        return stretch.start, stretch.stop
    return (0, 1) if isinstance(value, torch.Tensor) and not stretch.start else None

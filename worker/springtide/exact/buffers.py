"""Buffers as the parts of a step leave them, combined in logical order.

Each part has started from the committed buffers. In the sum that travels, every logical part has a place of
its own that only one worker writes, so that no order of the workers can show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from springtide.comm.combine import flat_view, is_floating, join_halves, shaped_like, split_halves
from springtide.exact.parts import PartContribution


def pack_parts(
    kept: Sequence[PartContribution], indices: Sequence[int], committed: Sequence[torch.Tensor], logical: int
) -> torch.Tensor:
    """float64 [n] on the CPU: what this worker's parts put into the sum for the buffers `indices`.

    committed: all buffers, for parts that did not move one. logical: the number of logical parts.
    """
    total = torch.zeros(sum(_places(committed[index], logical) for index in indices), dtype=torch.float64)
    own = {part.number: part for part in kept}
    pieces: list[torch.Tensor] = []
    places: list[slice] = []
    offset = 0
    for index in indices:
        floating = is_floating(committed[index])
        count = _places(committed[index], 1)
        for number in range(logical if floating else 1):
            if number in own:
                flat = flat_view(own[number].buffers.get(index, committed[index]))
                pieces.append(flat.to(torch.float64) if floating else split_halves(flat))
                places.append(slice(offset, offset + count))
            offset += count
    if pieces and any(piece.device.type != "cpu" for piece in pieces):
        # One copy for all of them: each one would be waited for.
        pieces = list(torch.split(torch.cat(pieces).cpu(), [piece.numel() for piece in pieces]))
    for place, piece in zip(places, pieces, strict=True):
        total[place] = piece
    return total


def _places(buffer: torch.Tensor, logical: int) -> int:
    """Numbers in the sum for a buffer."""
    count = flat_view(buffer).numel()
    return logical * count if is_floating(buffer) else 2 * count


def unpack_parts(
    total: torch.Tensor, indices: Sequence[int], committed: Sequence[torch.Tensor], weights: Sequence[float]
) -> list[torch.Tensor]:
    """New tensors on the CPU, otherwise like the buffers `indices`, from the sum over the workers.

    weights: by logical part. Floating ones are the mean by weight, added up in logical order in float64;
    integers and booleans are those of part 0.
    """
    divisor = math.fsum(weights)
    combined, offset = [], 0
    for index in indices:
        numel = flat_view(committed[index]).numel()
        if is_floating(committed[index]):
            piece = torch.zeros(numel, dtype=torch.float64)
            for number, weight in enumerate(weights):
                if weight:
                    start = offset + number * numel
                    piece.add_(total[start : start + numel], alpha=weight / divisor)
            offset += len(weights) * numel
        else:
            piece = join_halves(total[offset : offset + 2 * numel])
            offset += 2 * numel
        combined.append(shaped_like(piece, committed[index]))
    return combined

"""Buffers as the parts of a step leave them, combined in logical order.

Each part has started from the committed buffers. In the sum that travels, every logical part has a place of
its own that only one worker writes, so that no order of the workers can show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from springtide.comm.combine import (
    Rule,
    as_numbers,
    extreme,
    flat_view,
    is_floating,
    join_halves,
    shaped_like,
)
from springtide.exact.parts import PartContribution


def pack_parts(
    kept: Sequence[PartContribution],
    indices: Sequence[int],
    committed: Sequence[torch.Tensor],
    rules: Sequence[Rule],
    logical: int,
) -> torch.Tensor:
    """Return what this worker's parts put into the sum of buffers.

    Args:
        kept: this worker's finished parts.
        indices: numbers of the buffers.
        committed: all buffers, as the step found them.
        rules: how each of all buffers is combined.
        logical: the number of logical parts.

    Returns:
        float64 [n] on the CPU.
    """
    total = torch.zeros(
        sum(_numbers(committed[index]) * _places(rules[index], logical) for index in indices),
        dtype=torch.float64,
    )
    own = {part.number: part for part in kept}
    pieces: list[torch.Tensor] = []
    places: list[slice] = []
    offset = 0
    for index in indices:
        count = _numbers(committed[index])
        for number in range(_places(rules[index], logical)):
            if number in own:
                pieces.append(as_numbers(flat_view(own[number].buffers.get(index, committed[index]))))
                places.append(slice(offset, offset + count))
            offset += count
    if pieces and any(piece.device.type != "cpu" for piece in pieces):
        # One copy for all of them: each one would be waited for.
        pieces = list(torch.split(torch.cat(pieces).cpu(), [piece.numel() for piece in pieces]))
    for place, piece in zip(places, pieces, strict=True):
        total[place] = piece
    return total


def _places(rule: Rule, logical: int) -> int:
    """Logical parts whose values are in the sum."""
    return 1 if rule is Rule.FIRST else logical


def _numbers(buffer: torch.Tensor) -> int:
    """Return how many numbers of the sum one part of a buffer takes."""
    return flat_view(buffer).numel() * (1 if is_floating(buffer) else 2)


def unpack_parts(
    total: torch.Tensor,
    indices: Sequence[int],
    committed: Sequence[torch.Tensor],
    rules: Sequence[Rule],
    weights: Sequence[float],
) -> list[torch.Tensor]:
    """Combine buffers from the sum over the workers.

    Means are added up in logical order, in float64.

    Args:
        total: float64 [n], as `pack_parts` lays it out.
        indices: numbers of the buffers.
        committed: all buffers, as the step found them.
        rules: how each of all buffers is combined.
        weights: by logical part; those without any are left out, but for part 0 where it is the first one
            that counts.

    Returns:
        New tensors on the CPU, otherwise like the buffers.
    """
    combined, offset = [], 0
    for index in indices:
        before, rule = committed[index], rules[index]
        count, places = _numbers(before), _places(rule, len(weights))
        rows = total[offset : offset + count * places].view(places, -1)
        offset += count * places
        values = [row if is_floating(before) else join_halves(row) for row in rows]
        combined.append(shaped_like(_combined(values, rule, before, weights), before))
    return combined


def _combined(
    values: Sequence[torch.Tensor], rule: Rule, before: torch.Tensor, weights: Sequence[float]
) -> torch.Tensor:
    if rule is Rule.FIRST:
        return values[0]
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if rule in (Rule.MIN, Rule.MAX):
        return extreme([value for value, _ in counted], rule)
    if rule is Rule.SUM:
        old = flat_view(before).cpu().to(values[0].dtype)
        result = old.clone()
        for value, _ in counted:
            result += value - old
        return result
    divisor = math.fsum(weights)
    result = torch.zeros_like(values[0])
    for value, weight in counted:
        result.add_(value, alpha=weight / divisor)
    return result

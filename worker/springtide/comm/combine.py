"""Buffers that changed in a step, combined over the members by a rule for each of them.

They travel as float64 numbers in one vector that is summed, so that they can ride with the side reduction.
Integers and booleans travel exactly: 64 bits as two numbers of 32.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LOW = 0xFFFF_FFFF


class Rule(enum.StrEnum):
    """Rule by which a buffer that each member has changed in its own way gets one value.

    Attributes:
        MEAN: the average by samples.
        FIRST: the first member's.
        SUM: the changes of all are added up.
        MIN, MAX: the smallest or largest value, by element.
        LOCAL: each member keeps its own.
    """

    MEAN = "mean"
    FIRST = "first"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Share:
    """One member's share in a combined buffer.

    Args:
        weight: number of its samples; with 0 its buffers are ignored, unless it is the first member.
        rank: in the group.
        size: of the group.
    """

    weight: float
    rank: int
    size: int


def pack(
    buffers: Sequence[torch.Tensor],
    rules: Sequence[Rule],
    committed: Sequence[torch.Tensor],
    share: Share,
) -> torch.Tensor:
    """Return what this member puts into the sum; float64 [n] on the CPU.

    Args:
        buffers: as this member's step has left them.
        rules: one for each.
        committed: as the step has found them, alike on all members.
        share: this member's.
    """
    parts = []
    for positions in _side_by_side(buffers, rules):
        first = positions[0]
        if len(positions) > 1:
            own = torch.cat([flat_view(buffers[position]) for position in positions])
            parts.append(_packed(own, rules[first], own, share))
        else:
            parts.append(_packed(buffers[first], rules[first], committed[first], share))
    return torch.cat(parts) if parts else _zeros(0)


def _side_by_side(buffers: Sequence[torch.Tensor], rules: Sequence[Rule]) -> list[list[int]]:
    """Return the positions in the order of the sum; those that are packed by one call are one list.

    A model has hundreds of running statistics: one by one they would cost more than their sum.
    """
    together: dict[tuple[object, ...], list[int]] = {}
    for position, (buffer, rule) in enumerate(zip(buffers, rules, strict=True)):
        alone = position if rule not in (Rule.MEAN, Rule.FIRST) else None
        together.setdefault((rule, alone, buffer.device, buffer.dtype), []).append(position)
    return list(together.values())


def _packed(buffer: torch.Tensor, rule: Rule, before: torch.Tensor, share: Share) -> torch.Tensor:
    own = flat_view(buffer).cpu()
    if rule is Rule.MEAN:
        return own.to(torch.float64) * share.weight if share.weight > 0 else _zeros(own.numel())
    if rule is Rule.SUM:
        if not share.weight > 0:
            return _zeros(own.numel())
        wide = torch.float64 if is_floating(buffer) else torch.int64
        return (own.to(wide) - flat_view(before).cpu().to(wide)).to(torch.float64)
    if rule is Rule.FIRST:
        numbers = as_numbers(own)
        return numbers if share.rank == 0 else torch.zeros_like(numbers)
    # Smallest and largest: each member has a place of its own in the sum.
    numbers = as_numbers(own if share.weight > 0 else flat_view(before).cpu())
    places = _zeros(share.size * numbers.numel()).view(share.size, -1)
    places[share.rank] = numbers
    return places.view(-1)


def unpack(
    total: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    rules: Sequence[Rule],
    committed: Sequence[torch.Tensor],
    total_weight: float,
    size: int,
) -> list[torch.Tensor]:
    """Return new tensors, like the buffers, from the sum over the members.

    Args:
        total: float64 [n], the sum of what the members' `pack` returned.
        buffers: to combine.
        rules: of these buffers.
        committed: values of these buffers before the step.
        total_weight: sum of the members' weights.
        size: of the group.
    """
    combined: dict[int, torch.Tensor] = {}
    offset = 0
    for positions in _side_by_side(buffers, rules):
        chosen = [buffers[position] for position in positions]
        rule, floating, before = rules[positions[0]], is_floating(chosen[0]), committed[positions[0]]
        counts = [flat_view(buffer).numel() for buffer in chosen]
        numbers = sum(counts)
        if rule in (Rule.FIRST, Rule.MIN, Rule.MAX):
            numbers *= 1 if floating else 2
        if rule in (Rule.MIN, Rule.MAX):
            numbers *= size
        piece, offset = total[offset : offset + numbers], offset + numbers
        values = _unpacked(piece, chosen[0], rule, before, total_weight, size)
        combined |= zip(positions, _split(values, chosen, counts), strict=True)
    return [combined[position] for position in range(len(buffers))]


def _split(
    values: torch.Tensor, buffers: Sequence[torch.Tensor], counts: Sequence[int]
) -> list[torch.Tensor]:
    """Cut what lies side by side into tensors like the buffers."""
    if not buffers[0].is_complex():
        values = values.to(buffers[0].dtype)  # at once
    pieces = torch.split(values, list(counts))
    return [shaped_like(piece, buffer) for piece, buffer in zip(pieces, buffers, strict=True)]


def on_device(buffer: torch.Tensor, rule: Rule) -> bool:
    """Tell whether a buffer is summed where it lies (`pack_there`), without a way through the host.

    Args:
        buffer: to combine.
        rule: of the buffer.
    """
    return buffer.device.type != "cpu" and rule in (Rule.MEAN, Rule.FIRST)


def pack_there(buffers: Sequence[torch.Tensor], rules: Sequence[Rule], share: Share) -> list[torch.Tensor]:
    """Return what this member puts into the sums of buffers that lie on a device, for which `on_device` says
    so.

    Floating numbers travel as float32, unless they are wider; integers as int64. Nothing is waited for.

    Args:
        buffers: to combine.
        rules: of these buffers.
        share: this member's rank and weight.

    Returns:
        Flat tensors on the device, in the order of `_side_by_side`.
    """
    parts = []
    for positions in _side_by_side(buffers, rules):
        chosen = [buffers[position] for position in positions]
        flat = torch.cat([flat_view(buffer) for buffer in chosen]).to(_wide(chosen[0]))
        factor = share.weight if rules[positions[0]] is Rule.MEAN else float(share.rank == 0)
        # Not times zero: what does not count may be NaN.
        parts.append((flat if factor == 1 else flat * factor) if factor > 0 else torch.zeros_like(flat))
    return parts


def unpack_there(
    totals: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    rules: Sequence[Rule],
    total_weight: float,
) -> list[torch.Tensor]:
    """Return new tensors, like the buffers, from the sums of what `pack_there` made.

    Args:
        totals: the sums of what the members' `pack_there` returned.
        buffers: to combine.
        rules: of these buffers.
        total_weight: sum of the members' weights.
    """
    combined: dict[int, torch.Tensor] = {}
    for total, positions in zip(totals, _side_by_side(buffers, rules), strict=True):
        chosen = [buffers[position] for position in positions]
        values = total / total_weight if rules[positions[0]] is Rule.MEAN else total
        counts = [flat_view(buffer).numel() for buffer in chosen]
        combined |= zip(positions, _split(values, chosen, counts), strict=True)
    return [combined[position] for position in range(len(buffers))]


def _wide(buffer: torch.Tensor) -> torch.dtype:
    if not is_floating(buffer):
        return torch.int64
    return torch.float64 if flat_view(buffer).dtype == torch.float64 else torch.float32


def _unpacked(
    piece: torch.Tensor,
    buffer: torch.Tensor,
    rule: Rule,
    before: torch.Tensor,
    total_weight: float,
    size: int,
) -> torch.Tensor:
    floating = is_floating(buffer)
    if rule is Rule.MEAN:
        return piece / total_weight
    if rule is Rule.SUM:
        wide = torch.float64 if floating else torch.int64
        return flat_view(before).cpu().to(wide) + piece.to(wide)
    if rule is Rule.FIRST:
        return piece if floating else join_halves(piece)
    rows = [row if floating else join_halves(row) for row in piece.view(size, -1)]
    return extreme(rows, rule)


def extreme(rows: Sequence[torch.Tensor], rule: Rule) -> torch.Tensor:
    """Return the smallest or largest by element; a NaN of any row stays one.

    Args:
        rows: of one shape, at least one.
        rule: `MIN` or `MAX`.
    """
    stacked = torch.stack(list(rows))
    return stacked.amin(0) if rule is Rule.MIN else stacked.amax(0)


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def as_numbers(flat: torch.Tensor) -> torch.Tensor:
    """float64, exactly: [n] from floating numbers [n], [2n] from integers or booleans."""
    return flat.to(torch.float64) if flat.is_floating_point() else split_halves(flat)


def split_halves(integers: torch.Tensor) -> torch.Tensor:
    """float64 [2n] from integers or booleans [n]: the high halves, then the low ones."""
    whole = integers.to(torch.int64)
    return torch.cat([(whole >> 32).to(torch.float64), (whole & _LOW).to(torch.float64)])


def join_halves(halves: torch.Tensor) -> torch.Tensor:
    """int64 [n] from what `split_halves` made."""
    whole = halves.to(torch.int64)
    count = whole.numel() // 2
    return (whole[:count] << 32) | whole[count:]


def is_floating(buffer: torch.Tensor) -> bool:
    """Complex numbers too."""
    return buffer.is_floating_point() or buffer.is_complex()


def flat_view(buffer: torch.Tensor) -> torch.Tensor:
    """The values in one dimension, real and imaginary parts side by side."""
    return (torch.view_as_real(buffer) if buffer.is_complex() else buffer).reshape(-1)


def shaped_like(piece: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return a piece of a `flat_view` in the shape and type of `buffer`: the inverse of that function.

    Args:
        piece: flat, as many elements as `flat_view` of the buffer has.
        buffer: its shape and type are taken.
    """
    if buffer.is_complex():
        real = torch.view_as_real(buffer)
        return torch.view_as_complex(piece.to(real.dtype).reshape(real.shape).contiguous())
    return piece.to(buffer.dtype).reshape(buffer.shape)

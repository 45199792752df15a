"""Buffers that changed in a step (BatchNorm's statistics), combined over the members by weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from springtide.exchange.buckets import StartSum


def combine_buffers(
    buffers: Sequence[torch.Tensor],
    weight: float,
    total_weight: float,
    representative: bool,
    start_sum: StartSum,
) -> list[torch.Tensor]:
    """Return new tensors, like `buffers`, that are equal on all members.

    Floating ones: the mean weighted by `weight` (this member's samples; 0: whatever its buffers hold is
    ignored). Integers and booleans: those of the one member that is the representative, exactly. Raise
    RuntimeError of the group's.
    """
    floats = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
    integers = [buffer for buffer in buffers if not (buffer.is_floating_point() or buffer.is_complex())]
    share = weight / total_weight
    sums: dict[int, torch.Tensor] = {}
    works = []
    packs: list[tuple[list[torch.Tensor], torch.Tensor]] = []
    for group, dtype in ((floats, torch.float64), (integers, torch.int64)):
        if not group:
            continue
        flat = torch.zeros(sum(_flat(buffer).numel() for buffer in group), dtype=dtype)
        counts = share > 0 if dtype == torch.float64 else representative
        if counts:
            torch.cat([_flat(buffer).to(dtype) for buffer in group], out=flat)
            if dtype == torch.float64:
                flat.mul_(share)
        works.append(start_sum(flat))
        packs.append((group, flat))
    for work in works:
        work.wait()
    for group, flat in packs:
        offset = 0
        for buffer in group:
            numel = _flat(buffer).numel()
            piece = flat[offset : offset + numel]
            offset += numel
            sums[id(buffer)] = _like(piece, buffer)
    return [sums[id(buffer)] for buffer in buffers]


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(buffer) if buffer.is_complex() else buffer).reshape(-1)


def _like(piece: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    if buffer.is_complex():
        real = torch.view_as_real(buffer)
        return torch.view_as_complex(piece.to(real.dtype).reshape(real.shape).contiguous())
    return piece.to(buffer.dtype).reshape(buffer.shape)

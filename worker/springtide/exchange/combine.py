"""Buffers that changed in a step (BatchNorm's statistics), combined over the members by weight.

They travel as float64 numbers in one vector, so that they can ride with the side reduction. Integers and
booleans are those of one member, exactly: 64 bits travel as two numbers of 32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LOW = 0xFFFF_FFFF


def pack(buffers: Sequence[torch.Tensor], weight: float, representative: bool) -> torch.Tensor:
    """float64 [n]: what this member puts into the sum.

    weight: its samples (0: whatever its buffers hold is ignored). representative: it is the one member whose
    integers and booleans all take.
    """
    parts = []
    for buffer in buffers:
        flat = _flat(buffer)
        if _is_floating(buffer):
            parts.append(flat.to(torch.float64) * weight if weight > 0 else _zeros(flat.numel()))
        elif representative:
            whole = flat.to(torch.int64)
            parts += [(whole >> 32).to(torch.float64), (whole & _LOW).to(torch.float64)]
        else:
            parts.append(_zeros(2 * flat.numel()))
    return torch.cat(parts) if parts else _zeros(0)


def unpack(total: torch.Tensor, buffers: Sequence[torch.Tensor], total_weight: float) -> list[torch.Tensor]:
    """New tensors, like the buffers, from the sum over the members. Floating ones are the mean by weight;
    total_weight is the sum of the members' weights.
    """
    combined, offset = [], 0
    for buffer in buffers:
        numel = _flat(buffer).numel()
        if _is_floating(buffer):
            piece = total[offset : offset + numel] / total_weight
            offset += numel
        else:
            high, low = total[offset : offset + 2 * numel].to(torch.int64).view(2, numel)
            piece = (high << 32) | low
            offset += 2 * numel
        combined.append(_like(piece, buffer))
    return combined


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def _is_floating(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(buffer) if buffer.is_complex() else buffer).reshape(-1)


def _like(piece: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    if buffer.is_complex():
        real = torch.view_as_real(buffer)
        return torch.view_as_complex(piece.to(real.dtype).reshape(real.shape).contiguous())
    return piece.to(buffer.dtype).reshape(buffer.shape)

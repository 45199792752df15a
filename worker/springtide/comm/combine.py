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
        flat = flat_view(buffer).cpu()
        if is_floating(buffer):
            parts.append(flat.to(torch.float64) * weight if weight > 0 else _zeros(flat.numel()))
        elif representative:
            parts.append(split_halves(flat))
        else:
            parts.append(_zeros(2 * flat.numel()))
    return torch.cat(parts) if parts else _zeros(0)


def unpack(total: torch.Tensor, buffers: Sequence[torch.Tensor], total_weight: float) -> list[torch.Tensor]:
    """New tensors, like the buffers, from the sum over the members. Floating ones are the mean by weight;
    total_weight is the sum of the members' weights.
    """
    combined, offset = [], 0
    for buffer in buffers:
        numel = flat_view(buffer).numel()
        if is_floating(buffer):
            piece = total[offset : offset + numel] / total_weight
            offset += numel
        else:
            piece = join_halves(total[offset : offset + 2 * numel])
            offset += 2 * numel
        combined.append(shaped_like(piece, buffer))
    return combined


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


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
    """What `flat_view` of a tensor like `buffer` would be, in the buffer's shape and type."""
    if buffer.is_complex():
        real = torch.view_as_real(buffer)
        return torch.view_as_complex(piece.to(real.dtype).reshape(real.shape).contiguous())
    return piece.to(buffer.dtype).reshape(buffer.shape)

"""Buffers that are None when the script calls distribute(), and tensors from some step on.

ActNorm and observers make them of the first data that they see, so each member has made others. All take the
first member's, in the step in which it has one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from springtide.comm.combine import as_numbers, flat_view, is_floating, join_halves, shaped_like
from springtide.errors import UsageError
from springtide.train_step.buffers import Buffers

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MOST_DIMENSIONS = 8


def adopt_arrived(buffers: Buffers, first: bool, total: Callable[[torch.Tensor], object]) -> None:
    """Make what the first member's awaited buffers have become those of this member.

    Args:
        buffers: of the model.
        first: this is the first member.
        total: replaces a float64 tensor by its sum over the members, which all call it alike.

    Raises:
        UsageError: the first member's is of a type or shape that cannot travel.
    """
    names = buffers.awaited
    described = torch.zeros(len(names), 2 + _MOST_DIMENSIONS, dtype=torch.float64)
    if first:
        for row, name in enumerate(names):
            if (value := buffers.awaited_value(name)) is not None:
                described[row] = _description(name, value)
    total(described)
    for name, row in zip(names, described.tolist(), strict=True):
        if not row[0]:
            continue
        like = torch.empty([int(size) for size in row[2 : 2 + int(row[1])]], dtype=_DTYPES[int(row[0]) - 1])
        own = buffers.awaited_value(name)
        numbers = as_numbers(flat_view(like).zero_())
        if first and own is not None:
            numbers = as_numbers(flat_view(own).cpu())
        total(numbers)
        value = shaped_like(numbers if is_floating(like) else join_halves(numbers), like)
        buffers.adopt(name, value)


def _description(name: str, value: torch.Tensor) -> torch.Tensor:
    """[number of the dtype from 1, dimensions, sizes...]"""
    if value.dtype not in _DTYPES or value.dim() > _MOST_DIMENSIONS or value.layout != torch.strided:
        raise UsageError(
            f"the model's buffer {name} was None and is a {value.layout} tensor of {value.dtype} with "
            f"{value.dim()} dimensions now, which cannot travel to the other workers: make it before "
            "distribute()"
        )
    sizes = [*value.shape, *[0] * (_MOST_DIMENSIONS - value.dim())]
    return torch.tensor([_DTYPES.index(value.dtype) + 1, value.dim(), *sizes], dtype=torch.float64)

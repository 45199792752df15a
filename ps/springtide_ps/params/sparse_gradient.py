"""The form in which some elements of a gradient travel: their numbers, then their values. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from springtide_ps.wire.frames import joined

INDEX_BYTES: Final = 4


class SparseGradientError(ValueError):
    """Raised for bytes that are no selection of a gradient's elements."""


@dataclass(frozen=True, slots=True)
class SparseGradient:
    """indices: int32 [k], ascending, each once. values: [k], the gradient there; it is zero elsewhere."""

    indices: torch.Tensor
    values: torch.Tensor

    def add_to(self, total: torch.Tensor) -> torch.Tensor:
        """Add to a flat tensor in place."""
        return total.index_add_(0, self.indices, self.values.to(total.dtype))


def pack(selected: SparseGradient) -> torch.Tensor:
    """uint8 [k * (4 + bytes of a value)]."""
    return joined(selected.indices, selected.values)


def count_elements(nbytes: int, dtype: torch.dtype, elements: int) -> int:
    """Return how many elements of a gradient come in so many bytes.

    Args:
        nbytes: of indices and elements.
        dtype: of the elements.
        elements: of the whole gradient.

    Raises:
        SparseGradientError: the size cannot be.
    """
    width = INDEX_BYTES + dtype.itemsize
    if nbytes % width or nbytes // width > elements:
        raise SparseGradientError(
            f"{nbytes} bytes are no selection from {elements} elements, of which each has {width}"
        )
    return nbytes // width


def unpack(payload: torch.Tensor, dtype: torch.dtype, elements: int) -> SparseGradient:
    """Return the selection that was packed; its memory is the payload's.

    Args:
        payload: uint8.
        dtype: of the gradient.
        elements: of the whole gradient.

    Raises:
        SparseGradientError: the size or the indices cannot be.
    """
    count = count_elements(payload.numel(), dtype, elements)
    numbers = payload[: count * INDEX_BYTES]
    values = payload[count * INDEX_BYTES :]
    if values.storage_offset() % dtype.itemsize:
        values = values.clone()
    indices = numbers.view(torch.int32)
    if count and not (
        int(indices[0]) >= 0 and int(indices[-1]) < elements and bool((indices[1:] > indices[:-1]).all())
    ):
        raise SparseGradientError(f"a gradient's elements are named from 0 to {elements - 1}, ascending")
    return SparseGradient(indices, values.view(dtype))


def worth_it(count: int, dtype: torch.dtype, elements: int) -> bool:
    """Return whether elements are fewer bytes as a selection than all elements as they are.

    Args:
        count: of the selected elements.
        dtype: of the elements.
        elements: of the whole gradient.
    """
    return count * (INDEX_BYTES + dtype.itemsize) < elements * dtype.itemsize

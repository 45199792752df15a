"""Gradients into block-scaled integers and back, in pieces that stay in the cache.

A block is BLOCK consecutive values of one parameter. Each value of a part is multiplied by its block's factor
and by the part's weight, rounded to the nearest integer and added to an int32 sum; integer addition has no
order. A value that needs more than the part's bits is told by its block, not by a wrong sum.
"""

from __future__ import annotations

from typing import Protocol

import torch

from springtide.exact import exponents as scale

BLOCK = 256
_PIECE = 1 << 18


class Rounding(Protocol):
    """Rounds the parts of one step, of all blocks of a layout; `begin` first."""

    def begin(self, exponents: torch.Tensor, factors: torch.Tensor) -> None:
        """Start a step.

        Args:
            exponents: int32 by block.
            factors: float32 by block, which follow from them.
        """

    def add(
        self, gradient: torch.Tensor, weight: float, blocks: slice, total: torch.Tensor, fresh: bool
    ) -> None:
        """Add weight * gradient, rounded, into a sum.

        The sum of a block that does not fit has no meaning.

        Args:
            gradient: of any shape and floating type, n values.
            weight: of the part.
            blocks: where its blocks lie, ceil(n / BLOCK) long.
            total: int32 of shape (n,), contiguous.
            fresh: `total` is replaced, not added to.
        """

    @property
    def needed(self) -> torch.Tensor:
        """int32 by block: the exponent that the largest value needs which did not fit in this step; LOWEST
        where all did, and where the exponent says that the block is not finite."""


class Rounder:
    """Rounder on the CPU: scratch memory, and the limit of one part: rounded values stay below 2^bits."""

    def __init__(self, bits: int) -> None:
        self._limit = float(1 << bits) - 2.0 ** (bits - 24)
        self._floats = torch.empty(_PIECE)
        self._integers = torch.empty(_PIECE, dtype=torch.int32)

    def begin(self, exponents: torch.Tensor, factors: torch.Tensor) -> None:
        """Start a step, of which nothing has failed to fit yet.

        Args:
            exponents: int32 by block, on the CPU.
            factors: float32 by block, on the CPU.
        """
        self._exponents, self._factors = exponents, factors
        self.needed = torch.full(exponents.shape, scale.LOWEST, dtype=torch.int32)

    def add(
        self, gradient: torch.Tensor, weight: float, blocks: slice, total: torch.Tensor, fresh: bool
    ) -> None:
        """Add weight * gradient, rounded, into a sum; blocks that do not fit add zeros.

        Args:
            gradient: of any shape and floating type, n values, on the CPU.
            weight: of the part.
            blocks: where its blocks lie, ceil(n / BLOCK) long.
            total: int32 of shape (n,), contiguous.
            fresh: `total` is replaced, not added to.
        """
        values = gradient.detach().reshape(-1)
        factors = self._factors[blocks]
        weighted = factors if weight == 1.0 else factors * weight
        exceeded: torch.Tensor | None = None
        count = values.numel()
        whole = count - count % BLOCK
        for start, end in pieces(whole, count, _PIECE):
            rows = slice(start // BLOCK, -(-end // BLOCK))
            piece, scratch = values[start:end], self._floats[: end - start]
            if end <= whole:
                torch.mul(piece.view(-1, BLOCK), weighted[rows, None], out=scratch.view(-1, BLOCK))
            else:
                torch.mul(piece, weighted[rows], out=scratch)
            low, high = scratch.amin(), scratch.amax()  # faster than aminmax; NaN shows in both
            if not (float(low) >= -self._limit and float(high) <= self._limit):
                exceeded = torch.zeros(factors.shape, dtype=torch.float64) if exceeded is None else exceeded
                exceeded[rows] = self._set_aside(piece, scratch, weight, factors[rows])
            scratch.round_()
            if fresh:
                total[start:end].copy_(scratch)
            else:
                integers = self._integers[: end - start]
                integers.copy_(scratch)
                total[start:end].add_(integers)
        if exceeded is not None:
            needed = scale.needed(exceeded, self._exponents[blocks])
            self.needed[blocks] = torch.maximum(self.needed[blocks], needed)

    def _set_aside(
        self, piece: torch.Tensor, scratch: torch.Tensor, weight: float, factors: torch.Tensor
    ) -> torch.Tensor:
        """Zero the blocks of `scratch` that do not fit; return their largest magnitudes, 0 for the others."""
        rows = factors.numel()
        scaled = scratch.view(rows, -1)
        misfit = ~(scaled.abs().amax(1) <= self._limit)
        scaled[misfit] = 0.0
        # From the values themselves: scaled ones may have overflowed.
        largest = piece.reshape(rows, -1).to(torch.float64).abs().amax(1) * abs(weight)
        return torch.where(misfit, largest, 0.0)


def restore(
    total: torch.Tensor,
    units: torch.Tensor,
    target: torch.Tensor,
    largest: torch.Tensor | None,
    most: int = _PIECE,
) -> None:
    """Write an integer sum times its units into a tensor of floating numbers.

    Args:
        total: int32, shape (n,), n a multiple of BLOCK.
        units: float32, shape (n / BLOCK,).
        target: floating, shape (n,).
        largest: float32, shape (n / BLOCK,), is set to each block's largest magnitude; None: nobody asks.
        most: values that are worked on at once.
    """
    count = total.numel()
    for start, end in pieces(count, count, most):
        rows = slice(start // BLOCK, end // BLOCK)
        piece = target[start:end].view(-1, BLOCK)
        integers, scales = total[start:end].view(-1, BLOCK), units[rows, None]
        if target.dtype is torch.float32:
            # The same bits as the product of both types, without torch's slow way there.
            piece.copy_(integers)
            piece.mul_(scales)
        else:
            torch.mul(integers, scales, out=piece)
        if largest is not None:
            largest[rows] = torch.maximum(piece.amax(1), -piece.amin(1))


def pieces(whole: int, count: int, most: int) -> list[tuple[int, int]]:
    """Cut a row of values into ranges: whole blocks, then the rest of a last block.

    Args:
        whole: values of whole blocks.
        count: values in all.
        most: values of a range, at most.

    Returns:
        (start, stop) of each range, in order.
    """
    cuts = [(start, min(start + most, whole)) for start in range(0, whole, most)]
    return cuts if whole == count else [*cuts, (whole, count)]

"""Exact sums of a model on a GPU: rounding and restoring are queued there, and no value passes the host.

A question that needs an answer on the CPU (did a value not fit?) is kept on the device, and read once in a
step. The integers are the ones that NCCL adds: int32 sums, and their maximum for exponents.
"""

from __future__ import annotations

import torch

from springtide.exact import exponents as scale
from springtide.exact.rounding import BLOCK, pieces

DEVICE_PIECE = 1 << 24
"""Values that are rounded at once: they bound the memory that is taken besides (128 MiB)."""

_SAFE = 1.0 - 2.0**-20
"""Room for the rounding of weight and product, which the float64 account of magnitudes does not see."""


class DeviceRounder:
    """`rounding.Rounding` without a branch on values.

    Its temporaries come from the stream that uses them, since several streams may round at the same time.
    """

    def __init__(self, bits: int) -> None:
        self._limit = float(1 << bits) * _SAFE

    def begin(self, exponents: torch.Tensor, factors: torch.Tensor) -> None:
        """Start a step, and forget the largest magnitudes of the last one.

        Args:
            exponents: int32 by block, on the device.
            factors: float32 by block, on the device.
        """
        self._exponents, self._factors = exponents, factors
        self._largest = torch.zeros(exponents.shape, dtype=torch.float64, device=exponents.device)

    def add(
        self, gradient: torch.Tensor, weight: float, blocks: slice, total: torch.Tensor, fresh: bool
    ) -> None:
        """Add weight * gradient, rounded, into a sum; nothing waits for the device.

        The sum of a block that does not fit has no meaning.

        Args:
            gradient: of any shape and floating type, n values, on the device.
            weight: of the part.
            blocks: where its blocks lie, ceil(n / BLOCK) long.
            total: int32 of shape (n,), contiguous.
            fresh: `total` is replaced, not added to.
        """
        values = gradient.detach().reshape(-1)
        factors, largest = self._factors[blocks], self._largest[blocks]
        weighted = factors if weight == 1.0 else factors * weight
        count = values.numel()
        for start, end in pieces(count - count % BLOCK, count, DEVICE_PIECE):
            rows = slice(start // BLOCK, -(-end // BLOCK))
            piece = values[start:end].view(rows.stop - rows.start, -1)
            low, high = torch.aminmax(piece, dim=1)  # not a number where a value is not
            magnitude = torch.maximum(high, -low).to(torch.float64) * abs(weight)
            torch.maximum(largest[rows], magnitude, out=largest[rows])
            scaled = torch.mul(piece, weighted[rows, None]).view(-1)
            scaled.round_()
            # Of a block that does not fit these are no numbers of any meaning: either the step is done again,
            # or the block is known not to be finite and its unit is not a number.
            if fresh:
                total[start:end].copy_(scaled)
            else:
                total[start:end].add_(scaled.to(torch.int32))

    @property
    def needed(self) -> torch.Tensor:
        fits = self._largest * self._factors <= self._limit
        return scale.needed(torch.where(fits, 0.0, self._largest), self._exponents)

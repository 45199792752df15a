"""The scale of each block of gradients: a power of two that is part of the committed state.

A block with exponent e takes values of each part below 2^(e + MARGIN). Exponents of a step are those of the
last committed step. They rise to what a sum shows at once and fall slowly, since a gradient that was large
(a neuron that is seldom active) will be large again, and a step that is done again costs more than a bit. All
functions are pure: they depend on values that are equal on all workers alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MARGIN = 3
"""A part may exceed the last step's sum by 2^3 before the step has to be done again."""

STEPS_PER_FALL = 16
"""An exponent falls by at most one in so many steps."""

NEAR = 6
"""No block is finer than its parameter's coarsest one by more than 2^6: a quiet block may wake up."""

LOWEST = -80
"""No block is finer than 2^LOWEST, so that scales and their inverses are normal float32 numbers.
"""

NOT_FINITE = 1 << 20
"""Reserved: the block holds a value that is not finite, in some part."""


def part_bits(parts: int) -> int:
    """b: values of one part stay below 2^b, so that the sum of `parts` of them fits into int32.

    Whatever their signs (float32 has no number between 2^b - 2^(b-24) and 2^b). Raise ValueError for no
    parts.
    """
    if parts < 1:
        raise ValueError(f"exact sums need at least one part, got {parts}")
    return 31 - (parts - 1).bit_length()


def factors(exponents: torch.Tensor, parts: int) -> torch.Tensor:
    """Return by which factor each block's values are multiplied before they are rounded: float32, powers of
    two (0 for a block that is not finite).

    Args:
        exponents: int32, one a block.
        parts: how many the sum has.
    """
    finite = exponents < NOT_FINITE
    powers = torch.where(finite, part_bits(parts) - MARGIN - exponents, 0)
    return torch.where(finite, _power_of_two(powers), 0.0)


def units(exponents: torch.Tensor, parts: int) -> torch.Tensor:
    """Return the worth of one unit of the integer sum, by block: float32 (NaN for a block that is not
    finite).

    Args:
        exponents: int32, one a block.
        parts: how many the sum has.
    """
    finite = exponents < NOT_FINITE
    powers = torch.where(finite, exponents + MARGIN - part_bits(parts), 0)
    return torch.where(finite, _power_of_two(powers), float("nan"))


def exponent_of(largest: torch.Tensor) -> torch.Tensor:
    """int32: the least e >= LOWEST with |value| < 2^e; NOT_FINITE where `largest` is not finite."""
    finite = torch.isfinite(largest)
    exponent = torch.frexp(torch.where(finite, largest, 0.0)).exponent
    exponent = torch.where(largest == 0, LOWEST, exponent).clamp(min=LOWEST)
    return torch.where(finite, exponent, NOT_FINITE).to(torch.int32)


def raised(exponents: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """Return the exponents of a step that is done again.

    Args:
        exponents: int32 by block, of the attempt that did not fit.
        needed: int32 by block: the maximum over all parts that did not fit, LOWEST where all did.
    """
    return torch.maximum(exponents, needed)


def needed(misfits: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the exponents that a step needs when it is done again.

    Args:
        misfits: by block: the largest magnitude where one did not fit, 0 elsewhere.
        exponents: int32 by block, of this attempt; a block whose exponent says that it is not finite was left
            out on purpose.

    Returns:
        int32 by block; LOWEST where nothing is needed.
    """
    return torch.where(exponents == NOT_FINITE, LOWEST, exponent_of(misfits))


def after_commit(
    committed: torch.Tensor,
    used: torch.Tensor,
    largest: torch.Tensor,
    owners: torch.Tensor,
    parameters: int,
    step: int,
) -> torch.Tensor:
    """Return the exponents that are committed with a step.

    A block that summed up to zeros or was not finite keeps what it has (the rows of an embedding that a step
    does not touch).

    Args:
        committed: int32 by block, of the step before.
        used: int32 by block, of this step (may be NOT_FINITE).
        largest: by block, the largest magnitude of the step's sum.
        owners: int64 by block: the number of its parameter, from 0.
        parameters: how many there are.
        step: the number that the step is committed under.

    Returns:
        int32 by block.
    """
    base = torch.where(used < NOT_FINITE, used, committed)
    seen = (largest > 0) & torch.isfinite(largest)
    lower = base - 1 if step % STEPS_PER_FALL == 0 else base
    moved = torch.where(seen, torch.maximum(exponent_of(largest), lower), base)
    coarsest = torch.full((parameters,), LOWEST, dtype=torch.int32, device=owners.device)
    coarsest.scatter_reduce_(0, owners, moved, "amax")
    return torch.maximum(moved, coarsest[owners] - NEAR).clamp(min=LOWEST).to(torch.int32)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent for -126..127, exactly: float32 made of its bits."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


class Exponents:
    """The committed exponents, as an object that the state of a job holds beside the tracked ones."""

    def __init__(self, blocks: int, device: torch.device | None = None) -> None:
        """device: where they are used; a state may come from another one."""
        self.values = torch.full((blocks,), LOWEST, dtype=torch.int32, device=device)

    def state_dict(self) -> dict[str, Any]:
        return {"exponents": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for exponents of another layout."""
        values = state["exponents"]
        if values.dtype != torch.int32 or values.shape != self.values.shape:
            raise ValueError(
                f"exact mode: {tuple(values.shape)} exponents of {values.dtype} do not fit "
                f"{tuple(self.values.shape)} blocks"
            )
        self.values = values.to(self.values.device, copy=True)

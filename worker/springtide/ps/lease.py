"""Leases of batches, where workers do not step together: which one to work on, and what became of all.

Where workers are in groups, the first member of a group asks, and tells the others in a sum to which they add
nothing. PURE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

_FIELDS: Final = 5


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of a batch.

    number: the batch to work on; None: there is none, because the window is `over` or this member was asked
    to stop. finished: how many of the window's batches are in every chunk. waited: others went on in the
    meantime.
    """

    number: int | None
    over: bool = False
    finished: int = 0
    waited: bool = False


@dataclass(frozen=True, slots=True)
class Audit:
    """The counts of batches in the chunks at the end.

    repeated: updates of a chunk beyond one per batch. lost: batches that a chunk lacks. skipped: updates
    since the job's beginning that left a chunk as it was, since a gradient was not finite.
    """

    repeated: int
    lost: list[int]
    skipped: int


def encode_nothing() -> torch.Tensor:
    """Return what members that only listen put into the sum: float64, as long as what is told."""
    return torch.zeros(_FIELDS, dtype=torch.float64)


def encode(lease: Lease, clock: int) -> torch.Tensor:
    """Pack a lease into numbers that can be summed; those below 2**53 stay what they are.

    Args:
        lease: To be packed.
        clock: How many steps the group has made.

    Returns:
        float64.
    """
    number = 0 if lease.number is None else lease.number + 1
    fields = (number, lease.over, lease.finished, lease.waited, clock)
    return torch.tensor(fields, dtype=torch.float64)


def decode(total: torch.Tensor) -> tuple[Lease, int]:
    """(lease, steps of the group) in the sum over a group in which one member has told."""
    number, over, finished, waited, clock = (int(field) for field in total.tolist())
    return Lease(number - 1 if number else None, bool(over), finished, bool(waited)), clock

"""Slices of tables with trained rows, and what they are as bytes."""

from __future__ import annotations

from typing import Any

import torch

from springtide_ps.params.chunk import StepSpec
from springtide_ps.params.embedding import TableSpec
from springtide_ps.params.embedding_shard import Slice, records

DIM = 3
PART = 100
STEP_SPEC = StepSpec(1.0, False, ({"lr": 0.5},))
Dumped = tuple[dict[str, Any], bytes]


def record(ids: list[int], value: float = 1.0) -> torch.Tensor:
    return records(torch.tensor(ids, dtype=torch.int64), torch.full((len(ids), DIM), float(value))).view(-1)


def make(rows: int = 0, optimizer: str = "adam", **spec: Any) -> Slice:
    """Make a slice with this number of trained rows."""
    piece = Slice(TableSpec(DIM, optimizer, seed=1, **spec), 2, 0, [{"lr": 0.5}])
    for first in range(0, rows, 7):
        piece.apply(record(list(range(first, min(rows, first + 7)))), STEP_SPEC)
    return piece


def dumped(piece: Slice) -> Dumped:
    about, memory = piece.dump()
    return about, memory.numpy().tobytes()

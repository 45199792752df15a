"""Members of a job that write checkpoints to one place, in one process."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from springtide.checkpoint.keeper import Checkpoints
from springtide.checkpoint.location import CheckpointLocation
from springtide.checkpoint.shares import Share
from springtide.checkpoint.writer import Written
from springtide_protocol.names import GenerationName, StateName

FOLDER = "space-job-12345678"


def state(step: int, number: int = 1, incarnation: int = 1) -> StateName:
    return StateName(GenerationName.of(incarnation, 0, number), step)


def tree(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(7, generator=generator)
    return {
        "parameters": {
            "a": torch.randn(33, 5, generator=generator),
            "b": torch.randn(3, 4, generator=generator).to(torch.bfloat16).t(),
            "none": torch.empty(0, 3),
        },
        "optimizer": [{"step": torch.tensor(3.0), "mask": torch.tensor([True, False])}],
        "tracked": OrderedDict(x=shared, y=shared, z=torch.tensor([1 + 2j]), lr=0.1, worst=math.inf),
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and all(equal(one[key], other[key]) for key in {**one, **other})
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


class Members:
    """Some processes that write to one place, in one process."""

    def __init__(self, root: Path, count: int, *, keep: int = 3, uri: str = "") -> None:
        self.told: list[Written] = []
        self.share = tuple(f"w{index}" for index in range(count))
        self.present: list[str] | None = None
        place = CheckpointLocation(uri or str(root), FOLDER, 60.0, keep)
        self.all = [
            Checkpoints(place, {"name": "job"}, lambda _: self.present, self.told.append)
            for _ in range(count)
        ]

    def save(self, name: StateName, content: Any, *, reason: str = "interval", attempt: str = "") -> Written:
        """All take it; the outcome of the first, or the first error."""
        before = len(self.told)
        for index, member in enumerate(self.all):
            member.take(name, lambda: content, Share(index, self.share, attempt), reason)
        self.flush()
        told = self.told[before:]
        return next((t for t in told if t.error), told[-1])

    def flush(self) -> None:
        for member in self.all:
            assert member.flush(30)

    def close(self) -> None:
        for member in self.all:
            member.close()

"""What a server keeps of one chunk between two steps."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide_ps.chunk import Chunk
from springtide_ps.gathered import Done
from springtide_ps.slices import Slice


@dataclass(slots=True)
class Held:
    """One chunk, or (chunk None) the sums that wait for it. sums: by step, complete or in the making.

    before: what the chunk was before a tried step, as it is dumped.
    """

    chunk: Chunk | Slice | None = None
    version: int = -1
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    before: tuple[dict[str, Any], torch.Tensor] | None = None
    spare: torch.Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    forward: list[str] = field(default_factory=list)
    waiting: list[tuple[int, Done]] = field(default_factory=list)
    added: int = 0  # gradients in the newest sum
    closed: int = -1  # the step whose sum is complete, and on its way to the copies

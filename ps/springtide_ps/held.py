"""What a server keeps of one chunk between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide_ps.chunk import Chunk
from springtide_ps.early import Early
from springtide_ps.gathered import Done
from springtide_ps.ranges import Book, RangeSet
from springtide_ps.rows_within import ChangedRows
from springtide_ps.slices import Slice

Sum = tuple[int, int]
"""(step, round of the step)."""
Forward = Callable[[str, Sum, str, torch.Tensor, Callable[[Exception | None], None]], None]
"""(address, which, key, sum, done): send a sum to another server; `done` gets None once it is there."""
Fill = Callable[[str, str, int, dict[str, Any], torch.Tensor], Future[Any]]
"""(address, key, version, meta, payload): send a chunk, or a part of it, to another server."""


@dataclass(slots=True)
class Held:
    """One chunk, or (chunk None) the sums that wait for it. sums: complete, or (the newest) in the making.

    before: what the chunk was before a tried step, as it is dumped.
    """

    chunk: Chunk | Slice | None = None
    version: int = -1
    sums: dict[Sum, torch.Tensor] = field(default_factory=dict)
    before: tuple[dict[str, Any], torch.Tensor] | None = None
    spare: torch.Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    forward: list[str] = field(default_factory=list)
    waiting: list[tuple[int, Done]] = field(default_factory=list)
    added: int = 0  # gradients in the newest sum
    early: Early = field(default_factory=Early)
    changed: ChangedRows = field(default_factory=ChangedRows)
    closed: Sum = (-1, 0)  # the newest one that is complete, and on its way to the copies

    @property
    def values(self) -> torch.Tensor | None:
        """Of a chunk that is no slice of a table."""
        return self.chunk.values if isinstance(self.chunk, Chunk) else None

    def totals(self, step: int) -> dict[int, torch.Tensor]:
        """The sums of a step by round."""
        return {number: total for (own, number), total in self.sums.items() if own == step}

    def has_sums(self, step: int, last: int) -> bool:
        """Whether those of all rounds up to the last one of the step are here."""
        return self.totals(step).keys() >= set(range(last + 1))

    def closed_sums(self, step: int) -> dict[Sum, torch.Tensor]:
        """Those of the step that are complete, in their order."""
        if self.closed[0] != step:
            return {}
        return {which: self.sums[which] for which in sorted(self.sums) if (step, 0) <= which <= self.closed}

    def drop_sums(self, steps: Callable[[int], bool]) -> None:
        """Forget the sums of these steps."""
        self.sums = {which: total for which, total in self.sums.items() if not steps(which[0])}

    def undo(self, version: int) -> bool:
        """The step after `version` was only tried. False: what was before it is not here, so nothing is."""
        with self.lock:
            if self.version <= version or self.chunk is None:
                return True
            if self.before is None:
                return False
            self.chunk, self.version = self.chunk.again(*self.before), version
            self.before = None
        return True

    def write_book(self, skipped: int) -> bool:
        """Ranges are counted from now on: 0..version-1 are in the chunk. skipped: of them, in the whole job.

        False: there is no chunk that could have a book.
        """
        with self.lock:
            if self.chunk is None:
                return False
            if self.chunk.book is None:
                ranges = RangeSet([(0, self.version)]) if self.version > 0 else RangeSet()
                self.chunk.book = Book(ranges, max(0, self.version), skipped)
            self.version, self.sums, self.closed, self.early = 0, {}, (-1, 0), Early()
        return True

    def count_steps(self, version: int) -> bool:
        """Steps are counted from now on, `version` of them. False: the chunk's book says something else."""
        with self.lock:
            if self.chunk is None or self.chunk.book is None:
                return False
            exactly = RangeSet([(0, version)]) if version else RangeSet()
            if self.chunk.book.ranges != exactly:
                return False
            self.chunk.book, self.version, self.sums, self.closed = None, version, {}, (-1, 0)
        return True


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A chunk that nobody else changes, which is here."""

    held: Held

    @property
    def chunk(self) -> Chunk | Slice:
        assert self.held.chunk is not None
        return self.held.chunk

    @property
    def forward(self) -> list[str]:
        """Addresses of the servers that hold copies."""
        return self.held.forward

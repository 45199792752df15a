"""One shard: a chunk or a slice of a table that a server holds, and what its steps need.

Threads and locks: a shard's `lock` keeps its chunk, version and sums from changing. `add`, `measure` and the
methods on sums are called in it; `roll_back`, `begin_applied_batches` and `count_steps` take it. `forward`
and `waiting` belong to the store's lock, in which `take_waiting` is called. Where both are needed, the
store's comes first (`shard_store`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide_ps.params.applied import AppliedBatches, IntervalSet
from springtide_ps.params.chunk import Chunk
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.params.sparse_gradient import SparseGradient
from springtide_ps.server.intermediate_rows import ChangedRows
from springtide_ps.server.row_gather import Done
from springtide_ps.server.speculative_copy import SpeculativeCopy

Sum = tuple[int, int]
"""(step, backward pass of the step)."""
Forward = Callable[[str, Sum, str, torch.Tensor, Callable[[Exception | None], None]], None]
"""(address, which, key, sum, done): send a sum to another server; `done` gets None once it is there."""
Fill = Callable[[str, str, int, dict[str, Any], torch.Tensor], Future[Any]]
"""(address, key, version, meta, payload): send a chunk, or a part of it, to another server."""


@dataclass(slots=True)
class Shard:
    """A chunk (or slice) with its version, the sums of its gradients, and its further copies.

    `lock` keeps the chunk from changing; the lists are the store's, in the store's own lock.

    Attributes:
        chunk: the values and their optimizer's state; None: only sums are here, which wait for it.
        version: the step after which the values are; -1: none.
        sums: of gradients, by step and backward pass: complete, or (the newest one) in the making.
        before: what the chunk was before a step that is only tried, as it is dumped.
        spare: memory of an earlier sum, for a gradient to come.
        forward: addresses of the servers that hold copies and get the sums.
        waiting: who waits for the values after a step.
        norms: sums of squares over sums that are complete, as far as they were wanted.
        adding: (generation that has begun on this server, step, backward pass) of the newest sum.
        added: gradients in it.
        closed: the newest sum that is complete, and on its way to the copies.
        speculative: the chunk after a step that is not decided.
        changed: rows of a slice within a step that is not decided.
    """

    chunk: Chunk | Slice | None = None
    version: int = -1
    sums: dict[Sum, torch.Tensor] = field(default_factory=dict)
    before: tuple[dict[str, Any], torch.Tensor] | None = None
    spare: torch.Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    forward: list[str] = field(default_factory=list)
    waiting: list[tuple[int, Done]] = field(default_factory=list)
    norms: dict[Sum, float] = field(default_factory=dict)
    adding: tuple[int, int, int] = (0, -1, 0)
    added: int = 0
    closed: Sum = (-1, 0)
    speculative: SpeculativeCopy = field(default_factory=SpeculativeCopy)
    changed: ChangedRows = field(default_factory=ChangedRows)

    @property
    def values(self) -> torch.Tensor | None:
        """Return the values of a chunk; None of a slice of a table, and where there is neither."""
        return self.chunk.values if isinstance(self.chunk, Chunk) else None

    def add(
        self, adding: tuple[int, int, int], which: Sum, gradient: torch.Tensor | SparseGradient, own: bool
    ) -> None:
        """Add a gradient to a sum (in the shard's lock).

        Args:
            adding: what `adding` is for that sum; for another one it begins anew.
            which: the sum.
            gradient: flat, of the chunk's size, or some of its elements.
            own: it is in memory of the spare, which may be kept.
        """
        if self.adding != adding:
            self.adding, self.added = adding, 0
        first, chunk = self.added == 0, self.chunk
        kept = gradient if own and isinstance(gradient, torch.Tensor) else None
        if first and kept is not None:
            self.sums[which] = kept
        else:
            assert chunk is not None
            spare, self.spare = (self.spare, None) if first else (None, self.spare)
            more: Any = gradient
            self.sums[which] = chunk.add(None if first else self.sums[which], more, spare)
            self.spare = self.spare if kept is None else kept
        self.norms.pop(which, None)
        self.added += 1

    def measure(self, which: Sum) -> None:
        """Have the norm of a complete sum (in the shard's lock)."""
        total = self.sums.get(which)
        if total is not None and self.chunk is not None and which not in self.norms:
            self.norms[which] = self.chunk.square_norm(total)

    def totals(self, step: int) -> dict[int, torch.Tensor]:
        """Return the sums of a step by backward pass."""
        return {number: total for (own, number), total in self.sums.items() if own == step}

    def has_sums(self, step: int, last: int) -> bool:
        """Return whether the sums of a step are here (in the shard's lock).

        Args:
            step: its number.
            last: the last backward pass whose sum is needed.
        """
        return self.totals(step).keys() >= set(range(last + 1))

    def closed_sums(self, step: int) -> dict[Sum, torch.Tensor]:
        """Return the sums of the step that are complete, in their order."""
        if self.closed[0] != step:
            return {}
        return {which: self.sums[which] for which in sorted(self.sums) if (step, 0) <= which <= self.closed}

    def drop_sums(self, steps: Callable[[int], bool]) -> None:
        """Forget the sums of the steps for which `steps` is true."""
        self.sums = {which: total for which, total in self.sums.items() if not steps(which[0])}
        self.norms = {which: norm for which, norm in self.norms.items() if which in self.sums}

    def take_waiting(self) -> list[Done]:
        """Return who waited for what the chunk is now, and forget them (in the store's lock)."""
        ready = [done for step, done in self.waiting if step <= self.version]
        self.waiting = [(step, done) for step, done in self.waiting if step > self.version]

        def with_values(done: Done) -> Done:
            return lambda _, error: done(self.values, error)

        return ready + [with_values(done) for done in self.speculative.take_waiting(self.version)]

    def roll_back(self, version: int) -> bool:
        """Go back to `version`: the step after it was only tried.

        Returns:
            Whether the shard is at that version now; False: what was before the step is not here.
        """
        with self.lock:
            if self.version <= version or self.chunk is None:
                return True
            if self.before is None:
                return False
            self.chunk, self.version = self.chunk.again(*self.before), version
            self.before = None
        return True

    def begin_applied_batches(self, skipped: int) -> bool:
        """Count batches from now on: 0..version-1 are in the chunk.

        Args:
            skipped: how many of them changed nothing, in the whole job.

        Returns:
            Whether there is a chunk, which counts batches now.
        """
        with self.lock:
            if self.chunk is None:
                return False
            if self.chunk.applied_batches is None:
                ranges = IntervalSet([(0, self.version)]) if self.version > 0 else IntervalSet()
                self.chunk.applied_batches = AppliedBatches(ranges, max(0, self.version), skipped)
            self.version, self.sums, self.norms = 0, {}, {}
            self.closed, self.speculative = (-1, 0), SpeculativeCopy()
        return True

    def count_steps(self, version: int) -> bool:
        """Count steps from now on, `version` of them so far.

        Returns:
            Whether the chunk says the same: exactly the batches 0..version-1 are in it.
        """
        with self.lock:
            if self.chunk is None or self.chunk.applied_batches is None:
                return False
            exactly = IntervalSet([(0, version)]) if version else IntervalSet()
            if self.chunk.applied_batches.intervals != exactly:
                return False
            self.chunk.applied_batches, self.version, self.closed = None, version, (-1, 0)
            self.sums, self.norms = {}, {}
        return True


@dataclass(frozen=True, slots=True)
class LockedShard:
    """A shard whose chunk is here and which nobody else changes."""

    shard: Shard

    @property
    def chunk(self) -> Chunk | Slice:
        assert self.shard.chunk is not None
        return self.shard.chunk

    @property
    def forward(self) -> list[str]:
        """Return the addresses of the servers that hold copies."""
        return self.shard.forward

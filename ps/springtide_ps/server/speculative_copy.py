"""The second copy of a chunk, on which a step is made before it is decided.

Values can otherwise come back only after the last gradient, when a step is committed, and only the next
forward pass hides their way. How a step will be made (learning rates, scale, unused parameters) is mostly
known before: as the last one was. So a server makes it on a second copy of a chunk as soon as the gradients
of all members for that chunk are summed, and sends those values. Nothing else sees the second copy: it takes
the chunk's place when the step is decided just so, and is written over otherwise. Copies on other servers,
dumps and the next generation begin from the chunk itself, which no undecided step touches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.server.intermediate import make_substeps
from springtide_ps.server.row_gather import Done


@dataclass(slots=True)
class SpeculativeCopy:
    """The second copy of a chunk, with a step that is not decided or the first substeps of one.

    Attributes:
        chunk: the second copy; None: none was needed yet.
        step: the step that it has; -1: what it holds counts for nothing.
        step_spec: how that step was made.
        early_push: where batches are counted instead of steps, which one it was made from; 0: none.
        waiting: who wants the values after a step before it is decided.
    """

    chunk: Chunk | None = None
    step: int = -1
    step_spec: StepSpec | None = None
    early_push: int = 0
    waiting: list[tuple[int, Done]] = field(default_factory=list)

    def holds(self, step: int, step_spec: StepSpec | None) -> bool:
        """Return whether the second copy holds a step.

        Args:
            step: its number.
            step_spec: how the step is made; None: it is not known, and nothing is held.
        """
        return (
            self.chunk is not None
            and step_spec is not None
            and (self.step, self.step_spec) == (step, step_spec)
        )

    def has_begun(self, step: int, step_spec: StepSpec) -> bool:
        """Return whether the second copy holds the first substeps of a step, or all of them.

        Args:
            step: its number.
            step_spec: how the step is made.
        """
        return self.step_spec is not None and self.step == step and self.step_spec.begins(step_spec)

    def make(self, chunk: Chunk, total: torch.Tensor, step: int, step_spec: StepSpec) -> Chunk:
        """Make the step on the second copy.

        Args:
            chunk: what the step goes on from.
            total: the sum of the step's gradients, flat like the values; it stays as it is.
            step: its number.
            step_spec: how it is made.

        Raises:
            ChunkError: the step is of another optimizer.
        """
        self.step, self.step_spec = -1, None
        if self.chunk is None or not self.chunk.become(chunk):
            self.chunk = chunk.again(*chunk.dump())
        self.chunk.apply(total, step_spec, keep=True)
        self.step, self.step_spec = step, step_spec
        return self.chunk

    def reach(
        self,
        chunk: Chunk,
        totals: Mapping[int, torch.Tensor],
        step: int,
        step_spec: StepSpec,
        keep: bool = True,
    ) -> Chunk:
        """Have the second copy hold these substeps of a step, going on from what it holds where it can.

        Args:
            chunk: what the step goes on from.
            totals: sums of gradients by backward pass.
            step: its number.
            step_spec: how its substeps are made.
            keep: whether the sums stay as they are.

        Raises:
            ChunkError: the step is of another optimizer.
        """
        have, begun = self.step_spec, 0
        if self.chunk is not None and have is not None and self.step == step and have.begins(step_spec):
            begun = len(have.substeps)
        elif self.chunk is None or not self.chunk.become(chunk):
            self.chunk = chunk.again(*chunk.dump())
        self.step, self.step_spec = -1, None
        if rest := step_spec.substeps[begun:]:
            make_substeps(self.chunk, totals, replace(rest[-1], before=rest[:-1]), keep)
        self.step, self.step_spec = step, step_spec
        return self.chunk

    def swap(self, chunk: Chunk) -> Chunk:
        """Take the chunk's place, since the step is decided, and keep the chunk as the next second copy."""
        assert self.chunk is not None
        now, self.chunk = self.chunk, chunk
        self.step, self.step_spec, self.early_push = -1, None, 0
        return now

    def take_waiting(self, step: int) -> list[Done]:
        """Return who waits for this step or one before it, and forget them."""
        ready = [done for wanted, done in self.waiting if wanted <= step]
        self.waiting = [(wanted, done) for wanted, done in self.waiting if wanted > step]
        return ready

    def forget(self) -> list[Done]:
        """Hold no step any more, since the generation is over; return who waits, and forget them."""
        self.step, self.step_spec, self.early_push = -1, None, 0
        waiting, self.waiting = [done for _, done in self.waiting], []
        return waiting

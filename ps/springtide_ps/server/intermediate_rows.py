"""Rows of tables within a step of several substeps: what they become if the step ends with those made so far.

As for chunks (`intermediate`), nothing else sees that. A table is far larger than what a step changes of it,
so there is no second copy of a slice: the rows that have gradients are copied, and the substeps made on
these. Rows that `max_rows` and `max_age` let go, go when the step is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from springtide_ps.params.chunk import StepSpec
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.params.idmap import Ids
from springtide_ps.server.intermediate import make_substeps
from springtide_ps.server.step_protocol import StepProtocolError


@dataclass(slots=True)
class ChangedRows:
    """The rows of one slice that the first substeps of a step change, as they are after these.

    Attributes:
        step: the step; -1: none.
        step_spec: how its substeps are made.
        piece: the changed rows, as a slice of their own.
    """

    step: int = -1
    step_spec: StepSpec | None = None
    piece: Slice | None = field(default=None, repr=False)

    def reach(
        self, piece: Slice, totals: Mapping[int, torch.Tensor], step: int, step_spec: StepSpec
    ) -> Slice:
        """Return a slice of the changed rows alone, made now unless it is there already.

        Args:
            piece: the slice, at the step before.
            totals: sums of gradients by backward pass, which stay as they are.
            step: its number.
            step_spec: how its substeps are made.

        Raises:
            StepProtocolError: a sum is not here.
            ChunkError: the step is of another optimizer.
        """
        if self.piece is not None and (self.step, self.step_spec) == (step, step_spec):
            return self.piece
        numbers = {part.backward_pass for part in step_spec.substeps}
        if missing := numbers - totals.keys():
            raise StepProtocolError(f"the sums of backward pass {min(missing)} of step {step} are not here")
        touched = [piece.ids_in(totals[number]).numpy() for number in numbers]
        self.piece = None
        changed = piece.some(np.unique(np.concatenate(touched)))
        make_substeps(changed, totals, step_spec, keep=True)
        self.step, self.step_spec, self.piece = step, step_spec, changed
        return changed

    def rows(
        self, piece: Slice, totals: Mapping[int, torch.Tensor], step: int, step_spec: StepSpec, ids: Ids
    ) -> torch.Tensor:
        """Return rows of the slice after the substeps of a step that is not decided.

        Args:
            piece: the slice.
            totals: sums by backward pass.
            step: its number.
            step_spec: the substeps.
            ids: int64.

        Returns:
            float32 [len(ids), dim].

        Raises:
            StepProtocolError: `reach` refuses.
        """
        changed = self.reach(piece, totals, step, step_spec)
        found, there = piece.rows(ids), changed.table.has(ids)
        found[torch.from_numpy(there)] = changed.rows(ids[there])
        return found

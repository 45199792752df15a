"""Values within a step of several substeps: what a chunk becomes if the step ends with those made so far.

A script may make an optimizer's step, use the model again and make another one (a GAN, `step(closure)`), and
all of that is one step, which counts or does not. So servers keep the sums of each backward pass until the
step is decided, and make its substeps on a chunk's second copy (`speculative_copy`) when somebody wants to
see it. How the substeps are made, each member says; all say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.server.step_protocol import StepProtocolError

OTHERWISE: Final = "the members make different optimizer steps"
NO_ROOM: Final = "there is no room"


@dataclass(frozen=True, slots=True)
class Substeps:
    """Remember which substeps of a step that is not decided the members have made. PURE.

    Attributes:
        step: the step; -1: none.
        step_spec: how its substeps are made, as far as the member that is furthest has said; None: none has.
    """

    step: int = -1
    step_spec: StepSpec | None = None

    def with_report(self, step: int, step_spec: StepSpec) -> Substeps:
        """Return what is known after one more member's report, which may be behind another's.

        Args:
            step: its number.
            step_spec: the substeps that the member has made.

        Raises:
            StepProtocolError: the members make different substeps.
        """
        if self.step_spec is None or step != self.step or self.step_spec.begins(step_spec):
            return Substeps(step, step_spec)
        if not step_spec.begins(self.step_spec):
            raise StepProtocolError(
                f"{OTHERWISE} within step {step}: their scripts have to do the same, "
                "whatever their samples are"
            )
        return self

    def first(self, step: int, count: int) -> StepSpec:
        """Return how the first substeps of a step are made.

        Args:
            step: its number.
            count: of substeps.

        Raises:
            StepProtocolError: no member has told of so many.
        """
        if self.step_spec is None or step != self.step or not 0 < count <= len(self.step_spec.substeps):
            raise StepProtocolError(f"{count} parts of step {step} are asked for, which nobody has told of")
        return self.step_spec.first(count)


def make_substeps(
    chunk: Chunk | Slice, totals: Mapping[int, torch.Tensor], step_spec: StepSpec, keep: bool
) -> None:
    """Make a step of one or several substeps.

    Args:
        chunk: what changes.
        totals: sums of gradients by backward pass.
        step_spec: how the substeps are made.
        keep: whether the sums stay as they are; else they are used up.

    Raises:
        ChunkError: the step is of another optimizer.
    """
    substeps = step_spec.substeps
    for number, part in enumerate(substeps):
        again = keep or any(later.backward_pass == part.backward_pass for later in substeps[number + 1 :])
        chunk.apply(totals[part.backward_pass], part, again)

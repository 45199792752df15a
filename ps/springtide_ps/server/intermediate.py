"""Values within a step of several parts: what a chunk becomes if the step ends with those made so far.

A script may make an optimizer's step, use the model again and make another one (a GAN, `step(closure)`), and
all of that is one step, which counts or does not. So servers keep the sums of each backward pass (*round*)
until the step is decided, and make its parts on a chunk's second copy when somebody wants to see it (the copy
is in `speculative_copy`). How the parts are made, each member says; all say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.server.step_protocol import RoundError

OTHERWISE: Final = "the members make different optimizer steps"
NO_ROOM: Final = "there is no room"


@dataclass(frozen=True, slots=True)
class Parts:
    """Remember which parts of a step that is not decided the members have made. PURE.

    Attributes:
        step: the step; -1: none.
        recipe: how its parts are made, as far as the member that is furthest has said; None: none has.
    """

    step: int = -1
    recipe: StepSpec | None = None

    def with_word(self, step: int, recipe: StepSpec) -> Parts:
        """Return what is known after one more member's word, which may be behind another's.

        Raises:
            RoundError: the members make different parts.
        """
        if self.recipe is None or step != self.step or self.recipe.begins(recipe):
            return Parts(step, recipe)
        if not recipe.begins(self.recipe):
            raise RoundError(
                f"{OTHERWISE} within step {step}: their scripts have to do the same, "
                "whatever their samples are"
            )
        return self

    def first(self, step: int, count: int) -> StepSpec:
        """Return how the first `count` parts of the step are made.

        Raises:
            RoundError: no member has told of so many.
        """
        if self.recipe is None or step != self.step or not 0 < count <= len(self.recipe.parts):
            raise RoundError(f"{count} parts of step {step} are asked for, which nobody has told of")
        return self.recipe.first(count)


def make_parts(
    chunk: Chunk | Slice, totals: Mapping[int, torch.Tensor], recipe: StepSpec, keep: bool
) -> None:
    """Make a step of one or several parts.

    Args:
        chunk: what changes.
        totals: sums of gradients by round.
        recipe: how the parts are made.
        keep: whether the sums stay as they are; else they are used up.

    Raises:
        ChunkError: the recipe is of another optimizer.
    """
    parts = recipe.parts
    for number, part in enumerate(parts):
        again = keep or any(later.round == part.round for later in parts[number + 1 :])
        chunk.apply(totals[part.round], part, again)

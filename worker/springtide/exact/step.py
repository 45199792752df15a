"""One step made of logical parts: what this worker's have put in, and whether it must be done again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from springtide.comm.combine import Rule
from springtide.comm.process_group import Group, Work
from springtide.exact.buckets import ExactBuckets
from springtide.exact.buffers import pack_parts, unpack_parts
from springtide.exact.parts import PartContribution, weights_by_part


class ExactStep:
    """Account of the running step. contributions: this worker's finished parts, in logical order."""

    def __init__(self, buckets: ExactBuckets, logical_workers: int) -> None:
        self._buckets = buckets
        self._logical_workers = logical_workers
        self._raised: tuple[Group, int, torch.Tensor] | None = None
        self.contributions: list[PartContribution] = []
        self._before = buckets.exponents.values
        """The exponents of the state before the last committed step."""

    def begin(
        self, group: Group, number: int, first: bool, last: bool, start_sum: Callable[[torch.Tensor], Work]
    ) -> None:
        """Start a part.

        Args:
            group: of the generation.
            number: of the step that would be committed.
            first: it is the first of this worker's parts.
            last: it is the last of them.
            start_sum: starts the sum of a bucket's integers over the workers.
        """
        if not first:
            self._buckets.begin_part(last)
            return
        self.contributions = []
        # Raised exponents are not committed: another generation finds them anew, with members that joined.
        again = self._raised is not None and self._raised[0] is group and self._raised[1] == number
        self._buckets.begin(start_sum, last, self._raised[2] if again and self._raised else None)

    def go_on_with(self, parts: Sequence[PartContribution]) -> None:
        """Begin with parts whose gradients an earlier try at the step has kept. After `begin`."""
        self.contributions = list(parts)

    def keep(self, part: PartContribution) -> list[PartContribution]:
        """The gradients of a part are complete; return all parts of the step so far."""
        self.contributions.append(part)
        return self.contributions

    def extra(self) -> list[float]:
        """Return this worker's numbers for the commit vote: whether a value did not fit, then the weight of
        each logical part.
        """
        return [float(self._buckets.exceeded), *weights_by_part(self.contributions, self._logical_workers)]

    def misfit(self, extra: Sequence[float]) -> bool:
        """Whether any part of the step, on any worker, had a value that did not fit."""
        return extra[0] > 0

    def pack(
        self, indices: Sequence[int], committed: Sequence[torch.Tensor], rules: Sequence[Rule]
    ) -> torch.Tensor:
        """Return float64 [n]: the contributions of this worker's parts to the sum of buffers.

        Args:
            indices: of the buffers.
            committed: their values before the step.
            rules: how each is combined.
        """
        return pack_parts(self.contributions, indices, committed, rules, self._logical_workers)

    def unpack(
        self,
        total: torch.Tensor,
        indices: Sequence[int],
        committed: Sequence[torch.Tensor],
        rules: Sequence[Rule],
        extra: Sequence[float],
    ) -> list[torch.Tensor]:
        """Combine buffers from the sum over the members.

        Args:
            total: float64 [n], as the members' parts were packed.
            indices: numbers of the buffers.
            committed: all buffers, as the step found them.
            rules: how each of all buffers is combined.
            extra: what the members added to the commit vote, summed: one number, then the weights by logical
                part.

        Returns:
            New tensors on the CPU, otherwise like the buffers.
        """
        return unpack_parts(total, indices, committed, rules, extra[1:])

    def total_weight(self, extra: Sequence[float]) -> float:
        """The sum that does not depend on who added what first."""
        return math.fsum(extra[1:])

    def needed(self) -> torch.Tensor:
        """int32 by block: to be replaced by its maximum over the members."""
        return self._buckets.needed

    def do_again(self, group: Group, number: int, needed: torch.Tensor) -> None:
        """Have the next attempt at this step in this generation use exponents that fit.

        Args:
            group: of the generation; with another one the exponents are found anew.
            number: of the step that would be committed.
            needed: int32 by block, as `exponents.needed` returns it, the maximum over the members.
        """
        self._raised = group, number, self._buckets.raised(needed)

    def commit(self, number: int) -> None:
        """Step `number` cannot be dropped any more."""
        self._raised = None
        self._before = self._buckets.exponents.values
        self._buckets.commit(number)

    def take_back(self) -> None:
        """The step that was committed last is undone."""
        self._buckets.exponents.values = self._before

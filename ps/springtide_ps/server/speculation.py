"""Steps that are made before they are decided: which ones the members expect, and what their values are.

`Speculator` is used in the store's lock. The functions beside it change one shard, in that shard's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.params.idmap import Ids
from springtide_ps.server.intermediate import Substeps, make_substeps
from springtide_ps.server.intermediate_rows import ChangedRows
from springtide_ps.server.row_gather import Done
from springtide_ps.server.shard import Shard
from springtide_ps.server.step_protocol import StepProtocolError

log = logging.getLogger("springtide.ps")


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """How the members expect a step to be made; step_spec None: not all of them expect the same."""

    step: int
    step_spec: StepSpec | None

    def with_another(self, step: int, step_spec: StepSpec) -> ExpectedStep:
        """Return what is expected after one more member has said what it expects.

        Args:
            step: its number.
            step_spec: how the member expects it to be made.
        """
        if step != self.step:
            return ExpectedStep(step, step_spec)
        return self if step_spec == self.step_spec else ExpectedStep(step, None)


class Speculator:
    """Remember how the members expect the undecided step to be made, and which substeps they have made."""

    def __init__(self) -> None:
        self._expected = ExpectedStep(-1, None)
        self._substeps = Substeps()

    def expect(self, step: int, step_spec: StepSpec, shards: Iterable[Shard]) -> list[Done]:
        """Note how one more member expects the step to be made.

        Args:
            step: its number.
            step_spec: how the member expects it to be made.
            shards: of this server.

        Returns:
            The callbacks that wait for its values in vain, since the members expect different things.
        """
        self._expected = self._expected.with_another(step, step_spec)
        if self._expected.step_spec is not None:
            return []
        return [done for shard in shards for done in shard.speculative.forget()]

    def spec_of(self, step: int) -> StepSpec | None:
        """Return how all members expect the step to be made; None: they do not, or not the same."""
        return self._expected.step_spec if self._expected.step == step else None

    def add_substeps(self, step: int, step_spec: StepSpec) -> None:
        """Note which substeps one more member has made.

        Args:
            step: its number.
            step_spec: the substeps.

        Raises:
            StepProtocolError: another member made others.
        """
        self._substeps = self._substeps.with_report(step, step_spec)

    def first_substeps(self, step: int, count: int) -> StepSpec:
        """Return how the first substeps of a step are made.

        Args:
            step: its number.
            count: of substeps.

        Raises:
            StepProtocolError: no member has told of so many.
        """
        return self._substeps.first(step, count)

    def forget(self, shards: Iterable[Shard]) -> list[Done]:
        """Expect nothing any more, since the generation is over; return who waits for values."""
        self._expected, self._substeps = ExpectedStep(-1, None), Substeps()
        waiting = list[Done]()
        for shard in shards:
            waiting += shard.speculative.forget()
            shard.changed = ChangedRows()
        return waiting


def is_wanted(shard: Shard, step: int) -> bool:
    """Return whether a step can be made early, its sum being whole, and somebody waits for its values.

    Args:
        shard: the shard.
        step: its number.
    """
    return shard.closed == (step, 0) and bool(shard.speculative.waiting)


def speculate(shard: Shard, key: str, step: int, step_spec: StepSpec) -> bool:
    """Make a step of a chunk on its second copy (in the shard's lock).

    Args:
        shard: the shard.
        key: its key.
        step: its number.
        step_spec: how the step is expected to be made.

    Returns:
        Whether this ends the wait for its values: they are there, or cannot be had (then the second copy does
        not hold the step). False where the step has been decided meanwhile.
    """
    total, chunk = shard.sums.get((step, 0)), shard.chunk
    if total is None or shard.version != step - 1 or not isinstance(chunk, Chunk):
        return False
    try:
        if not shard.speculative.holds(step, step_spec):
            shard.speculative.make(chunk, total, step, step_spec)
    except Exception as failure:  # the step itself will say what is wrong, if it is made so
        log.warning("chunk %s: step %d cannot be made early: %r", key, step, failure)
    return True


def take_over(shard: Shard, totals: Mapping[int, torch.Tensor], step: int, step_spec: StepSpec) -> bool:
    """Make a decided step by putting the second copy in the chunk's place, where it has begun it just so.

    Args:
        shard: the shard.
        totals: sums by backward pass, which are used up.
        step: its number.
        step_spec: how the step is made.

    Returns:
        Whether the step is made (in the shard's lock).
    """
    if not shard.speculative.has_begun(step, step_spec) or shard.before is not None:
        return False
    assert isinstance(shard.chunk, Chunk)
    shard.speculative.reach(shard.chunk, totals, step, step_spec, keep=False)
    shard.chunk = shard.speculative.swap(shard.chunk)
    return True


def intermediate_values(shard: Shard, step: int, step_spec: StepSpec) -> torch.Tensor:
    """Return a copy of the chunk's values after substeps of a step (in the shard's lock).

    Args:
        shard: the shard.
        step: its number.
        step_spec: the substeps.

    Raises:
        StepProtocolError: the chunk is not at the step before.
    """
    if shard.version != step - 1 or not isinstance(shard.chunk, Chunk):
        raise StepProtocolError(f"parts of step {step} are asked for, and step {shard.version} is made")
    return shard.speculative.reach(shard.chunk, shard.totals(step), step, step_spec).values.clone()


@dataclass(frozen=True, slots=True)
class IntermediateRows:
    """Rows of a slice after the first substeps of a step that is not decided."""

    key: str
    shard: Shard
    step: int
    step_spec: StepSpec

    def rows(self, ids: Ids) -> torch.Tensor:
        """Return the rows of these ids, float32 [len(ids), dim], taking the shard's lock.

        Raises:
            StepProtocolError: the slice is not at the step before.
        """
        shard = self.shard
        with shard.lock:
            if shard.version != self.step - 1 or not isinstance(shard.chunk, Slice):
                raise StepProtocolError(
                    f"rows of {self.key!r} within step {self.step} are asked for, "
                    f"and step {shard.version} is made"
                )
            return shard.changed.rows(shard.chunk, shard.totals(self.step), self.step, self.step_spec, ids)


def apply(shard: Shard, totals: Mapping[int, torch.Tensor], step: int, step_spec: StepSpec) -> None:
    """Make a decided step of a shard (in its lock).

    Args:
        shard: the shard.
        totals: sums by backward pass, which are used up.
        step: its number.
        step_spec: how the step is made.
    """
    if take_over(shard, totals, step, step_spec):
        return
    assert shard.chunk is not None
    shard.changed = ChangedRows()
    make_substeps(shard.chunk, totals, step_spec, keep=False)


def not_expected(step: int) -> StepProtocolError:
    """Return the error for a question about values of a step whose making is not known."""
    return StepProtocolError(f"how step {step} will be made is not known, or not all members expect the same")

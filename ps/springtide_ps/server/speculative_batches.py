"""Batches that are made before they are pushed: the values of a chunk with one batch more.

A worker that does not step together with others pushes a chunk's gradient during backward and says how its
push will count it. The batch is made on the chunk's second copy (`speculative_copy`), whose values the worker
gets while it still computes. Nothing else sees them: a body that is left leaves no trace, and the push makes
the batch on the chunk as it is then. Where no other batch has come in between, the second copy takes the
chunk's place instead: the same operations on the same numbers. All functions are called in the chunk's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from springtide_ps.params.applied import AppliedBatches
from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.server.shard import LockedShard

log = logging.getLogger("springtide.ps")


def speculate(
    locked: LockedShard,
    early_number: int,
    of_batch: int,
    step_spec: StepSpec,
    gradient: Callable[[Chunk], torch.Tensor],
) -> tuple[AppliedBatches, torch.Tensor] | None:
    """Make a batch on the chunk's second copy.

    Args:
        locked: the shard.
        early_number: of the gradient among those whose values are wanted early on this server, above 0.
        of_batch: number of the batch.
        step_spec: how the push will apply it.
        gradient: returns it flat, like the values; its memory stays as it is.

    Returns:
        The batches and a copy of the values that the chunk would have. None: these cannot be known, or the
        batch
        is in the chunk already.

    Raises:
        ChunkError: the step is of another optimizer.
    """
    chunk, copy = locked.chunk, locked.shard.speculative
    if not isinstance(chunk, Chunk):
        return None
    chunk.check(step_spec)
    applied_batches = AppliedBatches() if chunk.applied_batches is None else chunk.applied_batches.copy()
    before = applied_batches.applied
    if not applied_batches.enter(of_batch, step_spec.skip):
        return None
    copy.early_push = 0
    try:
        made = copy.make(chunk, gradient(chunk), before, step_spec)
    except RuntimeError as error:  # the push itself will say what is wrong
        log.warning("batch %d cannot be made early: %r", of_batch, error)
        return None
    copy.early_push = early_number
    return applied_batches, made.values.clone()


def apply(
    locked: LockedShard, early_number: int, before: int, step_spec: StepSpec, gradient: torch.Tensor
) -> None:
    """Make a batch, which the chunk has written down already, on the chunk.

    Args:
        locked: the shard.
        early_number: the number that `speculate` got for this batch; 0: it got none.
        before: how many batches were applied until then.
        step_spec: how the batch is applied.
        gradient: flat, like the values; it is used up.

    Raises:
        ChunkError: the step is of another optimizer.
    """
    chunk, copy = locked.chunk, locked.shard.speculative
    if (
        isinstance(chunk, Chunk)
        and early_number
        and copy.early_push == early_number
        and copy.holds(before, step_spec)
    ):
        now = copy.swap(chunk)
        now.applied_batches, locked.shard.chunk = chunk.applied_batches, now
        return
    chunk.apply(gradient, step_spec)

"""Logical parts: how a global batch is cut, who computes which, and what a part leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide.data.balance import Proportions
from springtide.data.batch import Batch, Micro
from springtide.data.cursor import Cursor
from springtide.data.ledger import Contribution
from springtide.data.loop import LoopPlan
from springtide.data.partition import Part, partition
from springtide.data.salvage import Places, among, size
from springtide.train_step.randomness import isolated


@dataclass(frozen=True, slots=True)
class LogicalPart:
    """number: in 0..logical_workers-1, or the number of logical workers for a stand-in."""

    number: int
    batch: Batch


@dataclass(slots=True)
class PartContribution:
    """Contribution of a finished part to its step. moved: by buffer. buffers: by index, values of those."""

    number: int
    weight: float
    ids: Contribution
    moved: list[bool]
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)


def assignment(used: int, world_size: int, proportions: Proportions | None = None) -> list[range]:
    """Return by rank the numbers of the logical parts that it computes, contiguous; as even as possible, or
    by speed.

    Args:
        used: parts that have samples (the first ones).
        world_size: ranks; those beyond the parts get none.
        proportions: by which the number of parts follows speed; None: even.
    """
    if proportions is not None and used >= world_size:
        ends = list(itertools.accumulate(proportions.sizes(used)))
        return [range(a, b) for a, b in itertools.pairwise([0, *ends])]
    starts = [rank * used // world_size for rank in range(world_size + 1)]
    if used < world_size:
        starts = [min(rank, used) for rank in range(world_size + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def samples_by_rank(
    n: int, min_part: int, world_size: int, logical_workers: int, proportions: Proportions | None
) -> list[int]:
    """Return how many samples of a batch each rank has.

    Args:
        n: samples of the batch.
        min_part: fewest samples of a logical part.
        world_size: workers of the generation.
        logical_workers: parts that each global batch is cut into.
        proportions: as for `assignment`.
    """
    sizes = [part.size for part in partition(n, logical_workers, min_part) if part.size]
    return [sum(sizes[part] for part in own) for own in assignment(len(sizes), world_size, proportions)]


def parts_of(plan: LoopPlan, n: int, logical_workers: int) -> int:
    """Return how many logical parts of a batch have samples; they are the first ones.

    Args:
        plan: of the loop.
        n: samples of the batch.
        logical_workers: parts that each global batch is cut into.
    """
    return sum(1 for part in partition(n, logical_workers, plan.min_part) if part.size)


def assign(
    plan: LoopPlan,
    cursor: Cursor,
    rank: int,
    world_size: int,
    logical_workers: int,
    proportions: Proportions | None = None,
    rest: Places | None = None,
) -> list[LogicalPart]:
    """Return the parts of a step that a rank computes, in order; one stand-in if it has none.

    The parts depend on the batch's size and logical_workers alone, so bits do not depend on who has them.

    Args:
        plan: of the loop.
        cursor: where the step starts.
        rank: of this worker in its generation.
        world_size: workers of the generation.
        logical_workers: parts that each global batch is cut into.
        proportions: as for `assignment`.
        rest: numbers of the parts that are dealt, as places; None: all.

    Raises:
        ValueError: the rank is outside of the world.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of a world of {world_size}")
    ids = plan.global_ids(cursor)
    account = plan.account(ids, cursor)
    parts: list[Part] = partition(ids.numel(), logical_workers, plan.min_part)
    used = parts_of(plan, ids.numel(), logical_workers)
    step = cursor.step + 1

    def batch(
        number: int, own: torch.Tensor, counted: torch.Tensor, standin: torch.Tensor | None
    ) -> LogicalPart:
        fetch = plan.source.fetch
        if plan.source.runs_code:
            fetch = _seeded(fetch, plan.seed, step, number)
        made = Batch(
            Micro(counted, ids.numel()),
            own,
            fetch,
            standin_ids=standin,
            micro_batch=plan.micro_batch,
            min_part=plan.min_part,
        )
        return LogicalPart(number, made)

    dealt = ((0, used),) if rest is None else rest
    own = assignment(size(dealt), world_size, proportions)[rank]
    own_parts = [number for place in among(dealt, own.start, own.stop) for number in range(*place)]
    if not own_parts:
        return [batch(logical_workers, ids[:0], account[:0], ids[: plan.min_part])]
    spans = [
        (number, slice(parts[number].start, parts[number].start + parts[number].size)) for number in own_parts
    ]
    return [batch(number, ids[span], account[span], None) for number, span in spans]


def _seeded(
    fetch: Callable[[torch.Tensor], Any], seed: int, step: int, number: int
) -> Callable[[torch.Tensor], Any]:
    """Reading draws random numbers (augmentation) of the part's own, whenever in the body it happens."""

    def read(ids: torch.Tensor) -> Any:
        with isolated(seed, step, number, 1 + int(ids[0])):
            return fetch(ids)

    return read


def weights_by_part(kept: Sequence[PartContribution], logical_workers: int) -> list[float]:
    """Return the weight of each logical part, 0 where another worker has it.

    Args:
        kept: the parts of this worker.
        logical_workers: how many parts a step has.
    """
    weights = [0.0] * logical_workers
    for part in kept:
        if part.number < logical_workers:
            weights[part.number] = part.weight
    return weights


def total_ids(kept: Sequence[PartContribution]) -> Contribution:
    """Sums over this worker's parts, as the commit vote adds them."""
    return Contribution(*(sum(part.ids[place] for part in kept) for place in range(3)))

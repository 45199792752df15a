"""`batches`: deals this worker's part of each global batch, again after a dropped step."""

from __future__ import annotations

from collections.abc import Iterator

from springtide.body import Deal
from springtide.data.batch import Batch
from springtide.data.cursor import Cursor
from springtide.data.loop import LoopPlan
from springtide.exact import parts
from springtide.runtime import Runtime


def deal_batches(runtime: Runtime, plan: LoopPlan) -> Iterator[Batch]:
    """Yield batches until the loop has ended for all members.

    Raise SystemExit(0) when the coordinator lets this process go, UsageError when a batch was left out.
    """
    stage = runtime.open_loop(plan)
    while True:
        runtime.stand(stage)
        cursor = runtime.position.cursor
        if cursor.stage > stage:
            # A joiner: the job is past this loop.
            runtime.close_loop(stage)
            return
        if plan.ended(cursor):
            if runtime.end_loop(stage):
                return
            continue
        for deal in _deals(runtime, plan, cursor, stage):
            runtime.deal(deal)
            yield deal.batch
            runtime.check_taken()
            if not runtime.part_kept:
                break


def _deals(runtime: Runtime, plan: LoopPlan, cursor: Cursor, stage: int) -> list[Deal]:
    """The bodies that this worker runs for the step at the cursor: one, or one per logical part."""
    group, number = runtime.group, cursor.step + 1
    if not runtime.settings.logical_workers:
        batch = plan.batch(cursor, group.rank, group.size)
        return [Deal(batch, group, number, plan.seed, stage, cursor.epoch, group.rank)]
    own = parts.deal(plan, cursor, group.rank, group.size, runtime.settings.logical_workers)
    return [
        Deal(
            part.batch,
            group,
            number,
            plan.seed,
            stage,
            cursor.epoch,
            part.number,
            part is own[0],
            part is own[-1],
        )
        for part in own
    ]

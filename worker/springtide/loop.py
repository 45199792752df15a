"""`batches`: deals this worker's part of each global batch, again after a dropped step."""

from __future__ import annotations

from collections.abc import Iterator

from springtide.data.batch import Batch
from springtide.data.loop import LoopPlan
from springtide.runtime import Runtime
from springtide.training import Deal


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
        group = runtime.group
        batch = plan.batch(cursor, group.rank, group.size)
        runtime.deal(Deal(batch, group, cursor.step + 1, plan.seed, stage, cursor.epoch))
        yield batch
        runtime.check_taken()

"""`batches`: deals this worker's part of each global batch, again after a dropped step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from springtide.body import Deal
from springtide.data.batch import Batch
from springtide.data.cursor import Cursor
from springtide.data.loop import LoopPlan
from springtide.exact import parts
from springtide.loading import Loader
from springtide.rehearsal import rehearse
from springtide.runtime import Runtime


def deal_batches(
    runtime: Runtime, plan: LoopPlan, loader: Loader | None = None, rehearsals: int = 0
) -> Iterator[Batch]:
    """Yield batches until the loop has ended for all members.

    loader: reads ahead; it is closed at the end. rehearsals: of a worker that comes to a running job.
    Raise SystemExit(0) when the coordinator lets this process go, UsageError when a batch was left out.
    """
    with contextlib.ExitStack() as stack:
        if loader is not None:
            stack.callback(loader.close)
        yield from _deal(runtime, plan, loader, rehearsals)


def _deal(runtime: Runtime, plan: LoopPlan, loader: Loader | None, rehearsals: int) -> Iterator[Batch]:
    stage = runtime.open_loop(plan)
    yield from rehearse(runtime, plan, stage, rehearsals)
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
        for deal in _deals(runtime, plan, cursor, stage, loader):
            runtime.deal(deal)
            yield deal.batch
            runtime.check_taken()
            if not runtime.part_kept:
                break


def _deals(runtime: Runtime, plan: LoopPlan, cursor: Cursor, stage: int, loader: Loader | None) -> list[Deal]:
    """The bodies that this worker runs for the step at the cursor: one, or one per logical part; none when it
    has to look at the cursor again.
    """
    if runtime.leasing is not None:
        return runtime.leasing.deal(runtime.ready("batches()"), plan, cursor, stage)
    group, number = runtime.group, cursor.step + 1
    if not runtime.settings.logical_workers:
        fetch = None
        if loader is not None:
            loader.stand_at(cursor, group.rank, group.size)
            fetch = runtime.timing.timed(partial(loader.read, cursor.step))
        batch = plan.batch(cursor, group.rank, group.size, fetch)
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

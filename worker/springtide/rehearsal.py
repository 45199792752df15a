"""A worker that comes to a running job tries the body out before it asks to be admitted.

That warms compilation, kernels and allocator while the others train, who would wait for it in its first step
otherwise. Nothing of it is sent or stays: the bodies are dropped at optimizer.step, as any dropped body is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from springtide.body import Deal
from springtide.data.batch import Batch
from springtide.data.loop import LoopPlan
from springtide.exchange.groups import Group, Work
from springtide.randomness import isolated

if TYPE_CHECKING:
    from springtide.runtime import Runtime

log = logging.getLogger("springtide")

MOST = 10
_WELCOME_SECONDS = 5.0


class _Done:
    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Stage(Group):
    """Looks like the generation in which this process would be the last member; sums what is here alone."""

    def __init__(self, others: int) -> None:
        super().__init__(None, others, others + 1, 0.0)

    def _start_reduce(self, tensor: torch.Tensor, operation: Any) -> Work:
        return _Done()


def rehearse(runtime: Runtime, plan: LoopPlan, stage: int, count: int) -> Iterator[Batch]:
    """Yield at most `count` batches, whose bodies are dropped: for a process that is new in a job that trains
    without it.

    Not in exact mode, and not with parameter servers or tables, whose values it has no access to yet.
    """
    trainer, membership = runtime.ready("batches()"), runtime.membership
    possible = trainer.servers is None and not trainer.tables and not runtime.settings.logical_workers
    cursor = runtime.position.cursor
    if not count or not possible or membership is None or membership.generation is not None:
        return
    others = membership.await_welcome(_WELCOME_SECONDS)
    if not others or plan.ended(cursor):
        return
    began, own = time.monotonic(), runtime.group
    runtime.rehearsing, runtime.group = True, Stage(others)
    try:
        with isolated(plan.seed):
            for _ in range(count):
                batch = plan.batch(cursor, others, others + 1)
                number = cursor.step + 1
                runtime.deal(
                    Deal(batch, runtime.group, number, plan.seed, stage, cursor.epoch, others, rehearsal=True)
                )
                yield batch
                runtime.check_taken()
    finally:
        runtime.rehearsing, runtime.group = False, own
    log.info(
        "rehearsed %d times in %.3f s beside a job that trains (others: %d)",
        count,
        time.monotonic() - began,
        others,
    )

"""Give a worker that came later one batch of each training loop that the job has ended.

Such a worker runs the script from its beginning, through loops that it has no part in. Code behind a loop
uses names that the loop gives (`loss`, `epoch`, what `enumerate` counts), so an empty loop would end it with
a NameError. It gets a batch as large as its part would be; its body commits nothing and tells nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

from springtide.data.batch import Batch
from springtide.data.cursor import Cursor
from springtide.data.loop import LoopPlan
from springtide.elastic.lookahead import Lookahead
from springtide.elastic.step_runner import StepRunner
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.elastic.warm_up import ImaginedGroup
from springtide.loading.prefetch import Loader
from springtide.loading.streams import StreamLoader
from springtide.train_step.context import StepAssignment
from springtide.train_step.randomness import isolated

log = logging.getLogger(__name__)


class PastLoops:
    """Run bodies of ended loops in one process. Only the script's thread uses it."""

    def __init__(self, state: TrainingState, trainers: TrainerAccess, steps: StepRunner) -> None:
        """Make it for one process.

        Args:
            state: of the process.
            trainers: where its trainer is found.
            steps: that run the bodies.
        """
        self._state, self._trainers, self._steps = state, trainers, steps
        self._are_empty = False
        self._warned = False

    def leave_empty(self) -> None:
        """Have ended loops give nothing: the caller runs the script's loop, and knows what is behind it."""
        self._are_empty = True

    @property
    def is_possible(self) -> bool:
        """Return whether a body can run by itself, and is wanted."""
        return not self._are_empty and not self._why_impossible

    @property
    def _why_impossible(self) -> str:
        """Return why no body can run by itself; "" where one can."""
        trainer = self._trainers.require("batches()")
        if trainer.tables:
            return "rows of embedding tables are elsewhere, and are sent in backward"
        return "" if trainer.pod is None else "the processes of a pod with springtide.mesh() compute together"

    def _warn_once(self, stage: int) -> None:
        """Say that the loop gives nothing: code behind it may end the worker with a NameError.

        Args:
            stage: ordinal of the loop.
        """
        if self._are_empty or self._warned:
            return
        self._warned = True
        log.warning(
            "batches(): the job has ended training loop %d, which gives this worker no batch, since %s: "
            "names that are made in the body are missing behind the loop. Give them a value before it, or "
            "use one loop with epochs= instead of a loop for each epoch (said once)",
            stage + 1,
            self._why_impossible,
        )

    def batches(self, plan: LoopPlan, stage: int, loader: Loader | StreamLoader | None) -> Iterator[Batch]:
        """Yield one batch, whose body is put back; none where a body cannot run by itself.

        Args:
            plan: of the loop.
            stage: ordinal of the loop.
            loader: reads shards, where the data are some.
        """
        begin = Cursor(stage=stage)
        if plan.ended(begin):
            return
        if not self.is_possible:
            self._warn_once(stage)
            return
        group = self._state.group
        with isolated(plan.seed, stage):
            batch = self._batch(plan, begin, group.rank, group.size, loader)
            number = self._state.position.cursor.step + 1
            self._steps.assign(
                StepAssignment(batch, group, number, plan.seed, stage, 0, group.rank, is_past=True)
            )
            yield batch
            self._steps.check_taken()

    def _batch(
        self, plan: LoopPlan, begin: Cursor, rank: int, size: int, loader: Loader | StreamLoader | None
    ) -> Batch:
        """Return the part of the loop's first batch that a member of this rank would have."""
        if not isinstance(loader, StreamLoader):
            return plan.batch(begin, rank, size)
        known = Lookahead().cursor(plan, loader, begin, ImaginedGroup(0))
        loader.stand_at(known, rank, size)
        return plan.batch(known, rank, size, partial(loader.read, known.step))

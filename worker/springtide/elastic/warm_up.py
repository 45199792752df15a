"""Try the body out in a worker that comes to a running job, before it asks to be admitted.

That warms compilation, kernels and allocator while the others train, who would wait for it in its first step
otherwise. Nothing of it is sent or stays: the bodies are dropped at optimizer.step, as any dropped body is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from springtide.comm.process_group import Group, Work
from springtide.data.batch import Batch
from springtide.data.loop import LoopPlan
from springtide.elastic.step_runner import StepRunner
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.settings import Settings
from springtide.train_step.context import StepAssignment
from springtide.train_step.randomness import isolated
from springtide_protocol.names import GenerationName

log = logging.getLogger(__name__)

MAX_BODIES = 10
_WELCOME_SECONDS = 5.0


class _Done:
    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class ImaginedGroup(Group):
    """Look like the generation in which this process would be the last member; sum what is here alone."""

    def __init__(self, others: int) -> None:
        super().__init__(None, others, others + 1, 0.0)

    def _start_reduce(self, tensor: torch.Tensor, operation: Any, in_place: bool = False) -> Work:
        return _Done()


class Newcomer(Protocol):
    """Be a process that asks to be admitted to a job."""

    @property
    def generation(self) -> GenerationName | None:
        """Return the generation that it is a member of; None while it has not been admitted."""

    def await_welcome(self, seconds: float) -> int:
        """Wait for the coordinator that long; return how many processes train then."""

    @property
    def stands_by(self) -> bool:
        """Return whether those are as many as the job wants, so that this one is to replace one of them."""


class WarmUp:
    """Try bodies out in a process that is new in a job, which trains without it."""

    def __init__(
        self,
        settings: Settings,
        state: TrainingState,
        trainers: TrainerAccess,
        steps: StepRunner,
        newcomer: Newcomer | None,
    ) -> None:
        """Make it for one process.

        Args:
            settings: of the process.
            state: of the process.
            trainers: where its trainer is found.
            steps: that run the bodies.
            newcomer: this process in its job; None without a job.
        """
        self._exact, self._state, self._trainers = bool(settings.logical_workers), state, trainers
        self._steps, self._newcomer = steps, newcomer

    def batches(self, plan: LoopPlan, stage: int, count: int) -> Iterator[Batch]:
        """Yield batches whose bodies are dropped.

        There are none in exact mode, and none with parameter servers, shards or tables, whose values this
        process has no access to yet.

        Args:
            plan: of the loop.
            stage: ordinal of the loop.
            count: at most so many.
        """
        trainer, newcomer = self._trainers.require("batches()"), self._newcomer
        possible = not trainer.values_arrive and not trainer.tables and not self._exact
        cursor = self._state.position.cursor
        if not count or not possible or newcomer is None or newcomer.generation is not None:
            return
        others = newcomer.await_welcome(_WELCOME_SECONDS)
        if not others or plan.ended(cursor):
            return
        if newcomer.stands_by:
            others = max(1, others - 1)  # its part will be as large as one of theirs
        began, group = time.monotonic(), ImaginedGroup(others)
        with self._state.warm_up(group), isolated(plan.seed):
            for _ in range(count):
                batch = plan.batch(cursor, others, others + 1)
                number = cursor.step + 1
                self._steps.assign(
                    StepAssignment(
                        batch, group, number, plan.seed, stage, cursor.epoch, others, is_warm_up=True
                    )
                )
                yield batch
                self._steps.check_taken()
        log.info(
            "rehearsed %d times in %.3f s beside a job that trains (others: %d)",
            count,
            time.monotonic() - began,
            others,
        )

"""Say what memory the model takes, and refuse to begin what could only end for want of it.

Only the script's thread comes here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from springtide.coordination.membership import Membership
from springtide.coordination.metrics import Metrics
from springtide.errors import MemoryLimitError, SpringtideError
from springtide.memory.model import count, limit_of
from springtide.memory.optimizer_state import known_state_bytes, measured_state_bytes
from springtide.settings import Settings
from springtide.train_step.trainer import Trainer
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import memory_to_proto
from springtide_protocol.memory import ModelMemory, fits, in_words, need, why_too_small

log = logging.getLogger(__name__)


class MemoryReport:
    """Keep the estimate of one process."""

    def __init__(self, settings: Settings, metrics: Metrics, membership: Membership | None) -> None:
        """Begin without an estimate.

        Args:
            settings: Of the process.
            metrics: Where the estimate is shown.
            membership: Of the process, whose coordinator is told; None without a job.
        """
        self._settings, self._metrics, self._membership = settings, metrics, membership
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._model: ModelMemory | None = None
        self._size = 1
        self._minimum = 1
        self._to_measure = False

    def begin(
        self,
        trainer: Trainer,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Count what the model takes, and report it.

        Args:
            trainer: Of the models.
            models: Of the script.
            optimizers: Of the script.
        """
        if self._membership is None:
            return
        settings = self._settings
        steps_here = trainer.servers is None or not trainer.servers.dense
        model = count(
            models,
            optimizers,
            trainer.buckets.layout,
            trainer.device,
            shard=settings.shard if trainer.shards is not None else "None",
            steps_here=steps_here,
            masters=trainer.has_masters,
        )
        limit = limit_of(trainer.device, settings.memory_bytes, settings.local_world_size)
        self._optimizers = optimizers
        self._to_measure = steps_here and any(known_state_bytes(one) is None for one in optimizers)
        self._report(replace(model, limit=limit))

    def check(self, start: pb.Start, holds_state: bool) -> None:
        """Take part in a generation only if there is memory for it.

        A job that has not trained yet does not begin where the smallest generation that it may have could not
        go on: it would end so later, in the middle of the night perhaps.

        Args:
            start: Of the generation.
            holds_state: This process has the job's state, which would be lost with it.

        Raises:
            MemoryLimitError: The job is to begin, and could not go on with its fewest workers.
            SpringtideError: This process comes to a job that trains, and has no room for its model.
        """
        model, per_pod = self._model, self._settings.local_world_size
        self._size, self._minimum = len(start.members), start.minimum
        if model is None:
            return
        self._show()
        begins = start.fresh and not start.had_state
        why = why_too_small(model, start.minimum, per_pod, self._can_share) if start.minimum else ""
        if begins and why:
            raise MemoryLimitError(f"the model does not fit: {why}")
        if not holds_state and not fits(model, self._size):
            raise SpringtideError(
                f"this worker has no room for the model: a process needs "
                f"{in_words(need(model, self._size).total)} in a generation of {self._size} for parameters, "
                f"gradients and the optimizer's state, and has {in_words(model.limit)}. The others go on "
                "without it; give it as much memory as they have"
            )

    def committed(self, trainer: Trainer) -> None:
        """Measure the state of optimizers that were not known, after this process's first step."""
        if not self._to_measure or self._model is None:
            return
        self._to_measure = False
        if trainer.shards is not None:
            # Its part of the whole, in the generation that stands.
            state = trainer.shards.state_bytes * max(2, self._size) // 2
        else:
            state = sum(measured_state_bytes(one) for one in self._optimizers)
        self._report(replace(self._model, state=state))
        per_pod = self._settings.local_world_size
        if why := why_too_small(self._model, self._minimum, per_pod, self._can_share):
            log.warning("this job will end for want of memory when it shrinks to its minimum: %s", why)

    @property
    def _can_share(self) -> bool:
        settings = self._settings
        return settings.strategy == "AllReduce" and settings.shard != "Gradients"

    def _report(self, model: ModelMemory) -> None:
        assert self._membership is not None
        self._model = model
        self._membership.report_memory(memory_to_proto(model))
        self._show()

    def _show(self) -> None:
        assert self._model is not None
        self._metrics.memory.estimate.set(need(self._model, self._size).total)
        self._metrics.memory.limit.set(self._model.limit)

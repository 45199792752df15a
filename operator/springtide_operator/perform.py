"""Carry out the actions of one job's plan in their order, and keep the refusals for the next plan."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from springtide_kube.errors import ApiError
from springtide_operator.api.job import Job
from springtide_operator.executor import ClusterExecutor, fields
from springtide_operator.manifests.worker import TemplateError
from springtide_operator.plan.actions import Action, DeletePod, Turn
from springtide_operator.plan.retry import refuse

log = logging.getLogger("springtide.operator")

PARALLEL = 32  # requests of one job at a time
MOST_CREATIONS = 64  # workers made in one turn: what is left comes when others have had theirs


class Performer:
    """Performs one job's plans. may_act: whether this process is still the one that acts."""

    def __init__(
        self,
        executor: ClusterExecutor,
        may_act: Callable[[], bool],
        on_action: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._executor = executor
        self._may_act = may_act
        self._on_action = on_action
        self._clock = clock
        self.memory = executor.memory

    @property
    def coordinator_image(self) -> str:
        """Return the operator's own image for coordinators."""
        return self._executor.coordinator_image

    @property
    def server_image(self) -> str:
        """Return the operator's own image for parameter servers."""
        return self._executor.server_image

    @property
    def policy_missing(self) -> bool:
        """A NetworkPolicy is wanted, and this process has not applied it yet."""
        return self._executor.policy_missing

    async def perform(self, job: Job, actions: Sequence[Action]) -> int:
        """Carry out actions: first those that pods need and the coordinator, then deletions, then workers in
        growing batches.

        Refusals are remembered for the next plan, they are no errors here.

        Args:
            job: as the plan saw it.
            actions: of the plan.

        Returns:
            How many were carried out.
        """
        by_turn = {turn: [action for action in actions if action.turn is turn] for turn in Turn}
        deletions = sorted(by_turn[Turn.DELETION], key=lambda action: action.role != DeletePod.role)
        creations = by_turn[Turn.WORKER][:MOST_CREATIONS]
        if not any(action.role == DeletePod.role for action in deletions):
            self.memory.refusals.pop(DeletePod.role, None)  # what could not be deleted has gone by itself
        batches = [by_turn[Turn.TOGETHER]]
        batches += [[action] for action in by_turn[Turn.FIRST]]
        batches += [deletions[start : start + PARALLEL] for start in range(0, len(deletions), PARALLEL)]
        done = 0
        for batch in batches:
            if batch and not self._may_act():
                return done
            done += await self._all(job, batch)
        # A quota refuses all of a hundred creations: find out with one, then two, four, ...
        start, size = 0, 1 if "worker" in self.memory.refusals else 4
        while start < len(creations) and self._may_act():
            batch = creations[start : start + size]
            carried = await self._all(job, batch)
            done += carried
            if carried < len(batch):
                break
            start, size = start + size, min(PARALLEL, size * 2)
        return done

    def protection_due(self, job: Job, seconds: float) -> float | None:
        """Return in how many seconds somebody should look at what protects the job; None: a watch will tell.

        Args:
            job: as the plan saw it.
            seconds: between two looks at what is not watched.
        """
        return self._executor.protection_due(job, seconds)

    async def look_after(self, job: Job, seconds: float) -> bool:
        """See to what protects the job, as `ClusterExecutor.look_after` does, if this process may act.

        Args:
            job: as the plan saw it.
            seconds: between two looks.

        Returns:
            Whether something is to be applied again.

        Raises:
            ApiError: the API server refuses.
        """
        return self._may_act() and await self._executor.look_after(job, seconds)

    async def _all(self, job: Job, actions: Sequence[Action]) -> int:
        return sum(await asyncio.gather(*(self._one(job, action) for action in actions)))

    async def _one(self, job: Job, action: Action) -> bool:
        try:
            if not await action.execute(self._executor, job):
                return False
        except ApiError as error:
            terminating = "NamespaceTerminating" in error.causes
            self._refused(job, action.role, error.code, error.message, terminating)
            return False
        except TemplateError as error:
            self._refused(job, action.role, 422, str(error))
            return False
        self._on_action(action.kind)
        self.memory.refusals.pop(action.role, None)
        log.info("%s: %s", action.describe(job.name), action.reason, extra=fields(job))
        return True

    def _refused(self, job: Job, role: str, code: int, message: str, terminating: bool = False) -> None:
        before = self.memory.refusals.get(role)
        self.memory.refusals[role] = refuse(before, code, message, self._clock(), terminating, job.generation)
        if before is None or before.message != message:
            log.warning("refused by the API server: %s: %s (%s)", role, message, code, extra=fields(job))

"""Deal this worker's part of each global batch, again after a dropped step, until the loop has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from springtide import faults
from springtide.coordination.membership import Membership
from springtide.data.balance import Proportions
from springtide.data.batch import Batch
from springtide.data.cursor import Cursor
from springtide.data.loop import LoopPlan
from springtide.data.marks import Marks
from springtide.elastic.balancer import Balancer
from springtide.elastic.catching_up import CatchingUp
from springtide.elastic.consistency import Consistencies
from springtide.elastic.evaluation import Evaluations
from springtide.elastic.lookahead import GroupFailed, Lookahead
from springtide.elastic.past_loops import PastLoops
from springtide.elastic.recovery import Recovery
from springtide.elastic.replica_check import ReplicaCheck
from springtide.elastic.salvage import Salvage
from springtide.elastic.saving import CheckpointSaver
from springtide.elastic.server_values import ServerValues
from springtide.elastic.step_runner import StepRunner
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.elastic.warm_up import WarmUp
from springtide.errors import UsageError
from springtide.exact import parts as exact_parts
from springtide.loading.prefetch import Loader
from springtide.loading.streams import StreamLoader
from springtide.train_step.context import StepAssignment
from springtide.train_step.timing import Timing
from springtide.train_step.transaction import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """Name what training loops use of their process."""

    state: TrainingState
    trainers: TrainerAccess
    steps: StepRunner
    saver: CheckpointSaver
    replicas: ReplicaCheck
    values: ServerValues
    evaluations: Evaluations
    consistencies: Consistencies
    timing: Timing
    balancer: Balancer
    salvage: Salvage
    warm_up: WarmUp
    catching_up: CatchingUp
    membership: Membership | None  # None without a job
    recovery: Recovery | None  # None without a job
    logical_workers: int  # 0 unless sums are exact


class TrainingLoops:
    """Run the training loops of a script, one after another. Only the script's thread uses it."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._state = parts.state
        self._lookahead = Lookahead()
        self.past = PastLoops(parts.state, parts.trainers, parts.steps)

    def batches(
        self,
        plan: LoopPlan,
        loader: Loader | StreamLoader | None = None,
        rehearsals: int = 0,
        read_marks: Callable[[], Marks] = dict,
        until: Callable[[], bool] | None = None,
    ) -> Iterator[Batch]:
        """Yield batches until the loop has ended for all members.

        Args:
            plan: of the loop.
            loader: reads ahead, or reads shards; it is closed at the end.
            rehearsals: how often a worker that comes to a running job tries the body out before.
            read_marks: reads the samples that members compare.
            until: asked between two steps whether the loop ends there, before its plan does; it says the same
                in all members that hold the same state.

        Raises:
            SystemExit: the coordinator lets this process go.
            UsageError: a batch was left out, or this is the wrong place.
        """
        with contextlib.ExitStack() as stack:
            if loader is not None:
                stack.callback(loader.close)
            self._check_place()
            coming = self._state.opened_loops
            if self._state.position.cursor.stage <= coming and not self._passes(coming):
                plan = replace(plan, marks=read_marks())  # else the job is past this loop
            yield from self._batches(
                plan, loader, rehearsals, _never if until is None else self._asked(until)
            )

    def _batches(
        self, plan: LoopPlan, loader: Loader | StreamLoader | None, rehearsals: int, until: Callable[[], bool]
    ) -> Iterator[Batch]:
        steps, stage = self._parts.steps, self._state.open_loop(plan)
        trainer = self._parts.trainers.require("batches()")
        self._parts.balancer.open_loop(plan, on_cpu=trainer.device.type == "cpu")
        trainer.on_found(loader.found if isinstance(loader, StreamLoader) else tuple)
        if plan.streams is not None:
            self._parts.consistencies.needs_steps("batches() of data in shards")
        if not self._passes(stage):
            yield from self._parts.warm_up.batches(plan, stage, rehearsals)
        any_dealt = False
        while True:
            if self._passes(stage) or not self._stand(stage, until):
                # The job is past this loop, and trains: this process is no member yet.
                self._parts.catching_up.seem_last_member(stage)
                yield from self.past.batches(plan, stage, loader)
                self._state.close_loop(stage)
                return
            cursor = self._state.position.cursor
            if cursor.stage > stage:
                # A joiner: the job is past this loop.
                yield from self.past.batches(plan, stage, loader)
                self._state.close_loop(stage)
                return
            if plan.ended(cursor) or until():
                if not any_dealt and (cursor.epoch or cursor.position):
                    # A joiner: the others stand at the loop's end already.
                    yield from self.past.batches(plan, stage, loader)
                    any_dealt = True
                if self._end(stage):
                    return
                continue
            if not self._agree_on_data(stage) or not self._pod_begins(cursor):
                continue
            dealt_from = self._look_ahead(plan, cursor, loader)
            if dealt_from is None:
                continue
            for assignment in self._assignments(plan, dealt_from, stage, loader):
                steps.assign(assignment)
                any_dealt = True
                yield assignment.batch
                steps.check_taken()
                if not steps.part_set_aside:
                    break

    def _asked(self, until: Callable[[], bool]) -> Callable[[], bool]:
        """Return the script's question, which is not asked where members have no common steps."""

        def ask() -> bool:
            self._parts.consistencies.check_together("batches(until=)")
            return bool(until())

        return ask

    def _check_place(self) -> None:
        """Raise UsageError where no training loop can begin."""
        trainer = self._parts.trainers.require("batches()")
        self._parts.evaluations.check_none()
        if trainer.transaction.phase is not Phase.IDLE:
            raise UsageError("batches() inside of a step: start the next training loop after the step's body")
        if self._state.plan is not None:
            raise UsageError(
                "batches() before the previous training loop ended: loops run one after another and to "
                "their end; use epochs= instead of leaving a loop with `break`"
            )

    def _passes(self, stage: int) -> bool:
        """Return whether this process goes through loop `stage` before it asks to be admitted."""
        return self._may_pass and self._parts.catching_up.passes(stage)

    @property
    def _may_pass(self) -> bool:
        """Return whether this process can go through loops by itself; it is asked in each step."""
        return self._parts.catching_up.is_possible and self.past.is_possible

    def _stand(self, stage: int, until: Callable[[], bool]) -> bool:
        """Be a member of a running generation, with its state, at loop `stage` or past it.

        Return False when this process is none yet, and is to go through the loop first.
        """
        membership, plan = self._parts.membership, self._state.plan
        ended = plan is not None and plan.ended(self._state.position.cursor)
        if not ended and self._state.position.cursor.stage == stage and until():
            ended = True
            self._parts.saver.checkpoints.end_early()
        due = self._parts.saver.checkpoints.due
        odd = self._parts.replicas.compare(due or ended or self._state.boundary)
        if due and membership is not None and membership.state is not None:
            self._parts.saver.save_if_due(membership.state, ended=ended, without=odd)
        recovery = self._parts.recovery
        if recovery is not None and not recovery.stand(stage, moves_on=self._may_pass):
            return False
        self._state.skip_to_loop(stage)
        return True

    def _agree_on_data(self, stage: int) -> bool:
        """Return whether all members read the same; False when there will be another generation first."""
        recovery = self._parts.recovery
        if recovery is None or self._parts.consistencies.async_loop is not None:
            return True
        return recovery.agree_on_data(stage)

    def _look_ahead(
        self, plan: LoopPlan, cursor: Cursor, loader: Loader | StreamLoader | None
    ) -> Cursor | None:
        """Return the cursor with all that the step is dealt from; None where a member was lost meanwhile.

        Raise UsageError where members do not step together.
        """
        if not isinstance(loader, StreamLoader):
            return cursor
        if self._parts.consistencies.async_loop is not None:
            raise UsageError(
                "batches(): data in shards are dealt step by step, which needs "
                "strategy.parameterServer.consistency Synchronous; BoundedStaleness and Asynchronous take "
                "data with __len__ and __getitem__"
            )
        timing, lookahead = self._parts.timing, self._lookahead
        try:
            with timing.reading():
                return lookahead.cursor(plan, loader, cursor, self._state.group)
        except GroupFailed as error:
            self._parts.trainers.require("batches()").failure = error.failure
            return None

    def _pod_begins(self, cursor: Cursor) -> bool:
        """Return whether all processes of the pod begin the step at the cursor; one by itself does."""
        pod = self._parts.trainers.require("batches()").pod
        return pod is None or pod.begins(cursor.step + 1)

    def _end(self, stage: int) -> bool:
        """End loop `stage`, at whose end the cursor stands.

        Return False when the loop goes on, because the state is an earlier one now.
        """
        faults.reach("ended", self._state.position.cursor.step)
        self._parts.values.settle(None)
        if self._parts.recovery is not None and not self._parts.recovery.end_loop(stage):
            return False
        self._state.close_loop(stage)
        return True

    def _assignments(
        self, plan: LoopPlan, cursor: Cursor, stage: int, loader: Loader | StreamLoader | None
    ) -> list[StepAssignment]:
        """Return the bodies that this worker runs for the step at the cursor: one, or one per logical part.

        Return none when the loop has to look at the cursor again.
        """
        async_loop = self._parts.consistencies.async_loop
        if async_loop is not None:
            return async_loop.assign(self._parts.trainers.require("batches()"), plan, cursor, stage)
        group, number, salvage = self._state.group, cursor.step + 1, self._parts.salvage
        salvages = salvage.begin_step()
        if not self._parts.logical_workers:
            pod, fetch = self._parts.trainers.require("batches()").pod, None
            rank, size, together = (group.rank, group.size, range(0)) if pod is None else pod.data_place
            # The processes of a pod run forward and backward together, so their parts stay even.
            proportions = self._parts.balancer.proportions if pod is None else None
            if loader is not None:
                self._stand_at(loader, cursor, rank, size, proportions)
                fetch = self._parts.timing.timed(partial(loader.read, cursor.step))
            rest = salvage.rest(plan, cursor)
            salvaged = salvage.salvaged
            batch = plan.batch(
                cursor,
                rank,
                size,
                fetch,
                together,
                pod is None or pod.counts,
                proportions,
                rest,
                None if salvaged is None else salvaged.account,
            )
            # Random numbers go with the samples: those who compute on the same ones draw the same.
            part = rank if rest is None else plan.batch_size + (batch.micro.places or ((0, 0),))[0][0]
            return [
                StepAssignment(
                    batch,
                    group,
                    number,
                    plan.seed,
                    stage,
                    cursor.epoch,
                    part,
                    salvages=salvages,
                    salvaged=salvaged,
                    cursor=cursor,
                )
            ]
        if loader is not None:
            self._stand_at(loader, cursor, group.rank, group.size, self._parts.balancer.proportions)
        rest = salvage.rest(plan, cursor, self._parts.logical_workers)
        own = exact_parts.assign(
            plan,
            cursor,
            group.rank,
            group.size,
            self._parts.logical_workers,
            self._parts.balancer.proportions,
            rest,
        )
        return [
            StepAssignment(
                part.batch,
                group,
                number,
                plan.seed,
                stage,
                cursor.epoch,
                part.number,
                part is own[0],
                part is own[-1],
                salvages=salvages,
                salvaged=salvage.salvaged,
                cursor=cursor,
            )
            for part in own
        ]

    def _stand_at(
        self,
        loader: Loader | StreamLoader,
        cursor: Cursor,
        rank: int,
        size: int,
        proportions: Proportions | None,
    ) -> None:
        with self._parts.timing.reading():
            loader.stand_at(cursor, rank, size, proportions)


def _never() -> bool:
    return False

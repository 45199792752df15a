"""Run the bodies of `with springtide.step():`: open them, and commit, drop or break them off at their end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from springtide import faults
from springtide.comm.commit_vote import Result
from springtide.coordination.membership import Membership, generation_of
from springtide.data.balance import Figure
from springtide.data.cursor import Cursor
from springtide.elastic.accounting import Accounting
from springtide.elastic.balancer import Balancer
from springtide.elastic.consistency import Consistencies
from springtide.elastic.replica_check import ReplicaCheck
from springtide.elastic.salvage import Salvage
from springtide.elastic.saving import CheckpointSaver
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.errors import Dropped, SpringtideError, UsageError
from springtide.memory.report import MemoryReport
from springtide.train_step.context import StepAssignment, StepContext
from springtide.train_step.trainer import Trainer
from springtide.train_step.transaction import Phase
from springtide_protocol.names import StateName

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Name what steps use of their process."""

    state: TrainingState
    trainers: TrainerAccess
    accounting: Accounting
    saver: CheckpointSaver
    consistencies: Consistencies
    membership: Membership | None  # None without a job
    check_no_evaluation: Callable[[], None]  # raises UsageError inside of an evaluation loop
    all_together: Callable[[], None]  # tells that all members stand at the same committed step
    memory: MemoryReport
    balancer: Balancer
    replicas: ReplicaCheck
    salvage: Salvage


class StepRunner:
    """Run the script's body on each batch that is dealt, as one step. The script's thread alone uses it."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._state = parts.state
        self._assignment: StepAssignment | None = None
        self._dealt_from: Cursor | None = None
        self._set_aside = False
        self._broken = False
        self._is_past = False  # of the running body, or the last one
        self._warned_of_names = self._warned_of_values = False
        self._values: dict[str, float] = {}

    # ---- from the loop

    @property
    def committed_values(self) -> dict[str, float]:
        """Return the means of what all members reported in the newest step, by name; equal on all of them."""
        return self._values

    @property
    def part_set_aside(self) -> bool:
        """Return whether the last body was one part of its step, which goes on with the next body."""
        return self._set_aside

    def assign(self, assignment: StepAssignment) -> None:
        """Give the next body its samples."""
        if assignment.first:
            self._parts.accounting.timing.note_assigned()
        self._assignment, self._dealt_from = assignment, assignment.cursor

    def check_taken(self) -> None:
        """Raise UsageError when the script went on to the next batch without a step for this one."""
        if self._assignment is not None:
            raise UsageError(
                f"the batch of step {self._assignment.number} was not trained: every batch needs `with "
                "springtide.step():` around its training code, on every worker; do not skip batches with "
                "`continue`"
            )

    @property
    def is_past(self) -> bool:
        """Return whether the batch that was dealt last belongs to a loop that the job has ended."""
        return self._is_past if self._assignment is None else self._assignment.is_past

    @property
    def ends_pass(self) -> bool:
        """Return whether the step that was dealt last is known to be the last one of its pass.

        The end of data without numbers may turn out in that step only.
        """
        plan, cursor = self._state.plan, self._dealt_from
        return plan is not None and cursor is not None and plan.advance(cursor).epoch > cursor.epoch

    # ---- the body

    def enter(self) -> None:
        """Open the body of a step. Raise UsageError for a wrong place."""
        trainer = self._parts.trainers.require("step()")
        self._parts.check_no_evaluation()
        if self._assignment is None:
            if trainer.transaction.phase is Phase.IDLE:
                raise UsageError(
                    "step() without a batch: use it once for each batch of `for batch in "
                    "springtide.batches(...)`"
                )
            trainer.transaction.begin()  # raises: nested, or broken
        assignment = self._assignment
        assert assignment is not None
        self._is_past = assignment.is_past
        if assignment.is_past:
            trainer.past.begin((assignment.group, assignment.number))
            self._assignment = None
            return
        trainer.past.forget()
        if assignment.first:
            self._parts.accounting.timing.opened()
        trainer.begin(assignment)
        self._assignment = None

    def leave(self, error: BaseException | None) -> bool:
        """End the body, which `error` leaves if there is one; return whether that is swallowed.

        Raise UsageError or SpringtideError when the body was no whole step.
        """
        trainer = self._parts.trainers.require("step()")
        if trainer.past.is_open:
            self._leave_past(trainer, error)
            return False
        if error is None:
            try:
                trainer.finish()
            except Dropped:
                pass  # as if it had been found a moment earlier
            except SpringtideError as problem:
                self._break_off(str(problem))
                raise
        trainer.transaction.finish()
        self._set_aside = trainer.transaction.phase is Phase.SET_ASIDE
        if self._set_aside:
            try:
                trainer.end_part()
            except UsageError as problem:
                self._break_off(str(problem))
                raise
            return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
        if trainer.transaction.phase is Phase.DROPPED:
            if not self._state.warming_up:
                step = self._state.position.cursor.step + 1
                log.info("step %d is dropped: %s", step, trainer.transaction.reason)
                self._parts.accounting.metrics.dropped.inc()
            is_void = trainer.is_void
            try:
                kept = trainer.end_dropped()
            except UsageError as problem:
                self._break_off(str(problem))
                raise
            self._parts.salvage.dropped(kept, is_void=is_void)
            return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
        if error is not None:
            self._break_off(f"{type(error).__name__}: {error}")
            return False
        try:
            self._commit(trainer)
        except SpringtideError as problem:
            self._break_off(str(problem))
            raise
        return False

    def _leave_past(self, trainer: Trainer, error: BaseException | None) -> None:
        """End a body of a loop that the job is past, which `error` leaves if there is one."""
        if error is not None:
            self._break_off(f"{type(error).__name__}: {error}")
            return
        try:
            trainer.past.end()
        except UsageError as problem:
            self._break_off(str(problem))
            raise

    @property
    def failed_step(self) -> tuple[int, str]:
        """Return the step whose body or samples ended this process, and its samples in words.

        Return 0 when there is none, or when the failure came from outside and may be over next time.
        """
        cursor, plan = self._state.position.cursor, self._state.plan
        trained = self._assignment is not None or self._broken
        outside = self._state.failed_outside or self._state.warming_up or self.is_past
        if plan is None or not trained or outside:
            return 0, ""
        dealt_from = self._dealt_from
        if dealt_from is not None and (dealt_from.stage, dealt_from.step) == (cursor.stage, cursor.step):
            cursor = dealt_from
        return cursor.step + 1, plan.describe_samples(cursor)

    def _break_off(self, problem: str) -> None:
        self._broken = True
        trainer = self._parts.trainers.require("step()")
        trainer.transaction.break_off(
            f"step {self._state.position.cursor.step + 1} was left by an exception, and nothing can go on in "
            f"this process: {problem}"
        )
        self._state.group.shut()

    def _commit(self, trainer: Trainer) -> None:
        state, parts = self._state, self._parts
        body = trainer.end_stepped()
        if (async_loop := parts.consistencies.async_loop) is not None:
            async_loop.commit(trainer, body)
            return
        result, plan = body.result, state.plan
        assert result is not None
        assert plan is not None
        cursor, ledger = plan.commit(
            state.position.ledger,
            body.assignment.cursor or state.position.cursor,
            result.count,
            result.hash_lo,
            result.hash_hi,
            skipped=body.skipped,
            found=result.found,
        )
        seconds = time.perf_counter() - body.began
        state.commit(cursor, ledger, seconds + parts.salvage.committed(body, trainer, seconds))
        name = StateName(generation_of(parts.membership), cursor.step)
        if parts.membership is not None:
            parts.membership.hold(name)
        trainer.transaction.end()
        if trainer.feeds is not None:
            trainer.feeds.committed(cursor.step)
        parts.all_together()
        if trainer.servers is not None and trainer.servers.copied():
            trainer.want_change(True)
        # The loop ends anyway: nobody waits for another step.
        closing = trainer.buckets.closing or (
            trainer.servers is not None and trainer.servers.compression.closing
        )
        if body.change or (closing and plan.ended(cursor)):
            state.stop_at_boundary()
        parts.saver.checkpoints.committed(result.save, plan.ended(cursor))
        self._values = result.values or {}
        self._warn_once(body, result.values)
        parts.replicas.committed(body.found)
        self._balance(trainer, body, result)
        commit = parts.accounting.count_step(body, seconds, name, result.values or {})
        if trainer.shards is not None:
            parts.accounting.metrics.values.observe(trainer.shards.take_gather_seconds())
            parts.accounting.metrics.optimizer_bytes.set(trainer.shards.state_bytes)
        parts.memory.committed(trainer)
        parts.accounting.announce(commit)
        parts.accounting.step_log.write(commit)
        faults.reach("committed", cursor.step)

    def _balance(self, trainer: Trainer, body: StepContext, result: Result) -> None:
        """Take the committed figures of all members for the cut of the next step."""
        group, plan, accounting = body.assignment.group, self._state.plan, self._parts.accounting
        if trainer.pod is not None or plan is None or group.size == 1:
            return
        numbers = iter(result.figures)
        figures = [Figure(sample_time, room) for sample_time, room in zip(numbers, numbers, strict=True)]
        seconds = body.own_seconds - accounting.timing.fetched_in_body
        self._parts.balancer.committed(figures, seconds, body.computed_samples)
        accounting.share(self._parts.balancer.announce(plan, group.rank, group.size))

    def _warn_once(self, body: StepContext, values: dict[str, float] | None) -> None:
        number = body.assignment.number
        odd = [name for name, value in (values or {}).items() if not math.isfinite(value)]
        if odd and not self._warned_of_values:
            self._warned_of_values = True
            log.warning("step %d: %s is not finite (said once)", number, ", ".join(odd))
        if values is None and not self._warned_of_names:
            self._warned_of_names = True
            log.warning(
                "step %d: workers reported different names, so the values are left out; this one reported %s",
                number,
                sorted(body.reports),
            )

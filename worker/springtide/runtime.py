"""The one runtime of a process: where script, group and session with the coordinator meet."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from springtide import faults, outcome
from springtide.answers import Depart
from springtide.blocks import Blocks
from springtide.body import Body, Deal
from springtide.checkpoint import names as checkpoint_names
from springtide.checkpoint import schedule
from springtide.checkpoint.keeper import Checkpoints
from springtide.checkpoint.place import Place
from springtide.checkpoint.shares import Share
from springtide.checkpoint.writer import Written
from springtide.consistency import Consistencies
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.data.loop import LoopPlan
from springtide.environment import Settings
from springtide.errors import Dropped, SpringtideError, UsageError
from springtide.evaluation import Evaluations
from springtide.exchange.groups import Group
from springtide.leasing import Leasing
from springtide.membership import Membership
from springtide.metrics import Metrics
from springtide.names import ALONE, Generation, StateName
from springtide.records import Commit, Ring, StepLog, as_numbers
from springtide.recovery import Recovery
from springtide.reported import ReportedNames
from springtide.session import Session
from springtide.state import Position
from springtide.timing import Timing
from springtide.training import Trainer
from springtide.transaction import Phase
from springtide_coordinator import coordinator_pb2 as pb

log = logging.getLogger("springtide")


class Runtime:
    """State of the library in this process.

    All methods are called from the script's thread unless they say otherwise.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.job, settings.namespace)
        self.timing = Timing()
        self.ring = Ring()
        self.step_log = StepLog(settings.step_log, settings.pod_name or "alone")
        self.trainer: Trainer | None = None
        self.leasing: Leasing | None = None
        """While workers do not step together."""
        self.consistencies: Consistencies | None = None
        self.position = Position(Cursor(), Ledger())
        self.plan: LoopPlan | None = None
        self.last_plan: LoopPlan | None = None
        self.blocks = Blocks(self)
        self.group = Group(None, 0, 1, settings.collective_seconds)
        self.boundary = False
        self.loops = 0
        self.ended_loops = 0
        self.generations = 0
        self.values: dict[str, float] = {}
        self.reported = ReportedNames()
        self.outcome: outcome.Outcome | None = None
        self.part_kept = False
        self.rehearsing = False
        self.evaluations = Evaluations()
        self.failed_outside = False
        self._broken = False
        self._deal: Deal | None = None
        self._warned_of_names = self._warned_of_values = False
        self.membership: Membership | None = None
        self.session: Session | None = None
        self.recovery: Recovery | None = None
        self.checkpoints = Checkpoints(
            Place() if settings.alone else settings.checkpoint,
            {"namespace": settings.namespace, "name": settings.job, "uid": settings.job_uid},
            self._members_besides,
            self._on_checkpoint,
        )
        self._stop_metrics: Callable[[], None] = lambda: None
        self._committed_at = math.nan
        self.metrics.since_commit.set_function(lambda: time.monotonic() - self._committed_at)
        if not settings.alone:
            self.session = Session(settings, self)
            self.metrics.coordinator_missing.set_function(self.session.missing_seconds)
            self.membership = self.session.membership
            self.membership.use_storage(self.checkpoints.able, books=settings.asynchronous)
            self.recovery = Recovery(self, self.membership)

    def begin(self) -> None:
        """Serve metrics and say Hello, in a job."""
        if self.session is not None:
            self._stop_metrics = self.metrics.serve(
                self.settings.metrics_port, self.settings.bind, self.settings.metrics_file
            )
            self.session.start()

    # ---- from the stream's thread

    def on_over(self, reason: str) -> None:
        """Drop the open step, and release whoever waits in a collective of it, here and at the peers."""
        if self.trainer is not None:
            self.trainer.drop(reason)
        self.group.shut()
        self.blocks.shut()

    def on_boundary(self) -> None:
        if self.trainer is not None:
            self.trainer.want_change(True)
        if self.leasing is not None:
            self.leasing.interrupt()

    # ---- the loop

    def ready(self, call: str) -> Trainer:
        """Raise UsageError when distribute() has not been called."""
        if self.trainer is None:
            raise UsageError(
                f"{call} before springtide.distribute(): call model, optimizer = "
                "springtide.distribute(model, optimizer) first"
            )
        return self.trainer

    def open_loop(self, plan: LoopPlan) -> int:
        """A training loop begins; return its ordinal, from 0."""
        trainer = self.ready("batches()")
        self.evaluations.check_none()
        if trainer.transaction.phase is not Phase.IDLE:
            raise UsageError("batches() inside of a step: start the next training loop after the step's body")
        if self.plan is not None:
            raise UsageError(
                "batches() before the previous training loop ended: loops run one after another and to "
                "their end; use epochs= instead of leaving a loop with `break`"
            )
        self.plan = self.last_plan = plan
        self.loops += 1
        return self.loops - 1

    def stand(self, stage: int) -> None:
        """Be a member of a running generation, with its state, at loop `stage` or past it."""
        if self.checkpoints.due and self.membership is not None and self.membership.state is not None:
            share = Share(self.group.rank, tuple(self.membership.labels()))
            ended = self.plan is not None and self.plan.ended(self.position.cursor)
            self.save(self.membership.state, share, "end" if ended else schedule.INTERVAL)
        if self.recovery is not None:
            self.recovery.stand(stage)
        cursor = self.position.cursor
        while cursor.stage < stage:
            cursor = cursor.next_stage()
        self.position = replace(self.position, cursor=cursor)

    def save(self, state: StateName, share: Share, reason: str) -> None:
        """Copy this member's share of the state, which is named so, and have it written."""
        trainer, plan = self.ready("batches()"), self.plan
        assert plan is not None
        seconds = self.checkpoints.take(
            state,
            lambda: trainer.checkpoint_tree(self.position, plan.fingerprint()),
            share,
            reason,
            trainer.freeze,
        )
        self.timing.paused(seconds)
        self.metrics.checkpoint_stall.observe(seconds)
        faults.reach("staged", state.step)

    def deal(self, deal: Deal) -> None:
        if deal.first:
            self.timing.dealt()
        self._deal = deal

    def check_taken(self) -> None:
        """Raise UsageError when the script went on to the next batch without a step for this one."""
        if self._deal is not None:
            raise UsageError(
                f"the batch of step {self._deal.number} was not trained: every batch needs `with "
                "springtide.step():` around its training code, on every worker; do not skip batches with "
                "`continue`"
            )

    def end_loop(self, stage: int) -> bool:
        """The cursor stands at the end of loop `stage`.

        False: the loop goes on, since the state is an earlier one now.
        """
        faults.reach("ended", self.position.cursor.step)
        self.settle(None)
        if self.recovery is not None and not self.recovery.end_loop(stage):
            return False
        self.close_loop(stage)
        return True

    def close_loop(self, stage: int) -> None:
        self.ended_loops = stage + 1
        self.plan = None

    def settle(self, parameters: Collection[int] | None) -> None:
        """Wait until the values of these parameters (None: all) have come from servers, if there are any.

        In a step, raise what leaves it when they do not come; between steps, wait for the next generation.
        """
        if (trainer := self.trainer) is not None and trainer.servers is not None:
            self._ask(trainer, lambda: trainer.take_values(parameters))

    def rows(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table from the servers, float32 [n, dim]; index: of the parameter that stands for it.

        Waits and raises as `settle`.
        """
        trainer = self.ready("an embedding table")
        servers, found = trainer.servers, list[torch.Tensor]()
        assert servers is not None
        stepped = trainer.transaction.stepped
        self._ask(trainer, lambda: found.append(servers.read_rows(index, ids, stepped)))
        return found[-1]

    def all_rows(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, rows) of a whole table; as `rows`."""
        trainer = self.ready("an embedding table")
        servers, found = trainer.servers, list[tuple[torch.Tensor, torch.Tensor]]()
        assert servers is not None
        stepped = trainer.transaction.stepped
        self._ask(trainer, lambda: found.append(servers.all_rows(index, stepped)))
        return found[-1]

    def _ask(self, trainer: Trainer, wait: Callable[[], object]) -> None:
        while (error := trainer.ask(wait)) is not None:
            if self.plan is None or self.recovery is None:
                raise SpringtideError(f"the values of the last step are not all here: {error}")
            self.recovery.stand(self.loops - 1)

    # ---- the step

    def enter_body(self) -> None:
        trainer = self.ready("step()")
        self.evaluations.check_none()
        if self._deal is None:
            if trainer.transaction.phase is Phase.IDLE:
                raise UsageError(
                    "step() without a batch: use it once for each batch of `for batch in "
                    "springtide.batches(...)`"
                )
            trainer.transaction.begin()  # raises: nested, or broken
        deal = self._deal
        assert deal is not None
        if deal.first:
            self.timing.opened()
        trainer.begin(deal)
        self._deal = None

    def leave_body(self, error: BaseException | None) -> bool:
        """End the body; True: `error` is swallowed."""
        trainer = self.ready("step()")
        if error is None:
            try:
                trainer.finish()
            except Dropped:
                pass  # as if it had been found a moment earlier
            except SpringtideError as problem:
                self._break_off(str(problem))
                raise
        self.part_kept = trainer.transaction.phase is Phase.SET_ASIDE
        if self.part_kept:
            try:
                trainer.end_part()
            except UsageError as problem:
                self._break_off(str(problem))
                raise
            return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
        if trainer.transaction.phase is Phase.DROPPED:
            if not self.rehearsing:
                log.info("step %d is dropped: %s", self.position.cursor.step + 1, trainer.transaction.reason)
                self.metrics.dropped.inc()
            try:
                trainer.end_dropped()
            except UsageError as problem:
                self._break_off(str(problem))
                raise
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

    @property
    def ended_in(self) -> tuple[int, str]:
        """The step whose body or samples ended this process, and its samples in words; 0: none, or by a
        failure from outside, which may be over next time."""
        cursor, plan = self.position.cursor, self.plan
        trained = self._deal is not None or self._broken
        if plan is None or not trained or self.failed_outside or self.rehearsing:
            return 0, ""
        last = min(cursor.position + plan.batch_size, plan.order.size) - 1
        order = "" if not plan.order.shuffle else f" in the order of seed {plan.seed}"
        return cursor.step + 1, f"samples {cursor.position} to {last} of pass {cursor.epoch + 1}{order}"

    def _break_off(self, problem: str) -> None:
        self._broken = True
        trainer = self.ready("step()")
        trainer.transaction.break_off(
            f"step {self.position.cursor.step + 1} was left by an exception, and nothing can go on in this "
            f"process: {problem}"
        )
        self.group.shut()

    def _commit(self, trainer: Trainer) -> None:
        body = trainer.end_stepped()
        if self.leasing is not None:
            self.leasing.commit(trainer, body)
            return
        result, deal = body.result, body.deal
        assert result is not None
        assert self.plan is not None
        cursor, ledger = self.plan.commit(
            self.position.ledger,
            self.position.cursor,
            result.count,
            result.hash_lo,
            result.hash_hi,
            skipped=body.skipped,
        )
        seconds = time.perf_counter() - body.began
        self.position = Position(
            cursor,
            ledger,
            self.position.productive_seconds + seconds,
            self.position.began_unix or time.time() - seconds,
        )
        state = StateName(self.generation, cursor.step)
        if self.membership is not None:
            self.membership.hold(state)
        trainer.transaction.end()
        self.blocks.together()
        if trainer.servers is not None and trainer.servers.copied():
            trainer.want_change(True)
        # The loop ends anyway: nobody waits for another step.
        closing = trainer.buckets.closing or (
            trainer.servers is not None and trainer.servers.compression.closing
        )
        self.boundary = self.boundary or body.change or (closing and self.plan.ended(cursor))
        self.checkpoints.committed(result.save, self.plan.ended(cursor))
        odd = [name for name, value in (result.values or {}).items() if not math.isfinite(value)]
        if odd and not self._warned_of_values:
            self._warned_of_values = True
            log.warning("step %d: %s is not finite (said once)", deal.number, ", ".join(odd))
        if result.values is None and not self._warned_of_names:
            self._warned_of_names = True
            log.warning(
                "step %d: workers reported different names, so the values are left out; this one reported %s",
                deal.number,
                sorted(body.reports),
            )
        commit = self.account(body, seconds, state, result.values or {})
        self.ring.add(commit)
        self.step_log.write(commit)
        faults.reach("committed", cursor.step)

    def account(self, body: Body, seconds: float, state: StateName, values: dict[str, float]) -> Commit:
        """Count a committed step, which took so long and made this state."""
        data, paused = self.timing.committed(seconds, body.backward_seconds, body.exposed_seconds)
        self.metrics.step.observe(seconds)
        self.metrics.compute.observe(body.backward_seconds)
        self.metrics.exposed.observe(body.exposed_seconds)
        self.metrics.data.observe(data)
        self.metrics.communicated(body.communication_seconds, body.exposed_seconds, body.reduced_bytes)
        self.metrics.steps.inc()
        self._committed_at = time.monotonic()
        self.metrics.samples.inc(body.samples)
        return Commit(
            state,
            time.time(),
            seconds,
            body.exposed_seconds,
            body.deal.batch.micro.global_samples,
            values,
            data,
            paused,
            body.skipped,
        )

    # ---- from the thread that writes checkpoints

    def _members_besides(self, state: StateName) -> list[str] | None:
        """Who is in the current generation; None if that is the state's own."""
        if self.membership is None or self.generation == state.generation:
            return None
        return self.membership.labels()

    def _on_checkpoint(self, result: Written) -> None:
        self.metrics.checkpoint.observe(result.seconds)
        if result.error:
            self.metrics.checkpoint_failures.inc()
        else:
            self.metrics.checkpoint_bytes.inc(result.share_bytes)
        if self.membership is not None and (result.whole or result.error):
            self.membership.tell_checkpoint(
                pb.Checkpoint(
                    state=result.state.to_proto(),
                    name=checkpoint_names.folder(result.state),
                    uri=result.uri,
                    error=result.error[:1000],
                    bytes=result.bytes,
                    seconds=result.seconds,
                    stall_seconds=result.stall_seconds,
                    written_unix=result.written,
                    reason=result.reason,
                )
            )

    # ---- facts

    @property
    def generation(self) -> Generation:
        if self.membership is None or self.membership.generation is None:
            return ALONE
        return self.membership.generation

    @property
    def step_in_body(self) -> bool:
        return self.trainer is not None and self.trainer.transaction.phase is not Phase.IDLE

    def report(self, values: Mapping[str, Any]) -> None:
        numbers = self.reported.bounded(as_numbers(values))
        if self.step_in_body:
            self.ready("report()").report(numbers)
            return
        if self.evaluations.running is not None:
            self.evaluations.running.report(numbers)
            return
        if self.rehearsing:
            return
        self.values.update(numbers)
        if self.session is not None:
            self.session.send_values(numbers)

    def depart(self, answer: Depart) -> None:
        """The coordinator lets this process go: end it, without the script's code after the loop."""
        log.info("leaving the job: %s", answer.reason)
        self.outcome = outcome.Left(answer.reason, answer.finished)
        self.write_outcome()
        raise SystemExit(0)

    def finished(self) -> outcome.Outcome:
        """How the process ends when its script ended without an exception."""
        try:
            self.evaluations.check_none()
        except UsageError as problem:
            return outcome.Failed("UsageError", str(problem))
        if self.plan is not None or self.loops == 0:
            what = (
                "before its training loop did: do not leave the loop with `break` or `return`"
                if self.loops
                else "without a training loop: use `for batch in springtide.batches(...)`"
            )
            return outcome.Failed("UsageError", f"the script ended {what}")
        generation = self.generation
        return outcome.Finished(
            (generation.incarnation, generation.restart),
            generation.number,
            self.position.cursor.step,
            self.position.cursor.epoch,
            self.position.ledger.audit(),
            dict(self.values),
            {"generations": self.generations, "restarts": self.settings.attempt},
        )

    def write_outcome(self) -> None:
        if self.outcome is None or self.settings.alone:
            return
        try:
            outcome.write(self.outcome, self.settings.termination_log)
        except OSError as error:
            log.error("cannot write the outcome to %s: %s", self.settings.termination_log, error)

    def close(self) -> None:
        """End threads and sockets; the process is about to exit."""
        self.checkpoints.close()
        if self.session is not None:
            self.session.close(self.outcome)
        self.blocks.leave()
        self.group.release()
        if self.trainer is not None:
            self.trainer.close()
        self._stop_metrics()
        with contextlib.suppress(OSError):
            self.step_log.close()

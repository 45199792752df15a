"""Train without common steps: each worker, or group of workers, takes whole global batches (ranges) in turn.

Servers give the ranges of the running epoch out and know which are finished (`server.lease_table`); the epoch
ends for all when each is in every chunk. There the workers meet once: buffers are averaged by the samples
that each worker has computed in the epoch, and a checkpoint may be taken.

Threads: the script's thread trains. `interrupt` and `stop_at_the_end` may come on any thread (the stream's):
they set `_asked` or a flag that the script's thread looks at, and wait for nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from springtide import faults
from springtide.comm.combine import Packing, Rule, Share
from springtide.comm.process_group import Group, peers_in
from springtide.coordination.membership import Membership, generation_of
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.data.loop import LoopPlan
from springtide.elastic.accounting import Accounting
from springtide.elastic.saving import CheckpointSaver
from springtide.elastic.training_state import TrainingState
from springtide.ps.async_backend import AsyncBackend
from springtide.ps.connections import ServerError, servers_in
from springtide.train_step.context import Failure, StepAssignment, StepContext
from springtide.train_step.grad_scaler import agree
from springtide.train_step.late_buffers import adopt_arrived
from springtide.train_step.lr_schedulers import Schedules
from springtide.train_step.trainer import Trainer
from springtide_protocol.names import StateName

log = logging.getLogger(__name__)

_REASON_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncLoopParts:
    """Name what the loop uses of its process."""

    state: TrainingState
    accounting: Accounting
    saver: CheckpointSaver
    membership: Membership | None  # None without a job
    all_together: Callable[[], None]  # tells that all members stand at the same committed step
    collective_seconds: float  # limit of a collective


class AsyncLoop:
    """Train batch after batch as the servers give them out, until the workers meet at the epoch's end.

    The script's thread uses it; `interrupt` and `stop_at_the_end` may come from any.
    """

    def __init__(self, parts: AsyncLoopParts, servers: AsyncBackend, tracked: Mapping[str, Any]) -> None:
        """Make the loop of one script.

        Args:
            parts: what it uses of the process.
            servers: that give the batches out.
            tracked: objects of the script that are committed along, by name.

        Raises:
            UsageError: a tracked object would differ from worker to worker.
        """
        self._state, self._accounting, self._saver = parts.state, parts.accounting, parts.saver
        self._membership, self._all_together = parts.membership, parts.all_together
        self._collective_seconds, self._servers = parts.collective_seconds, servers
        self._schedules = Schedules(tracked)
        self._scalers = [item for item in tracked.values() if isinstance(item, torch.amp.GradScaler)]
        self._worker_group: Group | None = None  # whose members have equal scales
        self.stops_at_the_end = False
        self._samples = 0  # that this worker has computed in the epoch
        self._reported: StateName | None = None
        self._seen = 0  # samples of the job, as of `_reported`
        self._asked = threading.Event()

    def begin_anew(self) -> None:
        """Begin with equal members: they step together no more, or again, or went back."""
        self._samples = 0
        self._schedules.begin()

    def go_on_at_the_end(self) -> None:
        """Forget a wish to stop at the epoch's end, which was told to another generation."""
        self.stops_at_the_end = False

    def stop_at_the_end(self) -> None:
        """Have the members stop where they meet, at the epoch's end. Any thread."""
        self.stops_at_the_end = True
        log.info("asked to stop at the end of the epoch: the members are to step together")

    def interrupt(self) -> None:
        """Wait for a range no longer, because a new generation is wanted. Any thread."""
        self._asked.set()
        self._servers.interrupt()

    def assign(self, trainer: Trainer, plan: LoopPlan, cursor: Cursor, stage: int) -> list[StepAssignment]:
        """Return the next body: one range, or this member's part of its group's.

        Return none when the loop has to look first where it stands.

        Args:
            trainer: of the script.
            plan: of the loop.
            cursor: where the epoch stands.
            stage: ordinal of the loop.
        """
        first = cursor.step - cursor.position // plan.batch_size
        try:
            lease = self._servers.lease(first, first + plan.steps_per_epoch, trainer.reduction.change_wanted)
            if lease.over:
                self._end_epoch(trainer, plan, first)
                return []
            if lease.number is None:
                self._servers.part()
                self._state.stop_at_boundary()
                return []
            if lease.waited:
                # Others went on: a bound on staleness is one on the values that a step is computed with.
                self._servers.refresh()
                trainer.pending.expect()
            worker_group = self._agreed_group()
        except RuntimeError as error:
            if not isinstance(error, ServerError):
                self._await_reason(trainer, error)
            if trainer.reduction.change_wanted:
                self._state.stop_at_boundary()  # another worker has stopped before
            else:
                trainer.reduction.failure = Failure(str(error), [*peers_in(error), *servers_in(error)])
            return []
        self._advance(plan, first, lease.finished)
        number = lease.number
        if not cursor.position:
            self._schedules.begin_once()
        self._schedules.go_to(number)
        own = Cursor(stage, cursor.epoch, (number - first) * plan.batch_size, number)
        batch = plan.batch(own, worker_group.rank, worker_group.size)
        return [
            StepAssignment(batch, worker_group, number + 1, plan.seed, stage, cursor.epoch, worker_group.rank)
        ]

    def _await_reason(self, trainer: Trainer, error: RuntimeError) -> None:
        """Wait up to ten seconds for the coordinator to say why a peer has gone.

        It asks this member to stop, too, or ends the generation. A peer that stops at a boundary shuts its
        group, and others may learn of that first.
        """
        self._asked.clear()
        self._state.group.on_shut(self._asked.set)
        if trainer.reduction.change_wanted or self._state.group.is_shut:
            return
        log.info(
            "waiting up to %g s for the coordinator to say why a peer has gone: %s",
            _REASON_SECONDS,
            error,
        )
        if not self._asked.wait(_REASON_SECONDS):
            log.warning("the coordinator does not say why a peer has gone")

    def _agreed_group(self) -> Group:
        """Return the workers that share a range; in a new group they agree on scales. Raise RuntimeError."""
        worker_group = self._servers.group
        if worker_group is None:
            return Group(None, 0, 1, self._collective_seconds)
        if worker_group is not self._worker_group:
            agree(self._scalers, worker_group)
            self._worker_group = worker_group
        return worker_group

    def commit(self, trainer: Trainer, body: StepContext) -> None:
        """Count a body whose gradients are on their way.

        Args:
            trainer: holds the transaction, which ends here.
            body: the body that has ended; it has its result.
        """
        assignment = body.assignment
        assert body.result is not None
        seconds = time.perf_counter() - body.began
        self._state.add_productive_time(seconds)
        position = self._state.position
        self._samples += body.samples
        self._schedules.stepped(assignment.group.rank == 0)
        trainer.transaction.end()
        if self._servers.copied():
            trainer.want_change(True)
        if body.change:
            self._servers.part()
            self._state.stop_at_boundary()
        generation = generation_of(self._membership)
        state = StateName(generation, position.cursor.step)
        commit = self._accounting.count_step(body, seconds, state, body.result.values or {})
        if (staleness := self._servers.staleness()) is not None:
            self._accounting.metrics.staleness.observe(staleness)
        self._accounting.step_log.write(replace(commit, state=StateName(generation, assignment.number)))
        if self._reported is None or state > self._reported:
            seen = position.ledger.total_seen
            samples = 0 if self._reported is None else max(0, seen - self._seen)
            self._accounting.announce(replace(commit, samples=samples))
            self._reported, self._seen = state, seen
        faults.reach("committed", assignment.number)

    def _advance(self, plan: LoopPlan, first: int, finished: int) -> None:
        """Count the epoch's ranges that are in every chunk. The last one counts with the epoch's end."""
        position = self._state.position
        cursor, count = position.cursor, min(finished, plan.steps_per_epoch - 1)
        if first + count <= cursor.step:
            return
        samples = min(count * plan.batch_size, plan.numbered().size)
        self._state.advance(
            Cursor(cursor.stage, cursor.epoch, count * plan.batch_size, first + count),
            _seen(position.ledger, cursor, plan, samples),
        )
        self._hold()

    def _end_epoch(self, trainer: Trainer, plan: LoopPlan, first: int) -> None:
        """Meet the other workers: all ranges of the epoch are in every chunk. Raise RuntimeError."""
        servers, group, stop = self._servers, self._state.group, first + plan.steps_per_epoch
        servers.refresh()
        servers.settle()
        # Where nobody who is left has computed anything, the first member's buffers count.
        weight = self._samples + (1e-9 if group.rank == 0 else 0.0)
        shared = [index for index, rule in enumerate(trainer.buffers.rules) if rule is not Rule.LOCAL]
        current, copies = trainer.buffers.current(), trainer.buffers.committed
        buffers, before = [current[index] for index in shared], [copies[index] for index in shared]
        packing = Packing(buffers, [trainer.buffers.rules[index] for index in shared])
        wish = self._saver.checkpoints.wish(group.rank == 0)
        steps = self._schedules.report_steps()
        votes = [weight, wish, float(self.stops_at_the_end), *steps]
        own = torch.tensor(votes, dtype=torch.float64)
        vector = torch.cat((own, packing.pack(buffers, before, Share(weight, group.rank, group.size))))
        faults.reach("meeting", stop + 1)
        group.start_sum(vector).wait()
        audit = servers.audit(first, stop)
        repeated, lost = audit.repeated, audit.lost
        stops, counted = bool(vector[2]), len(votes) - len(steps)
        self._schedules.take_reports(vector[counted : len(votes)].tolist())
        self._schedules.go_to(stop)
        self._schedules.begin()
        values = packing.unpack(vector[len(votes) :], before, float(vector[0]), group.size)
        trainer.buffers.write(shared, dict(zip(shared, values, strict=True)))
        if trainer.buffers.awaited:
            adopt_arrived(trainer.buffers, group.rank == 0, lambda tensor: group.start_sum(tensor).wait())
        trainer.buffers.remember()
        position = self._state.position
        cursor = position.cursor
        if repeated or lost:
            log.error("epoch %d: %d ranges too many, and these are missing: %s", cursor.epoch, repeated, lost)
        short = sum(min(plan.batch_size, plan.numbered().size - (n - first) * plan.batch_size) for n in lost)
        ledger = _seen(position.ledger, cursor, plan, plan.numbered().size - short)
        after = Cursor(cursor.stage, cursor.epoch + 1, 0, stop)
        self._state.advance(
            after,
            replace(
                ledger,
                epoch=after.epoch,
                count=0,
                repeated=ledger.repeated + repeated * plan.batch_size,
                lost=ledger.lost + short,
                skipped=audit.skipped,
            ),
        )
        self._samples = 0
        self._hold()
        self._all_together()
        self._saver.checkpoints.committed(float(vector[1]), plan.ended(after))
        self._saver.save_if_due(StateName(generation_of(self._membership), stop), ended=plan.ended(after))
        # Nobody goes on before all have read what the checkpoint holds.
        group.start_sum(torch.zeros(1)).wait()
        if stops:
            # All of them have come here, hold this state, and go on in the next generation only.
            self._state.stop_at_boundary()
            if self._membership is not None:
                self._membership.mark_epoch_end()

    def _hold(self) -> None:
        if self._membership is not None:
            step = self._state.position.cursor.step
            self._membership.hold(StateName(generation_of(self._membership), step))


def _seen(ledger: Ledger, cursor: Cursor, plan: LoopPlan, samples: int) -> Ledger:
    """Return the ledger with so many samples of the running epoch in every chunk."""
    return replace(
        ledger,
        stage=cursor.stage,
        epoch=cursor.epoch,
        expected=plan.numbered().size,
        count=samples,
        hash=0,
        total_seen=ledger.total_seen - ledger.count + samples,
    )

"""A training loop in which workers do not step together: each, or each group of them, takes whole global
batches (ranges) in turn.

Servers give the ranges of the running epoch out and know which are finished (`springtide_ps.leases`); the
epoch ends for all when each is in every chunk. There the workers meet once: buffers are averaged by the
samples that each worker has computed in the epoch, and a checkpoint may be taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from springtide import faults
from springtide.body import Body, Deal, Failure
from springtide.checkpoint import schedule
from springtide.checkpoint.shares import Share
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.data.loop import LoopPlan
from springtide.errors import UsageError
from springtide.exchange.combine import pack, unpack
from springtide.exchange.groups import Group, peers_in
from springtide.names import StateName
from springtide.ps.async_backend import AsyncBackend
from springtide.ps.connections import ServerError, servers_in
from springtide.scaling import agree
from springtide.schedules import Schedules
from springtide.training import Trainer

if TYPE_CHECKING:
    from springtide.runtime import Runtime

log = logging.getLogger("springtide")

_WORD_SECONDS: Final = 10.0


class Leasing:
    """Used from the script's thread, `interrupt` from any. Raise UsageError for tracked objects that would
    differ from worker to worker.
    """

    def __init__(self, runtime: Runtime, servers: AsyncBackend, tracked: Mapping[str, Any]) -> None:
        self._runtime, self._servers = runtime, servers
        self._schedules = Schedules(tracked)
        self._scalers = [item for item in tracked.values() if isinstance(item, torch.amp.GradScaler)]
        self._worker_group: Group | None = None  # whose members have equal scales
        self.stops_at_the_end = False
        self._samples = 0  # that this worker has computed in the epoch
        self._told: StateName | None = None
        self._seen = 0  # samples of the job, as of `_told`
        self._asked = threading.Event()

    def begin_anew(self) -> None:
        """The members step together no more, or again, or go back: what they hold is equal."""
        self._samples = 0
        self._schedules.begin()

    def stop_at_the_end(self) -> None:
        """The members are to stop where they meet, at the epoch's end. Any thread."""
        self.stops_at_the_end = True
        log.info("asked to stop at the end of the epoch: the members are to step together")

    def interrupt(self) -> None:
        """A new generation is wanted: wait for a range no longer."""
        self._asked.set()
        self._servers.interrupt()

    def deal(self, trainer: Trainer, plan: LoopPlan, cursor: Cursor, stage: int) -> list[Deal]:
        """Return the next body: one range, or this member's part of its group's.

        Nothing when the loop has to look first where it stands.
        """
        runtime = self._runtime
        first = cursor.step - cursor.position // plan.batch_size
        try:
            lease = self._servers.lease(first, first + plan.steps_per_epoch, trainer.reduction.change_wanted)
            if lease.over:
                self._end_epoch(trainer, plan, first)
                return []
            if lease.number is None:
                self._servers.part()
                runtime.boundary = True
                return []
            if lease.waited:
                # Others went on: a bound on staleness is one on the values that a step is computed with.
                self._servers.refresh()
                trainer.pending.expect()
            group = self._agreed_group()
        except RuntimeError as error:
            if not isinstance(error, ServerError):
                self._await_word(trainer, error)
            if trainer.reduction.change_wanted:
                runtime.boundary = True  # another worker has stopped before
            else:
                trainer.reduction.failure = Failure(str(error), [*peers_in(error), *servers_in(error)])
            return []
        self._advance(plan, first, lease.finished)
        number = lease.number
        if not cursor.position:
            self._schedules.begin_once()
        self._schedules.go_to(number)
        own = Cursor(stage, cursor.epoch, (number - first) * plan.batch_size, number)
        batch = plan.batch(own, group.rank, group.size)
        return [Deal(batch, group, number + 1, plan.seed, stage, cursor.epoch, group.rank)]

    def _await_word(self, trainer: Trainer, error: RuntimeError) -> None:
        """A peer has gone: return when the coordinator has asked this member to stop, too, or has ended the
        generation, or has said neither in ten seconds.

        A peer that stops at a boundary shuts its group, and others may learn of that first.
        """
        self._asked.clear()
        self._runtime.group.on_shut(self._asked.set)
        if trainer.reduction.change_wanted or self._runtime.group.is_shut:
            return
        log.info(
            "waiting up to %g s for the coordinator to say why a peer has gone: %s", _WORD_SECONDS, error
        )
        if not self._asked.wait(_WORD_SECONDS):
            log.warning("the coordinator does not say why a peer has gone")

    def _agreed_group(self) -> Group:
        """Who works on a range together; in a new one scales may differ. Raise RuntimeError."""
        group = self._servers.group
        if group is None:
            return Group(None, 0, 1, self._runtime.settings.collective_seconds)
        if group is not self._worker_group:
            agree(self._scalers, group)
            self._worker_group = group
        return group

    def commit(self, trainer: Trainer, body: Body) -> None:
        """The body's gradients are on their way."""
        runtime, deal = self._runtime, body.deal
        assert body.result is not None
        seconds = time.perf_counter() - body.began
        position = runtime.position
        runtime.position = replace(
            position,
            productive_seconds=position.productive_seconds + seconds,
            began_unix=position.began_unix or time.time() - seconds,
        )
        self._samples += body.samples
        self._schedules.stepped(deal.group.rank == 0)
        trainer.transaction.end()
        if self._servers.copied():
            trainer.want_change(True)
        if body.change:
            self._servers.part()
            runtime.boundary = True
        state = StateName(runtime.generation, position.cursor.step)
        commit = runtime.account(body, seconds, state, body.result.values or {})
        if (staleness := self._servers.staleness()) is not None:
            runtime.metrics.staleness.observe(staleness)
        runtime.step_log.write(replace(commit, state=StateName(runtime.generation, deal.number)))
        if self._told is None or state > self._told:
            seen = position.ledger.total_seen
            samples = 0 if self._told is None else max(0, seen - self._seen)
            runtime.ring.add(replace(commit, samples=samples))
            self._told, self._seen = state, seen
        faults.reach("committed", deal.number)

    def _advance(self, plan: LoopPlan, first: int, finished: int) -> None:
        """So many of the epoch's ranges are in every chunk. The last one counts with the epoch's end."""
        runtime = self._runtime
        position = runtime.position
        cursor, count = position.cursor, min(finished, plan.steps_per_epoch - 1)
        if first + count <= cursor.step:
            return
        samples = min(count * plan.batch_size, plan.order.size)
        runtime.position = replace(
            position,
            cursor=Cursor(cursor.stage, cursor.epoch, count * plan.batch_size, first + count),
            ledger=_seen(position.ledger, cursor, plan, samples),
        )
        self._hold()

    def _end_epoch(self, trainer: Trainer, plan: LoopPlan, first: int) -> None:
        """All ranges of the epoch are in every chunk: the workers meet. Raise RuntimeError."""
        runtime, servers, stop = self._runtime, self._servers, first + plan.steps_per_epoch
        servers.refresh()
        servers.settle()
        # Where nobody who is left has computed anything, the first member's buffers count.
        weight = self._samples + (1e-9 if runtime.group.rank == 0 else 0.0)
        buffers = trainer.buffers.current()
        wish = runtime.checkpoints.wish(runtime.group.rank == 0)
        steps = self._schedules.told()
        told = [weight, wish, float(self.stops_at_the_end), *steps]
        own = torch.tensor(told, dtype=torch.float64)
        vector = torch.cat((own, pack(buffers, weight, runtime.group.rank == 0)))
        faults.reach("meeting", stop + 1)
        runtime.group.start_sum(vector).wait()
        audit = servers.audit(first, stop)
        repeated, lost = audit.repeated, audit.lost
        stops, counted = bool(vector[2]), len(told) - len(steps)
        self._schedules.hear(vector[counted : len(told)].tolist())
        self._schedules.go_to(stop)
        self._schedules.begin()
        values = unpack(vector[len(told) :], buffers, float(vector[0]))
        trainer.buffers.write(list(range(len(buffers))), values)
        trainer.buffers.remember()
        position = runtime.position
        cursor = position.cursor
        if repeated or lost:
            log.error("epoch %d: %d ranges too many, and these are missing: %s", cursor.epoch, repeated, lost)
        short = sum(min(plan.batch_size, plan.order.size - (n - first) * plan.batch_size) for n in lost)
        ledger = _seen(position.ledger, cursor, plan, plan.order.size - short)
        after = Cursor(cursor.stage, cursor.epoch + 1, 0, stop)
        runtime.position = replace(
            position,
            cursor=after,
            ledger=replace(
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
        runtime.blocks.together()
        runtime.checkpoints.committed(float(vector[1]), plan.ended(after))
        if runtime.checkpoints.due and runtime.membership is not None:
            share = Share(runtime.group.rank, tuple(runtime.membership.labels()))
            state = StateName(runtime.generation, stop)
            runtime.save(state, share, "end" if plan.ended(after) else schedule.INTERVAL)
        # Nobody goes on before all have read what the checkpoint holds.
        runtime.group.start_sum(torch.zeros(1)).wait()
        if stops:
            # All of them have come here, hold this state, and go on in the next generation only.
            runtime.boundary = True
            if runtime.membership is not None:
                runtime.membership.cut = True

    def _hold(self) -> None:
        runtime = self._runtime
        if runtime.membership is not None:
            runtime.membership.hold(StateName(runtime.generation, runtime.position.cursor.step))


def _seen(ledger: Ledger, cursor: Cursor, plan: LoopPlan, samples: int) -> Ledger:
    """With so many samples of the running epoch in every chunk."""
    return replace(
        ledger,
        stage=cursor.stage,
        epoch=cursor.epoch,
        expected=plan.order.size,
        count=samples,
        hash=0,
        total_seen=ledger.total_seen - ledger.count + samples,
    )


def check_together(runtime: Runtime, call: str) -> None:
    """Raise UsageError in a loop in which the workers are at different steps."""
    if runtime.plan is None:
        return
    if runtime.consistencies is not None:
        runtime.consistencies.needs_steps(call)
    if runtime.leasing is not None:
        raise UsageError(
            f"{call} inside of a training loop needs strategy.parameterServer.consistency Synchronous: the "
            "workers are at different steps. Call it after the loop"
        )

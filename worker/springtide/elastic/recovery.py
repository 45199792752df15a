"""Go from one generation to the next: park, wait for the Start, form the group, receive the state.

Only the script's thread comes here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from springtide import faults
from springtide.checkpoint import restore
from springtide.checkpoint.restore import Restored
from springtide.comm.process_group import Group, form, peers_in
from springtide.comm.store import FormationCancelled, StreamStore
from springtide.coordination.membership import Membership
from springtide.coordination.park_reply import Leave, MoveOn, Save, Start
from springtide.data.loop import LoopPlan
from springtide.elastic.accounting import Accounting
from springtide.elastic.balancer import Balancer
from springtide.elastic.consistency import Consistencies, staleness_bound
from springtide.elastic.data_check import DataCheck, own_row
from springtide.elastic.following import Following
from springtide.elastic.local_shards_restore import LocalShardsRestore
from springtide.elastic.own_faults import in_words, own_fault
from springtide.elastic.recovery_spans import RecoverySpans
from springtide.elastic.rendezvous import Rendezvous
from springtide.elastic.retry import RetryBlocks
from springtide.elastic.salvage import Salvage
from springtide.elastic.saving import CheckpointSaver
from springtide.elastic.set_aside import set_aside
from springtide.elastic.shared_restore import MakeShardsRestore, SharedRestore
from springtide.elastic.state_transfer import (
    StateTransfer,
    TransferSides,
    copied,
    order_in_row,
    transfer_order,
)
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.errors import ServerStepError, SpringtideError
from springtide.launch.cgroup import memory_left
from springtide.loggers.history import NO_LINE, Beginning
from springtide.memory.ready import warm_heap
from springtide.memory.report import MemoryReport
from springtide.pods.grid import grid_of
from springtide.pods.pod import Pod
from springtide.ps.backend import PsBackend
from springtide.ps.connections import servers_in
from springtide.ps.generation import GenerationStart, ServersLackState
from springtide.ps.step_failures import StepFailures, describe
from springtide.settings import Settings
from springtide.sharding.backend import ShardedOptimizer, ShardsLostError
from springtide.sharding.restore import ShardsRestore
from springtide.train_step.context import Failure
from springtide.train_step.state import Position, State, TensorPlace
from springtide.train_step.trainer import Trainer
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import required_state, state_to_proto
from springtide_protocol.names import StateName

log = logging.getLogger(__name__)


class NoWayBackError(RuntimeError):
    """The state to go on from is older than what this process could take."""


_WHY: dict[int, str] = {pb.STANDBY: "ready to train", pb.BOUNDARY: "members come or go"}
ROOM_BYTES = 256 << 20
"""Memory that a restore leaves free."""
WELCOME_SECONDS = 5.0
CALM_TRIES = 3
CALM_LIMIT_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryParts:
    """Parts of its process that recovery uses."""

    settings: Settings
    state: TrainingState
    trainers: TrainerAccess
    accounting: Accounting
    saver: CheckpointSaver
    consistencies: Consistencies
    retry_blocks: RetryBlocks
    state_transfer: StateTransfer
    membership: Membership
    memory: MemoryReport
    balancer: Balancer
    salvage: Salvage
    following: Following
    spans: RecoverySpans
    check_term: Callable[[], None]  # ends the process after SIGTERM when no coordinator lets it leave
    depart: Callable[[Leave], None]  # ends the process because the coordinator lets it go


class Recovery:
    """Bring the process into a running generation, and again into the next one when that is over."""

    def __init__(self, parts: RecoveryParts) -> None:
        self._parts = parts
        self._state = parts.state
        self._membership = parts.membership
        self._state_transfer = parts.state_transfer
        self._formation_error = ""
        self._unreached: list[str] = []  # addresses of the servers that it names
        self._unformed = 0  # generations in a row that this process could not enter
        self._lacking = ""
        self._no_way_back = ""
        self._step_failures = StepFailures()
        self._awaited: tuple[int, dict[str, object], State] | None = None
        self._waits = False  # it has asked to be admitted, and goes through a loop that has ended meanwhile
        self._data_check = DataCheck()

    def stand(self, stage: int, *, moves_on: bool = False) -> bool:
        """Return when this process is an active member of a generation and holds its state.

        Args:
            stage: ordinal of the training loop that the script is at.
            moves_on: the process can go through the loop by itself if the job ends it while the process
                waits to be admitted for the first time.

        Returns:
            False when it is to do that, and to call this again in the next loop; it is no member then.

        Raises:
            SystemExit: the coordinator lets the process go.
            SpringtideError: it was refused.
            ServerStepError: the servers fail again and again.
        """
        self._membership.check()
        self._parts.check_term()
        while (reason := self._why_park()) is not None:
            if not self._enter_generation(stage, moves_on, *reason):
                return False
        self._membership.train()
        if self._awaited is not None and self._awaited[0] <= stage:
            # The script's code after earlier loops ran on this state and may have changed it.
            _, tree, state = self._awaited
            trainer = self._trainer
            trainer.pending.mark_arrived(None)  # whatever they are
            state.write(tree)
            self._awaited = None
            if trainer.servers is not None:
                trainer.servers.fetch_again()
            if trainer.shards is not None:
                trainer.shards.fetch_again()
            trainer.pending.expect()
        return True

    def end_loop(self, stage: int) -> bool:
        """Return whether all members have ended loop `stage`; otherwise a new generation has begun."""
        if self._membership.await_end(stage):
            return True
        self.stand(stage)
        return False

    def agree_on_data(self, stage: int) -> bool:
        """Compare this member's data with the others', before the first step in loop `stage` together.

        Return whether the members go on with that step; else there will be another generation first. Raise
        SpringtideError when this member's data are not those of the others.
        """
        try:
            self._compare_data(stage)
        except SpringtideError:
            raise
        except RuntimeError as error:  # as when a sum of the step failed
            self._trainer.failure = Failure(str(error), peers_in(error))
            return False
        return True

    def _compare_data(self, stage: int) -> None:
        plan = self._state.plan
        assert plan is not None
        if self._data_check.is_done(self._state.group, stage):
            return
        row = own_row(plan, stage, held=not self._trainer.reduction.newcomer)
        self._data_check.agree(self._state.group, row, plan, self._membership.labels())

    @property
    def _trainer(self) -> Trainer:
        return self._parts.trainers.require("batches()")

    def _why_park(self) -> tuple[int, str, list[str]] | None:
        membership, trainer = self._membership, self._trainer
        if self._waits or membership.generation is None:
            return pb.STANDBY, "", []
        if over := membership.over:
            # What failed before this member heard that its generation is over is still news to the others.
            return pb.DROPPED, over, self._unreached
        if self._no_way_back:
            return pb.FORMATION_FAILED, self._no_way_back, []
        if self._lacking:
            return pb.SERVERS_LACK_STATE, self._lacking, []
        if self._formation_error:
            return pb.FORMATION_FAILED, self._formation_error, self._unreached
        if trainer.failure is not None:
            return pb.REDUCTION_FAILED, trainer.failure.detail, trainer.failure.suspects
        if self._state.boundary:
            return pb.BOUNDARY, "", []
        return None

    def _park(self, reason: int, detail: str, suspects: list[str]) -> bool:
        """Promise to commit nothing before the next generation; return whether all do so at a boundary.

        Args:
            reason: a `pb.ParkReason`.
            detail: the reason in words; "" for those that need none.
            suspects: addresses of peers and servers that may have failed.
        """
        state, membership, trainer = self._state, self._membership, self._trainer
        # Workers that do not step together stop one by one: another may wait for this one at an epoch's end,
        # unless all have met there.
        if trainer.servers is not None and (failed := trainer.servers.connections.failed_step):
            trainer.servers.connections.failed_step = ""
            self._step_failed(failed, lost=False)
        together = self._parts.consistencies.async_loop is None or membership.at_epoch_end
        at_boundary = reason == pb.BOUNDARY and together
        if at_boundary and trainer.servers is not None:
            trainer.servers.rest()
        handed_over = at_boundary and trainer.shards is not None and self._evacuate(trainer.shards)
        self._parts.retry_blocks.leave()
        self._parts.spans.begin(detail or _WHY.get(reason, "") or pb.ParkReason.Name(reason))
        if not at_boundary:
            state.group.shut()
        if reason == pb.STANDBY:
            set_aside()  # before anybody waits for this process
            self._take_memory()
            self._parts.following.follow(self._check)
        step, why = state.position.cursor.step, detail or _WHY.get(reason, "")
        if self._parts.accounting.tracking is not None:
            self._parts.accounting.tracking.pause()
        log.info(
            "after step %d: waiting for the next generation (%s: %s)", step, pb.ParkReason.Name(reason), why
        )
        if trainer.replicas.drifted and at_boundary:
            membership.forget()  # the others hold the state that all have stopped at
            trainer.replicas.drifted = False
        membership.park(
            reason,
            detail,
            suspects,
            cannot_go_back=bool(self._no_way_back),
            reached=() if trainer.servers is None else trainer.servers.connections.reached(),
            hands_over=trainer.shards is not None and not handed_over,
        )
        self._lacking = ""
        # What comes from here on concerns the next generation.
        trainer.want_change(trainer.replicas.drifted)
        trainer.buckets.reopen()
        trainer.pending.mark_arrived(None)
        if not at_boundary:
            self._release_groups(detach=True)
        trainer.failure = None
        state.clear_boundary()
        self._formation_error, self._unreached = "", []
        return at_boundary

    def _enter_generation(
        self, stage: int, moves_on: bool, reason: int, detail: str, suspects: list[str]
    ) -> bool:
        """Park, if this process has not yet, and form the next generation, which may fail.

        Args:
            stage: ordinal of the training loop that the script is at.
            moves_on: as in `stand`.
            reason: a `pb.ParkReason`.
            detail: the reason in words; "" for those that need none.
            suspects: addresses of peers and servers that may have failed.

        Returns:
            False when the process is to go through the loop first: the job has ended it.
        """
        state, membership, trainer = self._state, self._membership, self._trainer
        at_boundary = False if self._waits else self._park(reason, detail, suspects)
        self._waits = False
        # A state that arrives here beside training must not be put back at the end of a loop's body.
        newcomer_at = stage if moves_on and not self._parts.following.follows else None
        await_answer = partial(membership.await_start, self._parts.saver.checkpoints.make_way, newcomer_at)
        while isinstance(answer := await_answer(), Save):
            log.info("saving %s before leaving", answer.state)
            self._parts.saver.save(answer.state, answer.share, "leaving")
        if isinstance(answer, MoveOn):
            self._waits = True
            return False
        # The stream's thread says that a generation is over, and then drops its step: that may come after
        # this process has seen the former and parked, but never after the next start.
        trainer.transaction.allow()
        if at_boundary:
            # All members are parked, so nobody needs the old group any more.
            self._release_groups(detach=False)
        if isinstance(answer, Leave):
            self._parts.following.close()
            self._parts.spans.left(answer.reason)
            self._parts.depart(answer)
            return True
        self._parts.memory.check(answer.message, membership.state is not None)
        self._parts.following.begin_generation(answer)
        try:
            self._form(answer, stage)
            self._unformed = 0
        except SpringtideError as error:
            self._parts.spans.failed(error)
            raise
        except ShardsLostError as error:
            self._parts.spans.failed(error)
            self._lacking = str(error)
            state.group.shut()
        except ServersLackState as error:
            self._parts.spans.failed(error)
            self._lacking = str(error)
            state.group.shut()
            if error.failed and membership.state is not None:
                self._step_failed(error.failed, lost=True)
        except NoWayBackError as error:
            self._parts.spans.failed(error)
            step = state.position.cursor.step
            if failed := self._step_failures.last(step):
                raise ServerStepError(describe(failed, step)) from None
            self._no_way_back = f"StateLost: {error}"
            state.group.shut()
        except (MemoryError, RuntimeError, OSError, ValueError) as error:
            self._parts.spans.failed(error)
            if kind := own_fault(error):
                state.group.shut()
                raise SpringtideError(in_words(kind, error)) from error
            self._not_formed(error)
            self._unformed += 1
            if self._unformed >= CALM_TRIES:
                # Whoever fails for a reason of its own would make generations as fast as it can.
                time.sleep(min(CALM_LIMIT_SECONDS, 0.1 * 2.0 ** min(self._unformed - CALM_TRIES, 10)))
        return True

    def _check(self) -> None:
        self._membership.check()
        self._parts.check_term()

    def _take_memory(self) -> None:
        """Take memory for gradients and the optimizer's state while a job trains that this process joins."""
        trainer, membership = self._trainer, self._membership
        forms, gradients = [], trainer.gradient_forms()
        if not (trainer.values_arrive or trainer.pod is not None or trainer.has_masters):
            forms = trainer.missing_state()  # otherwise what comes is less, or of another form
        if not forms and not gradients:
            return
        # Whoever takes the place of a lost member may come before the others train again.
        if not membership.await_welcome(WELCOME_SECONDS) and membership.known is None:
            return
        trainer.import_ahead()
        began, size = time.monotonic(), sum(form.nbytes for form in [*forms, *gradients])
        if not self._has_room(size):
            log.info(
                "no memory is taken beforehand for %d KiB of gradients and optimizer state: it is short",
                size >> 10,
            )
            return
        trainer.state.ready.make(forms)
        warm_heap(gradients)
        log.info(
            "memory for %d KiB of gradients and optimizer state is taken beforehand (%.3f s)",
            size >> 10,
            time.monotonic() - began,
        )

    def _release_groups(self, *, detach: bool) -> None:
        """Free the groups of the generation that is over, and see that nothing of them is written any more.

        Args:
            detach: a state may have been on its way here.
        """
        row = None if self._trainer.pod is None else self._trainer.pod.row
        for group in (self._state.group, row):
            if group is not None and not group.release():
                self._trainer.buckets.allocate()
                if detach:
                    self._state_transfer.detach(group)
        self._trainer.buckets.drop_works()

    def _not_formed(self, error: Exception) -> None:
        """Park for another generation, because something between the members of this one failed."""
        self._formation_error = f"{type(error).__name__}: {error}"
        self._unreached = servers_in(error)
        # Told here, for a peer's complaint may have ended the generation before ours is heard.
        log.info("the generation could not be formed: %s", self._formation_error)
        self._state.group.shut()

    def _step_failed(self, failed: str, *, lost: bool) -> None:
        """Raise ServerStepError when the step is not to be tried again.

        Args:
            failed: where and why it failed.
            lost: its values are gone.
        """
        step = self._state.position.cursor.step
        if self._step_failures.failed(step, failed, lost=lost, can_go_back=self._membership.storage):
            self._state.group.shut()
            raise ServerStepError(describe(failed, step))

    def _form(self, start: Start, stage: int) -> None:
        """Enter a generation: connect with its members, and hold the state that all begin from.

        Args:
            start: of the generation.
            stage: ordinal of the training loop that the script is at.
        """
        membership, spans, servers = self._membership, self._parts.spans, self._trainer.servers
        members = Rendezvous(start, membership.me.id)
        traceparent, stood_by = start.message.traceparent, membership.state is None and membership.stands_by
        spans.started(start.generation, traceparent, members.rank, members.size, stood_by=stood_by)
        self._announce(members)
        began = time.monotonic()
        group = self._connect_all(members)
        formed = time.monotonic()
        spans.part("form group", members=members.size)
        faults.reach("formed", self._state.position.cursor.step + 1)
        self._take_announced(members)
        restored, by_all = self._restore(start, group, stage) if members.fresh else (None, False)
        if by_all or (restored is not None and restored.name):
            spans.part("restore checkpoint", read_here=restored is not None)
        if servers is not None:
            self._enter_on(servers, members, group)
            spans.part("enter on servers", servers=len(start.message.servers))
        moved = self._bring_state(members, group, stage, by_all)
        if servers is not None:
            if group.size > 1:
                group.start_sum(torch.zeros(1)).wait()
            servers.resolve()
            self._trainer.pending.expect()
        if self._parts.consistencies.async_loop is not None:
            self._compare_data(stage)  # later these members do not meet any more
        self._trainer.state.ready.clear()
        now = time.monotonic()
        membership.formed(formed - began, now - formed, moved, restored)
        spans.part("agree with members")
        spans.formed()
        self._count_generation(members)
        log.info(
            "generation %s: rank %d of %d, state %s, group %.3f s, transfer %.3f s (%s)",
            start.generation,
            members.rank,
            members.size,
            membership.state,
            formed - began,
            now - formed,
            start.message.reason,
        )

    def _announce(self, members: Rendezvous) -> None:
        """Tell the other members what they need to know of this process."""
        parts, trainer = self._parts, self._trainer
        claim = parts.salvage.own() if trainer.salvages else None
        members.announce(parts.retry_blocks.position(), parts.balancer.own(), claim)
        if not members.receives and not members.fresh:
            # Now, so that it is there when the group is formed: an entry is on its way for some milliseconds.
            members.announce_ended_loops(self._membership.ended_stages)
        if trainer.pod is None and trainer.servers is None:
            self._state_transfer.announce(transfer_order(members.start), members.rank, self._read_state)

    def _connect_all(self, members: Rendezvous) -> Group:
        """Form the group of all members, and with a mesh those of the local ranks; return the former."""
        nccl_device = self._trainer.nccl_device
        group = self._connect(members.store, members.rank, members.size, nccl_device=nccl_device)
        self._state.use_group(group)
        if over := self._membership.over:
            raise FormationCancelled(f"the generation ended while its group was formed: {over}")
        if (pod := self._trainer.pod) is not None:
            self._form_row(pod, members, group)
        return group

    def _connect(
        self, store: StreamStore, rank: int, size: int, *, nccl_device: torch.device | None = None
    ) -> Group:
        """Form a group of members.

        Args:
            store: of its members.
            rank: of this process among them.
            size: how many they are.
            nccl_device: the GPU that it sums on; None: it sums on the host.
        """
        settings = self._parts.settings
        return form(
            store,
            rank,
            size,
            address=settings.pod_ip,
            connect_seconds=settings.connect_seconds,
            collective_seconds=settings.collective_seconds,
            nccl_device=nccl_device,
        )

    def _take_announced(self, members: Rendezvous) -> None:
        """Take in what the others have told: where their scripts are, how fast they are, what they keep."""
        parts, positions = self._parts, members.positions()
        parts.balancer.begin_generation(members.figures())
        if self._trainer.salvages:
            parts.salvage.begin_generation(members.claims(), members.rank)
        joins = not members.fresh if members.fresh or members.receives else None
        # Before the state is moved: that may take longer than members wait for each other here.
        connect = partial(members.connect_some, self._connect)
        parts.retry_blocks.formed(positions, members.rank, connect, joins)

    def _bring_state(self, members: Rendezvous, group: Group, stage: int, by_all: bool) -> int:
        """Bring the state to the members that lack it, and what else only those know that hold it.

        Args:
            members: of the generation.
            group: of all of them.
            stage: ordinal of the training loop that the script is at.
            by_all: all members have read it from a checkpoint.

        Returns:
            The bytes that were sent or received here.
        """
        membership, trainer, start = self._membership, self._trainer, members.start
        if members.fresh and not members.receives:
            members.announce_ended_loops(membership.ended_stages)
        tracking = self._parts.accounting.tracking
        if members.lacking and members.rank == members.leader:
            members.announce_line(NO_LINE if tracking is None else tracking.line_to_send())
        trainer.reduction.newcomer = members.fresh or members.receives
        # One that reads a checkpoint says it when it has done so, for which others wait in the transfer.
        ended = 0 if members.fresh else members.ended_loops()
        moved = 0 if by_all else self._hand_over(start, group, stage, ended)
        begins_from = required_state(start.message.state, "Start.state")
        membership.hold(begins_from)
        if trainer.shards is not None:
            source = members.fresh and (by_all or members.rank == 0) and not trainer.shards.adopted
            moved += self._bring_shards(trainer.shards, start, group, begins_from, source)
        if moved:
            self._parts.spans.part(
                "transfer state", bytes=moved, receives=members.receives, state=str(begins_from)
            )
        membership.stages_ended(members.ended_loops())
        if tracking is not None and members.receives:
            tracking.adopt(members.line())
        return moved

    def _count_generation(self, members: Rendezvous) -> None:
        """Have what counts, measures and records know that this generation has begun."""
        start, accounting = members.start, self._parts.accounting
        self._parts.saver.checkpoints.started()
        self._state.count_generation()
        accounting.metrics.generation.set(start.generation.number)
        if accounting.tracking is not None:
            step = self._state.position.cursor.step
            accounting.tracking.begin_generation(
                Beginning(start.generation, step, members.size, start.message.reason),
                writes=members.rank == 0,
                truncates=members.fresh or self._parts.consistencies.async_loop is None,
            )
        accounting.commits.rewind(self._membership.known)

    def _form_row(self, pod: Pod, members: Rendezvous, group: Group) -> None:
        """Form the group of the processes with this local rank.

        Args:
            pod: of this process.
            members: of the generation.
            group: of all of them.
        """
        start = members.start
        grid = grid_of(list(start.message.members), members.rank, pod.processes)
        row = self._connect(
            members.store.with_prefix(f"row-{pod.local_rank}/"),
            grid.pod,
            grid.pods,
            nccl_device=self._trainer.nccl_device,
        )
        group.on_shut(row.shut)
        pod.enter(str(start.generation), grid, row)

    def _bring_shards(
        self, shards: ShardedOptimizer, start: Start, group: Group, begins_from: StateName, source: bool
    ) -> int:
        """Bring the optimizer's state and all values to where this generation has them; return the bytes."""
        moved = shards.begin_generation(
            group,
            start.generation,
            begins_from,
            step=self._state.position.cursor.step,
            is_source=source,
            keep_values=self._awaited is not None,
            on_bytes=self._parts.accounting.metrics.transfer.sent_bytes.inc,
        )
        self._trainer.pending.expect()
        return moved

    def _evacuate(self, shards: ShardedOptimizer) -> bool:
        """Bring what this member holds alone, with others that leave, to those that stay; return whether it
        is there.
        """
        try:
            shards.evacuate(bool(self._membership.leaving))
        except RuntimeError as error:
            # What a lost member held is at its buddies; the next generation finds out what is there.
            log.info("the shards of leaving workers could not be moved: %s", error)
            return False
        return True

    def _enter_on(self, servers: PsBackend, members: Rendezvous, group: Group) -> None:
        message, consistencies = members.start.message, self._parts.consistencies
        in_batches = consistencies.enter(message.consistency)
        if consistencies.async_loop is not None:
            self._parts.salvage.forget()  # members make no common steps from here on
        known = [*message.servers, *message.leaving_servers]
        begin = GenerationStart(
            members.start.generation.key,
            tuple(member.id for member in message.members),
            {server.id: server.address for server in known},
            frozenset(server.id for server in message.leaving_servers),
            self._state.position.cursor.step,
            staleness_bound(message.consistency, self._parts.settings),
            self._state.position.ledger.skipped,
            in_batches,
            message.traceparent,
        )
        if message.fresh and consistencies.async_loop is not None:
            consistencies.async_loop.begin_anew()
        servers.begin_generation(
            begin,
            group,
            members.store,
            holds=not members.receives,
            leader=0 if message.fresh else members.leader,
            fresh=message.fresh,
        )
        self._membership.use_servers(
            [server.id for server in message.servers], servers.in_use, servers.settled, servers.copies
        )

    def _restore(self, start: Start, group: Group, stage: int) -> tuple[pb.Restored | None, bool]:
        """Go on from the newest checkpoint, if there is one, since nobody holds state.

        Return what the first member tells the coordinator, and whether all members hold the state now;
        otherwise the first one does, and the others receive it. Raise SpringtideError when it belongs to
        another script, or cannot be read although it must be there.
        """
        faults.reach("restore", self._state.position.cursor.step + 1)
        began = time.monotonic()
        checkpoints = self._parts.saver.checkpoints
        # What servers hold is given to them by the first member alone. All members must decide alike.
        together = group.size > 1 and self._trainer.servers is None
        shared: SharedRestore | LocalShardsRestore = SharedRestore(
            group, self._has_room, self._shards_restore(start, group)
        )
        if self._trainer.pod is not None:
            shared = LocalShardsRestore(group, self._trainer.shard_runs)
        if group.rank > 0:
            copy = shared.follow() if together else None
            if copy is not None:
                self._go_back_to(copy, stage, began)
            return None, copy is not None
        found, skipped = checkpoints.newest(
            start.message.had_state, shared.read if together else restore.read
        )
        by_all = shared.end(found) if together else False
        return self._go_on_from(found, skipped, start, stage, began), by_all

    def _shards_restore(self, start: Start, group: Group) -> MakeShardsRestore | None:
        """Return what makes the restore of the optimizer's state, where the members share it out."""
        trainer = self._trainer
        if trainer.shards is None:
            return None
        trainer.shards.adopted = False  # of a generation that did not begin
        state = required_state(start.message.state, "Start.state")
        keep = partial(trainer.shards.adopt, state)
        target = trainer.shards.target()
        return lambda tree: ShardsRestore(group, target, trainer.positions_in(tree), keep)

    def _has_room(self, size: int) -> bool:
        """Return whether a state of so many bytes has room beside this process, and those beside it."""
        left = memory_left()
        return left is None or left > 1.1 * size * self._parts.settings.local_world_size + ROOM_BYTES

    def _go_on_from(
        self, found: Restored | None, skipped: list[str], start: Start, stage: int, began: float
    ) -> pb.Restored | None:
        """Install what the first member has found, and return what it tells the coordinator."""
        if found is None:
            if self._state.position.cursor.step:
                raise NoWayBackError(
                    "there is no checkpoint that a process which has trained could go back to"
                )
            if stage > self._state.position.cursor.stage:
                raise NoWayBackError(
                    f"there is no checkpoint, and this process has gone through {stage} training loops that "
                    "the job had ended: it cannot begin at the first one"
                )
            if self._state_transfer.torn:
                raise NoWayBackError(
                    "there is no checkpoint for a process that has received a part of a state which is lost"
                )
            if start.message.had_state:
                log.warning("there is no checkpoint to go on from: training begins again")
            return pb.Restored(skipped=skipped) if skipped else None
        self._go_back_to(found, stage, began)
        manifest = found.manifest
        return pb.Restored(
            state=state_to_proto(manifest.state), name=manifest.name, uri=found.uri, skipped=skipped
        )

    def _go_back_to(self, found: Restored, stage: int, began: float) -> None:
        """Make a checkpoint's state the live one.

        Args:
            found: the checkpoint.
            stage: of the loop that this process is in.
            began: when the restore did; monotonic.
        """
        plan, manifest = self._state.plan, found.manifest
        assert plan is not None
        try:
            state = self._trainer.whole_state
            position = self._check_fits(found.tree, stage, plan, state)
            self._install(found.tree, position, stage, state)
        except SpringtideError as error:
            raise SpringtideError(f"checkpoint {found.uri}/{manifest.name}: {error}") from None
        if position.cursor.stage == stage and (changed := plan.changed_samples(found.tree["plan"])):
            log.warning(
                "the samples %s are not what they were when %s was written: if the data set was not changed "
                "on purpose, its files are in another order now, and samples count twice or not at all",
                ", ".join(map(str, changed)),
                manifest.name,
            )
        if manifest.reason == "leaving":
            # The time in which the job was put away is no loss.
            away = max(0.0, time.time() - manifest.written)
            position = replace(position, began_unix=position.began_unix and position.began_unix + away)
        self._state.adopt(position)
        log.info(
            "restored %s/%s (step %d) in %.3f s",
            found.uri,
            manifest.name,
            position.cursor.step,
            time.monotonic() - began,
        )

    def _hand_over(self, start: Start, group: Group, stage: int, ended: int) -> int:
        """Send or receive the state as Start says; return the bytes moved.

        Args:
            start: of the generation.
            group: of all its members.
            stage: ordinal of the training loop that the script is at.
            ended: training loops that a member which holds the state knows to be ended.
        """
        state, plan, trainer = self._state, self._state.plan, self._trainer
        assert plan is not None

        def prepare(outline: dict[str, object]) -> tuple[dict[int, TensorPlace], int]:
            position = self._check_fits(outline, stage, plan, trainer.state, ended)
            return trainer.state.places(outline), position.cursor.step

        sides = TransferSides(
            has_state=self._membership.state is not None,
            forget=self._membership.forget,
            read=self._read_state,
            prepare=prepare,
        )
        order = transfer_order(start)
        if trainer.pod is not None:  # from each process to those that have the same parts
            assert trainer.pod.grid is not None
            assert trainer.pod.row is not None
            group = trainer.pod.row
            order = order_in_row(order, trainer.pod.grid.row, f"row-{trainer.pod.local_rank}/state/")
        moved, tree = self._state_transfer.run(order, group, sides)
        if tree is not None:
            position = trainer.state.check(tree)
            if position.cursor.stage > stage:
                tree = copied(tree)  # it is written once more, after what the script does until then
            self._install(tree, position, stage, trainer.state)
            trainer.replicas.drifted = False
            state.adopt(position)
        return moved

    def _read_state(self) -> dict[str, object]:
        assert self._state.plan is not None
        return self._trainer.state.read(self._state.position, self._state.plan.fingerprint())

    def _check_fits(
        self, tree: dict[str, object], stage: int, plan: LoopPlan, state: State, ended: int = 0
    ) -> Position:
        """Return where a state stands.

        Args:
            tree: of the state.
            stage: ordinal of the training loop that the script is at.
            plan: of that loop.
            state: of the script, into which it would go.
            ended: training loops that are known to be ended: the state of a loop's end fits the next one too.

        Raises:
            SpringtideError: it belongs to another script.
            NoWayBackError: this process has left the state's loop.
        """
        position = state.check(tree)
        if max(position.cursor.stage, ended) < stage:
            raise NoWayBackError(
                f"the state is of training loop {position.cursor.stage + 1}, which this process has left"
            )
        if position.cursor.stage == stage:
            try:
                plan.check_same(tree["plan"])  # type: ignore[arg-type]
            except ValueError as error:
                raise SpringtideError(str(error)) from None
        return position

    def _install(self, tree: dict[str, object], position: Position, stage: int, state: State) -> None:
        """Make a state the live one. Nobody else uses the tree."""
        later = position.cursor.stage > stage  # then it is written once more
        state.write(tree, give=not later)
        self._state_transfer.installed()
        self._awaited = (position.cursor.stage, tree, state) if later else None
        self._membership.stages_ended(position.cursor.stage)

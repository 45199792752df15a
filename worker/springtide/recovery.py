"""Between two generations: park, wait for the Start, form the group, receive the state.

Only the script's thread comes here.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from springtide import faults
from springtide.answers import Begin, Depart, SaveAsked
from springtide.consistency import staleness_bound
from springtide.data.loop import LoopPlan
from springtide.errors import ServerStepError, SpringtideError
from springtide.exchange.groups import Group, form
from springtide.exchange.store import StreamStore
from springtide.handover import Handover
from springtide.membership import Membership
from springtide.names import StateName
from springtide.places import Place
from springtide.ps.backend import PsBackend
from springtide.ps.connections import servers_in
from springtide.ps.generation import GenerationStart, ServersLackState
from springtide.ps.step_failures import StepFailures, told
from springtide.state import Position, State
from springtide_coordinator import coordinator_pb2 as pb

if TYPE_CHECKING:
    from springtide.runtime import Runtime

log = logging.getLogger("springtide")


class NoWayBackError(RuntimeError):
    """The state to go on from is older than what this process could take."""


_WHY: dict[int, str] = {pb.STANDBY: "ready to train", pb.BOUNDARY: "members come or go"}
CALM_TRIES = 3
CALM_LIMIT_SECONDS = 2.0


class Recovery:
    """Brings the runtime into a running generation, and again into the next one when that is over."""

    def __init__(self, runtime: Runtime, membership: Membership) -> None:
        self._runtime = runtime
        self._membership = membership
        self.handover = Handover(runtime)
        self._formation_error = ""
        self._unreached: list[str] = []  # addresses of the servers that it names
        self._unformed = 0  # generations in a row that this process could not enter
        self._lacking = ""
        self._no_way_back = ""
        self._step_failures = StepFailures()
        self._awaited: tuple[int, dict[str, object], State] | None = None

    def stand(self, stage: int) -> None:
        """Return when this process is an active member of a generation and holds its state.

        Raise SystemExit when the coordinator lets the process go, SpringtideError when it was refused,
        ServerStepError when the servers fail again and again.
        """
        self._membership.check()
        runtime = self._runtime
        if runtime.session is not None:
            runtime.session.check_term()
        while (reason := self._why_park()) is not None:
            self._enter_generation(stage, *reason)
        self._membership.train()
        if self._awaited is not None and self._awaited[0] <= stage:
            # The script's code after earlier loops ran on this state and may have changed it.
            _, tree, state = self._awaited
            trainer = self._runtime.ready("batches()")
            trainer.pending.here(None)  # whatever they are
            state.write(tree)
            self._awaited = None
            if trainer.servers is not None:
                trainer.servers.fetch_again()
            trainer.pending.expect()

    def end_loop(self, stage: int) -> bool:
        """Whether all members have ended loop `stage`; otherwise a new generation has begun."""
        if self._membership.await_end(stage):
            return True
        self.stand(stage)
        return False

    def _why_park(self) -> tuple[int, str, list[str]] | None:
        runtime, membership = self._runtime, self._membership
        trainer = runtime.ready("batches()")
        if membership.generation is None:
            return pb.STANDBY, "", []
        if over := membership.over:
            return pb.DROPPED, over, []
        if self._no_way_back:
            return pb.FORMATION_FAILED, self._no_way_back, []
        if self._lacking:
            return pb.SERVERS_LACK_STATE, self._lacking, []
        if self._formation_error:
            return pb.FORMATION_FAILED, self._formation_error, self._unreached
        if trainer.failure is not None:
            return pb.REDUCTION_FAILED, trainer.failure.detail, trainer.failure.suspects
        if runtime.boundary:
            return pb.BOUNDARY, "", []
        return None

    def _enter_generation(self, stage: int, reason: int, detail: str, suspects: list[str]) -> None:
        runtime, membership = self._runtime, self._membership
        trainer = runtime.ready("batches()")
        # Workers that do not step together stop one by one: another may wait for this one at an epoch's end,
        # unless all have met there.
        if trainer.servers is not None and (failed := trainer.servers.connections.failed_step):
            trainer.servers.connections.failed_step = ""
            self._step_failed(failed, lost=False)
        at_boundary = reason == pb.BOUNDARY and (runtime.leasing is None or membership.cut)
        if at_boundary and trainer.servers is not None:
            trainer.servers.rest()
        runtime.blocks.leave()
        if not at_boundary:
            runtime.group.shut()
        step, why = runtime.position.cursor.step, detail or _WHY.get(reason, "")
        log.info(
            "after step %d: waiting for the next generation (%s: %s)", step, pb.ParkReason.Name(reason), why
        )
        membership.park(reason, detail, suspects, cannot_go_back=bool(self._no_way_back))
        self._lacking = ""
        # What comes from here on concerns the next generation.
        trainer.want_change(False)
        trainer.buckets.reopen()
        trainer.pending.here(None)
        if not at_boundary and not runtime.group.release():
            trainer.buckets.allocate()
            self.handover.detach()
        trainer.failure = None
        runtime.boundary, self._formation_error = False, ""
        while isinstance(answer := membership.await_start(runtime.checkpoints.make_way), SaveAsked):
            log.info("saving %s before leaving", answer.state)
            runtime.save(answer.state, answer.share, "leaving")
        # The stream's thread says that a generation is over, and then drops its step: that may come after
        # this process has seen the former and parked, but never after the next start.
        trainer.transaction.allow()
        if at_boundary and not runtime.group.release():
            # All members are parked, so nobody needs the old group any more.
            trainer.buckets.allocate()
        if isinstance(answer, Depart):
            runtime.depart(answer)
            return
        try:
            self._form(answer, stage)
            self._unformed = 0
        except SpringtideError:
            raise
        except ServersLackState as error:
            self._lacking = str(error)
            runtime.group.shut()
            if error.failed and membership.state is not None:
                self._step_failed(error.failed, lost=True)
        except NoWayBackError as error:
            step = runtime.position.cursor.step
            if failed := self._step_failures.last(step):
                raise ServerStepError(told(failed, step)) from None
            self._no_way_back = f"StateLost: {error}"
            runtime.group.shut()
        except (RuntimeError, OSError, ValueError) as error:
            self._formation_error = f"{type(error).__name__}: {error}"
            self._unreached = servers_in(error)
            # Told here, for a peer's complaint may have ended the generation before ours is heard.
            log.info("the generation could not be formed: %s", self._formation_error)
            runtime.group.shut()
            self._unformed += 1
            if self._unformed >= CALM_TRIES:
                # Whoever fails for a reason of its own would make generations as fast as it can.
                time.sleep(min(CALM_LIMIT_SECONDS, 0.1 * 2.0 ** min(self._unformed - CALM_TRIES, 10)))

    def _step_failed(self, failed: str, *, lost: bool) -> None:
        """Raise ServerStepError when it is not to be tried again. failed: where and why."""
        step = self._runtime.position.cursor.step
        if self._step_failures.failed(step, failed, lost=lost, can_go_back=self._membership.storage):
            self._runtime.group.shut()
            raise ServerStepError(told(failed, step))

    def _form(self, begin: Begin, stage: int) -> None:
        runtime, membership = self._runtime, self._membership
        settings = runtime.settings
        members = list(begin.message.members)
        ids = [member.id for member in members]
        rank = ids.index(membership.me.id)
        assert isinstance(begin.store, StreamStore)
        store = begin.store
        store.set(f"place/{rank}", runtime.blocks.place().to_json())
        began = time.monotonic()
        connect = partial(
            form,
            address=settings.pod_ip,
            connect_seconds=settings.connect_seconds,
            collective_seconds=settings.collective_seconds,
        )
        group = connect(store, rank, len(ids), nccl_device=runtime.ready("batches()").nccl_device)
        runtime.group = group
        if membership.over:
            raise RuntimeError(f"the generation ended while its group was formed: {membership.over}")
        formed = time.monotonic()
        faults.reach("formed", runtime.position.cursor.step + 1)
        places = [Place.from_json(store.get(f"place/{other}")) for other in range(len(ids))]
        # Before the state is moved: that may take longer than members wait for each other here.
        runtime.blocks.formed(
            places, rank, lambda ranks: connect(store.within("block/"), ranks.index(rank), len(ranks))
        )
        receivers = [(ids.index(t.receiver), ids.index(t.holder)) for t in begin.message.transfers]
        lacking = {receiver for receiver, _ in receivers}
        restored = self._restore(begin, stage) if begin.message.fresh and rank == 0 else None
        servers = runtime.ready("batches()").servers
        if servers is not None:
            self._enter_on(servers, begin, group, lacking)
        if rank not in lacking:
            begin.store.set(f"loops/{rank}", json.dumps(membership.ended_stages).encode())
        runtime.ready("batches()").reduction.newcomer = begin.message.fresh or rank in lacking
        moved = self._hand_over(begin, group, receivers, stage)
        membership.hold(StateName.from_proto(begin.message.state))
        ended = [
            json.loads(begin.store.get(f"loops/{other}")) for other in range(len(ids)) if other not in lacking
        ]
        membership.stages_ended(max(ended))
        if servers is not None:
            if group.size > 1:
                group.start_sum(torch.zeros(1)).wait()
            servers.resolve()
            runtime.ready("batches()").pending.expect()
        now = time.monotonic()
        membership.formed(formed - began, now - formed, moved, restored)
        runtime.checkpoints.started()
        runtime.generations += 1
        runtime.metrics.generation.set(begin.generation.number)
        runtime.ring.rewind(membership.known)
        log.info(
            "generation %s: rank %d of %d, state %s, group %.3f s, transfer %.3f s (%s)",
            begin.generation,
            rank,
            len(ids),
            membership.state,
            formed - began,
            now - formed,
            begin.message.reason,
        )

    def _enter_on(self, servers: PsBackend, begin: Begin, group: Group, lacking: set[int]) -> None:
        message, consistencies = begin.message, self._runtime.consistencies
        in_ranges = None if consistencies is None else consistencies.enter(message.consistency)
        known = [*message.servers, *message.leaving_servers]
        generation = begin.generation
        start = GenerationStart(
            (generation.incarnation, generation.restart, generation.number),
            tuple(member.id for member in message.members),
            {server.id: server.address for server in known},
            frozenset(server.id for server in message.leaving_servers),
            self._runtime.position.cursor.step,
            staleness_bound(message.consistency, self._runtime.settings),
            self._runtime.position.ledger.skipped,
            in_ranges,
        )
        if message.fresh and self._runtime.leasing is not None:
            self._runtime.leasing.begin_anew()
        leader = min(rank for rank in range(group.size) if rank not in lacking)
        assert isinstance(begin.store, StreamStore)
        servers.begin_generation(
            start,
            group,
            begin.store,
            holds=group.rank not in lacking,
            leader=0 if message.fresh else leader,
            fresh=message.fresh,
        )
        self._membership.use_servers(
            [server.id for server in message.servers], servers.in_use, servers.settled, servers.copies
        )

    def _restore(self, begin: Begin, stage: int) -> pb.Restored | None:
        """Nobody holds state: go on from the newest checkpoint, if there is one. The others receive it.

        Raise SpringtideError when it belongs to another script, or cannot be read although it must be there.
        """
        runtime, plan = self._runtime, self._runtime.plan
        assert plan is not None
        faults.reach("restore", runtime.position.cursor.step + 1)
        began = time.monotonic()
        found, skipped = runtime.checkpoints.newest(begin.message.had_state)
        if found is None:
            if runtime.position.cursor.step:
                raise NoWayBackError(
                    "there is no checkpoint that a process which has trained could go back to"
                )
            if begin.message.had_state:
                log.warning("there is no checkpoint to go on from: training begins again")
            return pb.Restored(skipped=skipped) if skipped else None
        manifest = found.manifest
        try:
            state = runtime.ready("batches()").whole_state
            position = self._accept(found.tree, stage, plan, state, give=True)
        except SpringtideError as error:
            raise SpringtideError(f"checkpoint {found.uri}/{manifest.name}: {error}") from None
        if manifest.reason == "leaving":
            # The time in which the job was put away is no loss.
            away = max(0.0, time.time() - manifest.written)
            position = replace(position, began_unix=position.began_unix and position.began_unix + away)
        runtime.position = position
        log.info(
            "restored %s/%s (step %d) in %.3f s",
            found.uri,
            manifest.name,
            position.cursor.step,
            time.monotonic() - began,
        )
        return pb.Restored(
            state=manifest.state.to_proto(), name=manifest.name, uri=found.uri, skipped=skipped
        )

    def _hand_over(self, begin: Begin, group: Group, transfers: list[tuple[int, int]], stage: int) -> int:
        """Send or receive the state as Start says; return the bytes moved."""
        runtime, plan = self._runtime, self._runtime.plan
        trainer = runtime.ready("batches()")
        assert plan is not None
        moved, tree = self.handover.run(
            begin.message,
            group,
            transfers,
            lambda: trainer.state.read(runtime.position, plan.fingerprint()),
        )
        if tree is not None:
            runtime.position = self._accept(tree, stage, plan, trainer.state)
        return moved

    def _accept(
        self, tree: dict[str, object], stage: int, plan: LoopPlan, state: State, *, give: bool = False
    ) -> Position:
        """Swap the received state in. Raise SpringtideError when it belongs to another script.

        give: the tree is nobody else's.
        """
        position = state.check(tree)
        if position.cursor.stage < stage:
            raise NoWayBackError(
                f"the state is of training loop {position.cursor.stage + 1}, which this process has left"
            )
        if position.cursor.stage == stage:
            try:
                plan.check_same(tree["plan"])  # type: ignore[arg-type]
            except ValueError as error:
                raise SpringtideError(str(error)) from None
        later = position.cursor.stage > stage  # then it is written once more
        state.write(tree, give=give and not later)
        self._awaited = (position.cursor.stage, tree, state) if later else None
        self._membership.stages_ended(position.cursor.stage)
        return position

"""Parameters on servers where workers do not step together (BoundedStaleness, Asynchronous).

A body works on a whole global batch of its own, known by its number. Its gradients leave during backward
(`early_push`). At optimizer.step() each chunk, and each slice of a table (`row_gradients`), is pushed, with
the batch's number and the options of the script's optimizer, and the answer brings that chunk's newest
values, for which the next forward pass waits layer by layer: the next batch is asked for before they are
here. A push without an answer is kept and sent again in the next generation, so nothing is computed twice for
a new token; a server that has the batch answers without applying it.

A step of one of several optimizers need not wait for other workers: when the script goes on to look at what
it has made, the chunks and slices that it changes are pushed, and their newest values come back before the
body goes on. The rest of them is pushed at the body's end. So each of them still gets the batch once, with
one gradient: an optimizer makes one step in a body. A body that is dropped in between leaves a batch that
some have, as a worker does that dies in the middle of a push: the worker that takes the batch over completes
it in the others.

The script's thread makes all calls but two. `interrupt` is for any thread: it completes `_stop`, and nothing
else. Gradients of parameters on a device are pushed early by the thread of `HostMemory`, which runs
`_push_chunks_early` only: it writes `_gradients` and `_outgoing`, which the script's thread reads after it
has waited for `HostMemory.sent`. No lock is held.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from springtide import faults
from springtide.comm.process_group import Group
from springtide.errors import UsageError
from springtide.ps import row_access
from springtide.ps.applied_batches import applied_batches_of
from springtide.ps.batch_sharing import BatchSharing, OwnBatches
from springtide.ps.compression import Pushed
from springtide.ps.connections import ServerError
from springtide.ps.context import PsContext
from springtide.ps.early_push import EarlyPush, Outgoing
from springtide.ps.generation import GenerationLeader, GenerationStart, Meeting, Planned
from springtide.ps.lease import Audit, Lease
from springtide.ps.row_gradients import Rows, cut_rows, slices_by_table
from springtide.ps.row_reads import Result
from springtide.ps.shard_rescue import ShardRescue
from springtide.ps.sharding import PlannedChunk
from springtide.ps.speculative_pull import SpeculativeValues
from springtide.ps.speculative_push import SpeculativePush
from springtide.ps.step_fetches import Asked
from springtide.ps.worker_groups import GradientRoute
from springtide_ps.params.applied import AppliedBatches, IntervalSet
from springtide_ps.params.chunk import Chunk, StepSpec, square_norm
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.params.sparse_gradient import SparseGradient
from springtide_ps.wire.client import Answer, RefusedError
from springtide_ps.wire.frames import Kind
from springtide_ps.wire.keys import BATCH_KEY, INTERVALS_KEY, STEP_SPEC_KEY

_LATE_SECONDS: Final = 10.0


class AsyncBackend:
    """Batches that each worker or worker group takes in turn; see `ParameterBackend` for the order of calls.

    route: how gradients get to the servers. sharing: how a batch is shared; None: not at all. speculative:
    for values that are asked for as gradients leave; None: never.
    """

    asynchronous = True

    keeps_sums = False
    """Servers take the gradients of each optimizer once in a body."""

    def __init__(
        self,
        context: PsContext,
        route: GradientRoute,
        sharing: BatchSharing | None = None,
        speculative: SpeculativeValues | None = None,
    ) -> None:
        self._context, self._route = context, route
        self._sharing: BatchSharing = sharing or OwnBatches(context)
        self.speculative: SpeculativePush | None = None
        if speculative is not None:
            self.speculative = SpeculativePush(context, speculative)
        self._slices = {planned.key: planned for planned in context.tables.slices}
        self._slices_of = slices_by_table(context.tables)
        # ---- of the generation
        self.rescue = ShardRescue(context)
        self._restored = self._skipped = 0
        self._meeting: Meeting | None = None
        self._stop: Future[None] = Future()
        self._late: list[tuple[str, Asked]] = []  # asked for in a generation that ended
        # ---- of batches
        self.clock: int | None = None  # steps that this worker, or its group, has made
        self._leased = 0
        self._window = (0, 0)
        self._next_lease: Future[Answer] | None = None
        self._sent: int | None = None  # the batch whose pushes are not all answered
        self._done: list[int] = []
        self._behind: list[int] = []
        # ---- of the body
        self.early_push = EarlyPush(context.settings.me)
        self._step_spec = StepSpec(1.0, True, ())
        self._skipping: frozenset[int] = frozenset()
        self._sums: tuple[float, tuple[int, ...]] = (1.0, ())
        self._ahead_of_end: set[str] = set()  # chunks and slices that were pushed before the body's end
        self._saw_ahead = False
        self._gradients: dict[str, torch.Tensor] = {}
        self._outgoing: dict[str, Outgoing] = {}
        # ---- of pushes
        self._fetches: dict[str, Asked] = {}
        self._pending: set[str] = set()  # chunks and slices that have not answered the batch's push
        self._again: set[str] = set()  # those whose push is sent a second time
        self._based: dict[str, int] = {}  # updates in the values that a push was computed on

    # ---- generations

    def begin_generation(self, start: GenerationStart, meeting: Meeting) -> None:
        """Have the servers begin the generation, and send again what has no answer yet.

        Args:
            start: Where it begins.
            meeting: The members that meet for it.

        Raises:
            ServersLackState: The servers do not hold the state that it begins from.
            RuntimeError: A server or a member fails.
        """
        context = self._context
        self._route.leave()
        self._sharing.begin_generation()
        self._stop, self._next_lease, self._behind = Future(), None, []
        self._meeting = meeting
        context.memory.drop()
        self.early_push.forget()
        self._restored, self._skipped = start.step, start.skipped
        context.connections.connect(start.servers)
        self._late += self._fetches.items()
        if meeting.fresh or not meeting.leads:
            self._await_late()  # the leader does when it has told the servers, which end what waits there
        if meeting.fresh:
            self.clock, self._sent, self._pending, self._based = 0, None, set(), {}
            self.rescue.pulled.clear()
            context.compression.forget()
            if meeting.leads:
                meeting.store.set(f"lost/{meeting.leader}", b"{}")
        if self.speculative is not None:
            self.speculative.end_generation()
        self._fetches = {}
        # The servers count batches, not steps.
        self._enter(replace(start, step=0), meeting)
        self._route.form(start, meeting)
        self._send_again()
        meeting.store.set(f"clock/{meeting.group.rank}", json.dumps(self.clock).encode())

    def _enter(self, start: GenerationStart, meeting: Meeting) -> None:
        context = self._context
        context.open_generation(start, meeting)
        if not meeting.leads:
            self.rescue.follow(meeting)
            context.generation.follow(meeting)
            return
        rescue = self.rescue.as_leader(meeting, self._await_late)
        leader = GenerationLeader(context.connections, start, context.settings.replication, rescue)
        context.generation.lead(meeting, leader, self._new_shard)
        context.hand_over_states()

    def _new_shard(self, planned: Planned) -> Chunk | Slice:
        shard = self._context.new_shard(planned)
        before = IntervalSet([(0, self._restored)]) if self._restored else IntervalSet()
        shard.applied_batches = AppliedBatches(before, self._restored, self._skipped)
        return shard

    def _send_again(self) -> None:
        """Have the last generation's batch in all shards, since batches are given out by what shards have."""
        again = sorted(self._pending)
        self._again |= self._pending
        self._send(again)
        for key in again:
            self._receive(key, to_the_end=False)
        self._count()
        self._done = []

    def _await_late(self) -> None:
        """Wait for answers to the last generation's requests, which must not land after this one's values."""
        late, self._late = self._late, []
        bare: Collection[str] = () if self.speculative is None else self.speculative.bare
        wait([future for _, (future, _) in late], _LATE_SECONDS)
        for key, (future, _) in late:
            error = future.exception() if future.done() else TimeoutError()
            if error is None:
                if not future.result().meta.get("whole"):
                    self._take(key, future.result())
            elif key not in bare and not isinstance(error, RefusedError):
                self.rescue.tear(key)
        if self._sent is None:
            self._pending = set()  # of a body that was left: the worker that takes its batch over pushes it
        if self.speculative is not None:
            self.speculative.bare = set()

    def close_generation(self) -> None:
        """Let go of the last generation: in the next one members step together.

        Nothing may land after the next one's values.
        """
        self._late += self._fetches.items()
        self._await_late()
        if self.speculative is not None:
            self.speculative.end_generation()
        self._sharing.begin_generation()
        self._fetches, self._gradients, self._outgoing = {}, {}, {}
        self.clock, self._sent, self._next_lease = None, None, None
        self._pending, self._again, self._ahead_of_end, self._done = set(), set(), set(), []
        self.rescue.pulled.clear()
        self._context.values.lose()

    def resolve(self) -> None:
        """All members are here, and have sent again what had no answer: let batches be given out."""
        context, meeting = self._context, self._meeting
        assert meeting is not None
        members = context.generation.start.members
        reported = [json.loads(meeting.store.get(f"clock/{number}")) for number in range(len(members))]
        clocks, self.clock = self._sharing.clocks(reported, meeting)
        if meeting.leads:
            finished: IntervalSet | None = None
            for applied_batches in self.applied_batches().values():
                finished = (
                    applied_batches.intervals
                    if finished is None
                    else finished.intersection(applied_batches.intervals)
                )
            ranges = IntervalSet() if finished is None else finished
            bound = context.generation.start.bound
            about = {INTERVALS_KEY: ranges.to_json(), "clocks": clocks, "bound": bound}
            lease_server = self.lease_server
            context.connections.answer(
                context.ask(lease_server, Kind.OPEN, about), lease_server, "the ranges' begin"
            )
        context.values.note_versions()
        self.refresh()

    def fetch_again(self) -> None:
        """Take the servers' values, for this worker alone: the script may have changed the parameters."""
        self._context.hand_over_states()
        self._context.values.note_versions()
        self._sharing.forget_relayed()
        self._pull_all()

    def rest(self) -> None:
        """Do nothing: a worker waits for its own pushes, in the next generation too."""

    # ---- what is under way

    @property
    def under_way(self) -> Mapping[str, Asked]:
        """Return by chunk or slice the values that were asked for and not taken yet."""
        return self._fetches

    @property
    def unanswered(self) -> Collection[str]:
        """Chunks and slices that have not answered the push of the last batch."""
        return self._pending

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Return by chunk the gradients that may have to be sent again."""
        return self._gradients

    @property
    def outgoing(self) -> Mapping[str, Outgoing]:
        """Return by chunk or slice what travels of the gradients that may have to be sent again."""
        return self._outgoing

    # ---- batches

    @property
    def lease_server(self) -> str:
        """The server that gives the batches out."""
        return self._context.generation.homes[self._context.planned[0].key][0]

    @property
    def group(self) -> Group | None:
        """The workers that work on each batch together; None: this worker does so alone."""
        return self._sharing.group

    def part(self) -> None:
        """All members of the group have heard that they stop now: cut none off from what it waits for."""
        self._sharing.part(self.settle)

    def lease(self, first: int, stop: int, stopping: bool = False) -> Lease:
        """Take a batch of first..stop-1 to work on.

        If there is one at once, what was pushed may still be on its way; else that is answered before.

        Args:
            first: The window's first batch.
            stop: The one after its last.
            stopping: This member was asked to stop; in a group the first member's counts.

        Returns:
            The batch, or why there is none.

        Raises:
            RuntimeError: The generation is over.
        """
        lease, self.clock = self._sharing.lease(
            first, lambda: self._take_lease(first, stop, stopping), lambda: self.clock or 0
        )
        return lease

    def _take_lease(self, first: int, stop: int, stopping: bool) -> Lease:
        if stopping:
            self.settle()
            return Lease(None)
        connections, lease_server = self._context.connections, self.lease_server
        future, self._next_lease = self._next_lease, None
        if future is None or self._window != (first, stop):
            self._window = (first, stop)
            self.settle()
            future = self._ask_batch()
            faults.reach("leasing", first + 1)
        elif not connections.comes_before(future, [asked for asked, _ in self._fetches.values()]):
            # Others may wait for this one's last batch, as it does for theirs.
            self.settle()
            faults.reach("leasing", first + 1)
        if not connections.first_of(future, self._stop):
            return Lease(None)
        said = connections.answer(future, lease_server, "a range to work on").meta
        finished, waited = int(said["finished"]), bool(said["waited"])
        if waited or BATCH_KEY not in said:
            self.settle()
        if BATCH_KEY not in said:
            return Lease(None, True, finished, waited)
        self._leased = int(said[BATCH_KEY])
        return Lease(self._leased, False, finished, waited)

    def _ask_batch(self, sent: Sequence[int] = ()) -> Future[Answer]:
        """Ask for the next batch. sent: those that are still on their way."""
        first, stop = self._window
        about = {"me": self._context.settings.me, "first": first, "stop": stop, "sent": list(sent)}
        return self._context.ask(self.lease_server, Kind.LEASE, about)

    def interrupt(self) -> None:
        """Wait for a batch no longer: this member is asked to stop. Any thread."""
        if not self._stop.done():
            self._stop.set_result(None)

    def refresh(self) -> None:
        """Begin to fetch the newest values of all chunks; rows are always new. Nothing may be on its way.

        At the same place of all members of a group.
        """
        chunks = self._context.sharding.chunks
        if self._sharing.follows:
            self._context.values.outdate(None)
        else:
            self._sharing.expect([chunk.key for chunk in chunks])
            self._pull_all()
            for chunk in chunks:
                self._sharing.sent(chunk.key, self._fetches[chunk.key][0])
        self._sharing.refreshed()

    def _pull_all(self) -> None:
        if self.speculative is not None:
            self.speculative.release()
        self._context.values.outdate(None)
        self._pull(self._context.sharding.chunks)

    def _pull(self, chunks: Collection[PlannedChunk]) -> None:
        context = self._context
        for chunk in chunks:
            server = context.generation.homes[chunk.key][0]
            about = {"k": chunk.key, "rank": context.sharding.urgency[chunk.key]}
            answer = context.ask(server, Kind.PULL_CHUNK, about, out=context.values.of(chunk))
            self._fetches[chunk.key] = (answer, server)

    def applied_batches(self) -> dict[str, AppliedBatches]:
        """Return by chunk and slice which batches are in it. Raise ServerError."""
        generation = self._context.generation
        homes = {key: home[0] for key, home in generation.homes.items()}
        return applied_batches_of(self._context.connections, generation.start.token, homes)

    def audit(self, first: int, stop: int) -> Audit:
        """Return what the chunks say of the batches first..stop-1.

        Args:
            first: The first one.
            stop: The one after the last.

        Returns:
            How many are there too often, or not at all.

        Raises:
            ServerError: A server does not tell.
        """
        lost: set[int] = set()
        repeated = skipped = 0
        for applied_batches in self.applied_batches().values():
            lost |= set(applied_batches.intervals.missing(first, stop))
            repeated = max(repeated, applied_batches.applied - len(applied_batches.intervals))
            skipped = max(skipped, applied_batches.skipped)
        return Audit(repeated, sorted(lost), skipped)

    def copied(self) -> bool:
        """Whether the copies that this member has ordered are there; as `Generation.copied`."""
        return self._context.generation.copied()

    def staleness(self) -> float | None:
        """Return updates of others between the pull that the last push was computed on and the push.

        The mean over the chunks; None when no push was answered since the last call.
        """
        behind, self._behind = self._behind, []
        return sum(behind) / len(behind) if behind else None

    # ---- a body

    def begin_step(self) -> None:
        """Begin a body. Raise UsageError when the script has changed what servers have."""
        context = self._context
        self._sharing.begin_step()
        self._saw_ahead = bool(self._ahead_of_end)
        self._ahead_of_end, self._sums = set(), (1.0, ())
        context.begin_step()
        context.compression.begin_update()
        if self.speculative is not None:
            bound = context.generation.start.bound
            # What is seen within a body is pushed then.
            self.speculative.begin_step(None if self._saw_ahead or bound is not None else self._step_spec)
        self._route.begin_pass()
        self.early_push.begin()

    def begin_backward_pass(self) -> None:
        """Begin another backward pass of the body: what is staged takes the gradients of the last one.

        At the same place of all members of a group. Raise ServerError.
        """
        optimizers = self._context.optimizers
        if self._sharing.follows and optimizers.staged:
            keys = self._keys_of_steps(optimizers.staged)
            self._take_over(keys, optimizers.step_spec(*self._sums, False), frozenset())
            self._ahead_of_end |= set(keys)
        if self.speculative is not None:
            self.speculative.give_up()
        self._push_staged()
        self._context.compression.begin_update_pass()
        self.early_push.begin()
        self._route.begin_pass()

    def stage(
        self,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        scale: float,
        inverse: float,
        unused: Collection[int],
        resting: Collection[int],
    ) -> float:
        """Note the step that the script makes with this optimizer.

        Args:
            optimizer: One of several.
            clip_norm: See `ServerOptimizers.stage`, like `scale`, `inverse` and `resting`.
            scale: Of the whole step.
            inverse: A GradScaler's.
            unused: Parameters to which no worker had a gradient.
            resting: Parameters whose gradients the script has taken away.

        Returns:
            The factor by which gradients are multiplied besides `scale`.

        Raises:
            UsageError: It has made a step in the body already.
        """
        optimizers = self._context.optimizers
        if optimizers.steps_again(optimizer):
            raise UsageError(
                f"a second step of the same optimizer ({type(optimizer).__name__}) in one body takes "
                "strategy.parameterServer.consistency Synchronous, or strategy.type AllReduce"
            )
        self._sums = scale, tuple(unused)
        factor = optimizers.stage(optimizer, clip_norm, scale, inverse, resting)
        self._context.values.count_step(optimizers.parameters_of(optimizer))
        self._sharing.stepped(self._keys_of_steps([optimizers.all.index(optimizer)]))
        return factor

    def stage_tables(
        self, optimizer: torch.optim.Optimizer, scale: float, factor: float, unused: Collection[int]
    ) -> None:
        """Note a step of tables, to be made when the body is committed.

        Args:
            optimizer: One of several.
            scale: Of the whole step.
            factor: The factor by which gradients are multiplied besides.
            unused: Parameters to which no worker had a gradient.

        Raises:
            UsageError: It has made a step in the body already.
        """
        self._sums = scale, tuple(unused)
        self._context.optimizers.stage(optimizer, None, scale, factor)

    def carried(self, index: int, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        """Return this worker's share of a gradient that the script leaves, which the next one adds to.

        Args:
            index: Number of the parameter.
            gradient: As the script leaves it.
            factor: The factor that it was multiplied by since the sum was made.

        Returns:
            This worker's part.
        """
        return self._route.carried(index, gradient, factor)

    def push(self, gradients: torch.Tensor, bucket: int) -> Pushed:
        """Send a bucket's gradients on their way.

        They are to be applied when the body commits: only then the norm and the options are known.

        Args:
            gradients: Flat.
            bucket: Its number.

        Returns:
            The gradients that this worker sends.

        Raises:
            RuntimeError: A server or a member fails.
        """
        return self._route.push(gradients, bucket, self._push_bucket_early, self._ahead_of_end)

    def _push_bucket_early(self, gradients: torch.Tensor, bucket: int) -> Pushed:
        """Push a bucket's gradients early, before the step's end. Raise ServerError."""
        self.make_way()
        memory, chunks = self._context.memory, self._context.sharding.by_bucket[bucket]
        try:
            memory.send(bucket, gradients, lambda on_host: self._push_chunks_early(chunks, on_host))
        except ConnectionError as error:
            raise ServerError(str(error)) from None
        return Pushed(self._context.compression.nbytes(len(gradients), gradients.dtype))

    def _push_chunks_early(self, chunks: Sequence[PlannedChunk], gradients: torch.Tensor) -> None:
        """Send what travels of each chunk. Raise ConnectionError."""
        context = self._context
        for chunk in chunks:
            if chunk.key in self._ahead_of_end:
                continue  # it has the batch
            gradient = gradients[chunk.start : chunk.stop]
            outgoing = context.compression.outgoing(chunk, gradient)
            self._gradients[chunk.key], self._outgoing[chunk.key] = gradient, outgoing
            speculative, count = self.speculative, partial(self._counting, chunk.key)
            if speculative is None or not speculative.send(chunk, outgoing, self.early_push, count):
                self._push_early(chunk.key, outgoing)

    def _push_early(self, key: str, gradient: Outgoing) -> None:
        generation = self._context.generation
        client = self._context.connections[generation.homes[key][0]]
        self.early_push.send(client, generation.start.token, key, gradient)

    def _counting(self, key: str, step_spec: StepSpec) -> dict[str, Any]:
        """Say how a chunk's push is going to count its gradient."""
        return {"r": self._leased, STEP_SPEC_KEY: self._own(step_spec, key), **self._wanted(key)}

    def stage_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        """Send all gradients of a table on their way.

        Args:
            index: Number of the parameter that stands for it.
            ids: int64 [n], each once, or heads.
            sums: float32 [n, dim].

        Raises:
            ServerError: A connection is broken.
        """
        if not self._sharing.keep_rows(index, ids, sums):
            self._push_rows_early(index, ids, sums)

    def _push_rows_early(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        self.make_way()
        context = self._context
        for key, rows in cut_rows(context.tables, index, ids, context.compression.shrunk(sums)).items():
            if key in self._ahead_of_end:
                continue  # it has the batch
            self._outgoing[key] = rows
            if not len(rows.ids):
                continue  # nothing that could leave earlier
            try:
                self._push_early(key, rows)
            except ConnectionError as error:
                raise ServerError(str(error)) from None

    def make_way(self) -> None:
        """Wait until gradients may be kept where those of the last body are. Raise ServerError.

        A gradient that was pushed may have to be sent again until it is answered.
        """
        if self._sent is None:
            return
        self.settle()
        if self._sent is not None:
            # Values may be here without it: they came early.
            raise ServerError(f"range {self._sent} has not left whole: it does in the next generation")

    def prepare(self) -> float | None:
        """Have everything before this body here, and the body's gradients on their way. Raise RuntimeError.

        Returns:
            The norm of the gradients as they travel, of this worker or its group, if there is to be one; it
            is finite exactly when they are.
        """
        self._route.end_sums(self._push_bucket_early)
        follows, optimizers = self._sharing.follows, self._context.optimizers
        if follows:
            self.settle()
        for index, (ids, sums) in self._sharing.rows().items():
            self._push_rows_early(index, ids, sums)
        if not follows:
            self._get_ready()
        if not self._context.settings.with_norm:
            return None
        squares = self._sharing.norm_squares(self._squares)
        return optimizers.norm([optimizers.square(*square) for square in squares])

    def _get_ready(self) -> None:
        """Have everything before this body here, and its gradients on their way. Raise ServerError."""
        self.settle()
        try:
            self._context.memory.sent()
        except ConnectionError as error:
            raise ServerError(str(error)) from None

    def _squares(self) -> list[tuple[int, float]]:
        """Return sums of squares of what travels, each with the optimizer's number.

        A finite gradient may be infinite in 16 bits.
        """
        left = [chunk for chunk in self._context.sharding.chunks if chunk.key not in self._ahead_of_end]
        squares = [(chunk.optimizer, square_norm(self._pieces(chunk))) for chunk in left]
        for key in self._slices.keys() - self._ahead_of_end:
            rows = self._outgoing[key]
            assert isinstance(rows, Rows)
            squares.append((self.owner_of(key), rows.square_norm()))
        return squares

    def _pieces(self, chunk: PlannedChunk) -> list[torch.Tensor]:
        """Return what travels of a chunk's gradient, without padding, in the gradient's own type."""
        outgoing = self._outgoing[chunk.key]
        if isinstance(outgoing, SparseGradient):
            return [outgoing.values]
        assert isinstance(outgoing, torch.Tensor)
        flat = outgoing.to(self._gradients[chunk.key].dtype)
        return [flat[start:stop] for _, _, start, stop in chunk.pieces]

    def ends(self, wanted: bool) -> bool:
        """Return `wanted`: there is no last step to which all agree."""
        return wanted

    def commit(self, scale: float, unused: Collection[int], skip: bool = False) -> None:
        """Ask for the next batch, and say how the gradients count; the values follow.

        Args:
            scale: The factor by which gradients are multiplied.
            unused: Parameters to which no worker had a gradient.
            skip: Whether the body changes nothing.
        """
        optimizers = self._context.optimizers
        rest = [key for key in self.keys_in_order() if key not in self._ahead_of_end]
        skipping = frozenset(optimizers.skipped)
        step_spec = self._rest_of(optimizers.step_spec(scale, unused, skip), skip)
        optimizers.begin()
        if self._sharing.follows:
            self._take_over(rest, step_spec, skipping)
        else:
            self._step_spec, self._skipping = step_spec, skipping
            self._sharing.expect(rest)
            self._push_rest(rest)
        self._sharing.committed(rest)

    def _push_rest(self, keys: Sequence[str]) -> None:
        """Push what was not pushed before the body's end."""
        values = self._context.values
        self._sent, self._pending = self._leased, set(keys)
        values.outdate(self._context.sharding.by_key.keys() - self._ahead_of_end)
        self._again = set()
        if self.speculative is not None:
            self.speculative.commit(self._step_spec)
        try:
            # Before the pushes, or its answer would come behind all values.
            self._next_lease = self._ask_batch([self._sent])
            self._send(keys[: len(keys) // 2])
            faults.reach("pushing", self._sent + 1)
            self._send(keys[len(keys) // 2 :])
        except ServerError as error:
            # The step stays committed: the rest of it leaves in the next generation.
            self._context.connections.over(str(error))

    def _rest_of(self, step_spec: StepSpec, skip: bool) -> StepSpec:
        """Return how the body's last pushes are made. step_spec: of what is staged then, if anything is."""
        if not self._ahead_of_end or not skip:
            return step_spec
        every = frozenset(range(len(self._context.values.parameters)))
        return StepSpec(step_spec.scale, False, step_spec.groups, step_spec.unused | every)

    def _take_over(self, keys: Iterable[str], step_spec: StepSpec, skipping: Collection[int]) -> None:
        """The group's first member pushes these with what this one has owed of them. skipping: optimizers."""
        for key in keys:
            if key in self._context.sharding.by_key:
                applied = not step_spec.skip and self.owner_of(key) not in skipping
                self._context.compression.landed(key, step_spec.unused, applied)

    def _push_staged(self) -> None:
        """Push what the staged steps change, and wait for its values; a group's first member does for all."""
        context, optimizers = self._context, self._context.optimizers
        if not optimizers.staged or self._sharing.follows:
            return
        if self.speculative is not None:
            self.speculative.give_up()
        keys = self._keys_of_steps(optimizers.staged)
        self._sharing.expect(keys)
        self._sharing.relay_substep(keys)
        scale, unused = self._sums
        # What was pushed before is answered.
        self._step_spec, self._skipping = optimizers.step_spec(scale, unused, False), frozenset()
        self._ahead_of_end |= set(keys)
        self._pending |= set(keys)
        context.values.outdate(keys)
        self._send(keys)
        faults.reach("seen", self._leased + 1)
        for key in keys:
            self._receive(key, False)
            if key in context.sharding.by_key:
                context.values.arrived(key)
            self._outgoing.pop(key, None)
            self._gradients.pop(key, None)
        if left := [key for key in keys if key in self._pending]:
            raise ServerError(f"the range is not in {left[0]}")

    # ---- values and answers

    def settle(self, parameters: Collection[int] | None = None, to_the_end: bool = False) -> None:
        """Wait until values are here; of all parameters, until every push is answered too.

        Args:
            parameters: Whose (None: all).
            to_the_end: Within the body that has committed the step: wait also when the generation is over.

        Raises:
            ServerError: They do not come.
        """
        speculative = self.speculative
        if speculative is not None:
            # Answers without values are taken when they are there.
            for key in speculative.bare & self._context.values.held_keys & self._fetches.keys():
                if self._fetches[key][0].done():
                    self._receive(key, to_the_end)
        self._push_staged()
        self._context.values.take(parameters, lambda key: self._receive(key, to_the_end))
        if parameters is None:
            self._take_rows(self._slices_of, to_the_end)
            if speculative is not None:
                for key in speculative.bare & self._fetches.keys():
                    self._receive(key, to_the_end)
        self._conclude()

    def _send(self, keys: Iterable[str]) -> None:
        context, pulled = self._context, self.rescue.pulled
        token = context.generation.start.token
        for key in keys:
            number = self._leased if self._sent is None else self._sent
            form, gradient = self.early_push.push(key, self._outgoing[key])
            step_spec = self._own(self._step_spec, key)
            about = {"k": key, "r": number, STEP_SPEC_KEY: step_spec, **form, **self._wanted(key)}
            if key in pulled and key not in self._fetches:
                self._based[key] = pulled[key].applied
            server, chunk = context.generation.homes[key][0], context.sharding.by_key.get(key)
            values = None if chunk is None else context.values.of(chunk)
            answer = context.connections.ask(server, Kind.PUSH_BATCH, token, about, gradient, values)
            self._fetches[key] = (answer, server)
            self._sharing.sent(key, answer)

    def _receive(self, key: str, to_the_end: bool) -> None:
        """Wait for the values of a chunk, or the answer about a slice. Raise ServerError."""
        if self._route.receive(key, to_the_end, self._pull):
            self.rescue.pulled.pop(key, None)  # the values are newer than the batches that this one knows of
            return
        speculative = self.speculative
        if speculative is None or not speculative.asked_for(key):
            self._receive_answer(key, to_the_end)
            return
        if (said := speculative.receive(key, to_the_end)) is not None:
            self.rescue.note(key, said)
            return
        self._receive_answer(key, to_the_end)  # the push, after which the values are asked for
        self._pull([self._context.sharding.by_key[key]])
        speculative.replaced(key)
        self._receive_answer(key, to_the_end)

    def _receive_answer(self, key: str, to_the_end: bool) -> None:
        context = self._context
        while True:
            asked = self._fetches.get(key)
            if asked is None:
                raise ServerError(f"the values of chunk {key} are not here")
            answer = context.connections.answer(*asked, context.awaited(key), to_the_end)
            if not answer.meta.get("whole"):
                break
            # The server had no room for what was pushed early.
            self.early_push.forget([key])
            self._send([key])
        self._take(key, answer)
        del self._fetches[key]

    def _take(self, key: str, answer: Answer) -> None:
        """Note that values have landed, or an answer without any."""
        said = answer.meta
        if key in self._context.sharding.by_key and not said.get("bare"):
            self.rescue.note(key, said)
        if "already" not in said or key not in self._pending:
            return
        self._pending.discard(key)
        # What is there when it is sent again is this worker's own push, whose answer was lost; what is there
        # when it is sent first is that of a worker which had the batch before.
        applied = not self._step_spec.skip and (not said["already"] or key in self._again)
        self._context.compression.landed(key, self._step_spec.unused, applied)
        if not said["already"] and key in self._based:
            self._behind.append(max(0, int(said["before"]) - self._based[key]))

    def _conclude(self) -> None:
        """Say which batches are done, if any are."""
        self._count()
        if self._done:
            done, self._done = self._done, []
            about = {"me": self._context.settings.me, "done": done}
            try:
                self._context.ask(self.lease_server, Kind.FINISHED, about)
            except ServerError as error:
                # The values are here. The next generation begins from what the chunks say themselves.
                self._context.connections.over(str(error))

    def _count(self) -> None:
        """A batch that every chunk and slice has answered is done."""
        if self._sent is not None and not self._pending:
            self._done.append(self._sent)
            self.clock = (self.clock or 0) + 1
            self._sent, self._gradients, self._outgoing = None, {}, {}

    # ---- rows

    def read_rows(self, index: int, ids: torch.Tensor, to_the_end: bool = False) -> torch.Tensor:
        """Return the newest rows of a table, with this worker's own pushes and steps.

        Args:
            index: Number of the parameter that stands for it.
            ids: int64 [n], each once.
            to_the_end: As for `settle`.

        Returns:
            float32 [n, dim].

        Raises:
            ServerError: A server does not answer.
        """
        if self._context.optimizers.has_stepped(index):
            self._push_staged()
        self._settle_rows(index, to_the_end)
        return row_access.read(self._context, index, ids, self._result(to_the_end))

    def all_rows(self, index: int, to_the_end: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the newest (ids, rows) of a table.

        Args:
            index: Number of the parameter that stands for it.
            to_the_end: As for `settle`.

        Returns:
            ids int64 [n] in order, and rows float32 [n, dim].

        Raises:
            ServerError: A server does not answer.
        """
        self._settle_rows(index, to_the_end)
        return row_access.read_all(self._context, index, self._result(to_the_end))

    def _result(self, to_the_end: bool) -> Result:
        answer = self._context.connections.answer
        if not to_the_end:
            return answer
        # Rows need no other member.
        return lambda future, server, what: answer(future, server, what, to_the_end=True)

    def _settle_rows(self, index: int, to_the_end: bool) -> None:
        """Wait until what was pushed of a table is in its slices. Raise ServerError."""
        self._take_rows([index], to_the_end)
        self._conclude()

    def _take_rows(self, tables: Collection[int], to_the_end: bool) -> None:
        self._sharing.await_rows(tables, to_the_end)
        for key in [key for index in tables for key in self._slices_of[index]]:
            if key in self._fetches:
                self._receive(key, to_the_end)

    # ---- shards

    def keys_in_order(self) -> list[str]:
        """Return the keys of all slices and chunks, rows first: the next forward pass begins with them."""
        return [*self._slices, *self._context.sharding.by_key]

    def owner_of(self, key: str) -> int:
        """Return the number of the optimizer that trains a chunk or slice."""
        if key in self._slices:
            return self._context.optimizers.owners[self._context.tables.name(self._slices[key].parameter)]
        return self._context.sharding.by_key[key].optimizer

    def _keys_of_steps(self, optimizers: Collection[int]) -> list[str]:
        """Return the chunks and slices that steps of these optimizers change."""
        return [key for key in self.keys_in_order() if self.owner_of(key) in optimizers]

    def _own(self, step_spec: StepSpec, key: str) -> StepSpec:
        """Return the fields of a step that are about one chunk or slice."""
        if key in self._slices:
            own = {self._slices[key].parameter}
        else:
            own = {piece[0] for piece in self._context.sharding.by_key[key].pieces}
        skip = step_spec.skip or self.owner_of(key) in self._skipping
        return replace(step_spec, unused=step_spec.unused & own, skip=skip)

    def _wanted(self, key: str) -> dict[str, Any]:
        """Return what a push says of its answer."""
        if self.speculative is not None and key in self.speculative.bare:
            return {"bare": True}
        urgency = self._context.sharding.urgency
        return {"rank": urgency[key]} if key in urgency else {}

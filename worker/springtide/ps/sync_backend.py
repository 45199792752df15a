"""Parameters on servers where workers step together: push, prepare, commit, fetch.

A step's gradients go to the servers during backward. `prepare` returns when all members' gradients are
there; then comes the step's commit vote, and the members that have its result have committed
(`step_protocol` says why that is safe). The values come back in the order in which a forward pass
needs them.

The script's thread makes all calls. Gradients of parameters on a device are handed to the servers by the
thread of `HostMemory`, which runs `_send_chunks` only: it reads the generation, which changes when that
thread has nothing left to do. Any thread may call `Connections.over`, which ends waits. No lock is held.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from springtide.ps import row_access
from springtide.ps.compression import Made, Pushed
from springtide.ps.connections import ServerError
from springtide.ps.context import PsContext
from springtide.ps.generation import GenerationLeader, GenerationStart, Meeting
from springtide.ps.intermediate_values import IntermediateValues
from springtide.ps.row_reads import Result
from springtide.ps.sharding import PlannedChunk
from springtide.ps.speculative_pull import SpeculativePull, SpeculativeValues
from springtide.ps.step_fetches import StepFetches
from springtide.ps.tables import table_name
from springtide.ps.worker_groups import GradientRoute
from springtide_ps.params.chunk import StepSpec
from springtide_ps.wire.client import Answer, in_backward_pass
from springtide_ps.wire.frames import Kind
from springtide_ps.wire.keys import STEP_SPEC_KEY


class SyncBackend:
    """Steps that all members make in common; see `ParameterBackend` for the order of calls.

    route: how gradients get to the servers, and values back. speculative: for values that are asked for
    during backward; None: never.
    """

    asynchronous = False

    keeps_sums = True
    """Servers keep the sums of a body's backward passes, and show its steps before its end."""

    def __init__(
        self, context: PsContext, route: GradientRoute, speculative: SpeculativeValues | None = None
    ) -> None:
        self._context, self._route = context, route
        self.fetches = StepFetches(context)
        self.intermediate = IntermediateValues(context, self.fetches)
        self.speculative: SpeculativePull | None = None
        if speculative is not None:
            self.speculative = SpeculativePull(context, self.fetches, speculative)
        self.step_spec: StepSpec | None = None
        """How the last step was made, as far as this worker knows."""
        self._made: Made | None = None
        self._commits: list[Future[Answer]] = []
        self._ahead = False  # values of the last step may be here before the servers have made it
        self._counts: dict[str, int] = {}  # gradients on their way, by server

    # ---- generations

    def begin_generation(self, start: GenerationStart, meeting: Meeting) -> None:
        """Have the servers begin the generation, and learn where the shards are.

        Args:
            start: Where it begins; the step is as this member knows it, and the leader's counts.
            meeting: The members that meet for it.

        Raises:
            ServersLackState: The servers do not hold the state that it begins from.
            RuntimeError: A server or a member fails.
        """
        self._route.leave()
        if self.speculative is not None:
            self.speculative.end_generation()
        # Connections to servers that are gone end here, and with them what is waited for next.
        self._context.connections.connect(start.servers)
        self.intermediate.end_generation()
        self._ahead = False
        self.fetches.forget()
        self._commits = []
        self._context.open_generation(start, meeting)
        if meeting.fresh:
            self._made = None
            self._context.compression.forget()
        self._enter(start, meeting)
        self._route.form(start, meeting)

    def _enter(self, start: GenerationStart, meeting: Meeting) -> None:
        context = self._context
        if not meeting.leads:
            context.generation.follow(meeting)
            return
        if meeting.fresh:
            self.step_spec = None
        leader = GenerationLeader(context.connections, start, context.settings.replication)
        context.generation.lead(meeting, leader, context.new_shard)
        context.hand_over_states()

    def close_generation(self) -> None:
        """Let go of the last generation: in the next one members do not step together.

        Servers refuse what was asked for in this one, so only what a body has looked at is waited for.
        """
        if self.speculative is not None:
            self.speculative.end_generation()
        self.intermediate.end_generation()
        self._ahead = False
        self.fetches.forget()
        self._commits, self._made, self.step_spec = [], None, None
        self._context.values.lose()

    def resolve(self) -> None:
        """All members hold the state: let the servers make what is open of it, and fetch what is not here."""
        context, values = self._context, self._context.values
        self._commits = [
            context.ask(server, Kind.RESOLVE, {STEP_SPEC_KEY: self.step_spec})
            for server in context.connections
        ]
        self._stand_at(self._made)
        values.outdate(())
        values.note_versions()
        lacking = [chunk for chunk in context.sharding.chunks if chunk.key not in values.held_keys]
        self.fetches.fetch(lacking, context.generation.step)

    def fetch_again(self) -> None:
        """Take the servers' values: the script may have changed the parameters where that does not count."""
        context = self._context
        context.hand_over_states()
        context.values.note_versions()
        context.values.outdate(None)
        self.fetches.fetch(context.sharding.chunks, context.generation.step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a member must know to let the servers make an open step."""
        step_spec = None if self.step_spec is None else self.step_spec.to_json()
        return {"step spec": json.dumps(step_spec), "made": json.dumps(self._made)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what another member does."""
        step_spec, made = json.loads(state["step spec"]), json.loads(state["made"])
        self._made = None if made is None else ((made[0][0], made[0][1], made[0][2]), made[1])
        self.step_spec = None if step_spec is None else StepSpec.from_json(step_spec)

    def rest(self) -> None:
        """Let the last step's values pass the group at a boundary, where all members have committed it."""
        self._route.rest(self.settle)

    # ---- a step

    def begin_step(self) -> None:
        """Begin a body. Raise UsageError when the script has changed what servers have."""
        context = self._context
        self.intermediate.begin_step()
        self._counts = {}
        context.begin_step()
        context.compression.begin((context.generation.start.token, context.generation.step + 1))
        if self.speculative is not None:
            self.speculative.begin_step(self._last_made())
        self._route.begin_pass()

    def _last_made(self) -> StepSpec | None:
        """Return how the last step was made; None: nothing is to be asked for early in the next one."""
        if self.intermediate.seen_before or (self.step_spec is not None and self.step_spec.before):
            return None  # what is seen within a body comes then
        return self.step_spec

    def begin_backward_pass(self) -> None:
        """Begin another backward pass of the body. Raise ServerError, UsageError."""
        self.intermediate.begin_backward_pass()
        self._counts = {}
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
        """Note the step that the script makes with this optimizer and the sums of the present pass.

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
            UsageError: The body has too many steps.
        """
        optimizers = self._context.optimizers
        if optimizers.steps_again(optimizer):
            self.intermediate.on_use("the same optimizer's step() twice")
        self.intermediate.before_step(optimizer, scale, unused)
        factor = optimizers.stage(optimizer, clip_norm, scale, inverse, resting)
        self._context.values.count_step(optimizers.parameters_of(optimizer))
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
            UsageError: The body has too many steps.
        """
        self.intermediate.before_step(optimizer, scale, unused)
        self._context.optimizers.stage(optimizer, None, scale, factor)

    def push(self, gradients: torch.Tensor, bucket: int) -> Pushed:
        """Send a bucket's gradients on their way.

        Args:
            gradients: Flat.
            bucket: Its number.

        Returns:
            The gradients that this worker sends.

        Raises:
            RuntimeError: A server or a member fails.
        """
        return self._route.push(gradients, bucket, self._send_bucket)

    def _send_bucket(self, gradients: torch.Tensor, bucket: int) -> Pushed:
        """Send a bucket's gradients to the servers. Raise ServerError."""
        self.await_commits()
        context = self._context
        chunks = context.sharding.by_bucket[bucket]
        if self.speculative is not None and self.intermediate.backward_pass == 0:
            self.speculative.expect(chunks)
        for chunk in chunks:
            server = context.generation.homes[chunk.key][0]
            self._counts[server] = self._counts.get(server, 0) + 1
        made = (context.generation.start.token, context.generation.step + 1)
        try:
            context.memory.send(bucket, gradients, lambda on_host: self._send_chunks(chunks, made, on_host))
        except ConnectionError as error:
            raise ServerError(str(error)) from None
        nbytes = context.compression.nbytes
        return Pushed(sum(nbytes(chunk.stop - chunk.start, gradients.dtype) for chunk in chunks))

    def _send_chunks(self, chunks: Sequence[PlannedChunk], made: Made, gradients: torch.Tensor) -> None:
        """Send what travels of each chunk. Raise ConnectionError."""
        context = self._context
        for chunk in chunks:
            server = context.generation.homes[chunk.key][0]
            part = context.compression.outgoing(chunk, gradients[chunk.start : chunk.stop])
            if self.speculative is not None and self.speculative.send(server, made, chunk.key, part):
                continue
            client, number = context.connections[server], self.intermediate.backward_pass
            client.stage(*made, context.settings.me, chunk.key, part, number)

    def stage_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        """Send all gradients of a table.

        Args:
            index: Number of the parameter that stands for it.
            ids: int64 [n], each once, or heads.
            sums: float32 [n, dim].

        Raises:
            ServerError: A connection is broken.
        """
        self.await_commits()
        context, number = self._context, self.intermediate.backward_pass
        token, step, me = context.generation.start.token, context.generation.step + 1, context.settings.me
        sums = context.compression.shrunk(sums)
        try:
            for part in context.tables.split(index, ids, context.generation.homes, empty=True):
                gradients = context.tables.records(part, ids, sums)
                client = context.connections[part.server]
                about = (token, step, me, table_name(index), part.slices)
                client.stage_rows(*about, gradients, sums.dtype, number)
                self._counts[part.server] = self._counts.get(part.server, 0) + len(part.slices)
        except ConnectionError as error:
            raise ServerError(str(error)) from None

    def await_commits(self) -> None:
        """Wait until the servers have made the last step: they take gradients of one step. Raise ServerError.

        Values may have come before.
        """
        for future in self._commits:
            self._context.connections.result(future, lambda: "the last step's commit")
        self._commits = []

    def make_way(self) -> None:
        """Do nothing: gradients of the last body are on the servers."""

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

    def prepare(self) -> float | None:
        """Wait until all members' gradients are on the servers. Raise RuntimeError.

        Returns:
            The norm of their sum if there is to be one.
        """
        self._route.end_sums(self._send_bucket)
        self._take_values(None, False)
        context, settings = self._context, self._context.settings
        try:
            context.memory.sent()
        except ConnectionError as error:
            raise ServerError(str(error)) from None
        self.await_commits()
        about = {"s": context.generation.step + 1, "me": settings.me, "norm": settings.with_norm}
        about |= in_backward_pass(self.intermediate.backward_pass)
        asked = [
            (server, context.ask(server, Kind.PREPARE, {**about, "count": self._counts.get(server, 0)}))
            for server in context.connections
        ]
        answers = context.connections.answers(asked, "the step's gradients")
        if not settings.with_norm:
            return None
        return context.optimizers.norm([answer.meta["square_norms"] for answer in answers])

    def ends(self, wanted: bool) -> bool:
        """Agree whether to stop: return whether this step is the last one."""
        return self._context.compression.ends(wanted)

    def commit(self, scale: float, unused: Collection[int], skip: bool = False) -> None:
        """Have the servers make the step, which is committed, and begin to fetch the values.

        Args:
            scale: The factor by which sums are multiplied.
            unused: Parameters to which no worker had a gradient.
            skip: Whether the step changes nothing.
        """
        context, generation = self._context, self._context.generation
        self.step_spec, changed = self.intermediate.commit(scale, unused, skip)
        context.optimizers.begin()
        about = {"s": generation.step + 1, "me": context.settings.me, STEP_SPEC_KEY: self.step_spec}
        generation.advance()
        self.fetches.committed()
        self._made = (generation.start.token, generation.step)
        self._stand_at(self._made)
        context.values.outdate(chunk.key for chunk in changed)
        self._commits = []
        lost: dict[str, ServerError] = {}
        for server in context.connections:
            try:
                self._commits.append(context.ask(server, Kind.COMMIT, about))
            except ServerError as error:
                lost[server] = error
        if self.speculative is not None and changed:
            self.speculative.begin_commit(generation.step, self.step_spec)
        if self._route.fetches:
            self._fetch_made(changed, lost)
        self._route.relay(changed, lambda key: self.fetches.receive(key, False))
        if lost:
            context.connections.over("; ".join(str(error) for error in lost.values()))
        self._ahead = bool(self.intermediate.seen)
        if self.speculative is not None:
            self._ahead |= self.speculative.end_commit()

    def _fetch_made(self, chunks: Collection[PlannedChunk], lost: dict[str, ServerError]) -> None:
        """Begin to fetch the values of the step that was committed. lost: servers; more are added."""
        for chunk in chunks:
            # Where no copy is left, the step stays committed: its values come with the next generation.
            for home in self._context.generation.homes[chunk.key]:
                if home in lost:
                    continue
                if self.speculative is not None and self.speculative.use(chunk.key):
                    break
                try:
                    self.fetches.fetch([chunk], self._context.generation.step, home)
                    break
                except ServerError as error:
                    lost[home] = error

    def settle(self, parameters: Collection[int] | None = None, to_the_end: bool = False) -> None:
        """Wait until values are here; all of them are when the servers have made the step.

        Args:
            parameters: Whose (None: all).
            to_the_end: Within the body that has committed the step: wait also when the generation is over.

        Raises:
            ServerError: They do not come.
            UsageError: The script looks at what servers cannot show.
        """
        self.intermediate.look(parameters, lambda key: self._receive(key, False))
        self._take_values(parameters, to_the_end)
        if parameters is not None or to_the_end or not self._ahead:
            return
        for future in self._commits:
            try:
                self._context.connections.result(future, lambda: "the last step's commit")
            except ServerError:
                if not future.done():
                    raise
                # A server is lost, and its copy has the values: the next step will find that out.

    def _take_values(self, parameters: Collection[int] | None, to_the_end: bool) -> None:
        self._context.values.take(parameters, lambda key: self._receive(key, to_the_end))

    def _receive(self, key: str, to_the_end: bool) -> None:
        """Wait for the values of a chunk, wherever they come from. Raise ServerError."""
        if self._route.receive(key, to_the_end, lambda chunks: self._fetch_made(chunks, {})):
            return
        if self.speculative is not None and self.speculative.receive(key, to_the_end):
            return
        if not self.intermediate.receive(key):
            self.fetches.receive(key, to_the_end)

    # ---- rows

    def read_rows(self, index: int, ids: torch.Tensor, to_the_end: bool = False) -> torch.Tensor:
        """Return rows of a table; within a body those that its steps have made so far.

        Args:
            index: Number of the parameter that stands for it.
            ids: int64 [n], each once.
            to_the_end: As for `settle`.

        Returns:
            float32 [n, dim].

        Raises:
            ServerError: A server does not answer.
            UsageError: The script looks at what servers cannot show.
        """
        if self._context.generation.begun and self._context.optimizers.has_stepped(index):
            return self.intermediate.read_rows(index, ids)
        return row_access.read(self._context, index, ids, self._result(to_the_end))

    def all_rows(self, index: int, to_the_end: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (ids, rows) of a table.

        Args:
            index: Number of the parameter that stands for it.
            to_the_end: As for `settle`.

        Returns:
            ids int64 [n] in order, and rows float32 [n, dim].

        Raises:
            ServerError: A server does not answer.
        """
        return row_access.read_all(self._context, index, self._result(to_the_end))

    def _result(self, to_the_end: bool) -> Result:
        return self.fetches.answer_to_the_end if to_the_end else self._context.connections.answer

    def _stand_at(self, made: Made | None) -> None:
        step_spec, compression = self.step_spec, self._context.compression
        if step_spec is None:
            compression.stand_at(made, (), False)
        else:
            compression.stand_at(
                made, [(part.backward_pass, part.unused) for part in step_spec.substeps], step_spec.skip
            )

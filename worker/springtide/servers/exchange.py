"""The steps of one worker with parameters on servers: push, prepare, commit, fetch.

A step's gradients go to the servers during backward. `prepare` returns when all members' gradients are there;
then comes the step's side reduction, and who has its result has committed (`springtide_ps.rounds` says why
that is safe). The values come back in the order in which a forward pass needs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from springtide.errors import UsageError
from springtide.exchange.groups import Group
from springtide.exchange.layout import Layout
from springtide.exchange.store import StreamStore
from springtide.pending import looking
from springtide.ps.compression import Made, Pushed, Wire
from springtide.ps.connections import Links, ServerError
from springtide.ps.generation import Leader, Place
from springtide.ps.host_memory import Copier, Memory
from springtide.ps.optimizer_state import cut_states
from springtide.ps.sharding import LackError, PlannedChunk, described, plan_chunks
from springtide.ps.snapshot import Plan, Snapshot
from springtide.ps.step_spec import ServerOptimizers
from springtide.ps.tables import PlannedSlice, TableBook
from springtide.servers.table_steps import TableSteps
from springtide.tables.step import tables_among
from springtide_ps.chunk import Chunk, Recipe
from springtide_ps.client import Answer, in_round
from springtide_ps.frames import Kind
from springtide_ps.selected import Selected
from springtide_ps.slices import Slice


class ServersLackState(Exception):
    """The servers of this generation do not hold the state that it begins from.

    failed: which steps have failed there, if that is why.
    """

    def __init__(self, message: str, failed: str = "") -> None:
        super().__init__(message)
        self.failed = failed


MakeServers = Callable[
    [dict[str, torch.nn.Parameter], Layout, Sequence[torch.optim.Optimizer], bool], "ServerExchange"
]
"""(trained parameters by name, their layout, optimizers, whether the gradients' norm is wanted)."""


class ServerExchange(TableSteps):
    """Used from the script's thread. asynchronous: workers do not step together."""

    asynchronous = False

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        layout: Layout,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        me: str,
        token: str,
        replication: int,
        with_norm: bool,
        connect_seconds: float,
        answer_seconds: float,
        authority: str = "",
        dense: bool = True,
        wire: Wire | None = None,
        copier: Copier | None = None,
    ) -> None:
        """dense: all parameters are on the servers, not the rows of tables alone. wire: how gradients travel;
        None: as they are. copier: see `Memory`.
        """
        self.wire = wire or Wire()
        self._made: Made | None = None
        self._me, self._replication, self._with_norm = me, replication, with_norm
        self._names = list(parameters) if dense else []
        self.dense = dense
        self.tables = TableBook(tables_among(list(parameters.values())), list(parameters), optimizers)
        self.optimizers = ServerOptimizers(optimizers, parameters)
        self.links = Links(token, connect_seconds, answer_seconds, authority)
        self._layout = layout
        self._parameters = list(parameters.values()) if dense else []
        self._memory = Memory(self._parameters, layout, copier)
        self._versions: list[int] = []
        own = self.optimizers
        self.chunks = plan_chunks(layout, own.groups, owners=own.owners) if dense else []
        self._planned: list[PlannedChunk | PlannedSlice] = [*self.chunks, *self.tables.slices]
        self._chunks = {chunk.key: chunk for chunk in self.chunks}
        self._whose = {chunk.key: described(chunk, self._names) for chunk in self.chunks}
        self._ranks = {chunk.key: rank for rank, chunk in enumerate(self.chunks)}
        self._by_bucket: list[list[PlannedChunk]] = [[] for _ in layout.sizes]
        for chunk in self.chunks:
            self._by_bucket[chunk.bucket].append(chunk)
        self._of_parameter: dict[int, list[str]] = {}
        for chunk in self.chunks:
            for piece in chunk.pieces:
                self._of_parameter.setdefault(piece[0], []).append(chunk.key)
        self.lineage = ""
        self.recipe: Recipe | None = None
        self._place: Place | None = None
        self._homes: dict[str, list[str]] = {}
        self._clean: set[str] = {chunk.key for chunk in self.chunks}
        self._fetches: dict[str, tuple[Future[Answer], str]] = {}
        self._commits: list[Future[Answer]] = []
        self._counts: dict[str, int] = {}
        self._pushed = 0
        self._round = 0
        self._tried = False
        self.settled = True
        self._leader: Leader | None = None

    # ---- generations

    def begin_generation(
        self, place: Place, group: Group, store: StreamStore, *, holds: bool, leader: int, fresh: bool
    ) -> None:
        """Have the servers begin the generation, and learn where the chunks are.

        place.step: as this member knows it; the leader's counts. holds: this member has the state that it
        begins from. leader: rank of the member that speaks for all. fresh: nobody has a state, and training
        begins from the leader's parameters and optimizer. Raise ServersLackState, RuntimeError.
        """
        self._place = place
        self._fetches, self._commits = {}, []
        self.optimizers.begin()
        self._leader = None
        self.wire.reopen()
        self.links.connect(place.servers)
        group.on_shut(lambda: self.links.over("the generation is over"))
        self._memory.drop()
        if fresh:
            self._made = None
            self._memory.bring_down()
        if not holds:
            self._clean = set()
        if group.rank != leader:
            told = self._hear(store, leader)
            if "lacks" in told:
                raise ServersLackState(told["lacks"], told["failed"])
            self.lineage, self.settled = told["lineage"], told["settled"]
            self._place = replace(place, step=told["step"])
            homes = [[told["ids"][number] for number in numbers] for numbers in told["homes"]]
            self._homes = {planned.key: home for planned, home in zip(self._planned, homes, strict=True)}
            self._rely_on_others_than_leavers()
            return
        if fresh:
            self.lineage = "-".join(str(number) for number in place.token)
            self.recipe = None
        self._leader = self._make_leader(place)
        try:
            arrangement = self._leader.arrange(
                self._planned, self._me, self.lineage, self._new_chunk if fresh else None
            )
        except LackError as error:
            failed = "; ".join(f"{self._whose.get(key, key)}: {told}" for key, told in self._leader.failed)
            store.set(f"servers/{leader}", json.dumps({"lacks": str(error), "failed": failed}).encode())
            raise ServersLackState(str(error), failed) from None
        self._homes, self.settled = arrangement.homes, arrangement.settled
        # The optimizer's state lives on the servers from now on.
        self.optimizers.forget(self._parameters)
        ids = list(place.servers)
        numbers = {server: number for number, server in enumerate(ids)}
        told = {
            "lineage": self.lineage,
            "step": place.step,
            "settled": self.settled,
            "ids": ids,
            "homes": [[numbers[server] for server in self._homes[planned.key]] for planned in self._planned],
        }
        store.set(f"servers/{leader}", json.dumps(told).encode())
        self._rely_on_others_than_leavers()

    def _rely_on_others_than_leavers(self) -> None:
        """Servers that leave, and hold nothing that is used, may end at any moment."""
        place = self._entered
        self.links.rely_on(self.in_use | (place.servers.keys() - place.leaving))

    def _make_leader(self, place: Place) -> Leader:
        return Leader(self.links, place, self._replication)

    def _hear(self, store: StreamStore, leader: int) -> dict[str, Any]:
        """What the leader tells."""
        told = json.loads(store.get(f"servers/{leader}"))
        assert isinstance(told, dict)
        return told

    def _new_chunk(self, planned: PlannedChunk | PlannedSlice) -> Chunk | Slice:
        if isinstance(planned, PlannedSlice):
            return self.tables.make(planned)
        chunk = self.optimizers.make(self._values(planned), planned.pieces, planned.optimizer)
        states = self.optimizers.state_of(planned.optimizer)
        cut_states(self._layout, planned, chunk, self._parameters, states)
        return chunk

    @property
    def described(self) -> str:
        """What all workers have to agree on."""
        return f"{self.tables.describe()} {self.wire.kind}"

    @property
    def in_use(self) -> set[str]:
        """The servers that this generation's chunks are on."""
        return {server for home in self._homes.values() for server in home}

    @property
    def copies(self) -> int:
        """How many servers hold each chunk, at least."""
        return min((len(home) for home in self._homes.values()), default=0)

    def copied(self) -> bool:
        """Whether the copies that this member has ordered are there, so that another generation can use them.

        Asks now and then, and does not wait.
        """
        return self._leader is not None and self._leader.copied()

    def resolve(self) -> None:
        """All members hold the state: let the servers make what is open of it, and fetch what is not here."""
        recipe = None if self.recipe is None else self.recipe.to_json()
        self._commits = [self._ask(server, Kind.RESOLVE, {"recipe": recipe}) for server in self.links]
        self._stand_at(self._made)
        self._memory.mark()
        # What comes from the servers does not count as a change.
        self._versions = [parameter._version for parameter in self._parameters]
        self._fetch([chunk for chunk in self.chunks if chunk.key not in self._clean], self._step)

    def fetch_again(self) -> None:
        """The script may have changed the parameters where that does not count: take the servers' values."""
        self._memory.mark()
        self.optimizers.forget(self._parameters)
        self._versions = [parameter._version for parameter in self._parameters]
        self._clean = set()
        self._fetch(self.chunks, self._step)

    def state_dict(self) -> dict[str, Any]:
        """What a member must know to let the servers make an open step."""
        recipe = None if self.recipe is None else self.recipe.to_json()
        return {"lineage": self.lineage, "recipe": json.dumps(recipe), "made": json.dumps(self._made)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        recipe, made = json.loads(state["recipe"]), json.loads(state["made"])
        self.lineage = str(state["lineage"])
        self._made = None if made is None else ((made[0][0], made[0][1], made[0][2]), made[1])
        self.recipe = None if recipe is None else Recipe.from_json(recipe)

    def rest(self) -> None:
        """At a boundary: end what the next generation would cut off."""

    def close(self) -> None:
        self.links.close()
        self._memory.close()

    # ---- a step

    def begin_step(self) -> None:
        """Raise UsageError when the script has changed a parameter since the last step, or its optimizers."""
        self.optimizers.check_unchanged(self.dense)
        self.links.failed_step = ""
        self._memory.drop()
        self.optimizers.begin()
        self._pushed, self._counts = 0, {}
        self.wire.begin((self._entered.token, self._step + 1))
        with looking():
            versions = [parameter._version for parameter in self._parameters]
        if versions != self._versions:
            name = next(n for n, v, w in zip(self._names, versions, self._versions, strict=True) if v != w)
            raise UsageError(
                f"parameter {name} was changed outside of optimizer.step(), but it lives on the parameter "
                "servers: change it before distribute(), or use strategy.type AllReduce"
            )

    rounds = False
    """Whether servers keep the sums of a body's backward passes, and show its steps before its end."""

    def carried(self, index: int, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        """What the script leaves of a parameter's gradient goes into the next one: this worker's part of it.

        gradient: as it is left, multiplied by `factor` since the sum was made.
        """
        return gradient

    def begin_round(self) -> None:
        """Another backward pass of the body begins. Raise ServerError, UsageError."""
        raise NotImplementedError

    def stage(
        self,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        scale: float,
        inverse: float,
        unused: Collection[int],
        resting: Collection[int],
    ) -> float:
        """One of several optimizers makes its step. unused: parameters to which no worker had a gradient.

        The others, and what is returned, as for `ServerOptimizers.stage`.
        """
        return self.optimizers.stage(optimizer, clip_norm, scale, inverse, resting)

    def push(self, gradients: torch.Tensor) -> Pushed:
        """Send the next bucket's gradients (flat, in the layout's order) on their way. Raise ServerError."""
        made, bucket = (self._entered.token, self._step + 1), self._pushed
        chunks = [(self._homes[chunk.key][0], chunk) for chunk in self._by_bucket[bucket]]

        def stage(gradients: torch.Tensor) -> None:
            for server, chunk in chunks:
                part = self.wire.outgoing(chunk, gradients[chunk.start : chunk.stop])
                self._send_gradient(server, made, chunk.key, part)

        for server, _ in chunks:
            self._counts[server] = self._counts.get(server, 0) + 1
        try:
            self._memory.send(bucket, gradients, stage)
        except ConnectionError as error:
            raise ServerError(str(error)) from None
        self._pushed += 1
        return Pushed(sum(self.wire.nbytes(c.stop - c.start, gradients.dtype) for _, c in chunks))

    def _send_gradient(self, server: str, made: Made, key: str, gradient: torch.Tensor | Selected) -> None:
        self.links[server].stage(*made, self._me, key, gradient, self._round)

    def make_way(self) -> None:
        """Gradients of a body are about to be kept where those of the last one are. Raise ServerError."""

    def snapshot(self, name: str, readers: int, positions: Mapping[int, int]) -> Snapshot:
        """Have the servers keep what they hold after the last committed step, for `readers` members to read.

        Raise ServerError before the first generation.
        """
        homes = {key: home[0] for key, home in self._homes.items()}
        clients = {server: self.links[server] for server in sorted(set(homes.values()))}
        plan = Plan(self._layout, self.chunks, self.tables.slices, homes, positions)
        token, part_bytes = self._entered.token, self.links.part_bytes
        return Snapshot(clients, plan, token, self._step, name, self._me, readers, part_bytes)

    def prepare(self) -> float | None:
        """Wait until all members' gradients are on the servers; the norm of their sum if there is to be one.

        Raise ServerError.
        """
        self._take_values(None, False)
        try:
            self._memory.sent()
        except ConnectionError as error:
            raise ServerError(str(error)) from None
        for future in self._commits:
            self.links.result(future, lambda: "the last step's commit")
        self._commits = []
        about = {"s": self._step + 1, "me": self._me, "norm": self._with_norm} | in_round(self._round)
        asked = [
            (server, self._ask(server, Kind.PREPARE, {**about, "count": self._counts.get(server, 0)}))
            for server in self.links
        ]
        answers = self.links.answers(asked, "the step's gradients")
        if not self._with_norm:
            return None
        return self.optimizers.norm([answer.meta["square_norms"] for answer in answers])

    def ends(self, wanted: bool) -> bool:
        """All members agree whether to stop: whether this step is the last one."""
        return self.wire.ends(wanted)

    def commit(self, scale: float, unused: Collection[int], skip: bool = False) -> None:
        """The step is committed: have the servers make it, and begin to fetch the values."""
        self.recipe, changed = self._made_of(scale, unused, skip)
        self.optimizers.begin()
        about = {"s": self._step + 1, "me": self._me, "recipe": self.recipe.to_json()}
        place = self._entered
        self._place = replace(place, step=place.step + 1)
        self._made, self._tried = (place.token, place.step + 1), False
        self._stand_at(self._made)
        self._commits, lost = [], {}
        self._clean -= {chunk.key for chunk in changed}
        self._memory.mark()
        for server in self.links:
            try:
                self._commits.append(self._ask(server, Kind.COMMIT, about))
            except ServerError as error:
                lost[server] = error
        self._fetch_made(changed, lost)
        if lost:
            self.links.over("; ".join(str(error) for error in lost.values()))

    def _made_of(
        self, scale: float, unused: Collection[int], skip: bool
    ) -> tuple[Recipe, Sequence[PlannedChunk]]:
        """How the servers make the step, and the chunks whose values are to be fetched then."""
        return self.optimizers.recipe(scale, unused, skip), self.chunks

    def _fetch_made(self, chunks: Collection[PlannedChunk], lost: dict[str, ServerError]) -> None:
        """Begin to fetch the values of the step that was committed. lost: servers; more are added."""
        for chunk in chunks:
            # Where no copy is left, the step stays committed: its values come with the next generation.
            for home in self._homes[chunk.key]:
                try:
                    if home not in lost:
                        self._fetch([chunk], self._step, home)
                        break
                except ServerError as error:
                    lost[home] = error

    def settle(self, parameters: Collection[int] | None = None, to_the_end: bool = False) -> None:
        """Wait until the values of these parameters (None: all) are here. Raise ServerError.

        to_the_end: within the body that has committed the step, also when the generation is over.
        """
        self._see_within(parameters)
        self._take_values(parameters, to_the_end)

    def _see_within(self, parameters: Collection[int] | None) -> None:
        """Somebody wants to see values, in a body perhaps that has changed them. Raise RuntimeError."""

    def _take_values(self, parameters: Collection[int] | None, to_the_end: bool) -> None:
        if len(self._clean) == len(self.chunks):
            return
        keys: Sequence[str]
        if parameters is None:
            keys = [chunk.key for chunk in self.chunks]
        else:
            keys = [key for index in parameters for key in self._of_parameter.get(index, ())]
        for key in keys:
            if key not in self._clean:
                self._receive(key, to_the_end)
                self._memory.bring_up(*self._chunks[key].span)
                self._clean.add(key)

    def _receive(self, key: str, to_the_end: bool) -> None:
        """Wait for the values of a chunk; its other servers have them too, should the first one be lost."""
        asked = self._fetches.pop(key, None)
        if asked is None:
            raise ServerError(f"the values of chunk {key} are not here")
        result = self._patient if to_the_end else self.links.answer
        future, first = asked
        try:
            result(future, first, self._values_of(key))
            return
        except ServerError as error:
            lost = error
        for other in self._homes[key]:
            if other == first:
                continue
            try:
                self._fetch([self._chunks[key]], self._step, other)
                result(self._fetches.pop(key)[0], other, self._values_of(key))
                return
            except ServerError as error:
                lost = error
        raise lost

    def _values_of(self, key: str) -> str:
        """What is waited for of a chunk, or of a slice of a table."""
        return f"the newest values of {self._whose.get(key, key)}"

    def _patient(self, future: Future[Answer], server: str, what: str) -> Answer:
        """The answer about a step that this member has committed, also when the generation is over."""
        if self.links.outlived_by(future):
            self._try_step()
        return self.links.answer(future, server, what, to_the_end=True)

    # ---- within

    def _try_step(self) -> None:
        """This member has committed the step, and others may not: have the servers make it for now."""
        if self._tried:
            return
        self._tried = True
        for server in self.links:
            with suppress(ServerError):  # the others have copies
                self._ask(server, Kind.TRY, {"s": self._step, "me": self._me})

    def _stand_at(self, made: Made | None) -> None:
        recipe = self.recipe
        if recipe is None:
            self.wire.stand_at(made, (), False)
        else:
            self.wire.stand_at(made, [(part.round, part.unused) for part in recipe.parts], recipe.skip)

    def _values(self, chunk: PlannedChunk) -> torch.Tensor:
        return self._memory.values[chunk.bucket][chunk.start : chunk.stop]

    def _fetch(self, chunks: Collection[PlannedChunk], step: int, at: str | None = None) -> None:
        for chunk in chunks:
            server = at or self._homes[chunk.key][0]
            about = {"k": chunk.key, "s": step, "rank": self._ranks[chunk.key]}
            asked = self._ask(server, Kind.FETCH, about, out=self._values(chunk))
            self._fetches[chunk.key] = (asked, server)

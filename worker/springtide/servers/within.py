"""Values within a body that makes several optimizer steps: seen before the body's end, and before it counts.

Each backward pass of the body (*round*) is summed on the servers. A step of an optimizer becomes a *part* of
the body's one step when the script wants to see what it has made, goes on with another backward pass, or
makes the same optimizer step again. Servers make parts on a second copy (`springtide_ps.within`) and send
those values; the end of the body commits all parts. When it is dropped instead, the values that were seen
are fetched anew from the chunks, which no part has touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, Final

import torch

from springtide import faults
from springtide.errors import UsageError
from springtide.exchange.groups import Group
from springtide.exchange.store import StreamStore
from springtide.ps import row_reads as rows
from springtide.ps.compression import Pushed
from springtide.ps.connections import ServerError
from springtide.ps.generation import Place
from springtide.ps.sharding import PlannedChunk
from springtide.servers.exchange import ServerExchange
from springtide_ps.chunk import PARTS_LIMIT, ROUNDS_LIMIT, Recipe
from springtide_ps.client import Answer
from springtide_ps.frames import Kind
from springtide_ps.within import NO_ROOM, OTHERWISE

_LATE_SECONDS: Final = 10.0


class WithinExchange(ServerExchange):
    """As `ServerExchange`; only where members step together, whatever `rounds` says."""

    rounds = True

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._made_parts: list[Recipe] = []
        self._told: list[tuple[Future[Answer], str]] = []  # of the newest parts, to the servers
        self._outdated: set[str] = set()  # chunks that parts have changed since their values were asked for
        self._seen: dict[str, Future[Answer]] = {}  # chunks whose values of this body were asked for
        self._sums: tuple[float, tuple[int, ...]] = (1.0, ())
        self._saw_within = self._open = False
        self._ahead = False  # values of the last step may be here before the servers have made it
        # Called when a body does what there is in common steps only, with what it calls.
        self.on_within: Callable[[str], object] = lambda call: None

    def begin_generation(
        self, place: Place, group: Group, store: StreamStore, *, holds: bool, leader: int, fresh: bool
    ) -> None:
        """As in `ServerExchange`; what a dropped body has seen is of no use."""
        # It must not land after this generation's values.
        self.links.connect(place.servers)
        wait(list(self._seen.values()), _LATE_SECONDS)
        self._clean -= self._seen.keys()
        self._ahead = False
        self._forget_parts()
        super().begin_generation(place, group, store, holds=holds, leader=leader, fresh=fresh)

    def begin_step(self) -> None:
        self._saw_within = bool(self._seen)
        self._forget_parts()
        self._open = True
        super().begin_step()

    def _forget_parts(self) -> None:
        self._made_parts, self._told, self._outdated, self._seen, self._round = [], [], set(), {}, 0

    def begin_round(self) -> None:
        """Another backward pass of the body begins, after the last one's steps. Raise UsageError."""
        self._end_part()
        if self._round + 1 >= ROUNDS_LIMIT:
            raise UsageError(
                f"more than {ROUNDS_LIMIT} backward passes in one body: servers keep all their sums"
            )
        self.wire.begin_round([part.unused for part in self._made_parts if part.round == self._round])
        self._round += 1
        self._pushed, self._counts = 0, {}

    def stage(
        self,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        scale: float,
        inverse: float,
        unused: Collection[int],
        resting: Collection[int],
    ) -> float:
        """The script makes this optimizer's step with the sums of the present round.

        clip_norm, scale, inverse, resting: as for `ServerOptimizers.stage`, whose result is returned. unused:
        parameters to which no worker had a gradient.
        """
        if self.optimizers.steps_again(optimizer):
            self.on_within("the same optimizer's step() twice")
        if self.rounds and self.optimizers.is_staged(optimizer):
            self._end_part()
        self._sums = scale, tuple(unused)
        factor = self.optimizers.stage(optimizer, clip_norm, scale, inverse, resting)
        if self.rounds:
            # As if the step had been made here: a backward pass through what was computed before fails.
            for index in self.optimizers.parameters_of(optimizer):
                parameter = self._parameters[index]
                torch.autograd.graph.increment_version(parameter)
                self._versions[index] = parameter._version
        return factor

    def stage_tables(
        self, optimizer: torch.optim.Optimizer, scale: float, factor: float, unused: Collection[int]
    ) -> None:
        """As `StepHome.stage_tables`, where dense parameters are here."""
        if self.optimizers.is_staged(optimizer):
            self._end_part()
        self._sums = scale, tuple(unused)
        super().stage_tables(optimizer, scale, factor, unused)

    def _end_part(self) -> None:
        """What is staged becomes a part of the step. Raise UsageError."""
        staged = self.optimizers.staged
        if not staged:
            return
        if len(self._made_parts) + 1 >= PARTS_LIMIT:
            raise UsageError(f"more than {PARTS_LIMIT} optimizer steps in one body, one after another")
        scale, unused = self._sums
        self._made_parts.append(replace(self.optimizers.recipe(scale, unused, False), round=self._round))
        self._outdated |= {chunk.key for chunk in self.chunks if chunk.optimizer in staged}
        self._told = []

    def _see_within(self, parameters: Collection[int] | None) -> None:
        """Ask for the values that the body's parts have changed. Raise ServerError, UsageError."""
        if not self.rounds:
            super()._see_within(parameters)
            return
        if not self.dense:
            return  # only rows are there, which are asked for by id
        if self._outdated or self.optimizers.staged:
            self._end_part()
        keys = self._keys_of(parameters)
        if wanted := [key for key in keys if key in self._outdated]:
            self._ask_within(wanted)
        self._check_told()

    def read_rows(self, index: int, ids: torch.Tensor, to_the_end: bool = False) -> torch.Tensor:
        """As in `ServerExchange`; within a body they are those that its steps have made so far.

        Raise ServerError, UsageError.
        """
        if not self.rounds or self._place is None or not self.optimizers.has_stepped(index):
            return super().read_rows(index, ids, to_the_end)
        self._end_part()
        self._tell()
        self._check_told()
        about = {"parts": len(self._made_parts)}
        answer = self.links.answer
        return rows.read(self.tables, index, ids, self._homes, self._step + 1, self._ask, answer, about)

    # ---- values that are here before the step is made

    def push(self, gradients: torch.Tensor) -> Pushed:
        self._await_commits()
        return super().push(gradients)

    def stage_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        self._await_commits()
        super().stage_rows(index, ids, sums)

    def commit(self, scale: float, unused: Collection[int], skip: bool = False) -> None:
        super().commit(scale, unused, skip)
        self._ahead = bool(self._seen)

    def settle(self, parameters: Collection[int] | None = None, to_the_end: bool = False) -> None:
        """As in `ServerExchange`; whoever wants all values has them when the servers have made the step."""
        super().settle(parameters, to_the_end)
        if parameters is not None or to_the_end or not self._ahead:
            return
        for future in self._commits:
            try:
                self.links.result(future, lambda: "the last step's commit")
            except ServerError:
                if not future.done():
                    raise
                # A server is lost, and its copy has the values: the next step will find that out.

    def _await_commits(self) -> None:
        """Values may have come before the last step was made, and servers take gradients of one step."""
        for future in self._commits:
            self.links.result(future, lambda: "the last step's commit")
        self._commits = []

    # ---- what servers are asked within a body

    def _tell(self) -> None:
        """Say to the servers which parts the body has made."""
        if not self._told:
            made = replace(self._made_parts[-1], before=tuple(self._made_parts[:-1]))
            about = {"s": self._step + 1, "me": self._me, "recipe": made.to_json()}
            self._told = [(self._ask(server, Kind.WITHIN, about), server) for server in self.links]

    def _check_told(self) -> None:
        for future, server in self._told:
            try:
                self.links.answer(future, server, "the steps within a body")
            except ServerError as error:
                if OTHERWISE in str(error) or NO_ROOM in str(error):
                    raise UsageError(str(error)) from None
                raise

    def _keys_of(self, parameters: Collection[int] | None) -> Sequence[str]:
        if parameters is None:
            return [chunk.key for chunk in self.chunks]
        return [key for index in parameters for key in self._of_parameter.get(index, ())]

    def _ask_within(self, keys: Sequence[str]) -> None:
        step = self._step + 1
        self._memory.mark()
        self._tell()
        for key in dict.fromkeys(keys):
            if key in self._fetches:  # an earlier part's, in the same memory
                self._receive(key, to_the_end=False)
            server, values = self._homes[key][0], self._values(self._chunks[key])
            asked = {"s": step, "k": key, "parts": len(self._made_parts), "rank": self._ranks[key]}
            self._seen[key] = self._ask(server, Kind.FETCH_EARLY, asked, out=values)
            self._fetches[key] = self._seen[key], server
            self._clean.discard(key)
            self._outdated.discard(key)
        faults.reach("seen", step)

    def _receive(self, key: str, to_the_end: bool) -> None:
        """As in `ServerExchange`; values within a body that is open are on one server only."""
        asked, seen = self._fetches.get(key), self._seen.get(key)
        if asked is None or seen is None or asked[0] is not seen or not self._open:
            super()._receive(key, to_the_end)
            return
        self.links.answer(*self._fetches.pop(key), "values within a step")

    def _made_of(
        self, scale: float, unused: Collection[int], skip: bool
    ) -> tuple[Recipe, Sequence[PlannedChunk]]:
        self._open = False
        if self.rounds and (self._made_parts or self._round):
            self._end_part()
        if not self._made_parts:
            return super()._made_of(scale, unused, skip)
        made = replace(self._made_parts[-1], before=tuple(self._made_parts[:-1]))
        # What was seen of the last part is what the step makes of it.
        changed = self.chunks if not self._seen else [c for c in self.chunks if c.key in self._outdated]
        self._made_parts, self._outdated = [], set()
        return made, changed

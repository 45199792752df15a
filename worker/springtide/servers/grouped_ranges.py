"""Workers in teams that do not step together with other teams: a range is worked on by a whole team.

Within a team everything is as with common steps: a range's batch is cut into parts, gradients are summed, and
one word of the members' decides whether the step is made. Towards the servers the team is one worker, its
first member: that one takes ranges and tells the others which, pushes the sum, and passes on the values that
come back. So it is also the one that sends again what had no answer, whatever it is in the next generation;
when it dies, the range is given out again, and chunks that have it answer without applying it.

In a body with several steps the first member pushes what a step changes when it wants to see that, begins
another backward pass, or ends the body, and the values pass along in as many parts. Who looks at values that
it has not got yet waits for the part that they come in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from springtide import faults
from springtide.exchange.groups import Group
from springtide.exchange.store import StreamStore
from springtide.ps.compression import Pushed
from springtide.ps.connections import ServerError
from springtide.ps.generation import Place
from springtide.ps.group_rows import gather
from springtide.ps.lease import Lease, heard, nothing_told, told
from springtide.ps.tables import table_name
from springtide.servers.asynchronous import AsynchronousExchange
from springtide.servers.grouped import GroupedExchange, team_of
from springtide.tables.local import merged
from springtide_ps.chunk import Recipe
from springtide_ps.client import Answer
from springtide_ps.leases import starting_clocks

log = logging.getLogger("springtide")


class GroupedRanges(AsynchronousExchange, GroupedExchange):
    """As `AsynchronousExchange`, for a team; of one member, too."""

    rounds = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._landed: dict[str, Future[None]] = {}
        self._staged_rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._anew = False  # what was passed on may not be what the servers have sent
        # Passed along before values: what the range has done to a table is in it. No chunk is named so.
        self._words = {table_name(index): list(keys) for index, keys in self._slices_of.items()}
        self._in_parts = False  # steps of the body are told apart
        self._coming: dict[str, Future[bool]] = {}  # in parts, of what the body has not changed yet

    # ---- generations

    def begin_generation(
        self, place: Place, group: Group, store: StreamStore, *, holds: bool, leader: int, fresh: bool
    ) -> None:
        """As in `AsynchronousExchange`; the old team is over before anything of the new one comes."""
        self._leave_team()
        self._landed, self._staged_rows, self._anew = {}, {}, False
        self._in_parts, self._coming = False, {}
        super().begin_generation(place, group, store, holds=holds, leader=leader, fresh=fresh)

    @property
    def team(self) -> Group | None:
        return self._team

    def _clocks(self, reported: Sequence[int | None]) -> dict[str, int]:
        """By first member: a team has made as many steps as that of its members which has made the fewest."""
        members = self._entered.members
        clocks = starting_clocks(
            {members[first]: clock for first, clock in clocks_of_teams(reported, self._size).items()}
        )
        assert self._meeting is not None
        self._clock = clocks[members[team_of(self._meeting[1], self._size, len(members)).start]]
        return clocks

    def part(self) -> None:
        """Return when nobody of the team waits for a word of another one any more, nor for values."""
        with suppress(RuntimeError):  # then it is over anyhow
            self._in_team.start_sum(torch.zeros(1)).wait()
            self.settle()
            if self._passing is not None:
                self._passing.finish()

    # ---- ranges

    def lease(self, first: int, stop: int, stopping: bool = False) -> Lease:
        """A range for the team. stopping: only the first member's counts; the others follow it."""
        team = self._in_team
        if team.rank == 0:
            try:
                found = super().lease(first, stop, stopping)
            except RuntimeError:
                team.shut()  # the others wait for the word
                raise
            word = told(replace(found, waited=found.waited or self._anew), self._clock or 0)
        else:
            faults.reach("leasing", first + 1)
            word = nothing_told()
        team.start_sum(word).wait()
        lease, self._clock = heard(word)
        return lease

    def fetch_again(self) -> None:
        """For this member alone; what the first one has changed is fetched for all with the next range."""
        self._arrived, self._landed, self._anew = {}, {}, not self._follows
        self.optimizers.forget(self._parameters)
        self._versions = [parameter._version for parameter in self._parameters]
        self._memory.mark()
        self._clean = set()
        self._pull(self.chunks)

    def refresh(self) -> None:
        """As in `AsynchronousExchange`, by the first member; the others begin to receive. At the same place
        of all members.
        """
        self._anew = False
        if self._follows:
            self._memory.mark()
            self._clean = set()
        else:
            self._landed = {chunk.key: Future() for chunk in self.chunks}
            super().refresh()
            self._watch(self._chunks)
        self._pass_values()

    # ---- a step

    def begin_step(self) -> None:
        self._in_parts, self._coming = False, {}
        super().begin_step()

    def push(self, gradients: torch.Tensor) -> Pushed:
        """Begin to sum the next bucket within the team, and offer what is summed. Raise RuntimeError."""
        return self._sum_in_team(gradients, super().push, self._ahead_of_end)

    def stage(
        self,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        scale: float,
        inverse: float,
        unused: Collection[int],
        resting: Collection[int],
    ) -> float:
        """As in `RangeRounds`; from now on whoever looks at what it changes waits for the first member."""
        factor = super().stage(optimizer, clip_norm, scale, inverse, unused, resting)
        if self._follows:
            if not self._in_parts:
                self._coming = self._pass_parts(())
            self._await_parts(self._keys_of_steps([self.optimizers.all.index(optimizer)]))
        self._in_parts = True
        return factor

    def begin_round(self) -> None:
        """As in `RangeRounds`. At the same place of all members."""
        if self._follows and self.optimizers.staged:
            keys = self._keys_of_steps(self.optimizers.staged)
            self._take_over(keys, self.optimizers.recipe(*self._sums, False), frozenset())
            self._ahead_of_end |= set(keys)
        super().begin_round()
        self._summed, self._started = [], 0

    def _push_staged(self) -> None:
        if self._follows or not self.optimizers.staged:
            return  # the first member pushes for all
        keys = self._keys_of_steps(self.optimizers.staged)
        self._landed = {key: Future() for key in keys}
        self._pass_parts(keys)
        super()._push_staged()

    def stage_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        """Keep the gradients of a table for `prepare`: backward reaches tables in no order of its own."""
        self._staged_rows[index] = ids, sums

    def prepare(self) -> float | None:
        """The norm of the team's gradients as they travel, if there is to be one, the same at all members.

        Raise RuntimeError.
        """
        self._end_sums(super().push)
        team = self._in_team
        if self._follows:
            self.settle()
        found = gather(team, self._staged_rows, self.tables.handles)
        self._staged_rows = {}
        if not self._follows:
            for index, parts in found.items():
                handle = self.tables.handles[index]
                super().stage_rows(index, *merged(parts, handle.dim, handle.counted))
            self._get_ready()
        if not self._with_norm:
            return None
        squares = torch.zeros(len(self.optimizers.all), dtype=torch.float64)
        if not self._follows:
            for number, square in self._squares():
                squares[number] += square
        team.start_sum(squares).wait()
        return self.optimizers.norm(
            [self.optimizers.square(number, square) for number, square in enumerate(squares.tolist())]
        )

    def commit(self, scale: float, unused: Collection[int], skip: bool = False) -> None:
        """As in `AsynchronousExchange`, by the first member; what others have owed went with the sum."""
        rest = [key for key in self._keys_in_order() if key not in self._ahead_of_end]
        if self._follows:
            skipped = frozenset(self.optimizers.skipped)
            recipe = self._rest_of(self.optimizers.recipe(scale, unused, skip), skip)
            self.optimizers.begin()
            self._take_over(rest, recipe, skipped)
        else:
            self._landed = {key: Future() for key in rest}
            super().commit(scale, unused, skip)
        if not self._in_parts:
            self._memory.mark()
            self._clean = set()
            self._pass_values()
        elif self._follows:
            self._await_parts([key for key in rest if self._due_as(key) in self._coming])
        elif rest:
            self._pass_parts(rest)

    def _take_over(self, keys: Collection[str], recipe: Recipe, skipped: Collection[int]) -> None:
        """The first member pushes these with what this one has owed of them. skipped: optimizers."""
        for key in keys:
            if key in self._chunks:
                applied = not recipe.skip and self._owner_of(key) not in skipped
                self._owing.landed(key, recipe.unused, applied)

    # ---- what comes back

    def _pass_values(self) -> None:
        """Begin to pass on what the servers answer to the first member."""
        self._arrived = {}
        if self._passing is None:
            return
        arrived = self._pass_on(self._passing, self.chunks, self._fetch_landed(), self._markers())
        if self._passing.receives:
            self._arrived = arrived

    def _pass_parts(self, keys: Collection[str]) -> dict[str, Future[bool]]:
        """As `_pass_values`, of these chunks and slices; at the others begin to receive the body's parts."""
        if self._passing is None:
            return {}
        chosen = {self._due_as(key) for key in keys}
        fetch, markers = self._fetch_landed(), self._markers()
        return self._pass_on(self._passing, self.chunks, fetch, markers, chosen, in_parts=True)

    def _await_parts(self, keys: Collection[str]) -> None:
        """Values of these chunks and slices are not what they were, and come with a part of the body's."""
        self._memory.mark()
        for name in dict.fromkeys(self._due_as(key) for key in keys):
            self._arrived[name] = self._coming.pop(name)
        self._clean -= set(keys)

    def _fetch_landed(self) -> Callable[[str], None]:
        landed = self._landed

        def fetch(name: str) -> None:
            for needed in self._words.get(name, [name]):
                if name not in self._words or needed in landed:
                    self.links.result(landed[needed], lambda: "an answer to this worker's team")

        return fetch

    def _markers(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(1) for name in self._words}

    def _due_as(self, key: str) -> str:
        """The name under which it passes along the team: of a slice, its table's."""
        return table_name(self._slices[key].parameter) if key in self._slices else key

    def _send(self, keys: Iterable[str]) -> None:
        for key in keys:
            super()._send([key])
            self._watch([key])

    def _watch(self, keys: Iterable[str]) -> None:
        """Note when answers have come, by the thread that brings them: they go on from here at once."""
        for key in keys:
            if (landed := self._landed.get(key)) is not None:
                self._fetches[key][0].add_done_callback(partial(_land, landed))

    def _receive(self, key: str, to_the_end: bool) -> None:
        if self._from_team(key, to_the_end, self._pull):
            self._pulled.pop(key, None)  # the values are newer than the ranges that this one knows of
        else:
            super()._receive(key, to_the_end)

    def _take_rows(self, tables: Iterable[int], to_the_end: bool) -> None:
        """As in `RowPushes`, also of what the team's first member has pushed."""
        tables = list(tables)
        for index in tables:
            if (arrived := self._arrived.pop(table_name(index), None)) is None:
                continue
            try:
                self.links.result(arrived, lambda: "the rows of this worker's team", to_the_end)
            except RuntimeError as error:
                if not to_the_end:
                    raise ServerError(str(error)) from None
                log.info("rows are read as they are: %s", error)
        super()._take_rows(tables, to_the_end)

    # ---- within

    @property
    def _in_team(self) -> Group:
        if self._team is None:
            raise ServerError("no team has been formed")
        return self._team

    @property
    def _follows(self) -> bool:
        return self._in_team.rank > 0


def clocks_of_teams(reported: Sequence[int | None], size: int) -> dict[int, int | None]:
    """By each team's first rank: the steps that it is held to have made. reported: by rank, None of a joiner.

    The fewest of its members', since nobody is to be waited for longer than it was; joiners follow the others
    of their team. All values are fetched anew then, so that whatever is counted, none is older. PURE.
    """
    found: dict[int, int | None] = {}
    for first in range(0, len(reported), size):
        team = team_of(first, size, len(reported))
        found[first] = min(
            (clock for clock in reported[team.start : team.stop] if clock is not None), default=None
        )
    return found


def _land(landed: Future[None], answered: Future[Answer]) -> None:
    if landed.done():
        return
    error = answered.exception()
    if error is not None:
        landed.set_exception(RuntimeError(str(error)))
    elif not answered.result().meta.get("whole"):
        landed.set_result(None)

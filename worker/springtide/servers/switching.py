"""The exchange of a worker whose members step together in one generation and do not in another.

It is both kinds of exchange over the same memory, chunks and connections; what a generation is to be, its
Start says. Servers turn steps into books and books into steps when the generation enters
(`springtide_ps.rounds`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, ClassVar

import torch

from springtide.exchange.groups import Group
from springtide.exchange.store import StreamStore
from springtide.ps.compression import Pushed
from springtide.ps.connections import ServerError
from springtide.ps.generation import Leader, Place
from springtide.ps.sharding import PlannedChunk
from springtide.ps.tables import PlannedSlice
from springtide.servers.asynchronous import AsynchronousExchange
from springtide.servers.early import EarlyExchange
from springtide.servers.early_ranges import EarlyRanges
from springtide.servers.exchange import ServerExchange
from springtide.servers.grouped import GroupedExchange
from springtide.servers.grouped_ranges import GroupedRanges
from springtide_ps.chunk import Chunk
from springtide_ps.client import Answer
from springtide_ps.slices import Slice

log = logging.getLogger("springtide")


class Switching(AsynchronousExchange):
    """One kind of exchange in generations whose members step together, and another one in the others.

    in_ranges: which of them it is before the first generation. Raise what they raise.
    """

    in_steps: ClassVar[type[ServerExchange]]
    """What it is where members step together."""
    without: ClassVar[type[AsynchronousExchange]]
    """What it is where they do not."""

    def __init__(self, *args: Any, in_ranges: bool, **named: Any) -> None:
        self._kind: type[ServerExchange] = self.without
        super().__init__(*args, **named)
        self._become(in_ranges)

    def _become(self, in_ranges: bool) -> None:
        self._kind = self.without if in_ranges else self.in_steps
        self.asynchronous, self.rounds = in_ranges, self._kind.rounds
        self._owing.go_over(in_ranges)

    def _go_over(self, in_ranges: bool) -> None:
        """This generation is of the other kind than the last one."""
        if not in_ranges:
            # Nothing may land after this generation's values. Steps need no such wait: entering refuses them.
            self._late += self._fetches.items()
            self._await_late()
        self._become(in_ranges)
        self._fetches, self._commits, self._clean = {}, [], set()
        self._made = self.recipe = None
        self._clock, self._sent = None, None
        self._gradients, self._outgoing, self._pulled = {}, {}, {}
        self._pending, self._again, self._done = set(), set(), []
        self._next_lease = None

    def rest(self) -> None:
        """At a boundary, where all members have committed the last step: wait until all servers make it.

        So that none of it is open when books begin; what is open then is done again.
        """
        if self.asynchronous:
            return
        try:
            for future in self._commits:
                self.links.result(future, lambda: "the last step's commit")
        except ServerError as error:
            log.info("the last step may be open on some server: %s", error)

    # ---- by kind

    def begin_generation(
        self, place: Place, group: Group, store: StreamStore, *, holds: bool, leader: int, fresh: bool
    ) -> None:
        in_ranges = self.asynchronous if place.in_ranges is None else place.in_ranges
        if in_ranges is not self.asynchronous:
            self._go_over(in_ranges)
        if fresh:
            self._owing.forget()
        self._kind.begin_generation(self, place, group, store, holds=holds, leader=leader, fresh=fresh)

    def _make_leader(self, place: Place) -> Leader:
        return self._kind._make_leader(self, place)

    def _hear(self, store: StreamStore, leader: int) -> dict[str, Any]:
        return self._kind._hear(self, store, leader)

    def _new_chunk(self, planned: PlannedChunk | PlannedSlice) -> Chunk | Slice:
        return self._kind._new_chunk(self, planned)

    def resolve(self) -> None:
        self._kind.resolve(self)

    def fetch_again(self) -> None:
        self._kind.fetch_again(self)

    def begin_round(self) -> None:
        self._kind.begin_round(self)

    def stage(
        self,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        scale: float,
        inverse: float,
        unused: Collection[int],
        resting: Collection[int],
    ) -> float:
        return self._kind.stage(self, optimizer, clip_norm, scale, inverse, unused, resting)

    def _see_within(self, parameters: Collection[int] | None) -> None:
        self._kind._see_within(self, parameters)

    def push(self, gradients: torch.Tensor) -> Pushed:
        return self._kind.push(self, gradients)

    def stage_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        self._kind.stage_rows(self, index, ids, sums)

    def read_rows(self, index: int, ids: torch.Tensor, to_the_end: bool = False) -> torch.Tensor:
        return self._kind.read_rows(self, index, ids, to_the_end)

    def all_rows(self, index: int, to_the_end: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kind.all_rows(self, index, to_the_end)

    def _patient(self, future: Future[Answer], server: str, what: str) -> Answer:
        return self._kind._patient(self, future, server, what)

    def prepare(self) -> float | None:
        return self._kind.prepare(self)

    def commit(self, scale: float, unused: Collection[int], skip: bool = False) -> None:
        self._kind.commit(self, scale, unused, skip)

    def settle(self, parameters: Collection[int] | None = None, to_the_end: bool = False) -> None:
        self._kind.settle(self, parameters, to_the_end)

    def _receive(self, key: str, to_the_end: bool) -> None:
        self._kind._receive(self, key, to_the_end)


class SwitchingExchange(Switching, EarlyRanges):
    """Of a worker that speaks to the servers for itself."""

    in_steps, without = EarlyExchange, EarlyRanges


class SwitchingTeams(Switching, GroupedRanges):
    """Of a worker in a team."""

    in_steps, without = GroupedExchange, GroupedRanges

    def rest(self) -> None:
        """As in `GroupedExchange`, and until all servers have made the step."""
        if not self.asynchronous:
            GroupedExchange.rest(self)
        super().rest()

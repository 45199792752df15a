"""Workers in teams: gradients are summed within a team, and its first member sends them on and fetches the
values for all.

This is the topology of MXNet's MPI mode: servers receive one gradient per team instead of one per worker, and
send one copy of the values, which the team passes along (`passing`). Teams are runs of `size` consecutive
ranks of a generation; the last one may be smaller. All members still prepare and commit for themselves, so
that the rules of a step are those of workers without teams. A team that lost a member is made anew with the
next generation, like everything that knows ranks; what a member lacks then it fetches for itself.

Values that a body looks at between its steps each member fetches for itself, as it looks: whether the others
do, and at what, is their scripts' affair. With the commit the first member passes on what it has not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from springtide.exchange.groups import Group, Work, form
from springtide.exchange.store import StreamStore
from springtide.ps.compression import Pushed
from springtide.ps.connections import ServerError
from springtide.ps.generation import Place
from springtide.ps.sharding import PlannedChunk
from springtide.ps.value_chain import Passing, scratch_for
from springtide.servers.exchange import ServerExchange
from springtide.servers.within import WithinExchange

log = logging.getLogger("springtide")


def team_of(rank: int, size: int, world: int) -> range:
    """The ranks of the team of `rank`. PURE."""
    first = rank - rank % size
    return range(first, min(first + size, world))


class GroupedExchange(WithinExchange):
    """As `WithinExchange`. group_size: workers in a team. address: IP of this process for the teams' sums."""

    def __init__(
        self, *args: Any, group_size: int, address: str, collective_seconds: float, **named: Any
    ) -> None:
        super().__init__(*args, **named)
        self._size, self._address, self._collective_seconds = group_size, address, collective_seconds
        self._connect_seconds = float(named["connect_seconds"])
        self._team: Group | None = None
        self._summed: list[tuple[Work, torch.Tensor]] = []
        self._started = 0
        self._passing: Passing | None = None
        self._arrived: dict[str, Future[bool]] = {}
        self._scratch: list[torch.Tensor] = []

    def begin_generation(
        self, place: Place, group: Group, store: StreamStore, *, holds: bool, leader: int, fresh: bool
    ) -> None:
        """As in `WithinExchange`; then the team's members meet."""
        self._leave_team()
        super().begin_generation(place, group, store, holds=holds, leader=leader, fresh=fresh)
        ranks = team_of(group.rank, self._size, group.size)
        team = form(
            store.within(f"team/{ranks.start}/"),
            ranks.index(group.rank),
            len(ranks),
            self._address,
            connect_seconds=self._connect_seconds,
            collective_seconds=self._collective_seconds,
        )
        self._team = team
        self._passing = Passing(team) if team.size > 1 else None
        group.on_shut(team.shut)

    def begin_step(self) -> None:
        super().begin_step()
        self._summed, self._started = [], 0

    def begin_round(self) -> None:
        super().begin_round()
        self._summed, self._started = [], 0

    def carried(self, index: int, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        """As in `ServerExchange`. Every member has the team's sum, and one of them carries it."""
        if self._team is None or self._team.rank == 0:
            return gradient
        own = torch.zeros_like(gradient)
        for key in self._of_parameter.get(index, ()):
            if (handed := self.wire.handed_over(key)) is None:
                continue
            # It is in the sum, and has been paid with it, or is handed over once more.
            begin = self._chunks[key].start - self._layout.slots[index].offset
            for number, _, start, stop in self._chunks[key].pieces:
                if number == index:
                    paid = handed[start:stop].to(own.device, own.dtype)
                    own.view(-1)[begin + start : begin + stop] -= factor * paid
        return own

    def push(self, gradients: torch.Tensor) -> Pushed:
        """Begin to sum the next bucket within the team, and send on what is summed. Raise RuntimeError."""
        return self._sum_in_team(gradients, super().push)

    def _sum_in_team(
        self,
        gradients: torch.Tensor,
        send: Callable[[torch.Tensor], object],
        without: Collection[str] = (),
    ) -> Pushed:
        """send: what the team's first member does with what is summed. without: chunks that it leaves out."""
        assert self._team is not None
        if self._team.rank:
            # It may have been the first of its team before.
            chunks = [chunk for chunk in self._by_bucket[self._started] if chunk.key not in without]
            self.wire.hand_over(chunks, gradients)
        self._started += 1
        self._summed.append((self._team.start_sum(gradients), gradients))
        while self._summed and self._summed[0][0].is_completed():
            self._send_on(send)
        return Pushed(gradients.nbytes)

    def prepare(self) -> float | None:
        """As in `ServerExchange`, after the team's sums."""
        self._end_sums(super().push)
        return super().prepare()

    def _end_sums(self, send: Callable[[torch.Tensor], object]) -> None:
        while self._summed:
            self._send_on(send)

    def rest(self) -> None:
        """At a boundary, where all members have committed the last step: let its values pass the whole team.

        What is cut off, each member fetches for itself in the next generation.
        """
        if self._passing is None:
            return
        try:
            self.settle()
        except ServerError as error:
            log.info("not all values of the last step are here: %s", error)
        else:
            self._passing.finish()

    def close(self) -> None:
        self._leave_team()
        super().close()

    def _send_on(self, send: Callable[[torch.Tensor], object]) -> None:
        assert self._team is not None
        work, gradients = self._summed.pop(0)
        work.wait()
        if self._team.rank == 0:
            send(gradients)

    # ---- values

    def _fetch_made(self, chunks: Collection[PlannedChunk], lost: dict[str, ServerError]) -> None:
        """As in `ServerExchange`, at the team's first member; the others get them from it."""
        passing = self._passing
        if passing is None or not passing.receives:
            super()._fetch_made(chunks, lost)
        if passing is None:
            return
        lacking = [chunk.key for chunk in chunks]
        arrived = self._pass_on(
            passing,
            self.chunks,
            lambda key: ServerExchange._receive(self, key, False),
            chosen=frozenset(lacking),
        )
        # What comes besides, this one has seen within the body.
        self._arrived = {key: arrived[key] for key in lacking}

    def _pass_on(
        self,
        passing: Passing,
        chunks: Collection[PlannedChunk],
        fetch: Callable[[str], None],
        first: Mapping[str, torch.Tensor] | None = None,
        chosen: Collection[str] | None = None,
        in_parts: bool = False,
    ) -> dict[str, Future[bool]]:
        """Begin to pass values of chunks along the team, after what comes first; as `Passing.begin`."""
        if passing.receives and not self._scratch:
            self._scratch = scratch_for(self._memory.values)
        memory = self._scratch if passing.receives else self._memory.values
        pieces = {chunk.key: memory[chunk.bucket][chunk.start : chunk.stop] for chunk in chunks}
        return passing.begin({**(first or {}), **pieces}, fetch, chosen, in_parts)

    def _receive(self, key: str, to_the_end: bool) -> None:
        """Wait for the values of a chunk, which come along the team."""
        if not self._from_team(key, to_the_end, lambda chunks: ServerExchange._fetch_made(self, chunks, {})):
            super()._receive(key, to_the_end)

    def _from_team(
        self, key: str, to_the_end: bool, ask: Callable[[Collection[PlannedChunk]], object]
    ) -> bool:
        """Wait for values that the team passes on. False: they come from the servers. Raise ServerError.

        ask: asks servers for the values of these chunks, which do not come, or since the team is over.
        """
        arrived, passing = self._arrived.pop(key, None), self._passing
        if arrived is None or passing is None:
            return False
        try:
            comes = self.links.result(arrived, lambda: "the step's values from this worker's team")
        except RuntimeError as error:
            if not to_the_end:
                raise ServerError(str(error)) from None
        else:
            if not comes:
                ask([self._chunks[key]])
                return False
            if passing.receives:
                bucket, start, stop = self._chunks[key].span
                self._memory.values[bucket][start:stop] = self._scratch[bucket][start:stop]
            return True
        # The team is over, and the body that has committed the step goes on: it asks the servers for itself.
        passing.end()
        lacking = [key, *(other for other, came in self._arrived.items() if not _has_come(came))]
        for other in lacking[1:]:
            del self._arrived[other]
        ask([self._chunks[other] for other in lacking if other in self._chunks])
        return False

    def _leave_team(self) -> None:
        if self._passing is not None:
            self.links.over("this worker's team is over")
            self._passing.end()
        if self._team is not None:
            if not self._team.release() or (self._passing is not None and not self._passing.ended):
                self._scratch = []  # something may still come into it
            self._team, self._summed = None, []
        self._passing, self._arrived = None, {}


def _has_come(future: Future[bool]) -> bool:
    return future.done() and future.exception() is None and future.result()

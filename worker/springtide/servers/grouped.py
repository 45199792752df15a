"""Workers in teams: gradients are summed within a team, and only the team's first member sends them on.

This is the topology of MXNet's MPI mode: servers receive one gradient per team instead of one per worker.
Teams are runs of `size` consecutive ranks of a generation; the last one may be smaller. All members still
prepare, commit and fetch for themselves, so that the rules of a step are those of workers without teams. A
team that lost a member is made anew with the next generation, like everything that knows ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from springtide.exchange.groups import Group, Work, form
from springtide.exchange.store import StreamStore
from springtide.servers.exchange import ServerExchange
from springtide.servers.leading import Place
from springtide.servers.wire import Pushed


def team_of(rank: int, size: int, world: int) -> range:
    """The ranks of the team of `rank`. PURE."""
    first = rank - rank % size
    return range(first, min(first + size, world))


class GroupedExchange(ServerExchange):
    """As `ServerExchange`. group_size: workers in a team. address: IP of this process for the teams' sums."""

    def __init__(
        self, *args: Any, group_size: int, address: str, collective_seconds: float, **named: Any
    ) -> None:
        super().__init__(*args, **named)
        self._size, self._address, self._collective_seconds = group_size, address, collective_seconds
        self._connect_seconds = float(named["connect_seconds"])
        self._team: Group | None = None
        self._summed: list[tuple[Work, torch.Tensor]] = []
        self._started = 0

    def begin_generation(
        self, place: Place, group: Group, store: StreamStore, *, holds: bool, leader: int, fresh: bool
    ) -> None:
        """As in `ServerExchange`; then the team's members meet."""
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
        group.on_shut(team.shut)

    def begin_step(self) -> None:
        super().begin_step()
        self._summed, self._started = [], 0

    def push(self, gradients: torch.Tensor) -> Pushed:
        """Begin to sum the next bucket within the team, and send on what is summed. Raise RuntimeError."""
        assert self._team is not None
        if self._team.rank:
            # It may have been the first of its team before.
            self.wire.hand_over(self._by_bucket[self._started], gradients)
        self._started += 1
        self._summed.append((self._team.start_sum(gradients), gradients))
        while self._summed and self._summed[0][0].is_completed():
            self._send_on()
        return Pushed(gradients.nbytes)

    def prepare(self) -> float | None:
        """As in `ServerExchange`, after the team's sums."""
        while self._summed:
            self._send_on()
        return super().prepare()

    def close(self) -> None:
        self._leave_team()
        super().close()

    def _send_on(self) -> None:
        assert self._team is not None
        work, gradients = self._summed.pop(0)
        work.wait()
        if self._team.rank == 0:
            super().push(gradients)

    def _leave_team(self) -> None:
        if self._team is not None:
            self._team.release()
            self._team, self._summed = None, []

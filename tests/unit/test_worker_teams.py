"""Workers in teams: who is in one, and who sends to the servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ps_servers import TOKEN

from springtide.ps.compression import Pushed, Wire
from springtide.ps.connections import Links
from springtide.ps.sharding import PlannedChunk
from springtide.servers import grouped
from springtide.servers.grouped import GroupedExchange, team_of
from springtide.servers.within import WithinExchange

CHUNK = PlannedChunk("1.0", 1, 0, 2, 8, ((0, 0, 0, 2),))


@pytest.mark.parametrize(
    ("size", "world", "teams"),
    [(1, 3, [[0], [1], [2]]), (2, 5, [[0, 1], [2, 3], [4]]), (4, 4, [[0, 1, 2, 3]]), (8, 3, [[0, 1, 2]])],
)
def test_teams_are_runs_of_ranks(size: int, world: int, teams: list[list[int]]) -> None:
    for rank in range(world):
        assert [rank in team for team in teams] == [
            list(team_of(rank, size, world)) == team for team in teams
        ]


class Sum:
    """A sum under way that ends when it is waited for, or at once."""

    def __init__(self, tensor: torch.Tensor, at_once: bool) -> None:
        self._tensor, self._done = tensor, False
        if at_once:
            self.wait()

    def wait(self) -> bool:
        if not self._done:
            self._tensor *= 10
        self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done


class Team:
    def __init__(self, rank: int, at_once: bool) -> None:
        self.rank, self.size, self.at_once, self.released = rank, 2, at_once, False

    def start_sum(self, tensor: torch.Tensor) -> Sum:
        return Sum(tensor, self.at_once)

    def shut(self) -> None: ...

    def release(self) -> bool:
        self.released = True
        return True


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_of_a_team_sends_and_only_sums(
    monkeypatch: pytest.MonkeyPatch, rank: int, at_once: bool
) -> None:
    sent: list[list[float]] = []
    prepared: list[int] = []

    def push(self: WithinExchange, gradients: torch.Tensor) -> Pushed:
        sent.append(gradients.tolist())
        return Pushed(gradients.nbytes)

    monkeypatch.setattr(WithinExchange, "__init__", lambda self, **_: None)
    monkeypatch.setattr(WithinExchange, "begin_generation", lambda *_, **__: None)
    monkeypatch.setattr(WithinExchange, "begin_step", lambda self: None)
    monkeypatch.setattr(WithinExchange, "push", push)
    monkeypatch.setattr(WithinExchange, "prepare", lambda self: prepared.append(len(sent)))
    teams: list[Team] = []

    def form(store: Any, own: int, size: int, address: str, **_: float) -> Team:
        assert (store, own, size, address) == ("team/4/", rank, 2, "127.0.0.1")
        teams.append(Team(own, at_once))
        return teams[-1]

    class Store:
        def within(self, prefix: str) -> str:
            return prefix

    class Generation:
        size = 7

        def __init__(self) -> None:
            self.rank, self.calls = 4 + rank, 0

        def on_shut(self, call: Any) -> None:
            self.calls += 1

    monkeypatch.setattr(grouped, "form", form)
    exchange = GroupedExchange(group_size=2, address="127.0.0.1", collective_seconds=1.0, connect_seconds=1.0)
    exchange.links = Links(TOKEN, 1.0, 1.0)
    exchange.wire, exchange._by_bucket = Wire("TopK", 0.1), [[], [CHUNK]]
    own = exchange.wire.residuals
    assert own is not None
    own._kept[CHUNK.key] = torch.ones(2)
    own.begin(((1, 0, 1), 1))
    generation: Any = Generation()
    store: Any = Store()
    for _ in range(2):
        exchange.begin_generation(None, generation, store, holds=True, leader=0, fresh=False)  # type: ignore[arg-type]
    assert [team.released for team in teams] == [True, False]
    assert generation.calls == 2
    exchange.begin_step()
    for value in (1.0, 2.0):
        last = torch.full((2,), value)
        exchange.push(last)
        assert len(sent) == (value if at_once and rank == 0 else 0)
    exchange.prepare()
    assert sent == ([[10.0, 10.0], [20.0, 20.0]] if rank == 0 else [])
    # What it owes from when it was the first itself goes into the team's sum; the first one adds its own.
    assert last.tolist() == ([20.0, 20.0] if rank == 0 else [30.0, 30.0])
    assert own._next == ({} if rank == 0 else {CHUNK.key: None})
    assert prepared == [len(sent)]

"""Workers in groups: who is in one, and who sends to the servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ps_servers import TOKEN

from springtide.comm.layout import Field, plan_layout
from springtide.ps import worker_groups
from springtide.ps.compression import GradientCompression, Pushed
from springtide.ps.context import GroupSettings, PsContext, PsSettings
from springtide.ps.generation import GenerationStart, Meeting
from springtide.ps.worker_groups import GroupRoute, group_of


@pytest.mark.parametrize(
    ("size", "world", "groups"),
    [(1, 3, [[0], [1], [2]]), (2, 5, [[0, 1], [2, 3], [4]]), (4, 4, [[0, 1, 2, 3]]), (8, 3, [[0, 1, 2]])],
)
def test_groups_are_runs_of_ranks(size: int, world: int, groups: list[list[int]]) -> None:
    for rank in range(world):
        assert [rank in group for group in groups] == [
            list(group_of(rank, size, world)) == group for group in groups
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


class GroupMember:
    def __init__(self, rank: int, at_once: bool) -> None:
        self.rank, self.size, self.at_once, self.released = rank, 2, at_once, False

    def start_sum(self, tensor: torch.Tensor) -> Sum:
        return Sum(tensor, self.at_once)

    def shut(self) -> None: ...

    def release(self) -> bool:
        self.released = True
        return True


def context_with_debt() -> tuple[PsContext, str, torch.Tensor]:
    """A worker's context, whose one chunk is owed something by it."""
    weight = torch.nn.Parameter(torch.zeros(40))
    layout = plan_layout([Field("weight", (40,), torch.float32)], 1 << 20)
    settings = PsSettings("m0", TOKEN, 1, False, 1.0, 1.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    compression = GradientCompression("TopK", 0.1)
    context = PsContext({"weight": weight}, layout, [optimizer], settings, compression)
    [chunk] = context.sharding.chunks
    owed = torch.arange(40.0)
    residuals = compression.residuals
    assert residuals is not None
    compression.begin_update()
    compression.outgoing(chunk, torch.zeros(40))
    residuals.leave_out(chunk.key, owed.clone())
    compression.landed(chunk.key, (), True)
    return context, chunk.key, owed


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_of_a_group_sends_and_only_sums(
    monkeypatch: pytest.MonkeyPatch, rank: int, at_once: bool
) -> None:
    sent: list[float] = []

    def send(gradients: torch.Tensor, bucket: int) -> Pushed:
        assert bucket == 0
        sent.append(float(gradients[0]))
        return Pushed(gradients.nbytes)

    groups: list[GroupMember] = []

    def form(store: Any, own: int, size: int, address: str, **_: float) -> GroupMember:
        assert (store, own, size, address) == ("worker-group/4/", rank, 2, "127.0.0.1")
        groups.append(GroupMember(own, at_once))
        return groups[-1]

    class Store:
        def with_prefix(self, prefix: str) -> str:
            return prefix

    class Generation:
        size = 7

        def __init__(self) -> None:
            self.rank, self.calls = 4 + rank, 0

        def on_shut(self, call: Any) -> None:
            self.calls += 1

    monkeypatch.setattr(worker_groups, "form", form)
    context, key, owed = context_with_debt()
    residuals = context.compression.residuals
    assert residuals is not None
    route = GroupRoute(context, GroupSettings(2, "127.0.0.1", 1.0))
    generation: Any = Generation()
    store: Any = Store()
    start = GenerationStart((1, 0, 1), ("m0",), {}, frozenset(), 0)
    for _ in range(2):
        route.leave()
        route.form(start, Meeting(generation, store, 0, True, False))
    assert [group.released for group in groups] == [True, False]
    assert generation.calls == 2
    assert route.follows is (rank == 1)
    for value in (1.0, 2.0):
        # Two backward passes, since the model has one bucket.
        context.compression.begin_update_pass()
        route.begin_pass()
        last = torch.full((40,), value)
        assert route.push(last, 0, send).nbytes == last.nbytes
        assert len(sent) == (value if at_once and rank == 0 else value - 1 if rank == 0 else 0)
        route.end_sums(send)
    assert sent == ([10.0, 20.0] if rank == 0 else [])
    # What it owes from when it was the first itself goes into the group's sum; the first one adds its own.
    assert torch.equal(last, torch.full((40,), 20.0) + (0 if rank == 0 else 10 * owed))
    context.compression.landed(key, (), True)
    left = residuals.residual(key)
    assert (left is None) == (rank == 1), "another member sends it"
    context.connections.close()
    context.memory.close()

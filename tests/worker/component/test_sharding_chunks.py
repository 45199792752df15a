"""Steps in shards over gloo, in many exchanges and in few: the same bits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from sharding_world import PLAIN, Member
from worker_groups import form_groups, together

from springtide.comm.process_group import Group, Work
from springtide.sharding.collectives import LEAST_UNDER_WAY
from springtide_protocol.names import GenerationName, StateName

GENERATION = GenerationName.of(incarnation=1, restart=0, number=1)
SIZE, STEPS, FEW = 3, 3, 200


def flats_of(member: Member, step: int, rank: int) -> list[torch.Tensor]:
    """Return gradients whose sums depend on their order."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    sizes = zip(member.layout.sizes, member.layout.dtypes, strict=True)
    return [torch.randn(size, generator=draw).to(dtype) for size, dtype in sizes]


class Counted:
    """Counts a group's exchanges of gradients, sums and values."""

    def __init__(self, group: Group) -> None:
        self.count = 0
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def start_exchange(self, *arguments: Any) -> Work:
        self.count += 1
        return self._group.start_exchange(*arguments)


def train(least_by_rank: list[int], keeps_gradients: bool) -> tuple[list[list[bytes]], int]:
    """Make steps; return the bytes of all parameters and of the optimizer's state by rank, and the most
    exchanges of a member.
    """
    together_there = threading.Barrier(SIZE, timeout=30.0)

    def run(group: Group) -> tuple[list[bytes], int]:
        counted, rank = Counted(group), group.rank
        member = Member(f"m{rank}", f"n{rank}", PLAIN, 7, keeps_gradients, least_by_rank[rank])
        home = member.home
        home.begin_generation(
            counted,  # type: ignore[arg-type]
            GENERATION,
            StateName(GENERATION, 0),
            step=0,
            is_source=rank == 0,
            keep_values=False,
            on_bytes=lambda count: None,
        )
        counted.count = 0
        for step in range(1, STEPS + 1):
            home.settle(None)
            home.begin_step()
            for bucket, flat in enumerate(flats_of(member, step, rank)):
                home.push(flat, bucket)
            home.prepare()
            home.commit([0.5], ())
            member.optimizer.step()
            home.stepped()
        home.settle(None)
        state = [piece.state[name] for piece in home.held.pieces for name in sorted(piece.state)]
        tensors = [*member.parameters.values(), *(item for item in state if isinstance(item, torch.Tensor))]
        together_there.wait()  # nobody ends a group that others still use
        return [item.detach().contiguous().numpy().tobytes() for item in tensors], counted.count

    groups = form_groups(SIZE)
    try:
        found = together([lambda group=group: run(group) for group in groups])
    finally:
        for group in groups:
            group.shut()
    return [own for own, _ in found], max(count for _, count in found)


@pytest.mark.parametrize("keeps_gradients", [True, False])
def test_many_chunks_have_the_bits_of_one(keeps_gradients: bool) -> None:
    whole, few = train([LEAST_UNDER_WAY] * SIZE, keeps_gradients)
    cut, many = train([FEW] * SIZE, keeps_gradients)
    assert many > 3 * few
    assert cut == whole
    assert len({tuple(own[: len(PLAIN.parameters(0))]) for own in cut}) == 1


def test_members_with_other_settings_take_the_smallest() -> None:
    same, many = train([FEW] * SIZE, True)
    mixed, found = train([FEW, LEAST_UNDER_WAY, 5 * FEW], True)
    assert found == many
    assert mixed == same

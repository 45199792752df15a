"""Logical parts: who computes which, with whose random numbers, and how their buffers come together."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.comm.combine import Rule
from springtide.data.cursor import Cursor
from springtide.data.ledger import Contribution
from springtide.data.loop import plan_loop
from springtide.exact.buffers import pack_parts, unpack_parts
from springtide.exact.parts import PartContribution, assign, assignment, weights_by_part


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 15), st.integers(1, 3))
def test_the_cut_does_not_depend_on_the_number_of_workers(
    samples: int, logical: int, world: int, min_part: int
) -> None:
    plan = plan_loop(torch.arange(samples), batch_size=samples, seed=3, min_part=min_part)
    alone = assign(plan, Cursor(), 0, 1, logical)
    together = [part for rank in range(world) for part in assign(plan, Cursor(), rank, world, logical)]
    real = [part for part in together if not part.batch.standin]
    assert [part.number for part in real] == [part.number for part in alone]
    for mine, same in zip(real, alone, strict=True):
        assert torch.equal(mine.batch.ids, same.batch.ids)
    assert torch.equal(torch.cat([part.batch.ids for part in real]).sort().values, torch.arange(samples))
    assert all(part.number == logical for part in together if part.batch.standin)
    sizes = [len(numbers) for numbers in assignment(len(alone), world)]
    assert sum(sizes) == len(alone)
    assert max(sizes) - min(sizes) <= 1


def test_a_rank_outside_of_the_world_is_refused() -> None:
    plan = plan_loop(torch.arange(4), batch_size=4)
    with pytest.raises(ValueError, match="rank 2 of a world of 2"):
        assign(plan, Cursor(), 2, 2, 4)


class Noisy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3), random.random(), np.random.rand()


def test_augmentation_belongs_to_the_part_and_disturbs_nobody() -> None:
    plan = plan_loop(Noisy(), batch_size=12, seed=1)
    alone = [part.batch.data for part in assign(plan, Cursor(), 0, 1, 3)]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    last = assign(plan, Cursor(), 2, 3, 3)[0].batch.data
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    for mine, same in zip(last, alone[2], strict=True):
        assert torch.equal(mine, same)
    assert not torch.equal(alone[0][0], alone[1][0])
    later = assign(plan, Cursor(step=1), 0, 1, 3)[2].batch.data
    assert not torch.equal(later[0], alone[2][0])


def test_each_part_is_collated_into_aligned_memory_of_its_own() -> None:
    x = torch.randn(23, 5)
    plan = plan_loop((x, x[:, 0].clone()), batch_size=23)
    for part in assign(plan, Cursor(), 0, 1, 7):
        for tensor in part.batch.data:
            assert tensor.data_ptr() % 64 == 0
            assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()


def kept(number: int, weight: float, buffers: dict[int, torch.Tensor]) -> PartContribution:
    return PartContribution(number, weight, Contribution(0, 0, 0), [True] * 3, buffers)


def test_buffers_are_combined_in_logical_order() -> None:
    committed = [torch.zeros(2), torch.tensor(5), torch.tensor([7.0])]
    parts = [
        kept(0, 1.0, {0: torch.tensor([1.0, -0.0]), 1: torch.tensor(-(6 << 40))}),
        kept(1, 3.0, {0: torch.tensor([2.0, 4.0]), 1: torch.tensor(9), 2: torch.tensor([11.0])}),
        kept(4, 0.0, {}),  # a stand-in: its number lies behind the last part's
    ]
    rules = [Rule.MEAN, Rule.FIRST, Rule.MEAN]
    weights = weights_by_part(parts, 4)
    assert weights == [1.0, 3.0, 0.0, 0.0]
    together = pack_parts(parts, [0, 1, 2], committed, rules, 4)
    apart = sum(pack_parts([part], [0, 1, 2], committed, rules, 4) for part in reversed(parts))
    assert torch.equal(together, apart)
    result = unpack_parts(together, [0, 1, 2], committed, rules, weights)
    assert result[0].tolist() == [1.75, 3.0]
    assert result[1].item() == -(6 << 40)
    assert result[2].tolist() == [10.0]
    assert [tensor.dtype for tensor in result] == [torch.float32, torch.int64, torch.float32]

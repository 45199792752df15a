"""Block-scaled integer sums: equal bits for every order and grouping, small errors, nothing lost silently."""

from __future__ import annotations

import math

import pytest
import torch
from exact_world import SHAPES, World, bits, gradients, grouping, layout
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.comm.layout import Field, plan_layout
from springtide.comm.process_group import Group
from springtide.errors import UsageError
from springtide.exact import exponents as scale
from springtide.exact.buckets import ExactBuckets, plan_runs
from springtide.exact.rounding import BLOCK


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(grouping(), st.integers(0, 1 << 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_grouping_and_order_gives_equal_bits(
    case: tuple[int, list[list[int]]], seed: int, dtype: torch.dtype
) -> None:
    parts, assignment = case
    scales = [1.0 / (part + 2) for part in range(parts)]
    one, many = World([list(range(parts))], parts, dtype), World(assignment, parts, dtype)
    for step in range(3):
        made = [
            [None if g is None else g.to(dtype) for g in own]
            for own in gradients(parts, seed + step, 3 + step)
        ]
        assert bits(one.step(made, scales)) == bits(many.step(made, scales))
        for worker in many.workers:
            assert torch.equal(worker.exponents.values, one.workers[0].exponents.values)


def test_the_error_is_a_float_s_of_the_largest_in_the_block() -> None:
    parts = 8
    made = gradients(parts, 1, spread=0, missing=0.0)
    world = World([[0, 1, 2], [3], [4, 5, 6, 7]], parts)
    for _ in range(3):
        result = world.step(made, [0.125] * parts)
    for index in (0, 1, 3):
        exact = sum(own[index].double() * 0.125 for own in made)
        error = (result[index].double() - exact).square().mean().sqrt() / exact.abs().max()
        assert float(error) < 6e-8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_not_a_number(bad: float) -> None:
    made = gradients(3, 5, spread=0, missing=0.0)
    made[1][1][300] = bad
    one, many = World([[0, 1, 2]], 3), World([[2], [1, 0]], 3)
    result, other = one.step(made, [1.0] * 3), many.step(made, [1.0] * 3)
    assert bits(result) == bits(other)
    assert result[1][BLOCK : 2 * BLOCK].isnan().all()
    assert result[1][:BLOCK].isfinite().all()
    assert result[1][2 * BLOCK :].isfinite().all()
    assert all(result[index].isfinite().all() for index in (0, 2, 3))
    # The next step is sound again, also after gradients were clipped by a norm that is not finite.
    for worker in (*one.workers, *many.workers):
        worker.scale(math.nan)
    good = gradients(3, 6, spread=0, missing=0.0)
    after = one.step(good, [1.0] * 3)
    assert all(tensor.isfinite().all() for tensor in after)
    assert bits(after) == bits(many.step(good, [1.0] * 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_no_value_is_lost_silently(values: list[float]) -> None:
    """One value per part, of any magnitude: the error is below the resolution that the greatest asks for."""
    parts = len(values)
    made = [[None, None, torch.tensor([value]), None] for value in values]
    result = World([list(range(parts))], parts).step(made, [1.0] * parts)[2]
    expected = math.fsum(values)
    resolution = 2.0 ** (1 + scale.MARGIN - scale.part_bits(parts)) * max(abs(value) for value in values)
    floor = 2.0 ** (scale.LOWEST + scale.MARGIN - scale.part_bits(parts))
    if abs(expected) < 3e38:
        assert abs(float(result) - expected) <= parts * (resolution + floor) + 1e-7 * abs(expected)


def test_stand_in_adds_zeros_whatever_it_computed() -> None:
    made = gradients(2, 3, missing=0.0)
    made[1] = [torch.full(shape, math.nan) for shape in SHAPES]
    together, alone = World([[0], [1]], 2), World([[0]], 2)
    for seed in (3, 4):
        # In the second step, what it sent in the first one must be gone.
        made[0] = gradients(1, seed, missing=0.0)[0]
        assert bits(together.step(made, [1.0, 0.0])) == bits(alone.step(made, [1.0, 0.0]))


def test_exponents_rise_at_once_and_fall_slowly() -> None:
    owners, largest = torch.tensor([0, 0, 0, 1]), torch.tensor([1.5, 0.0, math.nan, 0.0])
    unset = torch.full((4,), scale.LOWEST, dtype=torch.int32)
    first = scale.after_commit(unset, unset, largest, owners, 2, 1)
    # Blocks without values stay near their parameter's; a parameter that was never seen stays unset.
    quiet = 1 - scale.NEAR
    assert first.tolist() == [1, quiet, quiet, scale.LOWEST]
    small = torch.tensor([1e-6, 0.0, 1.0, 100.0])
    second = scale.after_commit(first, first, small, owners, 2, 2)
    assert second.tolist() == [1, quiet, 1, 7]
    fallen = scale.after_commit(second, second, small, owners, 2, scale.STEPS_PER_FALL)
    assert fallen.tolist() == [0, quiet, 1, 7]
    raised = scale.raised(second, torch.tensor([9, scale.LOWEST, scale.NOT_FINITE, scale.LOWEST]))
    third = scale.after_commit(second, raised.to(torch.int32), small + largest * 0, owners, 2, 3)
    assert third.tolist() == [9, 9 - scale.NEAR, 9 - scale.NEAR, 7]


def test_every_element_belongs_to_one_run() -> None:
    sizes = [5, 70_000, 300, 60_000, 16_000, 60_000, 60_000, 16_000, 1, 1]
    fields = [Field(f"p{index}", (size,), torch.float32) for index, size in enumerate(sizes)]
    planned = plan_layout(fields, 400_000, BLOCK)
    runs = plan_runs(planned)
    assert sorted(index for run in runs for index in run.members) == list(range(len(sizes)))
    for bucket, size in enumerate(planned.sizes):
        ends = [(run.start, run.end) for run in runs if run.bucket == bucket]
        assert [0, *(end for _, end in ends)] == [*(start for start, _ in ends), size]
    blocks = [block for run in runs for block in range(run.blocks.start, run.blocks.stop)]
    assert blocks == list(range(sum(planned.sizes) // BLOCK))
    assert max(len(run.members) for run in runs) > 2
    assert all(len(run.members) == 1 or run.end - run.start <= 1 << 17 for run in runs)


def test_scales_are_exact_powers_of_two() -> None:
    exponents = torch.tensor([scale.LOWEST, -1, 0, 128, scale.NOT_FINITE], dtype=torch.int32)
    for parts in (1, 2, 7, 8, 1000):
        bits = scale.part_bits(parts)
        assert parts * ((1 << bits) - 2.0 ** (bits - 24)) < 1 << 31
        product = scale.factors(exponents, parts) * scale.units(exponents, parts)
        assert product[:4].tolist() == [1.0] * 4
        assert product[4].isnan()
    with pytest.raises(ValueError, match="at least one part"):
        scale.part_bits(0)


def test_other_types_and_layouts_are_refused() -> None:
    with pytest.raises(UsageError, match=r"p0 is torch\.float64"):
        ExactBuckets(plan_layout([Field("p0", (3,), torch.float64)], 100, BLOCK), 2)
    with pytest.raises(ValueError, match="do not fit"):
        scale.Exponents(3).load_state_dict({"exponents": torch.zeros(4, dtype=torch.int32)})


def test_a_gradient_that_the_script_changes_is_told() -> None:
    buckets = ExactBuckets(layout(), 1)
    buckets.begin(Group(None, 0, 1, 1.0).start_sum)
    view = buckets.put(1, torch.ones(700), 1.0, 0, True)
    view.mul_(2)
    with pytest.raises(UsageError, match="changed between backward"):
        buckets.flush()

"""The commit vote: what members learn of each other from one sum."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.comm import commit_vote as side


def part(**changes: object) -> side.Contribution:
    plain = side.Contribution(
        step=5,
        weight=4.0,
        count=4,
        hash_lo=2**32 - 1,
        hash_hi=7,
        change=False,
        seconds=0.5,
        used=[True, False],
        changed=[False],
        values={"loss": 2.0},
        values_weight=4.0,
    )
    return dataclasses.replace(plain, **changes)


def reduce(*parts: side.Contribution) -> list[side.Result]:
    total = torch.stack([side.encode(one) for one in parts]).sum(0)
    return [side.decode(total, one, len(parts)) for one in parts]


def test_sums_flags_and_maps() -> None:
    other = part(weight=12.0, count=12, used=[False, False], changed=[True], change=True, seconds=1.5)
    first, second = reduce(part(), other)
    assert first == second
    assert first.same_step
    assert (first.weight, first.count, first.hash_lo, first.hash_hi) == (16.0, 16.0, 2.0 * (2**32 - 1), 14.0)
    assert first.change
    assert first.seconds == 1.0
    assert first.used == [True, False]
    assert first.changed == [True]


def test_values_are_weighted_means_without_stand_ins() -> None:
    results = reduce(
        part(values={"loss": 1.0, "acc": 0.5}, values_weight=3.0),
        part(values={"acc": 1.0, "loss": 5.0}, values_weight=1.0),
        part(values={"loss": float("nan"), "acc": float("inf")}, values_weight=0.0),
    )
    assert [result.values for result in results] == [{"acc": 0.625, "loss": 2.0}] * 3


@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=6))
def test_all_members_see_alike_whether_they_are_at_the_same_step(steps: list[int]) -> None:
    seen = {result.same_step for result in reduce(*(part(step=step) for step in steps))}
    assert seen == {len({step % (1 << 20) for step in steps}) == 1}


def test_different_names_drop_the_values_on_all_members() -> None:
    results = reduce(
        part(values={"loss": 1.0}), part(values={"lost": 1.0}), part(values={"loss": 1.0, "acc": 2.0})
    )
    assert [result.values for result in results] == [None] * 3
    assert all(result.same_step for result in results)


def test_nobody_reports() -> None:
    assert reduce(part(values={}), part(values={}))[0].values == {}


def test_too_many_values() -> None:
    with pytest.raises(ValueError, match="at most 16 values per step, got 17"):
        side.encode(part(values={str(i): 0.0 for i in range(17)}))


OURS, OTHERS = (5, 77), (6, 78)


def fits(*members: tuple[tuple[int, int], bool]) -> list[bool]:
    """members: (hashes, whether it is a newcomer)."""
    return [result.options_fit for result in reduce(*(part(options=o, newcomer=n) for o, n in members))]


def test_newcomers_with_other_options_do_not_fit_and_nobody_else() -> None:
    assert fits((OURS, False), (OURS, False), (OTHERS, True), (OURS, True)) == [True, True, False, True]


def test_where_those_who_stepped_together_differ_nobody_fits() -> None:
    assert fits((OURS, False), (OTHERS, False), (OURS, True)) == [False] * 3


def test_at_the_first_step_all_are_newcomers() -> None:
    assert fits((OURS, True), (OURS, True)) == [True] * 2
    assert fits((OURS, True), (OTHERS, True), (OURS, True)) == [False] * 3


def test_one_equal_hash_is_enough() -> None:
    assert fits(((5, 77), False), ((5, 78), True)) == [True] * 2
    assert fits(((5, 77), True), ((6, 77), True)) == [True] * 2
    assert fits(((5, 77), False), ((6, 77), False)) == [True] * 2


@given(st.lists(st.tuples(st.sampled_from([OURS, OTHERS, (2**20 - 1, 0)]), st.booleans()), min_size=1))
def test_all_fit_exactly_when_all_have_the_same(members: list[tuple[tuple[int, int], bool]]) -> None:
    assert all(fits(*members)) == (len({options for options, _ in members}) == 1)

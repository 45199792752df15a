"""The cut of what is left of a dropped step: no sample twice, none missing, whatever members claim."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.data.cursor import Cursor
from springtide.data.loop import LoopPlan, plan_loop
from springtide.data.salvage import Carried, Claim, Places, agree, among, merged, size, take

WORK = "step 4 of generation 1.0/2, 0/0/128"


def numbers(places: Places) -> list[int]:
    return [number for start, stop in places for number in range(start, stop)]


@st.composite
def some_places(draw: st.DrawFn, n: int) -> Places:
    ends = sorted(draw(st.sets(st.integers(0, n), max_size=8)))
    return merged(tuple(zip(ends[::2], ends[1::2], strict=False)))


@st.composite
def claims_of(draw: st.DrawFn) -> tuple[int, list[Claim]]:
    n = draw(st.integers(1, 40))
    works = st.sampled_from([WORK, WORK, WORK, "", "step 3 of generation 1.0/1, 0/0/96"])
    one = st.builds(Claim, works, some_places(n + draw(st.integers(0, 2))))
    return n, draw(st.lists(one, min_size=1, max_size=6))


@given(claims_of())
def test_accepted_claims_and_the_rest_are_the_batch(world: tuple[int, list[Claim]]) -> None:
    n, claims = world
    agreed = agree(claims, WORK, n)
    parts = [claim.places for claim, counts in zip(claims, agreed.accepted, strict=True) if counts]
    found = [number for places in (*parts, agreed.rest) for number in numbers(places)]
    assert sorted(found) == list(range(n))
    assert all(claim.work == WORK for claim, ok in zip(claims, agreed.accepted, strict=True) if ok)
    # A claim is refused for a reason: another step, nothing there, or what others have.
    for claim, counts in zip(claims, agreed.accepted, strict=True):
        if not counts and claim.work == WORK and claim.places and claim.places[-1][1] <= n:
            assert set(numbers(claim.places)) & {number for places in parts for number in numbers(places)}


@given(claims_of())
def test_the_larger_of_two_claims_counts(world: tuple[int, list[Claim]]) -> None:
    n, claims = world
    accepted = agree(claims, WORK, n).accepted
    for (mine, ok), (other, counts) in itertools.permutations(zip(claims, accepted, strict=True), 2):
        overlap = set(numbers(mine.places)) & set(numbers(other.places))
        if overlap and ok and other.work == WORK and other.places[-1][1] <= n and not counts:
            refused_by = [
                kept for kept, is_in in zip(claims, accepted, strict=True) if is_in and kept is not other
            ]
            larger = [
                kept
                for kept in refused_by
                if set(numbers(kept.places)) & set(numbers(other.places))
                and size(kept.places) >= size(other.places)
            ]
            assert larger


@given(claims_of())
def test_claims_travel_as_json(world: tuple[int, list[Claim]]) -> None:
    assert [Claim.from_json(claim.to_json()) for claim in world[1]] == world[1]


@given(st.data())
def test_places_among_places(data: st.DataObject) -> None:
    places = data.draw(some_places(30))
    start = data.draw(st.integers(0, size(places)))
    stop = data.draw(st.integers(start, size(places)))
    assert numbers(among(places, start, stop)) == numbers(places)[start:stop]
    assert take(torch.arange(30), among(places, start, stop)).tolist() == numbers(places)[start:stop]


@pytest.fixture(scope="module")
def plan() -> LoopPlan:
    return plan_loop(torch.arange(100), batch_size=32, seed=3)


@given(claims=st.lists(st.integers(0, 3), min_size=1, max_size=4), members=st.integers(1, 5), data=st.data())
def test_the_rest_is_dealt_once(claims: list[int], members: int, data: st.DataObject) -> None:
    """Members that carry what they have kept, and joiners: together they have the batch."""
    plan, cursor = plan_loop(torch.arange(100), batch_size=32, seed=3), Cursor()
    ids = plan.global_ids(cursor)
    agreed = agree([Claim(WORK, data.draw(some_places(32))) for _ in range(members)], WORK, 32)
    parts = [plan.batch(cursor, rank, members, rest=agreed.rest) for rank in range(members)]
    kept = sorted(set(range(32)) - set(numbers(agreed.rest)))
    found = [*ids[kept].tolist(), *(number for part in parts for number in part.ids.tolist())]
    assert sorted(found) == sorted(ids.tolist())
    assert all(part.micro.global_samples == 32 for part in parts)
    for part in parts:
        assert ids[numbers(part.micro.places)].tolist() == part.ids.tolist()
        assert part.standin == (part.samples == 0)


def test_the_account_goes_on_with_what_is_carried(plan: LoopPlan) -> None:
    cursor = Cursor()
    carried = Carried(plan.account(plan.global_ids(cursor), cursor)[:6], ((0, 6),), 6.0)
    batch = plan.batch(cursor, 0, 1, rest=((6, 10), (20, 32)), carried=carried)
    assert batch.samples == 16
    assert (batch.micro.contributed_weight, batch.micro.contributed_ids.tolist()) == (
        6.0,
        carried.ids.tolist(),
    )
    pieces = batch.split(4)
    next(pieces)
    batch.micro.contribute()
    next(pieces)
    batch.micro.contribute()
    after = batch.micro.to_carry()
    assert after.places == ((0, 10), (20, 24))
    assert after.weight == 14.0
    expected = plan.account(plan.global_ids(cursor), cursor)[[*range(10), *range(20, 24)]]
    assert sorted(after.ids.tolist()) == sorted(expected.tolist())
    assert batch.micro.remaining_samples == 8

"""The cut by speed: a pure function of figures, and how a job's steps go with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.comm import commit_vote
from springtide.data.balance import EVEN, UNKNOWN, Figure, Proportions, SpeedMeter, next_proportions
from springtide.data.partition import partition

PICOSECONDS = 10**12
sample_times = st.lists(st.integers(1, 10**13), min_size=2, max_size=12)
BATCH = 600


def proportions_of(*own: int, room: int = 0) -> Proportions | None:
    return next_proportions(None, [Figure(sample_time, room) for sample_time in own])


@settings(deadline=None, max_examples=60)
@given(own=sample_times, extra=st.integers(0, 3000), least=st.integers(1, 4))
def test_cuts_tile_the_batch_and_favour_the_quick(own: list[int], extra: int, least: int) -> None:
    n = least * len(own) + extra
    sizes = Proportions(tuple(own), (0,) * len(own)).sizes(n, least)
    assert sum(sizes) == n
    assert min(sizes) >= least
    for sample_time, size in zip(own, sizes, strict=True):
        assert all(size >= other for slower, other in zip(own, sizes, strict=True) if slower > sample_time)
    # No sample can be moved so that the last one is done earlier.
    longest, size_of_last = max(
        (size * sample_time, size) for size, sample_time in zip(sizes, own, strict=True)
    )
    if size_of_last > least:
        assert all((size + 1) * sample_time >= longest for size, sample_time in zip(sizes, own, strict=True))


@settings(deadline=None, max_examples=60)
@given(own=sample_times, rooms=st.data(), n=st.integers(12, 3000))
def test_no_member_gets_more_than_it_has_room_for(own: list[int], rooms: st.DataObject, n: int) -> None:
    room = tuple(rooms.draw(st.sampled_from((0, 1000, 1500, 2000))) for _ in own)
    sizes = Proportions(tuple(own), room).sizes(n)
    even = -(-n // len(own))
    assert sum(sizes) == n
    assert all(size <= even * bound / 1000 for size, bound in zip(sizes, room, strict=True) if bound)


@settings(deadline=None, max_examples=60)
@given(before=st.none() | st.integers(0, 2**32), own=sample_times)
def test_a_new_cut_gains_and_an_old_one_is_near_best(before: int | None, own: list[int]) -> None:
    draw = random.Random(before)
    current = None if before is None else proportions_of(*(draw.randint(1, 10**6) for _ in own))
    even = Proportions((1,) * len(own), (0,) * len(own))
    best = Proportions(tuple(own), (0,) * len(own)).takes(own)
    after = next_proportions(current, [Figure(sample_time) for sample_time in own])
    assert (after or even).takes(own) <= 1.05 * best
    if after != current:
        assert (current or even).takes(own) > 1.05 * best
    if after is not None and after != current:
        assert even.takes(own) > 1.05 * best
    assert next_proportions(after, [Figure(sample_time) for sample_time in own]) == after


def test_unknown_members_count_as_the_mean_of_the_others() -> None:
    assert proportions_of(UNKNOWN, UNKNOWN) is None
    found = proportions_of(100, 300, UNKNOWN)
    assert found is not None
    assert found.sample_times == (100, 300, 200)


@pytest.mark.parametrize("own", [(7,), (100, 104, 100), (100, 300, EVEN)])
def test_parts_are_even_without_a_reason_not_to(own: tuple[int, ...]) -> None:
    assert proportions_of(*own) is None


def test_short_batch_and_wrong_cut() -> None:
    proportions = proportions_of(100, 100, 300)
    assert [part.size for part in partition(4, 3, 2, proportions)] == [2, 2, 0]
    assert [part.size for part in partition(7, 3, 1, proportions)] == [3, 3, 1]
    assert [part.start for part in partition(7, 3, 1, proportions)] == [0, 3, 6]
    with pytest.raises(ValueError, match="3 members, and there are 2"):
        partition(7, 2, 1, proportions)
    with pytest.raises(ValueError, match="2 samples are not 1 or more for each of 3 members"):
        Proportions((1, 1, 1), (0, 0, 0)).sizes(2)


@settings(deadline=None, max_examples=30)
@given(figures=st.lists(st.tuples(st.integers(-1, 2**52), st.integers(0, 2000)), min_size=1, max_size=6))
def test_all_members_read_the_same_figures_in_a_vote(figures: list[tuple[int, int]]) -> None:
    def own(rank: int) -> commit_vote.Contribution:
        told = [0.0] * (2 * len(figures))
        told[2 * rank : 2 * rank + 2] = map(float, figures[rank])
        return commit_vote.Contribution(
            step=1, weight=1.0, count=1, hash_lo=0, hash_hi=0, change=False, seconds=0.1,
            used=[True], changed=[], late=[False], figures=told, extra=[2.0],
        )  # fmt: skip

    votes = [own(rank) for rank in range(len(figures))]
    total = sum((commit_vote.encode(vote) for vote in votes[1:]), commit_vote.encode(votes[0]))
    result = commit_vote.decode(total, votes[-1], len(votes))
    assert result.figures == [number for figure in figures for number in figure]
    assert (result.extra, result.late) == ([2.0 * len(votes)], [False])
    assert [Figure.from_json(Figure(*figure).to_json()) for figure in figures] == figures


# ---- a job's steps


class Steps:
    """Members that compute with given seconds per sample; the figures of a step are those of the one before,
    as in the commit vote.
    """

    def __init__(self, members: int) -> None:
        self.meters = [SpeedMeter() for _ in range(members)]
        self.proportions: Proportions | None = None
        self.changes = 0

    def run(self, steps: int, seconds: Callable[[], Sequence[float]]) -> None:
        for _ in range(steps):
            sizes = [part.size for part in partition(BATCH, len(self.meters), 1, self.proportions)]
            before, figures = self.proportions, [Figure(meter.sample_time) for meter in self.meters]
            for meter, size, each in zip(self.meters, sizes, seconds(), strict=True):
                meter.measured(size * each, size)
            self.proportions = next_proportions(self.proportions, figures)
            self.changes += self.proportions != before

    @property
    def sizes(self) -> list[int]:
        return [part.size for part in partition(BATCH, len(self.meters), 1, self.proportions)]


def test_half_speed_worker_has_half_a_part_within_few_steps() -> None:
    steps = Steps(3)
    steps.run(4, lambda: (0.01, 0.01, 0.02))
    assert steps.sizes == [240, 240, 120]
    steps.run(20, lambda: (0.01, 0.01, 0.01))  # it is not held back any more
    assert steps.sizes == [200, 200, 200]
    assert steps.changes <= 5
    steps.run(20, lambda: (0.01, 0.01, 0.02))
    assert steps.sizes[2] < 130


@pytest.mark.parametrize("seed", range(4))
def test_equal_members_with_noise_keep_even_parts(seed: int) -> None:
    noise, steps = random.Random(seed), Steps(3)
    steps.run(300, lambda: [0.01 * noise.uniform(0.97, 1.03) for _ in range(3)])
    assert steps.changes == 0


@pytest.mark.parametrize("seed", range(4))
def test_unequal_members_with_noise_settle_on_one_cut(seed: int) -> None:
    noise, steps = random.Random(seed), Steps(3)
    steps.run(20, lambda: [each * noise.uniform(0.97, 1.03) for each in (0.01, 0.01, 0.02)])
    found, steps.changes = steps.proportions, 0
    steps.run(300, lambda: [each * noise.uniform(0.97, 1.03) for each in (0.01, 0.01, 0.02)])
    assert (steps.proportions, steps.changes) == (found, 0)


def test_one_long_step_and_the_first_steps_do_not_count() -> None:
    meter = SpeedMeter()
    for seconds in (9.0, 8.0):
        meter.measured(seconds, 10)
    assert (meter.seconds, meter.sample_time) == (0.0, UNKNOWN)
    for seconds in (1.0, 1.0, 30.0, 1.0, 1.0):
        meter.measured(seconds, 10)
    assert meter.seconds == pytest.approx(0.1)
    assert meter.sample_time == pytest.approx(0.1 * PICOSECONDS)
    meter.begin_generation()
    for seconds in (9.0, 8.0):
        meter.measured(seconds, 10)
    meter.measured(1.0, 0)  # a stand-in's
    assert meter.seconds == pytest.approx(0.1), "it keeps what it knew"

"""The order of an epoch: a permutation, at any place at once, chosen by seed and epoch alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.data.loop import plan_loop
from springtide.data.permutation import TABLE_SIZE, keyed, shuffled

LARGE = 3 * TABLE_SIZE + 17
FIRST_OF_A_BILLION = [750150860, 108187140, 426305011, 281720798]
seeds = st.integers(-(2**63), 2**63 - 1)


def whole(n: int, seed: int, epoch: int) -> torch.Tensor:
    return shuffled(n, seed, epoch, 0, n)


@pytest.mark.parametrize("n", [100, LARGE])
def test_order_depends_on_seed_and_epoch_only(n: int) -> None:
    state = torch.get_rng_state()
    first = whole(n, 7, 3).clone()
    for epoch in range(4, 8):  # the kept ones are forgotten
        whole(n, 7, epoch)
    torch.rand(5)
    torch.manual_seed(1)
    assert torch.equal(whole(n, 7, 3), first)
    assert first.dtype == torch.int64
    assert torch.equal(first.sort().values, torch.arange(n))
    for other in ((7, 4), (8, 3), (3, 7)):
        assert not torch.equal(whole(n, *other), first)
    torch.set_rng_state(state)
    whole(n, 0, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_order_never_changes_between_versions() -> None:
    # A job that is continued by another version must deal the same samples.
    assert whole(10, 0, 0).tolist() == [1, 5, 0, 4, 9, 7, 8, 3, 6, 2]
    assert shuffled(10**9, 0, 0, 0, 4).tolist() == FIRST_OF_A_BILLION


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**6))
def test_keyed_order_takes_each_sample_once(n: int, seed: int, epoch: int) -> None:
    assert torch.equal(keyed(n, seed, epoch, torch.arange(n)).sort().values, torch.arange(n))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(n=st.sampled_from([50, TABLE_SIZE, LARGE]), start=st.integers(0, LARGE), length=st.integers(0, LARGE))
def test_any_cut_is_a_piece_of_the_whole(n: int, start: int, length: int) -> None:
    """Also over the edges of what is kept, and beyond the end."""
    assert torch.equal(shuffled(n, 5, 1, start, start + length), whole(n, 5, 1)[start : start + length])


@pytest.mark.slow
def test_keyed_order_is_evenly_spread() -> None:
    """Chi-square of (first sample, second sample) over many seeds: about 1 per degree of freedom."""
    n, trials = 7, 4000
    counts = torch.zeros(n, n)
    for seed in range(trials):
        first, second = keyed(n, seed, 0, torch.arange(2)).tolist()
        counts[first, second] += 1
    expected = trials / (n * (n - 1))
    spread = ((counts - expected) ** 2 / expected)[~torch.eye(n, dtype=torch.bool)].sum() / (n * (n - 1) - 1)
    assert counts.diagonal().sum() == 0
    assert spread < 1.6


def test_neighbours_in_a_keyed_order_have_nothing_in_common() -> None:
    ids = whole(LARGE, 1, 1).double()
    assert abs(torch.corrcoef(torch.stack([ids[:-1], ids[1:]]))[0, 1]) < 0.02
    # The mean distance of two independent numbers of 0..n-1 is n / 3.
    assert (ids[1:] - ids[:-1]).abs().mean() / LARGE == pytest.approx(1 / 3, rel=0.02)


def test_negative_and_large_seeds_work() -> None:
    for n in (50, LARGE):
        assert not torch.equal(whole(n, -1, 0), whole(n, 2**63 - 1, 0))


def test_places_of_a_large_order_are_kept_in_blocks() -> None:
    """A step takes a small part of a block, without making it again."""
    first = shuffled(LARGE, 1, 1, 0, 256)
    assert shuffled(LARGE, 1, 1, 256, 512).data_ptr() == first.data_ptr() + 256 * 8


@pytest.mark.parametrize(("places", "what"), [((0, -1), "places"), ((-1, 3), "places"), ((5, 3), "places")])
def test_places_out_of_order_are_refused(places: tuple[int, int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        shuffled(10, 0, 0, *places)


def test_empty_order_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        shuffled(0, 0, 0, 0, 0)


def test_workers_with_another_kind_of_order_are_told() -> None:
    """The fingerprint that workers compare says by what permutation a large data set is dealt."""
    large = plan_loop(range(LARGE), batch_size=10)
    assert large.fingerprint()["keyed_permutation"] == 1
    without = {name: value for name, value in large.fingerprint().items() if name != "keyed_permutation"}
    with pytest.raises(ValueError, match="keyed_permutation is 1 here and None there"):
        large.check_same(without)
    assert "keyed_permutation" not in plan_loop(range(100), batch_size=10).fingerprint()

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.data import Cursor, permutation


@settings(deadline=None)
@given(n=st.integers(1, 50), batch=st.integers(1, 60), epochs=st.integers(1, 4))
def test_the_cursor_visits_every_position_once_per_epoch(n: int, batch: int, epochs: int) -> None:
    cursor, visited = Cursor(), 0
    while cursor.epoch < epochs:
        after = cursor.advance(batch, n)
        end = after.position if after.epoch == cursor.epoch else n
        assert 0 < end - cursor.position <= batch
        visited += end - cursor.position
        cursor = after
    assert visited == n * epochs
    assert cursor == Cursor(0, epochs, 0, -(-n // batch) * epochs)


def test_the_next_stage_begins_at_zero_but_for_the_step() -> None:
    assert Cursor(2, 3, 4, 5).next_stage() == Cursor(3, 0, 0, 5)


@pytest.mark.parametrize(("batch", "size", "what"), [(0, 10, "batch_size"), (1, 4, "outside a dataset of 4")])
def test_impossible_advances_are_refused(batch: int, size: int, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Cursor(position=4).advance(batch, size)


def test_json_gives_the_cursor_back() -> None:
    cursor = Cursor(1, 2, 3, 4)
    assert Cursor.from_json(json.loads(json.dumps(cursor.to_json()))) == cursor


@pytest.mark.parametrize("change", [{"step": -1}, {"step": 1.0}, {"epoch": True}, {"other": 1}])
def test_malformed_json_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cursor:"):
        Cursor.from_json(Cursor().to_json() | change)


def test_permutation_depends_on_seed_and_epoch_alone() -> None:
    state = torch.get_rng_state()
    first = permutation(100, 7, 3).clone()
    permutation.cache_clear()
    torch.rand(5)
    torch.manual_seed(1)
    assert torch.equal(permutation(100, 7, 3), first)
    assert first.dtype == torch.int64
    assert torch.equal(first.sort().values, torch.arange(100))
    for other in ((7, 4), (8, 3), (3, 7)):
        assert not torch.equal(permutation(100, *other), first)
    torch.set_rng_state(state)
    permutation(50, 0, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_permutation_never_changes_between_versions() -> None:
    # A job that is continued by another version must deal the same samples.
    assert permutation(10, 0, 0).tolist() == [1, 5, 0, 4, 9, 7, 8, 3, 6, 2]


def test_an_epoch_is_shuffled_once() -> None:
    assert permutation(1000, 1, 1) is permutation(1000, 1, 1)


def test_negative_and_large_seeds_work() -> None:
    assert not torch.equal(permutation(50, -1, 0), permutation(50, 2**63 - 1, 0))


def test_an_empty_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        permutation(0, 0, 0)

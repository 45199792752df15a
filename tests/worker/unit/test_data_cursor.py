import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.data import Cursor


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

"""Objects that live as long as the process are no work for later garbage collections."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from springtide.elastic.set_aside import set_aside


class Loop:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_garbage_is_freed_and_what_lives_is_set_aside() -> None:
    before = gc.get_freeze_count()
    garbage, alive = weakref.ref(Loop()), Loop()
    set_aside()
    assert garbage() is None
    assert gc.get_freeze_count() > before
    assert not any(item is alive for item in gc.get_objects())  # it knows those that it would look at


@pytest.mark.usefixtures("thawed")
def test_later_garbage_is_still_freed() -> None:
    set_aside()
    garbage = weakref.ref(Loop())
    gc.collect()
    assert garbage() is None

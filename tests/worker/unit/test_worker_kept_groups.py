"""Memory of a group that could not be freed is given back once nothing writes into it any more."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from springtide.comm.work import keep_until_done, let_go


class Stuck:
    """A collective that ends when the test says so."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.done = False

    def is_completed(self) -> bool:
        return self.done


class Backend:
    """A stand-in for the backend that a collective needs to stay alive."""


@pytest.mark.slow
def test_memory_is_given_back_when_all_works_have_ended() -> None:
    works, backend = [Stuck(torch.zeros(8)), Stuck(torch.zeros(8))], Backend()
    memory = [weakref.ref(work.memory) for work in works] + [weakref.ref(backend)]
    keep_until_done(works, backend)
    del backend
    first, second = works
    del works
    first.done = True
    assert let_go() == 0
    gc.collect()
    assert all(item() is not None for item in memory)
    second.done = True
    assert let_go() == 1
    del first, second
    gc.collect()
    assert all(item() is None for item in memory)
    assert let_go() == 0


def test_another_stuck_group_is_kept_on() -> None:
    one, other = Stuck(torch.zeros(8)), Stuck(torch.zeros(8))
    keep_until_done([one])
    keep_until_done([other])
    one.done = True
    assert let_go() == 1
    other.done = True
    assert let_go() == 1

"""Memory that a joiner takes before the others wait for it."""

from __future__ import annotations

import ctypes
import math
import os

import torch

from springtide.memory.ready import ReadyMemory

NUMBERS = 16 << 20
"""A number of float32 elements: so large a tensor always gets memory of its own from the system."""


def resident(tensor: torch.Tensor) -> float:
    """Return which part of a tensor's pages lies in memory; see mincore(2).

    The memory of the whole process says less: another test may have left a heap that holds as much, free.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    start = tensor.data_ptr() // page * page
    length = tensor.data_ptr() + tensor.nbytes - start
    pages = (ctypes.c_ubyte * math.ceil(length / page))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) == 0
    return sum(state & 1 for state in pages) / len(pages)


def test_pages_are_there_before_anybody_writes() -> None:
    form = torch.empty(NUMBERS)
    ready = ReadyMemory()
    ready.make([form])
    assert ready.nbytes == 4 * NUMBERS
    taken = ready.take(form, torch.float32)
    assert taken is not None
    assert resident(taken) == 1.0


def test_memory_that_nobody_takes_is_given_back() -> None:
    form, ready = torch.empty(NUMBERS), ReadyMemory()
    ready.make([form])
    ready.clear()
    assert ready.nbytes == 0
    assert ready.take(form, torch.float32) is None


def test_memory_fits_the_form_and_goes_once() -> None:
    ready, form = ReadyMemory(), torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ready.make([form])
    assert ready.take(form, torch.float64) is None
    assert ready.take(form.contiguous(), torch.float32) is None
    taken = ready.take(form, torch.float32)
    assert taken is not None
    assert (taken.shape, taken.stride()) == (form.shape, form.stride())
    assert ready.take(form, torch.float32) is None

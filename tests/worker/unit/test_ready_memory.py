"""Memory that a joiner takes before the others wait for it."""

from __future__ import annotations

from pathlib import Path

import torch

from springtide.memory.ready import ReadyMemory

NUMBERS = 16 << 20
"""A number of float32 elements: so large a tensor always gets memory of its own from the system."""


def resident() -> int:
    """Return the bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pages_are_there_before_anybody_writes() -> None:
    form = torch.empty(NUMBERS)
    ready, before = ReadyMemory(), resident()
    ready.make([form])
    assert resident() - before >= 4 * NUMBERS
    assert ready.nbytes == 4 * NUMBERS
    ready.clear()
    assert resident() - before < 2 * NUMBERS


def test_memory_fits_the_form_and_goes_once() -> None:
    ready, form = ReadyMemory(), torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ready.make([form])
    assert ready.take(form, torch.float64) is None
    assert ready.take(form.contiguous(), torch.float32) is None
    taken = ready.take(form, torch.float32)
    assert taken is not None
    assert (taken.shape, taken.stride()) == (form.shape, form.stride())
    assert ready.take(form, torch.float32) is None

"""Random numbers belong to (seed, step, part), so nothing random is ever transferred or rolled back."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch

from springtide.data.mixing import mix, signed


def seed_part(seed: int, step: int, part: int) -> None:
    """Seed torch (CPU, and CUDA once in use), numpy (if imported) and `random` for one part of one step.

    Called at the start of each part, so that a step that is done again draws the same numbers.

    Args:
        seed: of the loop.
        step: number that the step would be committed under.
        part: number of the part in the step.
    """
    value = mix(seed, step, part)
    torch.default_generator.manual_seed(signed(value))
    # Not torch.manual_seed: before CUDA is in use it queues a call each time.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(signed(value))
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


def seed_host(*names: int) -> None:
    """Seed torch's generator of the CPU, numpy (if imported) and `random`, for one sample that is read.

    Args:
        names: of the sample; the same names give the same numbers in any process.
    """
    value = mix(*names)
    torch.default_generator.manual_seed(signed(value))
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


@contextlib.contextmanager
def isolated(*names: int) -> Iterator[None]:
    """Random numbers that belong to `names`; afterwards those outside go on as if nothing had been drawn.

    Of torch's generators (CPU, and CUDA once in use), numpy (if imported) and `random`.
    """
    numpy = sys.modules.get("numpy")
    before = torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.get_rng_state_all() if cuda else []
    value = mix(*names)
    torch.default_generator.manual_seed(signed(value))
    if cuda:
        torch.cuda.manual_seed_all(signed(value))
    random.seed(value)
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        if cuda:
            torch.cuda.set_rng_state_all(devices)
        random.setstate(before[1])
        if numpy is not None:
            numpy.random.set_state(before[2])

"""Random numbers belong to (seed, step, part), so nothing random is ever transferred or rolled back."""

from __future__ import annotations

import random
import sys

import torch

from springtide.data.mixing import mix, signed


def seed_part(seed: int, step: int, part: int) -> None:
    """Seed torch (CPU, and CUDA once in use), numpy (if imported) and `random` for one part of one step.

    Called at the start of each part, so that a step that is done again draws the same numbers.
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

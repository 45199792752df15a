"""The parts of a checkpoint that the members of a simulated sharded job write, and optimizers for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sharding_world import Member, World

POSITIONS = {index: 2 * index + 1 for index in range(7)}


def sgd(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum: its state has no count of steps."""
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def asgd(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return averaged SGD: three single numbers for each parameter."""
    return torch.optim.ASGD(parameters, lr=0.125, t0=1)


def parts_of(world: World, writers: Sequence[int]) -> list[Any]:
    """Return the writers' parts."""
    found: dict[int, Any] = {}

    def write(member: Member, group: Any) -> None:
        member.home.settle(None)
        if group.rank in writers:
            found[group.rank] = member.home.snapshot(group.rank, writers, POSITIONS)
        else:
            # All members describe their states to each other.
            member.home.snapshot(group.rank, range(group.size), POSITIONS)

    world.each(write)
    return [found[rank].collect(number, len(writers)) for number, rank in enumerate(writers)]

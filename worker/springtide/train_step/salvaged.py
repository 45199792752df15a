"""The gradients that a worker keeps of a step that was dropped, for the next try at the same step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from springtide.data.salvage import Carried
from springtide.exact.parts import PartContribution

MOST = 0.005
"""The part of a step's time that copies of gradients may take at most."""
LOSS_EVERY_SECONDS = 600.0
"""How often a job is thought to lose a member."""
BYTES_PER_SECOND = 3e9
"""The speed at which a CPU copies gradients, before it is measured."""
DEVICE_BYTES_PER_SECOND = 3e11
ROOM_FACTOR = 3
"""How many times as much memory as copies take has to be free for them."""


@dataclass(frozen=True, slots=True)
class Salvaged:
    """The sums of all gradients that a worker has computed, and what goes with them.

    Attributes:
        account: of the samples.
        sums: by bucket, weighted; float32 or as the gradients are; int32 in exact mode.
        used: by parameter, whether there is a gradient.
        buffers: by number, those that the forward passes have moved.
        reports: values that the script has reported, with their weights, by name.
        seconds: that all of it has taken.
        parts: in exact mode, the finished logical parts.
    """

    account: Carried
    sums: Sequence[torch.Tensor]
    used: Sequence[bool]
    buffers: Mapping[int, torch.Tensor]
    reports: Mapping[str, Sequence[tuple[float, float]]]
    seconds: float
    parts: Sequence[PartContribution] = field(default=())

    @property
    def samples(self) -> int:
        """Return how many samples have been computed."""
        return self.account.ids.numel() + sum(part.ids.samples for part in self.parts)


@dataclass(frozen=True, slots=True)
class BeforeLast:
    """The account of what a body has computed when its last micro-batch begins, without the gradients.

    Attributes:
        account: of the samples.
        buffers: as in `Salvaged`.
        reports: as in `Salvaged`.
        seconds: that all of it has taken.
    """

    account: Carried
    buffers: Mapping[int, torch.Tensor]
    reports: Mapping[str, Sequence[tuple[float, float]]]
    seconds: float


def copies_pay(size: int, step_seconds: float, parts: int, copying_seconds: float, device: str) -> bool:
    """Return whether gradients are to be copied before they leave, so that a drop after that loses nothing.

    They are if that takes less time than what it saves, where a member is lost every ten minutes.

    Args:
        size: of the gradients, bytes.
        step_seconds: that a step takes; 0: not known yet.
        parts: micro-batches of a step, all but the last of which are kept anyway.
        copying_seconds: that the copies of a step took; 0: not known.
        device: type of the device that has them.
    """
    if device == "cpu":
        takes = copying_seconds or size / BYTES_PER_SECOND
    else:  # the calls alone take no time there
        takes = max(copying_seconds, size / DEVICE_BYTES_PER_SECOND)
    saves = step_seconds / parts
    return takes <= min(MOST * step_seconds, saves * step_seconds / LOSS_EVERY_SECONDS)


def has_room(size: int, left: int | None) -> bool:
    """Return whether there is memory for copies of gradients.

    Args:
        size: of the gradients, bytes.
        left: free memory, bytes; None: not bounded.
    """
    return left is None or left >= ROOM_FACTOR * size

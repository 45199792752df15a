"""Learning-rate schedulers of a worker that computes only some of the steps: the rate is that of the step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.amp import GradScaler
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from springtide.errors import UsageError


class Schedules:
    """The schedulers that `distribute()` was given.

    The script steps them in its bodies; for each range that another worker took they are stepped as often as
    in the last body of this one. They never go back: a range that is taken over late is computed with the
    present rate. Raise UsageError for tracked objects of other kinds.
    """

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        # A scaler's scale is this worker's own, and what others took is not in it.
        tracked = {name: item for name, item in tracked.items() if not isinstance(item, GradScaler)}
        for name, item in tracked.items():
            if not isinstance(item, LRScheduler) or isinstance(item, ReduceLROnPlateau):
                raise UsageError(
                    f"distribute(): {name} is a {type(item).__name__}, which would differ from worker to "
                    "worker where strategy.parameterServer.consistency is not Synchronous: leave it out, or "
                    "use Synchronous. Schedulers that need no measured value are fine"
                )
        self._items: list[LRScheduler] = list(tracked.values())
        for item in self._items:
            count_of(item)
        self._at: list[int] = []
        self._each: list[int] | None = None
        """Steps of each scheduler in a body; None before the first one."""

    def go_to(self, number: int) -> None:
        """The next body is that of this range."""
        if self._each is not None:
            with warnings.catch_warnings():
                # This worker may have computed nothing so far.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                for item, each in zip(self._items, self._each, strict=True):
                    # A scheduler makes a first step of its own when it is made.
                    for _ in range(1 + each * number - count_of(item)):
                        item.step()
        self._at = [count_of(item) for item in self._items]

    def told(self) -> list[float]:
        """What this worker knows of the steps in a body, for the sum over all members: 1 and the steps of
        each scheduler, or zeros."""
        return [0.0] * (1 + len(self._items)) if self._each is None else [1.0, *map(float, self._each)]

    def hear(self, sums: Sequence[float]) -> None:
        """The sums of what all members have told: who has computed no body yet learns from the others."""
        if self._each is None and sums[0]:
            self._each = [round(each / sums[0]) for each in sums[1:]]

    def stepped(self) -> None:
        """The body of that range has ended."""
        self._each = [count_of(item) - at for item, at in zip(self._items, self._at, strict=True)]


def count_of(item: LRScheduler) -> int:
    """How often it was stepped, its making included. Raise UsageError for one that does not say."""
    if isinstance(item, SequentialLR):
        return item.last_epoch + 1
    if isinstance(item, ChainedScheduler):  # steps all of its own at once
        return count_of(item._schedulers[0])
    count = getattr(item, "_step_count", None)
    if count is None:
        raise UsageError(
            f"distribute(): {type(item).__name__} does not count its steps as torch's schedulers do: call "
            "LRScheduler.__init__() in its own, or use strategy.parameterServer.consistency Synchronous"
        )
    return int(count)

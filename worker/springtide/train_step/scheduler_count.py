"""How often a learning-rate scheduler was stepped, of those too that do not count it themselves.

torch's count is kept by `LRScheduler.step()`. A class with a `step` of its own need not call that one (a
warm-up that hands over to another scheduler does not), so its calls are counted here, and the count is part
of its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    LRScheduler,
    SequentialLR,
)

from springtide.errors import UsageError

_KEY = "springtide_steps"


class _CountingScheduler:
    """Counts the steps of a scheduler, as the first base of a class that is derived from the script's own."""

    def __init_subclass__(cls) -> None:
        """Skip the checks that the script's class makes of classes derived from it: this one is ours."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        super().step(*args, **kwargs)  # type: ignore[misc]
        vars(self)[_KEY] += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), _KEY: vars(self)[_KEY]}  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict)
        count = state.pop(_KEY, None)
        super().load_state_dict(state)  # type: ignore[misc]
        # Who kept this state did not count.
        vars(self)[_KEY] = _by_torch(self) or 1 if count is None else count


def count_steps(tracked: Iterable[Any]) -> None:
    """Have each scheduler among the tracked objects count its steps from now on."""
    for item in tracked:
        if isinstance(item, LRScheduler) and not isinstance(item, _CountingScheduler) and not _counts(item):
            vars(item)[_KEY] = _by_torch(item) or 1
            item.__class__ = type(
                type(item).__name__, (_CountingScheduler, type(item)), {"__doc__": item.__doc__}
            )


def count_of(item: LRScheduler) -> int:
    """How often it was stepped, its making included. Raise UsageError for one that does not say."""
    if isinstance(item, _CountingScheduler):
        return int(vars(item)[_KEY])
    count = _by_torch(item)
    if not count:
        raise UsageError(
            f"distribute(): {type(item).__name__} does not count its steps as torch's schedulers do: call "
            "LRScheduler.__init__() in its own, or use strategy.parameterServer.consistency Synchronous"
        )
    return count


def _counts(item: LRScheduler) -> bool:
    if isinstance(item, ChainedScheduler):
        return _counts(item._schedulers[0])
    return type(item).step.__module__ == lr_scheduler.__name__


def _by_torch(item: Any) -> int:
    """Return the number of steps that torch has counted, the one at its making included; 0 if it has none."""
    if isinstance(item, SequentialLR | CosineAnnealingWarmRestarts):
        return int(item.last_epoch) + 1
    if isinstance(item, ChainedScheduler):  # steps all of its own at once
        return _by_torch(item._schedulers[0])
    return int(getattr(item, "_step_count", 0))

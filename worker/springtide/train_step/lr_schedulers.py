"""Learning-rate schedulers of a worker that computes only some of the steps: the rate is that of the step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.amp import GradScaler
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, ReduceLROnPlateau

from springtide.errors import UsageError
from springtide.train_step.scheduler_count import count_of, count_steps


class Schedules:
    """The schedulers that `distribute()` was given.

    The script steps them in its bodies; for each range that another worker took they are stepped as often as
    in the bodies of this one. Where that differs from body to body (one steps at an epoch's last batch), what
    others have stepped is known, and made up for, when all meet at the epoch's end. They never go back: a
    range that is taken over late is computed with the present rate, and its body, whose steps have been made,
    makes none. Raise UsageError for tracked objects of other kinds.
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
        count_steps(self._items)
        for item in self._items:
            count_of(item)
        self._at: list[int] = []
        self._each: list[int] | None = None
        """Steps of each scheduler in a body; None before the first one."""
        self._differs = False
        """Bodies have made different numbers of steps: where others stepped is heard when all meet."""
        self._begun: list[int] | None = None
        """Counts at the epoch's begin; None: this worker was not there."""
        self._own = [0] * len(self._items)
        """Steps in this worker's bodies of the epoch."""
        self._newest = -1
        """The last of the ranges of the epoch that this worker has gone to."""
        self._late = False
        """The present body is that of a range before it."""

    def begin(self) -> None:
        """A worker stands at the epoch's begin; or all do, and hold the same."""
        self._let_step()
        self._newest = -1
        self._begun, self._own = self._counts(), [0] * len(self._items)

    def begin_once(self) -> None:
        """Call `begin` if this worker has been at no epoch's begin so far."""
        if self._begun is None:
            self.begin()

    def go_to(self, number: int) -> None:
        """The next body is that of this range."""
        self._let_step()
        if self._each is not None and not self._differs:
            # A scheduler makes a first step of its own when it is made.
            self._step_up_to([1 + each * number for each in self._each])
            self._late = number < self._newest
        self._newest = max(self._newest, number)
        self._at = self._counts()
        if self._late:
            for item in self._items:
                item.__class__ = _resting(type(item))

    def report_steps(self) -> list[float]:
        """Return what this worker knows of the steps in bodies; `take_reports` takes its sum over all
        members.
        """
        self._let_step()
        each, begun, own = self._each, self._begun, self._own
        nothing = [0] * len(self._items)
        if begun is not None:  # what was restored has fewer steps
            begun = [min(one, count) for one, count in zip(begun, self._counts(), strict=True)]
            own = [min(one, now - at) for one, now, at in zip(own, self._counts(), begun, strict=True)]
        told = [each is not None, self._differs, *(each or nothing), *(one * one for one in each or nothing)]
        return [float(value) for value in (*told, *own, begun is not None, *(begun or nothing))]

    def take_reports(self, sums: Sequence[float]) -> None:
        """Take the sums of all members' reports at the epoch's end.

        A worker that has computed no body yet learns from the others how often one steps. Where bodies
        differ, a scheduler has made the steps of all of them.
        """
        width, (known, differ) = len(self._items), sums[:2]
        each, squares, own = (sums[2 + width * n :][:width] for n in range(3))
        there, *begun = sums[2 + 3 * width :]
        alike = all(known * square == total * total for total, square in zip(each, squares, strict=True))
        self._differs = self._differs or differ > 0 or not alike
        if self._differs:
            if there:
                self._step_up_to([round(at / there + made) for at, made in zip(begun, own, strict=True)])
        elif self._each is None and known:
            self._each = [round(total / known) for total in each]

    def stepped(self, counts: bool = True) -> None:
        """The body of that range has ended. counts: no other worker counts its steps.

        Raise UsageError for a scheduler that the script moves to places between its steps.
        """
        for item in self._items:
            if isinstance(item, CosineAnnealingWarmRestarts) and item.T_cur != int(item.T_cur):
                raise UsageError(
                    "CosineAnnealingWarmRestarts.step(epoch) with fractions of an epoch: where the ranges in "
                    "between are other workers', the rate would be that of an earlier one. Give T_0 in steps "
                    "and call step() in each body, or use strategy.parameterServer.consistency Synchronous"
                )
        each = [now - at for now, at in zip(self._counts(), self._at, strict=True)]
        if self._late and self._each is not None:
            each = self._each
        self._let_step()
        self._differs = self._differs or self._each not in (None, each)
        self._each = each
        if counts:
            self._own = [own + more for own, more in zip(self._own, each, strict=True)]

    def _let_step(self) -> None:
        """The body of a late range has ended, or was left."""
        self._late = False
        for item in self._items:
            if isinstance(item, _Resting):
                item.__class__ = type(item).__mro__[2]

    def _counts(self) -> list[int]:
        return [count_of(item) for item in self._items]

    def _step_up_to(self, counts: Sequence[int]) -> None:
        with warnings.catch_warnings():
            # This worker may have computed nothing so far.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for item, count in zip(self._items, counts, strict=True):
                for _ in range(count - count_of(item)):
                    item.step()


class _Resting:
    """A scheduler that makes no steps is of a class of its own, which its `state_dict()` knows nothing of."""

    def __init_subclass__(cls) -> None:
        """Skip the checks that a script's class makes of classes derived from it: this one is ours."""

    def step(self, *_: object, **__: object) -> None:
        """Do nothing, since no step is due."""


def _resting(kind: type[LRScheduler]) -> type[LRScheduler]:
    return type(kind.__name__, (_Resting, kind), {})

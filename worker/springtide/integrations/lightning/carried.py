"""The counts of a Lightning Trainer, as a part of the job's committed state beside the model.

It changes between two steps only, alike on all workers, so a worker that joins, or a job that begins again
from a checkpoint, goes on with the same counts, logged values and states of callbacks.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import torch

from springtide.comm.codec import flatten
from springtide.elastic.evaluation import Evaluations
from springtide.errors import UsageError
from springtide.integrations.lightning.logged import load_results, results_state

if TYPE_CHECKING:
    import lightning.pytorch as pl


_LEFT_OUT = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Attributes of a ModelCheckpoint that say what is saved already, and that its own state leaves out: a worker
that joins after the last step would save once more, and ask others who do not.
"""


class Progress:
    """Give and take the counts of a Trainer, as an object that `distribute()` tracks."""

    def __init__(self, trainer: pl.Trainer, evaluations: Evaluations) -> None:
        """Make it for one trainer.

        Args:
            trainer: whose loops, values and callbacks are read and written.
            evaluations: of the process, which counts those of each state.
        """
        self._trainer, self._evaluations = trainer, evaluations
        self._numbers: dict[str, tuple[torch.Tensor, float]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as text, and the states of callbacks and of the data module as they give them."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        now = {
            "counts": [_numbers_of(item) for item in self._counters()],
            "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "validated": trainer.fit_loop.epoch_loop.val_loop._has_run,
            "should_stop": trainer.should_stop,
            "results": results_state(trainer.fit_loop.epoch_loop._results),
            "values": [
                self._floats("callback", connector._callback_metrics),
                self._floats("logged", connector._logged_metrics),
                self._floats("shown", connector._progress_bar_metrics),
            ],
            "place": [connector._first_loop_iter, connector._current_fx],
            "evaluations": self._evaluations.begun,
            "saved": [
                {name: getattr(item, name) for name in _LEFT_OUT if hasattr(item, name)}
                for item in trainer.checkpoint_callbacks
            ],
        }
        return {
            "now": json.dumps(now),
            "of": {name: item.state_dict() for name, item in self._owners().items()},
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take the counts of another worker, of a checkpoint, or those from before a dropped step.

        Args:
            values: of `state_dict`.
        """
        trainer, connector = self._trainer, self._trainer._logger_connector
        own, now = self.state_dict(), json.loads(values["now"])
        for item, numbers in zip(self._counters(), now["counts"], strict=True):
            item.load_state_dict(numbers)
        trainer.fit_loop.epoch_loop._batches_that_stepped = now["stepped"]
        trainer.fit_loop.epoch_loop.val_loop._has_run = now["validated"]
        trainer.should_stop = now["should_stop"]
        load_results(trainer.fit_loop.epoch_loop._results, now["results"], trainer.lightning_module)
        callback, logged, shown = now["values"]
        connector._callback_metrics = {name: torch.tensor(value) for name, value in callback.items()}
        connector._logged_metrics = {name: torch.tensor(value) for name, value in logged.items()}
        connector._progress_bar_metrics = shown
        connector._first_loop_iter, connector._current_fx = now["place"]
        step, evaluations, errands = now["evaluations"]
        self._evaluations.count_from((step, evaluations, errands))
        saved = now.get("saved", [])  # a state of an earlier release has none
        for item, attributes in zip(trainer.checkpoint_callbacks, saved, strict=bool(saved)):
            vars(item).update(attributes)
        for name, owner in self._owners().items():
            if not _same(own["of"][name], values["of"][name]):
                owner.load_state_dict(copy.deepcopy(values["of"][name]))

    def check(self) -> None:
        """Raise UsageError for a state of a callback or data module that cannot be given to other workers."""
        try:
            flatten(self.state_dict()["of"], "state_dict()")
        except TypeError as error:
            raise UsageError(f"SpringtideStrategy: a callback's or data module's {error}") from None

    def _owners(self) -> dict[str, Any]:
        """Return callbacks and the data module, by a name that is the same in all workers."""
        items = [*self._trainer.callbacks, *([self._trainer.datamodule] if self._trainer.datamodule else [])]
        return {f"{type(item).__name__}_{number}": item for number, item in enumerate(items)}

    def _counters(self) -> list[Any]:
        loop = self._trainer.fit_loop
        return [
            loop.epoch_progress,
            loop.epoch_loop.batch_progress,
            loop.epoch_loop.scheduler_progress,
            loop.epoch_loop.automatic_optimization.optim_progress,
            loop.epoch_loop.manual_optimization.optim_step_progress,
            loop.epoch_loop.val_loop.batch_progress,
        ]

    def _floats(self, kind: str, values: dict[str, Any]) -> dict[str, float]:
        """Return the values as numbers, of which those on a device are fetched once."""
        found = {}
        for name, value in values.items():
            known = self._numbers.get(f"{kind} {name}")
            if isinstance(value, torch.Tensor):
                if known is None or known[0] is not value:
                    known = self._numbers[f"{kind} {name}"] = value, float(value)
                found[name] = known[1]
            else:
                found[name] = float(value)
        return found


def _numbers_of(progress: Any) -> Any:
    """Return the numbers of one of Lightning's counters, which has others inside."""
    if isinstance(progress, int | bool):
        return progress
    return {name: _numbers_of(value) for name, value in vars(progress).items()}


def _same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, tensors in them by their values."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            return False
        return one.shape == other.shape and bool((one.cpu() == other.cpu()).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)

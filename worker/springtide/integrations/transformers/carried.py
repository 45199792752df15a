"""The counts of a Trainer, as a part of the job's committed state beside the model and the optimizer.

It changes between two steps only, alike on all workers, so a worker that joins, or a job that begins again
from a checkpoint, goes on with the same counts, logs and states of callbacks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from transformers.trainer_callback import ExportableState

from springtide.elastic.evaluation import Evaluations

if TYPE_CHECKING:
    import torch
    from transformers import TrainerControl, TrainerState

_OWN = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "log_history")
"""Fields of TrainerState that are this process's, or are carried in another way."""


class Carrier(Protocol):
    """A Trainer, as far as it is carried."""

    state: TrainerState
    control: TrainerControl
    callback_handler: Any
    _tr_loss: torch.Tensor
    _total_loss_scalar: float
    _globalstep_last_logged: int


class Progress:
    """Give and take the counts of a Trainer, as an object that `distribute()` tracks."""

    def __init__(self, trainer: Carrier, evaluations: Evaluations) -> None:
        """Make it for one trainer.

        Args:
            trainer: whose attributes are read and written; its state and control stay the same objects.
            evaluations: of the process, which counts those of each state.
        """
        self._trainer, self._evaluations = trainer, evaluations
        self.begun = False
        """Training has begun in the job: what is done once at its begin is done."""
        self._history: tuple[int, str] = 0, "[]"

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as text: it is taken before each step, and nobody changes a text in place."""
        trainer = self._trainer
        counts = {name: value for name, value in vars(trainer.state).items() if name not in _OWN}
        now = {
            "state": counts,
            "control": vars(trainer.control),
            "callbacks": [callback.state() for callback in exportable(trainer)],
            "logged": [float(trainer._tr_loss), trainer._total_loss_scalar, trainer._globalstep_last_logged],
            "begun": self.begun,
            "evaluations": self._evaluations.begun,
        }
        history = trainer.state.log_history
        if len(history) != self._history[0]:
            self._history = len(history), json.dumps(history, default=_plain)
        return {"now": json.dumps(now, default=_plain), "history": self._history[1]}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take the counts of another worker, of a checkpoint, or those from before a dropped step.

        Args:
            values: of `state_dict`.
        """
        trainer, now = self._trainer, json.loads(values["now"])
        vars(trainer.state).update(now["state"])
        vars(trainer.control).update(now["control"])
        for callback, state in zip(exportable(trainer), now["callbacks"], strict=True):
            vars(callback).update(vars(type(callback).from_state(state)))
        loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = now["logged"]
        trainer._tr_loss.fill_(loss)
        self.begun = now["begun"]
        step, evaluations, errands = now["evaluations"]
        self._evaluations.count_from((step, evaluations, errands))
        if values["history"] != self._history[1]:
            trainer.state.log_history[:] = json.loads(values["history"])
            self._history = len(trainer.state.log_history), values["history"]
        elif len(trainer.state.log_history) != self._history[0]:
            trainer.state.log_history[:] = json.loads(values["history"])

    def show_callbacks(self) -> None:
        """Write the states of callbacks into the Trainer's state, as its file has them."""
        found: dict[str, Any] = {}
        for item in (*exportable(self._trainer), self._trainer.control):
            name = type(item).__name__
            earlier = found.get(name)
            if earlier is None:
                found[name] = item.state()
            else:
                found[name] = [*(earlier if isinstance(earlier, list) else [earlier]), item.state()]
        self._trainer.state.stateful_callbacks = found


def exportable(trainer: Carrier) -> list[Any]:
    """Return the callbacks that say what of them has to be kept, in their order."""
    return [
        callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ExportableState)
    ]


def _plain(value: Any) -> Any:
    """Return a number of numpy's or torch's as one of Python's, and all else as text."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        return str(value)

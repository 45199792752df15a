"""Give the parts of the library the trainer that `distribute()` makes."""

from __future__ import annotations

from springtide.errors import UsageError
from springtide.train_step.trainer import Trainer
from springtide.train_step.transaction import Phase


class TrainerAccess:
    """Hold the trainer from `distribute()` on. Any thread may read it."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer | None:
        """Return the trainer; None before `distribute()`."""
        return self._trainer

    def install(self, trainer: Trainer) -> None:
        """Take the trainer of the script's models."""
        self._trainer = trainer

    def require(self, call: str) -> Trainer:
        """Return the trainer. Raise UsageError, which names the call, before `distribute()`."""
        if self._trainer is None:
            raise UsageError(
                f"{call} before springtide.distribute(): call model, optimizer = "
                "springtide.distribute(model, optimizer) first"
            )
        return self._trainer

    @property
    def in_body(self) -> bool:
        """Return whether the script's thread is in the body of a step."""
        trainer = self._trainer
        return trainer is not None and (trainer.transaction.phase is not Phase.IDLE or trainer.past.is_open)

    def waiting_since(self) -> float | None:
        """Return the monotonic time since when a reduction is being waited for; None without one."""
        return None if self._trainer is None else self._trainer.waiting_since

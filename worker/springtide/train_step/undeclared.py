"""Optimizers and scalers that take part in a body without having been declared: the other workers would not
know what they do, and an undo would not reach them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from springtide.errors import UsageError
from springtide.train_step.grad_scaler import watch
from springtide.train_step.transaction import Phase, Transaction

DECLARE = (
    "For several optimizers, several steps, or step(closure), declare them as lists: "
    "distribute([model, ...], [optimizer, ...])"
)


class UndeclaredOptimizers:
    """Looks at every optimizer step and every GradScaler of this process while a body runs.

    begin, end: a body of the calling thread. Other threads are not looked at.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Sequence[torch.amp.GradScaler],
        transaction: Transaction,
    ) -> None:
        self._optimizers = {id(optimizer) for optimizer in optimizers}
        self._scalers = {id(scaler) for scaler in scalers}
        self._transaction = transaction
        self._thread: int | None = None
        self._handle = register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_step(optimizer))
        self._stop_watching = watch(self._before_unscale)

    def begin(self) -> None:
        self._thread = threading.get_ident()

    def end(self) -> None:
        self._thread = None

    def close(self) -> None:
        self._handle.remove()
        self._stop_watching()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if threading.get_ident() != self._thread or id(optimizer) in self._optimizers:
            return
        self._transaction.finish()
        self._transaction.check_alive()
        if self._transaction.phase in (Phase.OPEN, Phase.STEPPING, Phase.STEPPED):
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) that distribute() was not given makes a step "
                f"inside of `with springtide.step()`: the other workers would not know of it. {DECLARE}"
            )

    def _before_unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if threading.get_ident() != self._thread or id(scaler) in self._scalers:
            return
        if id(optimizer) in self._optimizers:
            self._transaction.finish()
            self._transaction.check_alive()
            raise UsageError(
                "a GradScaler that distribute() was not given looks at gradients that are not summed yet: "
                "call distribute(..., scaler=scaler)"
            )

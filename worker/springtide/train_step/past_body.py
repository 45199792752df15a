"""A body of a training loop that the job has ended, in a worker that came later: it runs here, and is undone.

The script's code behind the loop may use what the body makes (`loss`, a counter), so the whole body runs,
with optimizer steps: on this worker's own gradients where it has parameters and optimizer state as plain
PyTorch has them, and without gradients, so that nothing moves, where they are elsewhere. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from springtide.train_step.buffers import Buffers
from springtide.train_step.optimizers import closure_of, parameters_of, with_closure
from springtide.train_step.rollback import Rollback


class PastBody:
    """Take the state at such a body's begin, and restore it at its end. Only the script's thread uses it."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        buffers: Buffers,
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: Mapping[str, Any],
        *,
        is_here: bool,
    ) -> None:
        """Make it for one script.

        Args:
            parameters: that are trained.
            buffers: of the models.
            optimizers: of the script.
            tracked: objects that are put back along.
            is_here: parameters and the optimizers' state are this process's own, so that a step of its own
                can be made and undone.
        """
        self._parameters, self._buffers = parameters, buffers
        self._optimizers, self._tracked, self._is_here = optimizers, tracked, is_here
        self._rollback: Rollback | None = None

    @property
    def is_open(self) -> bool:
        """Return whether such a body runs."""
        return self._rollback is not None

    def begin(self) -> None:
        """Open a body."""
        rollback = Rollback(self._parameters, self._buffers, self._optimizers, self._tracked, multi_step=True)
        rollback.begin()
        for optimizer in self._optimizers:
            # A script may change parameters before its step as well; who holds them elsewhere has no copy.
            (rollback.keep if self._is_here else rollback.expect)(optimizer)
        self._rollback = rollback

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Prepare a step of an optimizer; return other arguments for it, or None.

        Args:
            optimizer: of the script.
            args: of the call, with the optimizer itself, as torch's hooks have them.
            kwargs: of the call.
        """
        if self._is_here:
            return None
        closure = closure_of(args, kwargs)
        if closure is None:
            _forget_gradients(optimizer)
            return None
        return with_closure(args, kwargs, _without_gradients(optimizer, closure))

    def end(self) -> None:
        """Put back what the body has moved. Raise UsageError where that is impossible."""
        rollback, self._rollback = self._rollback, None
        assert rollback is not None
        rollback.put_back()


def _forget_gradients(optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def _without_gradients(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    def evaluate() -> Any:
        loss = closure()
        _forget_gradients(optimizer)
        return loss

    return evaluate

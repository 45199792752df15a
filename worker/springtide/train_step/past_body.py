"""A body of a training loop that the job has ended, in a worker that came later: it runs here, and is undone.

The script's code behind the loop may use what the body makes (`loss`, a counter), so the whole body runs.
While an optimizer steps there are no gradients, so that it moves nothing; they are there again behind it.
Nothing is sent.

Parameters may move all the same (a script that clips its weights). Where they are this process's own, they
are copied to the host's memory, once for all loops that are gone through in one state, and put back where
they have moved: a copy beside them could have no room on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from springtide.errors import UsageError
from springtide.train_step.buffers import Buffers
from springtide.train_step.optimizers import closure_of, parameters_of, with_closure
from springtide.train_step.rollback import Rollback, Snapshot


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
            is_here: parameters are this process's own, not those of servers, of shards or of masters, which
                bring their values anew.
        """
        self._parameters, self._buffers = parameters, buffers
        self._optimizers, self._tracked, self._is_here = optimizers, tracked, is_here
        self._rollback: Rollback | None = None
        self._states: list[dict[Any, Snapshot]] = []
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._versions: list[int] = []
        self._values: tuple[Hashable, list[torch.Tensor]] = None, []
        """Copies of the parameters, and the state that they are of."""

    @property
    def is_open(self) -> bool:
        """Return whether such a body runs."""
        return self._rollback is not None

    def begin(self, state: Hashable) -> None:
        """Open a body.

        Args:
            state: the same for all bodies between which nothing else changes the parameters.
        """
        rollback = Rollback(self._parameters, self._buffers, self._optimizers, self._tracked, multi_step=True)
        rollback.begin()
        for optimizer in self._optimizers:
            rollback.expect(optimizer)  # a script may change parameters where they have a copy
        self._states = [
            {key: Snapshot(value) for key, value in optimizer.state.items()} for optimizer in self._optimizers
        ]
        if self._is_here:
            if self._values[0] != state or not self._values[1]:
                copies = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]
                self._values = state, copies
            self._versions = [parameter._version for parameter in self._parameters]
        self._rollback = rollback

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Prepare a step of an optimizer; return other arguments for it, or None.

        Args:
            optimizer: of the script.
            args: of the call, with the optimizer itself, as torch's hooks have them.
            kwargs: of the call.
        """
        closure = closure_of(args, kwargs)
        if closure is None:
            self._set_aside(optimizer)
            return None
        return with_closure(args, kwargs, self._without_gradients(optimizer, closure))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the parameters back the gradients that they had before a step of their optimizer.

        Args:
            optimizer: of the script.
        """
        for parameter in parameters_of(optimizer):
            if parameter in self._gradients:
                parameter.grad = self._gradients.pop(parameter)

    def end(self) -> None:
        """Put back what the body has moved.

        Raises:
            UsageError: an optimizer has changed large tensors of its state without gradients.
        """
        rollback, self._rollback = self._rollback, None
        assert rollback is not None
        self._gradients.clear()
        rollback.put_back()
        for optimizer, states in zip(self._optimizers, self._states, strict=True):
            if moved := [name for snapshot in states.values() for name in snapshot.moved()]:
                raise UsageError(
                    f"{type(optimizer).__name__} changed {moved[0]!r} of its state in a step without "
                    "gradients, which a worker that joins makes in loops that the job has ended: have step() "
                    "leave out parameters whose grad is None"
                )
            optimizer.state.clear()
            optimizer.state.update({key: snapshot.restored() for key, snapshot in states.items()})
        if self._is_here:
            with torch.no_grad():
                for parameter, value, version in zip(
                    self._parameters, self._values[1], self._versions, strict=True
                ):
                    if parameter._version != version:
                        parameter.copy_(value)

    def forget(self) -> None:
        """Give the copies' memory back: the job's own steps begin."""
        self._values = None, []

    def _set_aside(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._gradients[parameter] = parameter.grad
                parameter.grad = None

    def _without_gradients(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._set_aside(optimizer)
            return loss

        return evaluate

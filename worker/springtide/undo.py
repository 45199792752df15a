"""Putting back what the body of a dropped step has moved: gradients, buffers, and the small state of
optimizer and objects.

Parameters and the optimizer's tensors need no copy: they move only in optimizer.step, after which a step is
never dropped. Large tensors of tracked objects (an average of the weights, say) may move only after
optimizer.step, which is checked.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from springtide.buffers import Buffers
from springtide.errors import UsageError

_SMALL_ELEMENTS = 1 << 16


class Snapshot:
    """A state_dict: plain values and small tensors copied, large tensors by reference with their version."""

    def __init__(self, state: Any) -> None:
        self._large: list[tuple[str, torch.Tensor, int]] = []
        self._state = self._copy(state, "")

    def _copy(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.numel() <= _SMALL_ELEMENTS:
                return value.detach().clone()
            self._large.append((path, value, value._version))
            return value
        if isinstance(value, dict):
            result = copy.copy(value)
            for key, item in value.items():
                result[key] = self._copy(item, f"{path}.{key}" if path else str(key))
            return result
        if isinstance(value, list):
            return [self._copy(item, f"{path}[{number}]") for number, item in enumerate(value)]
        if type(value) is tuple:
            return tuple(self._copy(item, f"{path}[{number}]") for number, item in enumerate(value))
        return copy.deepcopy(value)

    def moved(self) -> list[str]:
        """Large tensors that have changed since."""
        return [path for path, tensor, version in self._large if tensor._version != version]

    def state(self) -> Any:
        """A copy to load."""
        return Snapshot(self._state)._state


class Undo:
    """Takes the state at a body's begin, and restores it when the body is dropped."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        buffers: Buffers,
        optimizer: torch.optim.Optimizer,
        tracked: Mapping[str, Any],
    ) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._optimizer = optimizer
        self._tracked = tracked
        self._groups: list[Snapshot] = []
        self._objects: dict[str, Snapshot] = {}
        self._versions: list[int] = []

    def begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers.remember()
        self._groups = [Snapshot(_hyperparameters(group)) for group in self._optimizer.param_groups]
        self._objects = {name: Snapshot(item.state_dict()) for name, item in self._tracked.items()}
        self._versions = [parameter._version for parameter in self._parameters]

    def check_untouched(self) -> None:
        """Before optimizer.step: raise UsageError if the body changed what cannot be put back."""
        if [parameter._version for parameter in self._parameters] != self._versions:
            raise UsageError(
                "a parameter was changed inside the step before optimizer.step(): change parameters after "
                "optimizer.step(), or outside of the step"
            )
        for name, snapshot in self._objects.items():
            if moved := snapshot.moved():
                raise UsageError(
                    f"the tracked object {name!r} changed {moved[0]} before optimizer.step(): update it "
                    "after optimizer.step()"
                )

    def put_back(self) -> None:
        """Restore the state at `begin`. Raise UsageError if that is impossible."""
        self.check_untouched()
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers.put_back()
        for group, snapshot in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(snapshot.state())
        for name, snapshot in self._objects.items():
            self._tracked[name].load_state_dict(snapshot.state())


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}

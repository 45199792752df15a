"""Putting back what the body of a dropped step has moved: gradients, buffers, and the small state of
optimizer and objects.

Where a body makes one optimizer.step, parameters and the optimizer's tensors need no copy: they move only
there, after which a step is never dropped. Large tensors of tracked objects (an average of the weights, say)
may move only after optimizer.step, which is checked.

Where it makes several, a step may be dropped until its body has ended. Then each optimizer's parameters and
state are copied before its first step of a body, and tracked objects as a whole.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.amp import GradScaler

from springtide.errors import UsageError
from springtide.ps.lazy_values import looking
from springtide.train_step.buffers import Buffers
from springtide.train_step.grad_scaler import ScalerState
from springtide.train_step.optimizers import parameters_of

_SMALL_ELEMENTS = 1 << 16
_PLAIN = frozenset((bool, int, float, str, type(None)))
_VERSION = operator.attrgetter("_version")
_ALWAYS_CHECKED, _CHECK_EVERY = 32, 16
"""A script that changes parameters too early does so from the begin; a look at all of them is not for nothing
where there are hundreds."""


class Snapshot:
    """A state_dict: plain values and small tensors copied, large tensors by reference with their version."""

    def __init__(self, state: Any, whole: bool = False, earlier: Snapshot | None = None) -> None:
        """Take it.

        Args:
            state: the state_dict.
            whole: large tensors are copied too.
            earlier: a snapshot of the same object, which is not used any more: its memory is.
        """
        self._most = None if whole else _SMALL_ELEMENTS
        self._large: list[tuple[str, torch.Tensor, int]] = []
        self._copies: dict[str, torch.Tensor] = {}
        self._earlier = {} if earlier is None else earlier._copies
        self._again: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        if type(state) is dict and all(map(_never_changes, state.values())):
            self._live = self._state = dict(state)  # options of most groups, taken in each step
            return
        self._live = _references(state)
        self._state = self._copy(state, "")
        if self._again[0]:
            # An average of hundreds of tensors: one by one their copies would cost more than the average.
            torch._foreach_copy_(*self._again)
        self._earlier, self._again = {}, ([], [])

    def _copy_of(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        kept = self._earlier.pop(path, None)
        if kept is None or not _alike(kept, tensor):
            kept = tensor.clone()
        else:
            self._again[0].append(kept)
            self._again[1].append(tensor)
        self._copies[path] = kept
        return kept

    def _copy(self, value: Any, path: str) -> Any:
        if type(value) in _PLAIN:
            return value  # most options of most groups: a deepcopy takes ten times as long
        if isinstance(value, torch.Tensor):
            if self._most is None or value.numel() <= self._most:
                return self._copy_of(value.detach(), path)
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
        return Snapshot(self._state, self._most is None)._state

    def restored(self) -> Any:
        """Return the state, made of the tensors that it was taken from, with their values then.

        Code that was compiled or captured with a tensor (a learning rate) goes on with that one.
        """
        with torch.no_grad():
            return _refilled(self._live, self._state)


def _never_changes(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_never_changes, value)))


def _references(value: Any) -> Any:
    """Return containers of their own around the same tensors, for those of `value` may get others."""
    if isinstance(value, dict):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = _references(item)
        return result
    if isinstance(value, list) or type(value) is tuple:
        return type(value)([_references(item) for item in value])
    return value


def _refilled(live: Any, kept: Any) -> Any:
    """Return `kept` with the tensors of `live` in it, which take its values. Containers are new ones."""
    if isinstance(kept, torch.Tensor):
        if live is kept:
            return kept  # a large one, by reference
        if (live.shape, live.dtype, live.device) != (kept.shape, kept.dtype, kept.device):
            return kept.clone()  # changed its form since
        return live.copy_(kept)
    if isinstance(kept, dict):
        result = copy.copy(kept)
        for key, item in kept.items():
            result[key] = _refilled(live[key], item)
        return result
    if isinstance(kept, list) or type(kept) is tuple:
        return type(kept)([_refilled(one, item) for one, item in zip(live, kept, strict=True)])
    return copy.deepcopy(kept)


class OptimizerCopy:
    """An optimizer's parameters and state before its first step of a body."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = parameters_of(optimizer)
        self._values = [parameter.detach().clone() for parameter in self._parameters]
        self._state = {key: Snapshot(value, whole=True) for key, value in optimizer.state.items()}

    def put_back(self) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._values, strict=True):
                parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update({key: snapshot.restored() for key, snapshot in self._state.items()})


class Rollback:
    """Takes the state at a body's begin, and restores it when the body is dropped.

    multi_step: bodies make more than one optimizer step, each announced by `keep`.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        buffers: Buffers,
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: Mapping[str, Any],
        multi_step: bool = False,
    ) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._optimizers = optimizers
        self._tracked = {name: item for name, item in tracked.items() if not isinstance(item, GradScaler)}
        self._scalers = [ScalerState(item) for item in tracked.values() if isinstance(item, GradScaler)]
        self._multi_step = multi_step
        self._groups: list[list[Snapshot]] = []
        self._objects: dict[str, Snapshot] = {}
        self._versions: list[int] = []
        self._expected: set[int] = set()
        """Ids of the parameters that may move: their optimizer is stepping."""
        self._optimizer_copies: dict[int, OptimizerCopy] = {}
        self._bodies = 0

    def begin(self) -> None:
        """Take the state as it is when a body begins."""
        self._bodies += 1
        self._buffers.remember()
        self._groups = [
            [Snapshot(_hyperparameters(group)) for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        self._objects = {
            name: Snapshot(item.state_dict(), self._multi_step, self._objects.get(name))
            for name, item in self._tracked.items()
        }
        for scaler in self._scalers:
            scaler.remember()
        with looking():
            self._versions = list(map(_VERSION, self._parameters))
        self._expected.clear()
        self._optimizer_copies = {}

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to step, and the step may still be dropped afterwards."""
        if id(optimizer) in self._optimizer_copies:
            return
        self._optimizer_copies[id(optimizer)] = OptimizerCopy(optimizer)
        self.expect(optimizer)

    def expect(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer steps elsewhere, from where its parameters are put back, too."""
        self._expected |= {id(parameter) for parameter in parameters_of(optimizer)}

    def check_untouched(self) -> None:
        """Raise UsageError if the body changed something that cannot be put back.

        It is called before an optimizer step. In most bodies parameters are looked at only when they have to
        be put back.
        """
        if self._bodies <= _ALWAYS_CHECKED or self._bodies % _CHECK_EVERY == 0:
            self._check_parameters()
        self._check_objects()

    def _check_parameters(self) -> None:
        with looking():
            versions = list(map(_VERSION, self._parameters))
        if versions != self._versions and any(
            now != before and id(parameter) not in self._expected
            for now, before, parameter in zip(versions, self._versions, self._parameters, strict=True)
        ):
            raise UsageError(
                "a parameter was changed inside the step before optimizer.step(): change parameters after "
                "optimizer.step(), or outside of the step"
            )

    def _check_objects(self) -> None:
        for name, snapshot in self._objects.items():
            if moved := snapshot.moved():
                raise UsageError(
                    f"the tracked object {name!r} changed {moved[0]} before optimizer.step(): update it "
                    "after optimizer.step()"
                )

    def put_back(self) -> None:
        """Restore the state at `begin`. Raise UsageError if that is impossible."""
        self._check_parameters()
        self._check_objects()
        for parameter in self._parameters:
            parameter.grad = None
        for kept in reversed(self._optimizer_copies.values()):
            kept.put_back()
        self._buffers.put_back()
        for optimizer, snapshots in zip(self._optimizers, self._groups, strict=True):
            for group, snapshot in zip(optimizer.param_groups, snapshots, strict=True):
                group.update(snapshot.restored())
        for name, snapshot in self._objects.items():
            self._tracked[name].load_state_dict(snapshot.state())
        for scaler in self._scalers:
            scaler.put_back(self._optimizers)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}

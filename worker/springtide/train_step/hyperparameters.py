"""The options of a script's optimizers, as members compare them before a common step.

A learning rate that follows a worker's own count, or its own loss, makes other steps there than elsewhere:
replicas drift apart without a word. Only what scripts set is compared, not what some optimizers keep among
their options (estimates, sums), and of objects their type: they are written differently in each process.
Tensors count where parameters are on the CPU. Elsewhere a newcomer may have them on the CPU, whence it got
its state, and to look at others would wait for the device. Machines may differ in the last bits of a cosine,
so numbers are equal within a millionth: each is cut to such steps in two ways, and one of them agrees.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

COMPARED: Final = (
    *("lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "alpha", "centered"),
    *("lr_decay", "rho", "amsgrad", "maximize", "lambd", "etas", "step_sizes", "ns_steps"),
)
_FIXED: Final = frozenset([int, float, str, bool, type(None)])
"""Types of values that nobody can change in place."""
_STEPS: Final = 1e6
_HASHES: Final = 1 << 20
_SHOWN_GROUPS: Final = 4


class Hyperparameters:
    """Reads the hyperparameters of these optimizers' groups as they are when it is asked."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._last: tuple[list[Any], tuple[int, int]] = [], hashes([])
        self._seen: list[Any] | None = None
        """The options themselves, as of the last hash, where all of them are plain values."""

    def hashes(self) -> tuple[int, int]:
        """Two numbers below 2^20. Of options that are equal within a millionth, one is (mostly both are)."""
        options = [
            group.get(name)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for name in COMPARED
        ]
        if all(map(_is_fixed, options)):
            if options == self._seen:
                return self._last[1]
            self._seen = options
        else:
            self._seen = None
        found = list(_flat(value for _, value in self._named()))
        if found != self._last[0]:
            self._last = found, hashes(found)
        return self._last[1]

    def described(self) -> str:
        """Return a text for messages: `group 0: lr=0.1, momentum=0.9; group 1: ...`."""
        groups: dict[str, list[str]] = {}
        for where, value in self._named():
            group, _, name = where.rpartition(" ")
            groups.setdefault(group, []).append(f"{name}={value}")
        texts = [f"{group}: {', '.join(values)}" for group, values in groups.items()]
        more = f"; and {len(texts) - _SHOWN_GROUPS} more groups" if len(texts) > _SHOWN_GROUPS else ""
        return "; ".join(texts[:_SHOWN_GROUPS]) + more

    def _named(self) -> Iterator[tuple[str, Any]]:
        for number, optimizer in enumerate(self._optimizers):
            which = f"optimizer {number} " if len(self._optimizers) > 1 else ""
            for place, group in enumerate(optimizer.param_groups):
                for name in COMPARED:
                    value = _plain(group.get(name), group)
                    if value is not None:
                        yield f"{which}group {place} {name}", value


def _is_fixed(value: Any) -> bool:
    kind = type(value)
    return kind in _FIXED or (kind is tuple and all(type(item) in _FIXED for item in value))


def _plain(value: Any, group: Mapping[str, Any]) -> Any:
    """Return a number, a string, or a tuple of such, of a group's option; None for what is not compared."""
    if isinstance(value, torch.Tensor):
        on_host = all(parameter.device.type == "cpu" for parameter in group["params"])
        readable = on_host and value.device.type == "cpu" and value.numel() == 1
        return value.item() if readable else None
    if isinstance(value, tuple | list):
        return tuple(_plain(item, group) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, int | float | str):
        return value
    return type(value).__qualname__


def hashes(values: Iterable[Any]) -> tuple[int, int]:
    """See `Hyperparameters.hashes`. PURE."""
    cuts = [_shape_and_values(value) for value in values]
    first, second = (zlib.crc32(repr([cut[way] for cut in cuts]).encode()) % _HASHES for way in (0, 1))
    return first, second


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _shape_and_values(value: Any) -> tuple[object, object]:
    if not isinstance(value, int | float):
        return str(value), str(value)
    number = float(value)
    if number == 0 or not math.isfinite(number):
        return str(abs(number)), str(abs(number))
    sign, place = math.copysign(1.0, number), math.log(abs(number)) * _STEPS
    return (sign, round(place)), (sign, math.floor(place))

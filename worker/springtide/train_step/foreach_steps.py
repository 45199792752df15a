"""Optimizer steps of many small parameters on the CPU, made by torch's own foreach code.

On the CPU torch goes through the parameters one by one in Python unless it is told `foreach=True`, and for a
small parameter these calls take longer than the numbers. The other way has the same operations in the same
order: the results of the optimizers below are equal bit by bit (a test compares them), those of NAdam, RAdam
and ASGD, or of numbers of 16 bits, are not. It keeps intermediate values of all parameters at once, so large
ones, which would not stay in a cache, are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

_EQUAL: Final = frozenset(
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.Rprop,
    ]
)
_FEWEST, _MOST_BYTES_EACH, _MOST_BYTES = 8, 16 << 10, 4 << 20


class ForeachSteps:
    """Sets `foreach` in an optimizer's groups while it steps. Used from the script's thread.

    A script that has said `foreach=`, `fused=`, `capturable=` or `differentiable=` keeps what it has said.
    """

    def __init__(self) -> None:
        self._fit: dict[tuple[int, int], bool] = {}
        self._set: list[dict[str, Any]] = []

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Set it in the groups of an optimizer that is about to step, where it changes nothing but the time.

        Args:
            optimizer: any; those that are not torch's own are left alone.
        """
        if type(optimizer) not in _EQUAL:
            return
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and is_free(group) and self._fits(group):
                group["foreach"] = True
                self._set.append(group)

    def end(self) -> None:
        """Take back what `begin` has set, so that nobody sees it in the options."""
        for group in self._set:
            group["foreach"] = None
        self._set.clear()

    def _fits(self, group: Mapping[str, Any]) -> bool:
        key = id(group), len(group["params"])
        fits = self._fit.get(key)
        if fits is None:
            fits = self._fit[key] = are_small(group["params"])
        return fits


def are_small(parameters: list[torch.Tensor]) -> bool:
    """Return whether one call for all of these costs less than one for each. PURE."""
    if len(parameters) < _FEWEST:
        return False
    total = sum(parameter.nbytes for parameter in parameters)
    most = min(_MOST_BYTES, _MOST_BYTES_EACH * len(parameters))
    return total <= most and all(map(is_dense_on_cpu, parameters))


def is_dense_on_cpu(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a strided tensor of float32 or float64 in the host's memory. PURE."""
    return (
        parameter.device.type == "cpu"
        and parameter.layout is torch.strided
        and parameter.dtype in (torch.float32, torch.float64)
    )


def is_free(group: Mapping[str, Any]) -> bool:
    """Return whether no option says that a group's steps are made in a way of their own."""
    said = any(group.get(name) for name in ("fused", "capturable", "differentiable"))
    return not said and not any(isinstance(group.get(name), torch.Tensor) for name in ("lr", "weight_decay"))

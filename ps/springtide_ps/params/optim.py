"""Update the values on a server with torch's own optimizers, by name, on flat chunks. PURE.

All of them work element by element, so a chunk of a tensor is updated as the whole tensor would be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from springtide_ps.params.fused import stepper, without_compiler

Step = Callable[[torch.Tensor], None]

# name -> (class, options that may be given, extra arguments)
_OPTIMIZERS: Final[dict[str, tuple[type[torch.optim.Optimizer], frozenset[str], dict[str, Any]]]] = {
    "sgd": (
        without_compiler(torch.optim.SGD),
        frozenset({"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"}),
        {"fused": True},
    ),
    "adam": (
        without_compiler(torch.optim.Adam),
        frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"}),
        {"fused": True},
    ),
    "adamw": (
        without_compiler(torch.optim.AdamW),
        frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"}),
        {"fused": True},
    ),
    "adagrad": (
        without_compiler(torch.optim.Adagrad),
        frozenset({"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"}),
        {"fused": True},
    ),
    "rmsprop": (
        without_compiler(torch.optim.RMSprop),
        frozenset({"lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"}),
        {},
    ),
}
_DIRECT: Final = ("assign", "sum")
NAMES: Final = (*_DIRECT, *_OPTIMIZERS)


class UpdateError(ValueError):
    """An update that does not exist, or options that it does not have."""


@dataclass(frozen=True)
class Update:
    """A named update with its options.

    assign: the push replaces the values. sum: it is added. sgd, adam, adamw, adagrad, rmsprop: the push is a
    gradient for torch's optimizer of that name, with that optimizer's own defaults.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options(self.name, self.options)
        if self.name not in _DIRECT:
            # torch checks what belongs together (nesterov needs momentum, for example).
            self.bind(torch.zeros(1))

    def bind(self, values: torch.Tensor) -> Step:
        """A function that applies one push (same shape and dtype) to `values` in place, with its own state.

        Raise UpdateError when the optimizer cannot work on that dtype.
        """
        if self.name == "assign":
            return lambda pushed: _copy(values, pushed)
        if self.name == "sum":
            return lambda pushed: _add(values, pushed)
        if not values.is_floating_point():
            raise UpdateError(f"{self.name} needs floating point values, not {values.dtype}")
        make_step = stepper(self.make([{"params": [values]}]))

        def step(pushed: torch.Tensor) -> None:
            values.grad = pushed
            make_step()
            values.grad = None

        return step

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer itself over parameter groups, whose own options come before this update's.

        Raise UpdateError for what is no optimizer, or what it does not take.
        """
        if self.name in _DIRECT:
            raise UpdateError(f"{self.name} is no optimizer: choose one of {', '.join(_OPTIMIZERS)}")
        kind, _, extra = _OPTIMIZERS[self.name]
        if self.name == "sgd" and any(t.itemsize < 4 for group in groups for t in group["params"]):
            # Its fused kernel leaves whole vectors of 16-bit values as they are (pytorch/pytorch#191763).
            extra = {}
        options: dict[str, Any] = {k: tuple(v) if k == "betas" else v for k, v in self.options.items()}
        try:
            return kind(groups, **{**options, **extra})
        except (ValueError, TypeError, RuntimeError) as error:
            raise UpdateError(f"{self.name}: {error}") from None


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse an update that does not exist, or an option that it does not have or take.

    Which options have to be together, torch checks where an optimizer is made; a script may change them
    later.

    Args:
        name: of the update.
        options: by name.

    Raises:
        UpdateError: one of them is refused.
    """
    if name not in NAMES:
        raise UpdateError(f"there is no update {name!r}: choose one of {', '.join(NAMES)}")
    allowed = frozenset() if name in _DIRECT else _OPTIMIZERS[name][1]
    if unknown := sorted(set(options) - allowed):
        known = ", ".join(sorted(allowed)) or "none"
        raise UpdateError(f"{name} has no option {', '.join(unknown)}: its options are {known}")
    for key, value in options.items():
        _check_option(name, key, value)


def allowed_options(name: str) -> frozenset[str]:
    """The options of the optimizer of that name. Raise UpdateError when there is none."""
    if name not in _OPTIMIZERS:
        raise UpdateError(f"there is no optimizer {name!r} on servers: {', '.join(_OPTIMIZERS)} are")
    return _OPTIMIZERS[name][1]


def _copy(values: torch.Tensor, pushed: torch.Tensor) -> None:
    values.copy_(pushed)


def _add(values: torch.Tensor, pushed: torch.Tensor) -> None:
    values.add_(pushed)


def _check_option(name: str, key: str, value: object) -> None:
    if key == "betas":
        fine = isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_number(v) for v in value)
        expected = "two numbers"
    elif key in ("nesterov", "maximize", "amsgrad", "centered"):
        fine, expected = isinstance(value, bool), "true or false"
    else:
        fine, expected = _is_number(value), "a finite number"
    if not fine:
        raise UpdateError(f"{name}: {key} is {value!r}, expected {expected}")


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False

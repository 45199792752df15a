"""The script's optimizer as the servers run it. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from springtide.errors import UsageError
from springtide_ps.updates import UpdateError, allowed_options

_NAMES: Final[dict[type[torch.optim.Optimizer], str]] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
}


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The servers' name of the optimizer. Raise UsageError for one that they do not have."""
    name = _NAMES.get(type(optimizer))
    if name is None:
        known = ", ".join(kind.__name__ for kind in _NAMES)
        raise UsageError(
            f"distribute(): parameter servers do not have the optimizer {type(optimizer).__name__}: use one "
            f"of {known}, or strategy.type AllReduce"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise UsageError(
                "distribute(): an optimizer with differentiable=True cannot run on parameter servers"
            )
    try:
        group_options(optimizer)
    except UpdateError as error:
        raise UsageError(f"distribute(): parameter servers refuse the optimizer: {error}") from None
    return name


def group_options(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """The options of each parameter group as they are now, in JSON's types."""
    allowed = allowed_options(_NAMES[type(optimizer)])
    return tuple(
        {name: _plain(value) for name, value in group.items() if name in allowed}
        for group in optimizer.param_groups
    )


def group_numbers(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Parameter group by name of parameter; a parameter that the optimizer does not have is in none."""
    owner = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return {name: owner[id(item)] for name, item in parameters.items() if id(item) in owner}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value

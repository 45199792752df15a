"""How much state the optimizers of torch.optim keep for a parameter, known before their first step. PURE.

Single numbers (counts of steps) are left out: they are a few bytes for a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

Group = Mapping[str, Any]
"""Options of one group of an optimizer's parameters, as `param_groups` has them."""

COPIES: Final[Mapping[type[torch.optim.Optimizer], Callable[[Group], int]]] = {
    torch.optim.SGD: lambda group: int(group["momentum"] != 0),
    torch.optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.AdamW: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.RMSprop: lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]),
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.NAdam: lambda group: 2,
    torch.optim.RAdam: lambda group: 2,
    torch.optim.Adamax: lambda group: 2,
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.ASGD: lambda group: 1,
    torch.optim.Rprop: lambda group: 2,
}
"""By class: how many tensors of a parameter's size and type it keeps for it."""


def known_state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes of state that an optimizer has after its first step; None for one that is not known.

    A class of the script's own is not known, also where it is derived from one that is.
    """
    copies = COPIES.get(type(optimizer))
    if copies is None:
        return None
    total = 0
    for group in optimizer.param_groups:
        total += copies(group) * sum(item.nbytes for item in group["params"] if item.requires_grad)
    return total


def measured_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the tensors that an optimizer keeps now, without single numbers."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )

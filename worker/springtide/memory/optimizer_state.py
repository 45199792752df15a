"""How much state the optimizers of torch.optim keep for a parameter, known before their first step. PURE.

Single numbers (counts of steps) are left out: they are a few bytes for a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from springtide.pods.tensors import local_shard

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
"""Number of tensors of a parameter's size and type that each class keeps for it."""


def known_state_bytes(optimizer: torch.optim.Optimizer, masters: bool = False) -> int | None:
    """Return the bytes of state that an optimizer has after its first step; None for one that is not known.

    A class of the script's own is not known, also where it is derived from one that is.

    Args:
        optimizer: Of the script.
        masters: Parameters of 16 bits have a float32 copy in the state, and the rest of it is float32, too.
    """
    copies = COPIES.get(type(optimizer))
    if copies is None:
        return None
    total = 0
    for group in optimizer.param_groups:
        for item in [local_shard(item) for item in group["params"] if item.requires_grad]:
            if masters and item.dtype in (torch.bfloat16, torch.float16):
                total += (copies(group) + 1) * 4 * item.numel()
            else:
                total += copies(group) * item.nbytes
    return total


def measured_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the tensors that an optimizer keeps now, without single numbers."""
    return sum(
        local_shard(value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )

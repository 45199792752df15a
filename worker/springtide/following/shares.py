"""The state of a model as followers get it: which parameters, in which bunches, and with what beside them.

A bunch is one large parameter, or several small ones, which travel in one frame. Both ends name parameters by
their numbers among the trained ones; a hash of the layout shows that these are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from springtide.comm import codec
from springtide.comm.state_pieces import assign
from springtide.memory.optimizer_state import COPIES

MOST_BUNCH_BYTES: Final = 4 << 20
"""Bytes of the parameters in a bunch of several."""
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    )
}
_PLAIN: Final = (bool, int, float, str, type(None))


def can_follow(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the steps of an optimizer can be made from the gradients alone.

    That is known for those of torch.optim, which step each parameter by itself; not for classes of a script.
    """
    return type(optimizer) in COPIES


def fits(parameter: torch.Tensor) -> bool:
    """Return whether a parameter can travel: it is one stretch of memory of a known type."""
    known = _name(parameter.dtype) in _DTYPES
    return known and parameter.layout is torch.strided and parameter.is_contiguous() and parameter.numel() > 0


def bunches(sizes: Sequence[int], share: int, count: int) -> list[list[int]]:
    """Return the bunches of one share. PURE.

    Args:
        sizes: bytes of each parameter; 0 for one that does not travel.
        share: number of the share, from 0.
        count: of shares, which are about equal.

    Returns:
        Numbers of the share's parameters, in bunches.
    """
    owners = assign(sizes, [True] * len(sizes), count)
    found: list[list[int]] = []
    filled = MOST_BUNCH_BYTES
    for number, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        if owner != share or not size:
            continue
        if filled + size > MOST_BUNCH_BYTES:
            found.append([])
            filled = 0
        found[-1].append(number)
        filled += size
    return found


@dataclass(frozen=True, slots=True)
class Described:
    """A parameter with its state: a description of JSON's types, and the tensors in its order."""

    description: dict[str, Any]
    tensors: list[torch.Tensor]


def describe(number: int, parameter: torch.Tensor, state: Mapping[str, Any]) -> Described | None:
    """Describe a parameter and the optimizer's state of it; None for a state that cannot travel.

    Args:
        number: of the parameter.
        parameter: contiguous.
        state: of the optimizer.
    """
    tensors, entries = [parameter.detach()], []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            if not value.is_contiguous() or _name(value.dtype) not in _DTYPES:
                return None
            tensors.append(value.detach())
            entries.append(
                {
                    "key": key,
                    "dtype": _name(value.dtype),
                    "shape": list(value.shape),
                    "host": value.device.type == "cpu",
                }
            )
        elif isinstance(value, _PLAIN):
            entries.append({"key": key, "value": value})
        else:
            return None
    return Described({"number": number, "state": entries}, tensors)


def form_of(
    entry: Mapping[str, Any], parameter: torch.Tensor
) -> tuple[torch.dtype, torch.Size, torch.device]:
    """Return dtype, shape and device of a described tensor.

    Args:
        entry: of `Described.description`.
        parameter: that it belongs to, as it is here.

    Raises:
        ValueError: it is none that `describe` makes.
    """
    dtype, shape = _DTYPES.get(str(entry.get("dtype"))), entry.get("shape")
    if dtype is None or not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError("a tensor of the optimizer's state is described as nothing that there is")
    device = torch.device("cpu") if entry.get("host") else parameter.device
    size = torch.Size(shape)
    if size.numel() > max(1, parameter.numel()):
        raise ValueError("a tensor of the optimizer's state is larger than its parameter")
    return dtype, size, device


def plain_options(group: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an optimizer's options for a group of parameters, as JSON has them; None if they are not plain.

    Args:
        group: of `param_groups`.
    """
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name == "params":
            continue
        items = value if isinstance(value, tuple | list) else [value]
        if not all(isinstance(item, _PLAIN) for item in items):
            return None
        found[name] = value
    return found


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes, one-dimensional, on its device; shared memory."""
    return codec.as_bytes(tensor.detach())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

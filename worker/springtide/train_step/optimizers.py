"""Facts of an optimizer, and of the arguments of its step(), that the trainer's step needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def scale_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the factor that gradients still have in them: a fused optimizer takes a GradScaler's scale
    itself.
    """
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of a step; None where there is none.

    Args:
        args: of the call of `step`; args[0] is the optimizer.
        kwargs: of the call of `step`.
    """
    if kwargs.get("closure") is not None:
        closure: Callable[[], Any] = kwargs["closure"]
        return closure
    return args[1] if len(args) > 1 and callable(args[1]) else None


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step with another closure in place of theirs.

    Args:
        args: of the call of `step`; args[0] is the optimizer.
        kwargs: of the call of `step`.
        closure: the other one.
    """
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": closure}
    return (*args[:1], closure, *args[2:]), kwargs

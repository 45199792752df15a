"""Which sparse optimizer a table has: the counterpart of the script's, or an error that says why. PURE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from springtide.errors import UsageError

_SPARSE: Final[dict[type[torch.optim.Optimizer], str]] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
}
_MUST_BE_OFF: Final = ("momentum", "weight_decay", "amsgrad")


def group_among(
    optimizers: Sequence[torch.optim.Optimizer], weight: torch.Tensor, name: str
) -> tuple[int, int]:
    """Find the optimizer that has a table's parameter.

    Args:
        optimizers: of the script.
        weight: the parameter.
        name: of the table, for the error.

    Returns:
        Number of the optimizer, and of its parameter group.

    Raises:
        UsageError: no optimizer has it.
    """
    for owner, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            if any(item is weight for item in group["params"]):
                return owner, number
    raise UsageError(
        f"table {name}: the optimizer does not have its parameter: give the optimizer all of "
        "model.parameters(), or freeze the table with requires_grad_(False)"
    )


def sparse_rule(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], name: str
) -> tuple[str, dict[str, Any]]:
    """Return how a table's rows are updated.

    SGD and Adagrad are torch's with sparse gradients, Adam and AdamW are `SparseAdam`.

    Args:
        optimizer: the script's.
        group: its parameter group with the table's parameter.
        name: of the table, for the error.

    Returns:
        Name of the tables' optimizer, and what a new row's state begins with.

    Raises:
        UsageError: the optimizer has no sparse counterpart, or an option would touch rows that were not used.
    """
    kind = _SPARSE.get(type(optimizer))
    if kind is None:
        known = ", ".join(item.__name__ for item in _SPARSE)
        raise UsageError(
            f"table {name}: {type(optimizer).__name__} has no sparse counterpart: use one of {known}"
        )
    for option in _MUST_BE_OFF:
        if group.get(option):
            raise UsageError(
                f"table {name}: {type(optimizer).__name__} with {option}={group[option]!r} would change rows "
                f"that a batch does not use: give the table a parameter group of its own with {option}="
                f"{'False' if group[option] is True else 0}"
            )
    initial = {}
    if kind == "adagrad":
        initial["initial_accumulator_value"] = float(group.get("initial_accumulator_value", 0.0))
    return kind, initial


def step_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group's step as they are now."""
    names = ("lr", "betas", "eps", "lr_decay", "maximize")
    return {name: _plain(group[name]) for name in names if name in group}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value

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
    """(number of the optimizer, of its parameter group) that the table's parameter is in.

    Raise UsageError when it is in none.
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
    """(name of the tables' optimizer, what a new row's state begins with).

    SGD and Adagrad are torch's with sparse gradients, Adam and AdamW are `SparseAdam`. Raise UsageError for
    an optimizer that has no sparse counterpart, and for options that would touch rows that were not used.
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

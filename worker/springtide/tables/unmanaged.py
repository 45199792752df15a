"""Tables of a script that has not given its model to `springtide.distribute()`.

Every optimizer of the process is watched; one that has a table's parameter makes the table's step too, with
the gradients since the last `zero_grad()`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from springtide.errors import UsageError
from springtide.scaling import watch
from springtide.tables.handle import Handle, handle_of
from springtide.tables.local import merged
from springtide.tables.rules import sparse_rule, step_options

_watching = False


class Collected:
    """The gradients of one table that no step has taken."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._seen: torch.Tensor | None = None
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        _watch()

    def collect(self, weight: torch.Tensor) -> None:
        """A backward pass has reached the table."""
        if self._handle.managed:
            return
        if weight.grad is not self._seen:
            self._parts = []  # zero_grad() has come between
        self._seen = weight.grad
        self._parts += self._handle.take()

    def step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        handle, name = self._handle, "of this model"
        if handle.managed or handle.weight.grad is None or handle.weight.grad is not self._seen:
            return
        handle.local.use(*sparse_rule(optimizer, group, name))
        ids, sums = merged(self._parts, handle.dim)
        handle.local.apply(ids, sums, 1.0, step_options(group))
        self._parts, self._seen = [], None


def _watch() -> None:
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_post_hook(_after_step)
        watch(_before_unscale)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (handle := handle_of(parameter)) is not None and handle.collected is not None:
                handle.collected.step(optimizer, group)


def _before_unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if any(handle_of(parameter) is not None for parameter in group["params"]):
            raise UsageError(
                "a GradScaler does not reach the rows of springtide.Embedding: train in float32 or bfloat16, "
                "or give the tables an optimizer of their own that the scaler does not step"
            )

"""Tables of a script that has not given its model to `springtide.distribute()`.

Every optimizer of the process is watched; one that has a table's parameter makes the table's step too, with
the gradients since the last `zero_grad()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from springtide.embedding.handle import Handle, handle_of
from springtide.embedding.local import merged
from springtide.embedding.sparse_optimizers import sparse_rule, step_options
from springtide.train_step.grad_scaler import unscale_too
from springtide.train_step.optimizers import scale_of
from springtide_ps.params.frequencies import divided, heads_of

_watching = False


class Collected:
    """The gradients of one table that no step has taken."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._seen: torch.Tensor | None = None
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._looked_at = False
        _watch()

    def collect(self, weight: torch.Tensor) -> None:
        """A backward pass has reached the table."""
        if self._handle.managed:
            return
        if weight.grad is not self._seen or self._looked_at:
            self._parts = []  # zero_grad() has come between, or a step that a scaler skipped
        self._looked_at = False
        self._seen = weight.grad
        self._parts += [divided(heads, rows) for heads, rows in self._handle.take()]
        self._handle.calls = 0

    def step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Make the table's step with the gradients since the last `zero_grad()`, if there are any.

        Args:
            optimizer: makes the dense step now; it has the table's parameter.
            group: the optimizer's parameter group with that parameter.

        Raises:
            UsageError: the optimizer has no sparse counterpart, or an option would touch rows that were not
                used.
        """
        handle, name = self._handle, "of this model"
        if handle.managed or handle.weight.grad is None or handle.weight.grad is not self._seen:
            return
        handle.local.use(*sparse_rule(optimizer, group, name))
        ids, sums = merged(self._parts, handle.dim)
        if handle.has_counts:
            ids = heads_of(ids, torch.ones_like(ids), 0)  # divided already
        found = getattr(optimizer, "found_inf", None)  # of a scaler, for an optimizer that skips by itself
        if found is None or not bool(found):
            handle.local.apply(ids, sums, 1.0 / scale_of(optimizer), step_options(group))
        self._parts, self._seen = [], None

    @property
    def managed(self) -> bool:
        """Whether a trainer takes the gradients."""
        return self._handle.managed

    def unscale(self, inverse: float) -> bool:
        """Multiply what no step has taken; whether some of it is not finite."""
        weight = self._handle.weight
        if weight.grad is None or weight.grad is not self._seen:
            return False
        self._looked_at = True
        self._parts = [(ids, rows if inverse == 1.0 else rows * inverse) for ids, rows in self._parts]
        return not all(bool(rows.isfinite().all()) for _, rows in self._parts)


def _watch() -> None:
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_post_hook(_after_step)
        unscale_too(_unscale)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for collected, group in _collected_by(optimizer):
        collected.step(optimizer, group)


def _unscale(
    optimizer: torch.optim.Optimizer, inverse: float, found: Mapping[torch.device, torch.Tensor]
) -> None:
    for collected, _ in _collected_by(optimizer):
        if not collected.managed and collected.unscale(inverse):
            for flag in found.values():
                flag.fill_(1.0)


def _collected_by(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Collected, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (handle := handle_of(parameter)) is not None and isinstance(handle.collected, Collected):
                yield handle.collected, group

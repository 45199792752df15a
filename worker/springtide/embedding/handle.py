"""Handles: they stand between a module and the rows of its table, wherever these are.

The module has a parameter without elements. Optimizers, parameter groups, hooks and the map of used
parameters see that parameter in place of the table; the gradients of rows are collected beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from springtide.embedding.local import LocalRows
from springtide_ps.params.frequencies import heads_of
from springtide_ps.params.row_norms import bounded

_ATTRIBUTE = "_springtide_table"

Read = Callable[[torch.Tensor], torch.Tensor]
"""Rows float32 [n, dim] of ids int64 [n], each once, on the CPU."""

ReadAll = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""(ids, rows) of all rows that are held."""


class Collects(Protocol):
    """Takes gradients where no trainer does."""

    def collect(self, weight: torch.Tensor) -> None: ...

    def step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Make the table's step, if the gradients are this collector's to take.

        Args:
            optimizer: makes the dense step now; it has the table's parameter.
            group: the optimizer's parameter group with that parameter.
        """
        ...


class Handle:
    """read: where the rows come from once others hold them. arrived: (ids, gradients) of the running backward
    pass, each id once in a pair; or heads (`springtide_ps.params.frequencies`). expected_rows: at most, 0 if
    unknown. managed: a trainer takes the gradients; otherwise the optimizer's own step does. calls: how many
    lookups there were whose gradients may come, since it was set to 0; where they are divided by frequency,
    heads name the call.
    """

    def __init__(self, weight: torch.nn.Parameter, local: LocalRows, expected_rows: int = 0) -> None:
        self.local, self.expected_rows = local, expected_rows
        self.read: Read | None = None
        self.managed = False
        self.calls = 0
        self.read_all: ReadAll | None = None
        self.arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.collected: Collects | None = None
        self.stand_for(weight)

    def stand_for(self, weight: torch.nn.Parameter) -> None:
        """Make this parameter stand for the rows from now on."""
        self.weight = weight
        setattr(weight, _ATTRIBUTE, self)

    @property
    def dim(self) -> int:
        return self.local.spec.dim

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids (each once) as they are held, float32 [n, dim] on the CPU."""
        return self.local.rows(ids) if self.read is None else self.read(ids)

    @property
    def has_counts(self) -> bool:
        """Whether gradients are divided by how often their row was looked up."""
        return self.local.spec.by_frequency

    def lookup(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return rows as a model uses them, with gradients that go to the table.

        Args:
            ids: int64 [n], each id once.
            places: int64 [lookups]: which of `ids` each lookup is.

        Returns:
            [n, dim], on the device of the module's parameter.
        """
        spec, heads = self.local.spec, ids
        if spec.by_frequency and torch.is_grad_enabled() and self.weight.requires_grad:
            heads = heads_of(ids, torch.bincount(places, minlength=len(ids)), self.calls)
            self.calls += 1
        found = bounded(self.rows(ids), spec.max_norm, spec.norm_type)
        rows: torch.Tensor = _Gather.apply(self.weight, found.to(self.weight.device), self, heads)  # type: ignore[no-untyped-call]
        return rows

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [n] in order, rows float32 [n, dim]) that were ever trained and not let go."""
        return self.local.held() if self.read_all is None else self.read_all()

    def load(self, ids: torch.Tensor, rows: torch.Tensor, seed: int, init: str, scale: float) -> None:
        """Hold exactly these rows, and make others by the given rule.

        Args:
            ids: int64 [n], each id once.
            rows: float32 [n, dim].
            seed: of rows to be made.
            init: "normal", "uniform" or "zeros".
            scale: standard deviation, or the bound, of the first values.
        """
        spec = replace(self.local.spec, seed=seed, init=init, scale=scale)
        self.local = LocalRows(spec, len(self.local.slices))
        self.local.hold(ids, rows)

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take the (ids, gradients) that have arrived since the last call."""
        arrived, self.arrived = self.arrived, []
        return arrived


def handle_of(parameter: torch.Tensor) -> Handle | None:
    """The table that the parameter stands for, if it does."""
    found: Handle | None = getattr(parameter, _ATTRIBUTE, None)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, rows: torch.Tensor, handle: Handle, ids: torch.Tensor
    ) -> torch.Tensor:
        ctx.handle, ctx.ids = handle, ids
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.handle.arrived.append((ctx.ids, gradient.detach().to("cpu", torch.float32)))
        return torch.zeros_like(ctx.handle.weight), None, None, None


def tables_among(parameters: Sequence[torch.Tensor]) -> dict[int, Handle]:
    """Return the tables that these parameters stand for, by the parameter's number."""
    found = {index: handle_of(parameter) for index, parameter in enumerate(parameters)}
    return {index: handle for index, handle in found.items() if handle is not None}

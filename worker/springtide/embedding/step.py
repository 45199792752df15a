"""Gradients of rows in one step: weighted as those of dense parameters, sent when the last micro-batch has
brought its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from springtide.embedding.handle import Handle
from springtide.embedding.local import merged
from springtide.embedding.sparse_optimizers import group_among, sparse_rule, step_options
from springtide.ps.backend import ParameterBackend, Pushed
from springtide.ps.step_spec import group_options
from springtide_ps.params.frequencies import carried, divided, renumbered


class StepTables:
    """The tables of one step, between backward hooks and the home of the rows. Call order: `begin`, `put`...,
    `flush`.
    """

    def __init__(self, handles: Mapping[int, Handle], home: ParameterBackend) -> None:
        self._handles, self._home = handles, home
        self._parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._sent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # By table: the running micro-batch, lookups before it, and lookups so far.
        self._micro: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._calls: dict[int, int] = {}
        for handle in handles.values():
            handle.managed = True

    def begin(self) -> None:
        for handle in self._handles.values():
            handle.take()
            handle.calls = 0
        self._calls = dict.fromkeys(self._handles, 0)
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._parts, self._sent = {index: [] for index in self._handles}, {}
        self._micro = dict.fromkeys(self._handles, -1)

    def begin_backward_pass(self, left: Mapping[int, float]) -> None:
        """Another backward pass of the step begins. left: by parameter, the factor of what it adds to.

        Gradients of it may have arrived already.
        """
        sent = self._sent
        self._begin_pass()
        for index, factor in left.items():
            if index in sent:
                ids, sums = sent[index]
                self._parts[index] = [(carried(ids), sums * factor)]

    def put(self, index: int, scale: float, last: bool, micro: int = 0) -> None:
        """Take the gradients of rows that a backward pass has made.

        A call is known by its number among the micro-batch's.

        Args:
            index: number of the parameter that the pass has reached; others than tables' are ignored.
            scale: of the micro-batch's gradients; 0 leaves its rows out.
            last: it is the step's last micro-batch: the table's gradients leave now.
            micro: number of the micro-batch.
        """
        if index not in self._parts:
            return
        handle = self._handles[index]
        if self._micro[index] != micro:
            self._micro[index], self._first[index] = micro, self._calls[index]
        # More of this micro-batch may come (checkpointed activations); what is called now is before the next.
        self._calls[index] = handle.calls
        arrived = handle.take()
        if scale != 0.0:
            self._parts[index] += [
                (renumbered(ids, -self._first[index]), rows * scale if scale != 1.0 else rows)
                for ids, rows in arrived
            ]
        if last:
            self._send(index)

    def flush(self) -> None:
        """Send what has not been sent; a table that was not used sends nothing but says so."""
        for index in list(self._parts):
            self._send(index)

    def _send(self, index: int) -> None:
        handle = self._handles[index]
        ids, sums = self._sent[index] = merged(self._parts.pop(index), handle.dim, handle.has_counts)
        self._home.stage_rows(index, ids, sums)


class LocalHome:
    """The tables of a process that trains alone."""

    dense = False

    any_staged = False

    def __init__(
        self,
        handles: Mapping[int, Handle],
        names: Sequence[str],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._handles, self._optimizers = handles, optimizers
        self._groups: dict[int, tuple[torch.optim.Optimizer, int]] = {}
        self._staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._norms: dict[int, float] = {}
        for index, handle in handles.items():
            owner, number = group_among(optimizers, handle.weight, names[index])
            optimizer = optimizers[owner]
            handle.local.use(*sparse_rule(optimizer, optimizer.param_groups[number], names[index]))
            self._groups[index] = optimizer, number
            group_options(optimizer)

    def begin_step(self) -> None:
        self._staged = {}

    def begin_backward_pass(self) -> None:
        self._staged = {}

    def push(self, gradients: torch.Tensor, bucket: int) -> Pushed:
        """Refuse: dense parameters are this process's own.

        Args:
            gradients: float [n] of one bucket.
            bucket: its number.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("dense parameters are this process's own")

    def ends(self, wanted: bool) -> bool:
        return wanted

    def stage_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        """Keep the gradients of a table until the step is made.

        Args:
            index: number of the table's parameter.
            ids: int64 [n], each id once, or heads [n, 2].
            sums: float32 [n, dim].
        """
        self._staged[index] = ids, sums

    def prepare(self) -> float | None:
        squares: dict[int, float] = {}
        for index, staged in self._staged.items():
            own, sums = id(self._groups[index][0]), divided(*staged)[1]
            squares[own] = squares.get(own, 0.0) + float(sums.to(torch.float64).square().sum())
        self._norms = {own: math.sqrt(square) for own, square in squares.items()}
        return math.sqrt(math.fsum(squares.values()))

    def norm_of(self, optimizer: torch.optim.Optimizer) -> float:
        return self._norms.get(id(optimizer), 0.0)

    def stage_tables(
        self, optimizer: torch.optim.Optimizer, scale: float, factor: float, unused: Collection[int]
    ) -> None:
        """Make the tables' part of an optimizer's step now: nobody else is in this step.

        Args:
            optimizer: whose tables step.
            scale: that gradients are multiplied by, for the weights of samples.
            factor: that they are multiplied by besides: a GradScaler's and that of clipping.
            unused: numbers of parameters that no worker used.
        """
        own = [index for index, (owner, _) in self._groups.items() if owner is optimizer]
        self._apply(own, scale * factor, unused)

    def commit(self, factors: Sequence[float], unused: Collection[int], skip: bool = False) -> None:
        """Make the step of all tables with gradients.

        Args:
            factors: gradients are multiplied by their product.
            unused: numbers of parameters that no worker used.
            skip: nothing is to change: a scaler found gradients that are not finite.
        """
        if not skip:
            self._apply(self._staged, math.prod(factors), unused)

    def _apply(self, indices: Collection[int], scale: float, unused: Collection[int]) -> None:
        for index in indices:
            if index in unused or index not in self._staged:
                continue
            (ids, sums), (optimizer, group) = self._staged[index], self._groups[index]
            options = step_options(optimizer.param_groups[group])
            self._handles[index].local.apply(ids, sums, scale, options)

    def settle(self, parameters: Collection[int] | None = None) -> None:
        """Return at once, since there is nothing to wait for."""


def home_here(
    handles: Mapping[int, Handle], names: Sequence[str], optimizers: Sequence[torch.optim.Optimizer]
) -> ParameterBackend | None:
    """Return a home in this process for tables that no servers hold; None without tables.

    Args:
        handles: by parameter number.
        names: of all parameters.
        optimizers: the script's.
    """
    return LocalHome(handles, names, optimizers) if handles else None

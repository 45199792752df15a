"""Gradients that travel smaller than they are: in 16 bits, or as products of thin matrices (PowerSGD).

PowerSGD: Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization, NeurIPS 2019. A worker's residual is the part that its product leaves out, which it adds to its
next gradient (error feedback). Residuals are the worker's own: they are kept with the committed step, never
transferred, and summed in full in the last step of a generation that ends at a boundary, so that a worker
that leaves takes nothing along. Those of a worker that is killed are lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from springtide.comm.buckets import Buckets, StartSum
from springtide.comm.layout import Layout
from springtide.comm.process_group import Work

RANK = 4
_WORTH_IT = 2
"""A matrix is compressed when it is at least so many times larger than its two factors."""

KINDS = ("None", "BF16", "FP16", "PowerSGD")
_WIRE = {"BF16": torch.bfloat16, "FP16": torch.float16}


def make_buckets(kind: str, layout: Layout, device: torch.device, multi_step: bool = False) -> Buckets:
    """Return the buckets for a compression.

    Args:
        kind: one of KINDS.
        layout: of the model's gradients.
        device: where they lie.
        multi_step: a body may have more than one backward pass or step.
    """
    if kind == "PowerSGD":
        return LowRankBuckets(layout, device, multi_step)
    return Buckets(layout, device) if kind == "None" else CastBuckets(layout, device, _WIRE[kind])


class CastBuckets(Buckets):
    """Each bucket of larger numbers travels as `wire`."""

    def __init__(self, layout: Layout, device: torch.device | None, wire: torch.dtype) -> None:
        self._wire = wire
        self._sent: dict[int, torch.Tensor] = {}
        super().__init__(layout, device)

    def _stays(self, bucket: int) -> bool:
        return bucket in self._sent

    def _outgoing(self, bucket: int) -> torch.Tensor:
        flat = self._flats[bucket]
        if flat.element_size() <= self._wire.itemsize:
            return flat
        self._sent[bucket] = flat.to(self._wire)
        return self._sent[bucket]

    def begin(self, start_sum: StartSum) -> None:
        super().begin(start_sum)
        self._sent = {}

    def wait(self) -> None:
        super().wait()
        for bucket, sent in self._sent.items():
            self._flats[bucket].copy_(sent)
            self._versions[bucket] = self._flats[bucket]._version
        self._sent = {}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter whose gradient is compressed, as rows x columns."""

    rows: int
    columns: int
    rank: int


def plan_matrix(shape: tuple[int, ...]) -> Matrix | None:
    """Return how a gradient of this shape is split into two thin matrices; None for one that travels as it
    is.
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], int(torch.Size(shape[1:]).numel())
    rank = min(RANK, rows, columns)
    worth_it = rank > 0 and rows * columns >= _WORTH_IT * rank * (rows + columns)
    return Matrix(rows, columns, rank) if worth_it else None


class LowRankBuckets(Buckets):
    """PowerSGD with error feedback and warm start.

    A step: P = (gradient + residual) Q is summed during backward; `wait` makes its columns orthonormal, sums
    (gradient + residual)^T P, and puts the product in the gradient's place. The part that a sum leaves out is
    the residual when an optimizer's step has taken that sum (`take`), and `committed` keeps it.
    """

    may_expect_unused = False  # products cannot be added to

    def __init__(self, layout: Layout, device: torch.device | None, multi_step: bool = False) -> None:
        self.matrices = {
            index: matrix
            for index, field in enumerate(layout.fields)
            if (matrix := plan_matrix(field.shape)) is not None
        }
        """The matrix as which each parameter is compressed."""
        generator = torch.Generator()
        self._bases = {}
        for index, matrix in self.matrices.items():
            generator.manual_seed(index)
            start = torch.randn(matrix.columns, matrix.rank, generator=generator)
            self._bases[index] = start.to(device=device, dtype=layout.fields[index].dtype)
        self.residuals: dict[int, torch.Tensor] = {}
        """The rest of each parameter's gradients that committed steps have left out."""
        # Of the running body: as its steps have left them.
        self._since: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Of the running backward pass: what it leaves out, and the next basis.
        self._next: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Of the last one, whose sum is added to: what was owed before is in that sum.
        self._open: dict[int, torch.Tensor] = {}
        self._sent: dict[int, torch.Tensor] = {}
        self._multi_step = multi_step
        self._sends_all = False
        super().__init__(layout, device)

    def begin(self, start_sum: StartSum) -> None:
        super().begin(start_sum)
        self._since, self._open, self._next, self._sent = {}, {}, {}, {}
        self._sends_all = self.closing

    def begin_backward_pass(self, start_sum: StartSum, left: Collection[int]) -> None:
        """Begin another backward pass of the step.

        Args:
            start_sum: starts the sum of a flat tensor over the members.
            left: numbers of parameters whose last sums are added to.
        """
        self._open = {index: self._next[index][0] for index in left if index in self._next}
        super().begin(start_sum)
        self._next, self._sent = {}, {}

    def _residual(self, index: int) -> torch.Tensor | None:
        if index in self._open:
            return self._open[index]
        return self._since[index][0] if index in self._since else self.residuals.get(index)

    def _basis(self, index: int) -> torch.Tensor:
        return self._since[index][1] if index in self._since else self._bases[index]

    def _outgoing(self, bucket: int) -> torch.Tensor:
        parts = []
        for index in self.layout.members[bucket]:
            view, matrix = self.views[index], self.matrices.get(index)
            if matrix is None:
                parts.append(view.reshape(-1))
                continue
            if (residual := self._residual(index)) is not None:
                view.add_(residual)
            parts.append((view.reshape(matrix.rows, -1) @ self._basis(index)).reshape(-1))
        self._versions[bucket] = self._flats[bucket]._version
        self._sent[bucket] = torch.cat(parts)
        return self._sent[bucket]

    def wait(self) -> None:
        super().wait()
        second: list[tuple[int, dict[int, torch.Tensor], torch.Tensor, torch.Tensor, Work]] = []
        for bucket, sent in self._sent.items():
            columns: dict[int, torch.Tensor] = {}
            factors = []
            offset = 0
            for index in self.layout.members[bucket]:
                view, matrix = self.views[index], self.matrices.get(index)
                size = view.numel() if matrix is None else matrix.rows * matrix.rank
                piece, offset = sent[offset : offset + size], offset + size
                if matrix is None:
                    view.copy_(piece.view_as(view))
                    continue
                columns[index] = _orthonormal(piece.view(matrix.rows, matrix.rank))
                factors.append((view.reshape(matrix.rows, -1).T @ columns[index]).reshape(-1))
            if factors:
                total = torch.cat(factors)
                own = total.clone()
                second.append((bucket, columns, own, total, self._start_sum(total)))
            self._versions[bucket] = self._flats[bucket]._version
        for bucket, columns, own, total, work in second:
            work.wait()
            offset = 0
            for index, left in columns.items():
                matrix, view = self.matrices[index], self.views[index]
                size = matrix.columns * matrix.rank
                mine = own[offset : offset + size].view(matrix.columns, matrix.rank)
                all_ = total[offset : offset + size].view(matrix.columns, matrix.rank)
                offset += size
                whole = view.reshape(matrix.rows, -1)
                self._next[index] = (whole - left @ mine.T).view_as(view), all_.clone()
                view.copy_((left @ all_.T).view_as(view))
            self._versions[bucket] = self._flats[bucket]._version

    def settle(self, last: bool) -> None:
        """Sum all residuals after the commit vote of a step, if no later step can take them.

        With several backward passes and steps in a body, residuals are sent in the next body, which is the
        last one then: some steps of this one may have been made.

        Args:
            last: all members stop after this step.
        """
        if not (self._sends_all if self._multi_step else last) or not self._next:
            return
        rest = torch.cat([residual.reshape(-1) for residual, _ in self._next.values()])
        self._start_sum(rest).wait()
        offset = 0
        for index, (residual, basis) in self._next.items():
            view = self.views[index]
            view.add_(rest[offset : offset + view.numel()].view_as(view))
            offset += view.numel()
            self._next[index] = torch.zeros_like(residual), basis
        self._versions = [flat._version for flat in self._flats]

    def ends(self, wanted: bool) -> bool:
        if not self._multi_step or self._sends_all:
            return wanted or self._sends_all
        self.closing = self.closing or wanted
        return False

    def reopen(self) -> None:
        self.closing = self._sends_all = False

    def take(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index in self._next:
                self._since[index] = self._next[index]

    def committed(self) -> None:
        """The step cannot be dropped any more. A gradient that no step took keeps its residual for later."""
        for index, (residual, basis) in self._since.items():
            self.residuals[index], self._bases[index] = residual, basis
        self._since, self._next = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all members have in common: the warm start. Each worker has residuals of its
        own.
        """
        return {"bases": {str(index): basis for index, basis in self._bases.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state in which this worker's residuals have no part. Raise ValueError for another
        layout."""
        bases = state["bases"]
        shapes = {str(index): basis.shape for index, basis in self._bases.items()}
        if {name: basis.shape for name, basis in bases.items()} != shapes:
            raise ValueError("PowerSGD: the job's state is of another model or rank")
        for index, basis in self._bases.items():
            self._bases[index] = bases[str(index)].to(basis.device, copy=True)
        self.residuals, self._since, self._next = {}, {}, {}


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns' span, by QR; in float32 where the type is smaller."""
    exact = columns if columns.dtype in (torch.float32, torch.float64) else columns.float()
    basis: torch.Tensor = torch.linalg.qr(exact).Q
    return basis.to(columns.dtype)

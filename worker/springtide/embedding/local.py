"""The rows of a table in this process: when it trains alone, and before a job's servers hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from springtide_ps.params.chunk import StepSpec
from springtide_ps.params.embedding import TableSpec
from springtide_ps.params.embedding_shard import Slice, records, slice_numbers
from springtide_ps.params.frequencies import ids_of, summed


def by_slice(ids: torch.Tensor, slices: int) -> list[torch.Tensor]:
    """Return for each slice which of the ids belong to it, as int64 positions.

    Args:
        ids: int64 [n], or heads [n, 2] (`params.frequencies`).
        slices: how many there are.
    """
    ids = ids_of(ids).contiguous()
    if slices == 1:
        return [torch.arange(len(ids))]
    numbers = torch.from_numpy(slice_numbers(ids.numpy(), slices))
    counts = torch.bincount(numbers, minlength=slices).tolist()
    return list(torch.split(torch.argsort(numbers, stable=True), counts))


def merged(
    parts: list[tuple[torch.Tensor, torch.Tensor]], dim: int, has_counts: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one pair of ids and sums from several.

    Args:
        parts: (ids, sums) pairs, each of which names an id once; the ids int64 [n], or heads [n, 2] by id and
            call; the sums float32 [n, dim].
        dim: numbers of a row, for the case without pairs.
        has_counts: whether ids are heads, for the case without pairs.

    Returns:
        The same form, each id once.
    """
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return torch.empty((0, 2) if has_counts else 0, dtype=torch.int64), torch.empty(0, dim)
    return summed(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


class LocalRows:
    """spec: of the whole table; its optimizer is told by `use`. slices: into which it is cut, as on servers,
    so that the same rows are let go.
    """

    def __init__(self, spec: TableSpec, slices: int) -> None:
        self.spec = spec
        each = replace(spec, max_rows=-(-spec.max_rows // slices))
        self.slices = [Slice(each, 0, 0, [{}]) for _ in range(slices)]

    def use(self, optimizer: str, initial: Mapping[str, Any]) -> None:
        """Make later steps with this optimizer; the state of another one is forgotten, rows stay.

        Args:
            optimizer: "sgd", "adagrad" or "adam".
            initial: what a new row's state begins with, by the option's name.
        """
        if (optimizer, initial) == (self.spec.optimizer, self.spec.options):
            return
        self.spec = replace(self.spec, optimizer=optimizer, options=dict(initial))
        for number, old in enumerate(self.slices):
            spec = replace(old.table.spec, optimizer=optimizer, options=dict(initial))
            ids, touched, rows, *_ = old.table.held()
            self.slices[number] = _slice_of(spec, ids, touched, rows)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 [len(ids), dim]; ids: int64, on the CPU."""
        found = torch.empty(len(ids), self.spec.dim)
        for piece, own in zip(self.slices, by_slice(ids, len(self.slices)), strict=True):
            if len(own):
                found[own] = piece.rows(ids[own].numpy())
        return found

    def apply(self, ids: torch.Tensor, sums: torch.Tensor, scale: float, options: Mapping[str, Any]) -> None:
        """Make one step.

        Args:
            ids: int64 [n], each id once, or heads [n, 2].
            sums: of gradients: float32 [n, dim].
            scale: that the sums are multiplied by.
            options: of the optimizer's parameter group.
        """
        step_spec = StepSpec(scale, False, (dict(options),))
        for piece, own in zip(self.slices, by_slice(ids, len(self.slices)), strict=True):
            piece.apply(records(ids[own], sums[own]).view(-1), step_spec)

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [n] in order, rows float32 [n, dim]) that were ever trained and not let go."""
        parts = [piece.table.held() for piece in self.slices]
        ids, rows = (torch.cat([part[kind] for part in parts]) for kind in (0, 2))
        order = torch.argsort(ids)
        return ids[order], rows[order]

    def hold(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Hold exactly these rows, without state of an optimizer.

        Args:
            ids: int64 [n], each id once.
            rows: float32 [n, dim].
        """
        for number, own in enumerate(by_slice(ids, len(self.slices))):
            spec = self.slices[number].table.spec
            self.slices[number] = _slice_of(
                spec, ids[own], torch.zeros(len(own), dtype=torch.int64), rows[own]
            )


def _slice_of(spec: TableSpec, ids: torch.Tensor, touched: torch.Tensor, rows: torch.Tensor) -> Slice:
    made = Slice(spec, 0, 0, [{}])
    state = torch.full(
        (made.table.width - 1, rows.numel()), spec.settings.get("initial_accumulator_value", 0.0)
    )
    pushes = int(touched.max()) if len(touched) else 0
    data = torch.cat((rows.reshape(1, -1), state))
    made.table.restore(ids, touched, data, pushes if spec.optimizer != "adam" else 0)
    return made


def cut_anew(pieces: list[Slice], count: int) -> list[Slice]:
    """Cut the rows of a whole table into another number of slices, with the optimizer's state.

    Args:
        pieces: all slices of the table; they are left as they are.
        count: slices to make.
    """
    held = [piece.table.held() for piece in pieces]
    ids, touched, *data = (torch.cat(parts) for parts in zip(*held, strict=True))
    made = [Slice(pieces[0].table.spec, 0, 0, [{}]) for _ in range(count)]
    # A step of a table is one of each of its slices, with rows there or without.
    pushes = max(piece.table.pushes for piece in pieces)
    for piece, own in zip(made, by_slice(ids, count), strict=True):
        piece.table.restore(ids[own], touched[own], [part[own].reshape(-1) for part in data], pushes)
    made[0].table.evicted = sum(piece.table.evicted for piece in pieces)
    return made


def as_ids(ids: torch.Tensor) -> torch.Tensor:
    """int64 [n], contiguous, on the CPU."""
    flat = ids.detach().to("cpu", torch.int64).reshape(-1)
    return torch.from_numpy(np.ascontiguousarray(flat.numpy()))

"""Embedding tables on servers: which slice of which table is where, and what goes there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from springtide.embedding.handle import Handle
from springtide.embedding.local import by_slice
from springtide.embedding.sparse_optimizers import group_among, sparse_rule
from springtide.errors import UsageError
from springtide.ps.step_spec import group_options
from springtide_ps.params.embedding_shard import ID_WORDS, Slice, records
from springtide_ps.params.placement import CHUNK_BYTES
from springtide_ps.wire.frames import PAYLOAD_LIMIT

Homes = Mapping[str, Sequence[str]]
"""The servers of each slice by its key, first the one that workers speak to."""


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """nbytes: what it is expected to hold, equal on all workers; it is placed by that."""

    key: str
    nbytes: int
    parameter: int
    number: int


@dataclass(frozen=True, slots=True)
class Part:
    """The share of one request that goes to one server.

    slices: (number, how many ids). own: which of the ids.
    """

    server: str
    slices: list[tuple[int, int]]
    own: torch.Tensor


class TableIndex:
    """The tables of one model, by the number of the parameter that stands for each.

    Raise UsageError for an optimizer that tables cannot have.
    """

    def __init__(
        self,
        handles: Mapping[int, Handle],
        names: Sequence[str],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.handles, self._names, self._optimizers = dict(handles), names, optimizers
        self._groups: dict[int, tuple[int, int]] = {}  # where its optimizer's begin among all, and its own
        self.slices: list[PlannedSlice] = []
        for index, handle in self.handles.items():
            owner, number = group_among(optimizers, handle.weight, names[index])
            optimizer = optimizers[owner]
            handle.local.use(*sparse_rule(optimizer, optimizer.param_groups[number], names[index]))
            first = sum(len(other.param_groups) for other in optimizers[:owner])
            self._groups[index] = first, first + number
            each = CHUNK_BYTES
            if handle.expected_rows:
                each = 1 + 4 * handle.dim * handle.expected_rows // len(handle.local.slices)
            self.slices += [
                PlannedSlice(f"{table_name(index)}.{piece}", each, index, piece)
                for piece in range(len(handle.local.slices))
            ]

    def describe(self) -> str:
        """Return what all workers have to agree on."""
        return " ".join(
            f"{index}:{h.dim}/{len(h.local.slices)}/{h.local.spec.max_rows}/{h.local.spec.max_age}"
            f"/{h.local.spec.max_norm}/{h.local.spec.norm_type}/{h.has_counts}"
            for index, h in self.handles.items()
        )

    def name(self, index: int) -> str:
        """Return the name of the table's parameter, as the script calls it."""
        return self._names[index]

    def make(self, planned: PlannedSlice) -> Slice:
        """Return the slice that a server begins to hold, as it is in this process; it counts no batches."""
        handle = self.handles[planned.parameter]
        piece = handle.local.slices[planned.number]
        piece.parameter = planned.parameter
        piece.first, piece.group = self._groups[planned.parameter]
        piece.groups = [group for optimizer in self._optimizers for group in group_options(optimizer)]
        piece.applied_batches = None
        return piece

    def split(self, index: int, ids: torch.Tensor, homes: Homes, *, empty: bool) -> Iterator[Part]:
        """Yield the share of ids (or heads) that goes to each server.

        Args:
            index: Number of the table.
            ids: int64 [n], or heads [n, 2].
            homes: Servers of each slice.
            empty: Slices without ids are named too.

        Raises:
            UsageError: More than fits a request.
        """
        handle = self.handles[index]
        own = by_slice(ids, len(handle.local.slices))
        width = 4 * (ID_WORDS * ids.dim() + handle.dim)
        numbers: dict[str, list[int]] = {}
        for number, chosen in enumerate(own):
            if empty or len(chosen):
                numbers.setdefault(homes[f"{table_name(index)}.{number}"][0], []).append(number)
        for server, wanted in numbers.items():
            together = sum(len(own[number]) for number in wanted) * width <= PAYLOAD_LIMIT
            for some in [wanted] if together else [[number] for number in wanted]:
                count = sum(len(own[number]) for number in some)
                if count * width > PAYLOAD_LIMIT:
                    raise UsageError(
                        f"table {self._names[index]}: a batch uses {count} rows of one slice, which do not "
                        f"fit a request of {PAYLOAD_LIMIT} bytes: give the table more than {len(own)} slices"
                    )
                slices = [(number, len(own[number])) for number in some]
                yield Part(server, slices, torch.cat([own[number] for number in some]))

    def records(self, part: Part, ids: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Return the records of one server's share, flat.

        Args:
            part: The share.
            ids: int64 [n], or heads [n, 2].
            sums: float32 [n, dim].
        """
        return records(ids[part.own], sums[part.own]).view(-1)


def table_name(index: int) -> str:
    """Return the servers' name of the table of parameter `index`; a slice's has a dot and its number."""
    return f"t{index}"

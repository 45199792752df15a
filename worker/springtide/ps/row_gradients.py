"""Rows of tables where workers do not step together: pushed by batch like chunks, read as they are now.

A batch brings to every slice of every table the records of its rows, also none: each slice knows which
batches it has, like a chunk. The answer has no values; a worker that reads rows waits first for the answers
to its own pushes of that table, so that it sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from springtide.embedding.local import by_slice
from springtide.errors import UsageError
from springtide.ps.tables import TableIndex, table_name
from springtide_ps.params.embedding_shard import record_bytes, records
from springtide_ps.params.frequencies import divided
from springtide_ps.wire.frames import DTYPE_NAMES, PAYLOAD_LIMIT


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch's gradients of one slice, as they travel.

    ids: int64 [n], each once, or heads. gradients: [n, dim].
    """

    ids: torch.Tensor
    gradients: torch.Tensor

    @property
    def dtype(self) -> str:
        """Name of the gradients' type."""
        return DTYPE_NAMES[self.gradients.dtype]

    def records(self) -> torch.Tensor:
        """Flat; memory of its own."""
        return records(self.ids, self.gradients).view(-1)

    def square_norm(self) -> float:
        """Sum of the squares; finite exactly when all of them are."""
        rows = divided(self.ids, self.gradients)[1]
        return float(rows.to(torch.float64).square().sum())


def slices_by_table(table_index: TableIndex) -> dict[int, list[str]]:
    """Return the keys of the slices of each table, in their order."""
    found: dict[int, list[str]] = {index: [] for index in table_index.handles}
    for planned in table_index.slices:
        found[planned.parameter].append(planned.key)
    return found


def cut_rows(
    table_index: TableIndex, index: int, ids: torch.Tensor, sums: torch.Tensor
) -> Mapping[str, Rows]:
    """Return by slice its share of a table's gradients.

    Args:
        table_index: The tables.
        index: Number of the table.
        ids: int64 [n], each once, or heads [n, 2].
        sums: [n, dim].

    Raises:
        UsageError: More than fits a request.
    """
    handle, found = table_index.handles[index], dict[str, Rows]()
    width = record_bytes(handle.dim, sums.dtype, handle.has_counts)
    own = by_slice(ids, len(handle.local.slices))
    for number, chosen in enumerate(own):
        if len(chosen) * width > PAYLOAD_LIMIT:
            raise UsageError(
                f"table {table_index.name(index)}: a batch uses {len(chosen)} rows of one slice, which do "
                "not fit a "
                f"request of {PAYLOAD_LIMIT} bytes: give the table more than {len(own)} slices"
            )
        found[f"{table_name(index)}.{number}"] = Rows(ids[chosen], sums[chosen])
    return found

"""Rows of tables on servers, as the present generation has them; before the first, as this process does."""

from __future__ import annotations

import torch

from springtide.ps import row_reads
from springtide.ps.context import PsContext
from springtide.ps.row_reads import Result


def read(context: PsContext, index: int, ids: torch.Tensor, result: Result) -> torch.Tensor:
    """Return rows float32 [n, dim]; before the first generation those that this process would make.

    Args:
        context: Of this worker.
        index: Number of the parameter that stands for the table.
        ids: int64 [n], each once.
        result: Waits for an answer.

    Returns:
        The rows.

    Raises:
        ServerError: A server does not answer.
    """
    generation, tables = context.generation, context.tables
    if not generation.begun:
        return tables.handles[index].local.rows(ids)
    return row_reads.read(tables, index, ids, generation.homes, generation.step, context.ask, result)


def read_all(context: PsContext, index: int, result: Result) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, rows) that the table's slices hold; before the first generation this process's.

    Args:
        context: Of this worker.
        index: Number of the parameter that stands for the table.
        result: Waits for an answer.

    Returns:
        ids int64 [n] in order, and rows float32 [n, dim].

    Raises:
        ServerError: A server does not answer.
    """
    generation, tables = context.generation, context.tables
    if not generation.begun:
        return tables.handles[index].local.held()
    part_bytes = context.connections.part_bytes
    return row_reads.read_all(
        tables, index, generation.homes, generation.step, context.ask, result, part_bytes
    )

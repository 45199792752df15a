"""Gradients of tables' rows within a group: the first member gets what the others have, and pushes all."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from springtide.comm.process_group import Group
from springtide.embedding.handle import Handle

Rows = tuple[torch.Tensor, torch.Tensor]
"""ids int64 [n], each once, or heads [n, 2]; sums float32 [n, dim]."""


def gather(group: Group, own: Mapping[int, Rows], tables: Mapping[int, Handle]) -> dict[int, list[Rows]]:
    """Gather the rows of all members of a group at the first one.

    All members call this at the same place of a body, and nobody else sends messages to the first one.

    Args:
        group: The group.
        own: This member's rows of every table.
        tables: The tables.

    Returns:
        By table what each member has put in, by rank; nothing at the other members.

    Raises:
        RuntimeError: A member fails.
    """
    indices = sorted(tables)
    if not indices:
        return {}
    if group.size == 1:
        return {index: [own[index]] for index in indices}
    counts = torch.zeros(group.size, len(indices), dtype=torch.float64)
    counts[group.rank] = torch.tensor([len(own[index][0]) for index in indices], dtype=torch.float64)
    group.start_sum(counts).wait()
    if group.rank:
        for index in indices:
            ids, sums = own[index]
            if len(ids):
                group.start_send(ids.contiguous(), 0).wait()
                group.start_send(sums.contiguous(), 0).wait()
        return {}
    found = {index: [own[index]] for index in indices}
    for rank in range(1, group.size):
        for place, index in enumerate(indices):
            if count := int(counts[rank, place]):
                shape = (count, 2) if tables[index].has_counts else (count,)
                ids = torch.empty(shape, dtype=torch.int64)
                sums = torch.empty(count, tables[index].dim)
                group.start_receive(ids, rank).wait()
                group.start_receive(sums, rank).wait()
                found[index].append((ids, sums))
    return found

"""Cutting the optimizer's state into what servers hold of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from springtide.comm.layout import Layout
from springtide.ps.sharding import PlannedChunk
from springtide_ps.params.chunk import Chunk


def cut_states(
    layout: Layout,
    plan: PlannedChunk,
    chunk: Chunk,
    parameters: Sequence[torch.nn.Parameter],
    state: Mapping[Any, Mapping[str, Any]],
) -> None:
    """Give a new chunk the state that the script's optimizer has for its parameters.

    Args:
        layout: Places of the parameters in their buckets.
        plan: Which parameters the chunk is of.
        chunk: The new one.
        parameters: All trained ones, in their order.
        state: The optimizer's, by parameter.
    """
    for number, (index, _, start, stop) in enumerate(plan.pieces):
        values = state.get(parameters[index], {})
        if not values:
            continue
        offset = plan.start + start - layout.slots[index].offset
        chunk.set_state(
            number,
            {
                name: value.to("cpu", copy=True)
                if value.dim() == 0
                else value.detach().reshape(-1)[offset : offset + stop - start].to("cpu", copy=True)
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
            },
        )

"""The optimizer's state between the servers, where it lives, and a checkpoint, where it looks as without
servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from springtide.exchange.layout import Layout
from springtide.optimizers import parameters_of
from springtide.servers.plan import PlannedChunk
from springtide_ps.chunk import Chunk

States = dict[int, dict[str, torch.Tensor]]
"""State of an optimizer by parameter's number and name."""


def join_states(layout: Layout, planned: Sequence[PlannedChunk], chunks: Sequence[Chunk]) -> States:
    """Put the state of whole parameters together from the chunks that the servers dumped."""
    states: States = {}
    for plan, chunk in zip(planned, chunks, strict=True):
        for number, (index, _, start, stop) in enumerate(plan.pieces):
            offset = plan.start + start - layout.slots[index].offset
            mine = states.setdefault(index, {})
            for name, value in chunk.state_of(number).items():
                if value.dim() == 0:
                    mine[name] = value
                    continue
                if name not in mine:
                    field = layout.fields[index]
                    mine[name] = torch.zeros(field.shape, dtype=value.dtype)
                mine[name].view(-1)[offset : offset + stop - start] = value
    return states


def cut_states(
    layout: Layout,
    plan: PlannedChunk,
    chunk: Chunk,
    parameters: Sequence[torch.nn.Parameter],
    state: Mapping[Any, Mapping[str, Any]],
) -> None:
    """Give a new chunk the state that the script's optimizer has for its parameters."""
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


@contextmanager
def lent_states(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[torch.nn.Parameter], states: States
) -> Iterator[None]:
    """Let the script's optimizers have the servers' state for as long as it is read."""
    held: dict[torch.Tensor, dict[str, torch.Tensor]] = {parameters[n]: s for n, s in states.items()}
    try:
        for optimizer in optimizers:
            own = [parameter for parameter in parameters_of(optimizer) if parameter in held]
            optimizer.state.update({parameter: held[parameter] for parameter in own})
        yield
    finally:
        for optimizer in optimizers:
            for parameter in held:
                optimizer.state.pop(parameter, None)

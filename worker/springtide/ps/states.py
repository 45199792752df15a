"""The state in this process and on servers, for members that receive it and checkpoints that save it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from springtide.checkpoint.names import TABLES
from springtide.ps.backend import PsBackend
from springtide.ps.row_reads import TableState
from springtide.sharding.backend import ShardedOptimizer
from springtide.train_step.buffers import Buffers
from springtide.train_step.state import State, names_in_state_dict

SHARDS = "optimizer in shards"
"""The entry of a state that says how its last step was made."""


def states_of(
    model: torch.nn.Module,
    buffers: Buffers,
    optimizers: Sequence[torch.optim.Optimizer],
    tracked: Mapping[str, Any],
    home: PsBackend | ShardedOptimizer | None,
    dense_here: bool,
    masters: bool = False,
) -> tuple[State, State]:
    """Return the state that members hand over to each other, and the one that a checkpoint saves.

    A checkpoint looks like one of a job without servers.

    Args:
        model: The script's.
        buffers: Of the model.
        optimizers: The script's.
        tracked: Further objects with a state, by name.
        home: of what is on servers, or in shards; None: there is neither.
        dense_here: Trained parameters are in this process, all but the rows of tables.
        masters: Those of 16 bits have float32 masters.

    Returns:
        Both states; one and the same where all of it is in each process.
    """
    named, saved_as = dict(model.named_parameters()), names_in_state_dict(model)
    if home is None:
        state = State(named, buffers, optimizers, tracked, saved_as, masters=masters)
        return state, state
    held = {name: item for name, item in named.items() if dense_here or not item.requires_grad}
    if isinstance(home, ShardedOptimizer):
        own = {**tracked, SHARDS: home}
        return (
            State(held, buffers, optimizers, own, saved_as, masters=masters, grouped=named),
            State(named, buffers, optimizers, tracked, saved_as, masters=masters),
        )
    servers = home
    own = {**tracked, "parameter servers": servers}
    saved = {**tracked, TABLES: TableState(servers.tables)} if servers.tables.handles else dict(tracked)
    return (
        State(held, buffers, optimizers, own, saved_as, {"parameter servers"}, masters),
        State(named, buffers, optimizers, saved, saved_as, {TABLES}, masters),
    )

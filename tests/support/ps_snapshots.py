"""Snapshots of servers, put together again as restoring does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from springtide.checkpoint.shares import missing
from springtide.checkpoint.staging import Collected
from springtide.comm import codec

_names = count()


def joined(parts: Sequence[Collected]) -> dict[str, Any]:
    """The tree of which each member has collected a part, every element of it once."""
    first = parts[0]
    assert all(part.header == first.header and part.specs == first.specs for part in parts)
    assert missing(first.specs, [piece for part in parts for piece in part.pieces]) == ""
    tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in first.specs]
    for part in parts:
        at = 0
        for piece in part.pieces:
            whole = codec.as_bytes(tensors[piece.tensor])
            size = first.specs[piece.tensor].dtype.itemsize
            nbytes = (piece.stop - piece.start) * size
            whole[piece.start * size : piece.stop * size] = part.memory[at : at + nbytes]
            at += nbytes
        assert at == part.memory.numel()
    tree: dict[str, Any] = codec.unflatten(first.header, tensors)
    return tree


def states_on(exchange: Any) -> dict[int, dict[str, torch.Tensor]]:
    """The optimizer's state on the servers after the last committed step, by parameter's number."""
    every = {index: index for index in range(len(exchange.context.layout.fields))}
    snapshot = exchange.snapshot(f"look {next(_names)}", 1, every)
    try:
        states: dict[int, dict[str, torch.Tensor]] = joined([snapshot.collect(0, 1)])["optimizer"]
        return states
    finally:
        snapshot.close()

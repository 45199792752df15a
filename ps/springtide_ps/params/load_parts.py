"""How a chunk that is sent to a server is cut into requests, and how it is read. PURE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from springtide_ps.params.chunk import Chunk
from springtide_ps.params.embedding_shard import Slice


def loads(chunk: Chunk | Slice, part_bytes: int) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """(JSON, memory uint8) of each LOAD: one, or of a slice of more than `part_bytes` several, in order.

    Each is made when it is asked for; the chunk must not change in between.
    """
    if not isinstance(chunk, Slice) or chunk.dumped_bytes <= part_bytes:
        yield chunk.dump()
        return
    total = chunk.dumped_bytes
    for at, size in spans(0, total, part_bytes):
        yield {**({} if at else chunk.about()), "at": at, "of": total}, chunk.memory(at, at + size)


def spans(start: int, total: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of the bytes from `start` on, in parts."""
    for at in range(start, total, part_bytes):
        yield at, min(part_bytes, total - at)

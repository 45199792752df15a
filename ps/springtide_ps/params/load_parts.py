"""How a chunk that is sent to a server is cut into requests, and how it is read. PURE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from springtide_ps.params.chunk import Chunk
from springtide_ps.params.embedding_shard import Slice


def loads(chunk: Chunk | Slice, part_bytes: int) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield what each LOAD brings: one, or of a slice with a larger dump several, in order.

    Each is made when it is asked for; the chunk must not change in between.

    Args:
        chunk: to be sent.
        part_bytes: of one LOAD of a slice, at most.

    Yields:
        (JSON, memory uint8).
    """
    if not isinstance(chunk, Slice) or chunk.dumped_bytes <= part_bytes:
        yield chunk.dump()
        return
    total = chunk.dumped_bytes
    for at, size in spans(0, total, part_bytes):
        yield {**({} if at else chunk.about()), "at": at, "of": total}, chunk.memory(at, at + size)


def spans(start: int, total: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the parts into which bytes are divided.

    Args:
        start: number of the first byte.
        total: number of the byte after the last.
        part_bytes: of each part, at most.

    Yields:
        (first byte, how many).
    """
    for at in range(start, total, part_bytes):
        yield at, min(part_bytes, total - at)

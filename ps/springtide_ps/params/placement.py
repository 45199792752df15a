"""Which server holds what: tensors are cut into chunks, and chunks are placed by size. PURE.

The greatest load is at most the mean plus one chunk (greedy "longest processing time first", Graham 1969),
and one large tensor is spread like all the others.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CHUNK_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements start to stop (exclusive) of the flat tensor `key`; `nbytes` of memory."""

    key: str
    index: int
    start: int
    stop: int
    nbytes: int

    @property
    def name(self) -> str:
        return f"{self.key}#{self.index}"


def split(key: str, elements: int, element_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Cut a tensor into equal chunks (the last may be smaller); an empty tensor is one chunk.

    Args:
        key: the tensor's.
        elements: how many it has.
        element_bytes: of each element.
        chunk_bytes: of a chunk, at most.

    Raises:
        ValueError: a chunk is smaller than an element.
    """
    if element_bytes <= 0 or chunk_bytes < element_bytes:
        raise ValueError(f"chunks of {chunk_bytes} bytes cannot hold elements of {element_bytes} bytes")
    each = chunk_bytes // element_bytes
    starts = range(0, max(elements, 1), each)
    return [
        Chunk(
            key, i, start, min(start + each, elements), (min(start + each, elements) - start) * element_bytes
        )
        for i, start in enumerate(starts)
    ]


def place(chunks: Sequence[Chunk], loads: Mapping[str, int]) -> dict[str, str]:
    """Give chunks to servers, from the largest to the smallest, each to the one with the least.

    The same arguments give the same answer on every process.

    Args:
        chunks: of any tensors.
        loads: bytes that each server holds already.

    Returns:
        The server by chunk's name.

    Raises:
        ValueError: there is no server.
    """
    if not loads:
        raise ValueError("no parameter server to place anything on")
    heap = sorted((load, server) for server, load in loads.items())
    placed = {}
    for chunk in sorted(chunks, key=lambda c: (-c.nbytes, c.key, c.index)):
        load, server = heap[0]
        placed[chunk.name] = server
        heapq.heapreplace(heap, (load + chunk.nbytes, server))
    return placed


def spread(chunks: Sequence[Chunk], servers: int) -> list[int]:
    """Return the server of each chunk of one tensor, in turn from a start that its key gives.

    For keys that come one after another and in any order: every process finds the same server.

    Args:
        chunks: of the tensor.
        servers: how many there are.

    Returns:
        Numbers from 0 to servers - 1.

    Raises:
        ValueError: there is no server.
    """
    if servers < 1:
        raise ValueError("no parameter server to place anything on")
    return [(zlib.crc32(chunk.key.encode()) + chunk.index) % servers for chunk in chunks]

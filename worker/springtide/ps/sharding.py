"""Sharding: which part of the parameters is which chunk, and which server has it. PURE."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from springtide.comm.layout import Layout
from springtide_ps.params.placement import CHUNK_BYTES

_SMALLEST_BUCKET: Final = 1 << 20
_SMALLEST_CHUNK: Final = 1 << 18
_ALIGNED: Final = 64
_BUCKETS: Final = 64


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Elements start to stop of a bucket. pieces: (parameter, its group, start, stop) within the chunk.

    optimizer: number of the one that has all of them.
    """

    key: str
    bucket: int
    start: int
    stop: int
    nbytes: int
    pieces: tuple[tuple[int, int, int, int], ...]
    optimizer: int = 0

    @property
    def span(self) -> tuple[int, int, int]:
        """Return its bucket, its first element, and the element after its last."""
        return self.bucket, self.start, self.stop


def bucket_bytes(total: int) -> int:
    """Return how many bytes of gradients are pushed together, of `total`.

    The last bucket of a backward pass and the first one of a forward pass are waited for, so they are a small
    part of the model; beyond that each costs time of its own.
    """
    return min(CHUNK_BYTES, max(_SMALLEST_BUCKET, total // _BUCKETS))


def plan_chunks(
    layout: Layout,
    groups: Mapping[str, int],
    chunk_bytes: int = CHUNK_BYTES,
    owners: Mapping[str, int] | None = None,
) -> list[PlannedChunk]:
    """Cut the buckets into chunks of at most `chunk_bytes`, in the order in which a forward pass needs them.

    The parameters that a forward pass needs first are cut finer (a quarter of the bytes before them, 256 KiB
    at least): their gradients are the last to leave, and a worker then waits for the last chunk's way back.

    Args:
        layout: Places of the parameters in their buckets.
        groups: Parameter group by name; a parameter in none is not updated by the optimizer, and is in no
            chunk's pieces. Chunks without a piece are left out.
        chunk_bytes: Of a chunk, at most.
        owners: Number of the optimizer by name, where there are several; a chunk has parameters of one only.

    Returns:
        The chunks.
    """
    owner = {index: (owners or {}).get(item.name, 0) for index, item in enumerate(layout.fields)}
    spans: list[list[tuple[int, int, int, int]]] = [[] for _ in layout.sizes]
    for index, (item, slot) in enumerate(zip(layout.fields, layout.slots, strict=True)):
        if item.name in groups:
            spans[slot.bucket].append((index, groups[item.name], slot.offset, slot.offset + item.numel))
    chunks: list[PlannedChunk] = []
    before = 0
    # Buckets are filled from the last parameter to the first.
    for bucket in reversed(range(len(layout.sizes))):
        size, each = layout.sizes[bucket], layout.dtypes[bucket].itemsize
        ordered = sorted(spans[bucket], key=lambda span: span[2])
        changes = {later[2] for span, later in pairwise(ordered) if owner[span[0]] != owner[later[0]]}
        starts: list[int] = []
        for first, end in reversed(list(pairwise([0, *sorted(changes), size]))):
            starts += chunk_starts(first, end, each, before + (size - end) * each, chunk_bytes)
        before += size * each
        bounds = list(pairwise([*sorted(starts), size]))
        for number, (start, stop) in reversed(list(enumerate(bounds))):
            pieces = tuple(
                (index, group, max(first, start) - start, min(last, stop) - start)
                for index, group, first, last in ordered
                if max(first, start) < min(last, stop)
            )
            if pieces:
                key, one = f"{bucket}.{number}", owner[pieces[0][0]]
                chunks.append(PlannedChunk(key, bucket, start, stop, (stop - start) * each, pieces, one))
    return chunks


class Sharding:
    """The chunks of one model, and what is looked up about them. names: of all parameters on servers."""

    def __init__(self, layout: Layout, names: Sequence[str], chunks: Sequence[PlannedChunk]) -> None:
        self.layout, self.chunks = layout, list(chunks)
        self.by_key = {chunk.key: chunk for chunk in self.chunks}
        self.urgency = {chunk.key: number for number, chunk in enumerate(self.chunks)}
        """Place of each chunk in the order in which a forward pass needs them."""
        self.by_bucket: list[list[PlannedChunk]] = [[] for _ in layout.sizes]
        for chunk in self.chunks:
            self.by_bucket[chunk.bucket].append(chunk)
        self._keys = [chunk.key for chunk in self.chunks]
        self._described = {chunk.key: described(chunk, names) for chunk in self.chunks}
        self._of_parameter: dict[int, list[str]] = {}
        for chunk in self.chunks:
            for piece in chunk.pieces:
                self._of_parameter.setdefault(piece[0], []).append(chunk.key)

    def keys_of(self, parameters: Collection[int] | None) -> Sequence[str]:
        """Return the keys of the chunks that have elements of these parameters (None: all chunks)."""
        if parameters is None:
            return self._keys
        return [key for index in parameters for key in self._of_parameter.get(index, ())]

    def describe(self, key: str) -> str:
        """Return which parameters a chunk is of; of a slice of a table its key."""
        return self._described.get(key, key)


def described(chunk: PlannedChunk, names: Sequence[str]) -> str:
    """Return in words which parameters a chunk is of. PURE.

    Args:
        chunk: The chunk.
        names: Of all parameters, in their order.
    """
    own = [names[piece[0]] for piece in chunk.pieces]
    return own[0] if len(own) == 1 else f"{own[0]} to {own[-1]}"


def chunk_starts(first: int, end: int, itemsize: int, before: int, chunk_bytes: int) -> list[int]:
    """Return where the chunks of a bucket's elements begin, the last one first.

    Args:
        first: Number of the first element.
        end: Number of the element after the last.
        itemsize: Bytes of an element.
        before: Bytes that a forward pass needs earlier.
        chunk_bytes: Of a chunk, at most.
    """
    starts = []
    while end > first:
        limit = min(chunk_bytes, max(_SMALLEST_CHUNK, before // 4))
        most = max(1, limit // itemsize)
        even = -(-(end - first) // -(-(end - first) // most))
        width = min(most, end - first, -(-even // _ALIGNED) * _ALIGNED)
        end -= width
        before += width * itemsize
        starts.append(end)
    return starts


@dataclass(frozen=True, slots=True)
class Arrangement:
    """homes: servers of each chunk, first the one that workers speak to. fills: servers that get a copy.

    drops: servers whose copy is not needed. settled: nothing is left to copy, and no server holds more than
    its part.
    """

    homes: dict[str, list[str]]
    fills: dict[str, list[str]] = field(default_factory=dict)
    drops: dict[str, list[str]] = field(default_factory=dict)
    settled: bool = True


class LackError(ValueError):
    """No server holds these chunks."""


def arrange(
    sizes: Mapping[str, int],
    servers: Sequence[str],
    holders: Mapping[str, Collection[str]],
    replication: int,
    leaving: Collection[str] = (),
) -> Arrangement:
    """Decide which server has what: the present holders serve on, and servers that should hold a chunk get a
    copy.

    Chunks are given out from the largest to the smallest (Graham 1969), each to a holder as long as that
    keeps every server within the mean plus one chunk, else to the server with the least.

    Args:
        sizes: Bytes by chunk.
        servers: Those that stay.
        holders: Servers that hold each chunk, of all connected ones.
        replication: Servers that are to hold each chunk.
        leaving: Servers that are connected, and to be emptied.

    Raises:
        LackError: A chunk is held by no server.
        ValueError: There is no server.
    """
    if not servers:
        raise ValueError("no parameter server to place anything on")
    if lacking := [key for key in sizes if not holders.get(key)]:
        raise LackError(f"{len(lacking)} of {len(sizes)} chunks are held by no server, {lacking[0]} for one")
    copies = max(1, min(replication, len(servers)))
    wanted = _wanted(sizes, servers, holders, copies)
    homes, fills, drops = {}, {}, {}
    for key in sizes:
        holding = set(holders[key])
        having = [server for server in wanted[key] if server in holding]
        rest = sorted(holding - set(wanted[key]), key=lambda server: (server in leaving, server))
        if missing := [server for server in wanted[key] if server not in holding]:
            # Until they have it, whoever has it keeps it.
            fills[key], homes[key] = missing, having + rest
        else:
            homes[key] = having
            if rest:
                drops[key] = rest
    settled = not fills and all(homes[key][0] == wanted[key][0] for key in sizes)
    return Arrangement(homes, fills, drops, settled)


def place_fresh(sizes: Mapping[str, int], servers: Sequence[str], replication: int) -> Arrangement:
    """Return where chunks go that nobody holds yet.

    Args:
        sizes: Bytes by chunk.
        servers: Those that stay.
        replication: Servers that are to hold each chunk.

    Raises:
        ValueError: There is no server.
    """
    if not servers:
        raise ValueError("no parameter server to place anything on")
    return Arrangement(
        _wanted(sizes, servers, dict.fromkeys(sizes, ()), max(1, min(replication, len(servers))))
    )


def _wanted(
    sizes: Mapping[str, int], servers: Sequence[str], holders: Mapping[str, Collection[str]], copies: int
) -> dict[str, list[str]]:
    largest, total = max(sizes.values(), default=0), sum(sizes.values())
    wanted: dict[str, list[str]] = {key: [] for key in sizes}
    order = sorted(sizes, key=lambda key: (-sizes[key], key))
    for _ in range(copies):
        load = dict.fromkeys(servers, 0)
        bound = total / len(servers)
        for key in order:
            free = [server for server in servers if server not in wanted[key]]
            fitting = [
                server
                for server in free
                if server in holders[key] and load[server] + sizes[key] <= max(bound, largest)
            ]
            choice = min(fitting or free, key=lambda server: (load[server], servers.index(server)))
            wanted[key].append(choice)
            load[choice] += sizes[key]
    return wanted

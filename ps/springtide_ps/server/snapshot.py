"""Snapshots: what the chunks of a server were after a step, while training goes on. PURE.

The first member that asks takes the snapshot; each of them asks before its own vote on the next step, so
nothing can have changed. From then on a chunk is copied on write, just before it changes, unless it was read
before that. Each chunk is read once, by one of the members, a large slice of a table in parts; when all have
released the snapshot, or another one is asked for, or nobody has come for long, what is left of it goes.

Threads and locks: threads that read requests take, read and release a snapshot; any thread that changes a
chunk calls `before` first. The caller holds the lock of the chunk that it hands in, which also orders what is
noted of that chunk; `_lock` is taken inside of it, and guards which snapshot there is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide_ps.params.chunk import Chunk
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.server.snapshot_reader import (
    READER_SECONDS,
    CopyOnWriteBlock,
    SnapshotReader,
    keep,
    part_of,
    part_of_block,
)
from springtide_ps.server.step_protocol import StepProtocolError
from springtide_ps.wire.keys import APPLIED_BATCHES_KEY

DumpPiece = tuple[dict[str, Any], torch.Tensor, int]
"""(JSON, uint8 [n], bytes of all): some of what a chunk's dump is."""


@dataclass(slots=True)
class Snapshot:
    """The chunks of a server as they were after one step, as far as they are not read yet.

    Attributes:
        name: how the members call it.
        step: after which the chunks are.
        keys: the chunks that are in it.
        readers: how many members will read it.
        since: when it was made, or last asked for, in seconds on the keeper's clock.
        blocks: of chunks that have changed since, copies of what was not read.
        descriptions: the description of each chunk (`describe`).
        begun: how many bytes of a chunk were read.
        given: chunks that were read whole.
        done: members that need it no more.
    """

    name: str
    step: int
    keys: frozenset[str]
    readers: int
    since: float
    blocks: dict[str, CopyOnWriteBlock] = field(default_factory=dict)
    descriptions: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Return the memory of the copies."""
        return sum(kept.block.nbytes for kept in self.blocks.values())


class SnapshotKeeper:
    """Keep at most one snapshot, and what is read of chunks by themselves.

    The caller holds the lock that keeps a chunk from changing when it hands it in.

    Args:
        clock: seconds, to forget a snapshot that nobody comes for.

    Attributes:
        chunk_reads: of chunks by themselves, which see the same changes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.chunk_reads = SnapshotReader(clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None

    @property
    def nbytes(self) -> int:
        """Return the memory of the snapshot's copies."""
        with self._lock:
            return self._snapshot.nbytes if self._snapshot is not None else 0

    def take(self, name: str, step: int, readers: int, versions: Iterable[tuple[str, int]]) -> None:
        """Keep the chunks as they are after `step`, unless the snapshot of that name does so already.

        Args:
            name: of the snapshot.
            step: after which the chunks are wanted, which some may not have made yet.
            readers: how many members will read.
            versions: key and version of all chunks here.

        Raises:
            StepProtocolError: one of the chunks is past that step.
        """
        with self._lock:
            if self._snapshot is not None and self._snapshot.name == name:
                return
            versions = list(versions)
            if late := [key for key, version in versions if version > step]:
                raise StepProtocolError(f"chunk {late[0]!r} is past step {step}: it cannot be kept as it was")
            keys = frozenset(key for key, _ in versions)
            self._snapshot = Snapshot(name, step, keys, readers, self._clock())

    def has(self, name: str) -> bool:
        """Return whether the snapshot of that name is kept."""
        with self._lock:
            return self._snapshot is not None and self._snapshot.name == name

    def release(self, name: str, member: str) -> None:
        """Note that a member needs the snapshot no more; forget it after the last one.

        Args:
            name: of the snapshot.
            member: its id.
        """
        with self._lock:
            if self._snapshot is not None and self._snapshot.name == name:
                self._snapshot.done.add(member)
                if len(self._snapshot.done) >= self._snapshot.readers:
                    self._snapshot = None

    def find(self, name: str) -> Snapshot:
        """Return the snapshot of that name; it is kept for longer since it is asked for.

        Raises:
            StepProtocolError: it is not kept any more.
        """
        with self._lock:
            if self._snapshot is None or self._snapshot.name != name:
                raise StepProtocolError(f"the state {name} is not kept here any more")
            self._snapshot.since = self._clock()
            return self._snapshot

    def before(self, key: str, chunk: Chunk | Slice, version: int) -> None:
        """Copy the unread rest of a chunk that is about to change, or to go.

        Args:
            key: the chunk's.
            chunk: as it is now.
            version: of the chunk now.
        """
        self.chunk_reads.before(key, chunk)
        with self._lock:
            snapshot = self._snapshot
            if snapshot is not None and self._clock() - snapshot.since > READER_SECONDS:
                snapshot = self._snapshot = None
        if (
            snapshot is None
            or key not in snapshot.keys
            or key in snapshot.blocks
            or key in snapshot.given
            or version != snapshot.step
        ):
            return
        snapshot.descriptions.setdefault(key, describe(chunk))
        snapshot.blocks[key] = keep(chunk, snapshot.begun.get(key, 0))


def describe_shard(
    snapshot: Snapshot, key: str, chunk: Chunk | Slice | None, version: int
) -> dict[str, Any] | None:
    """Return the description of the chunk as it is in the snapshot; None: it has not come that far.

    Args:
        snapshot: the one that is read.
        key: the chunk's.
        chunk: as it is now; None: it is not here.
        version: of the chunk now.

    Raises:
        StepProtocolError: the chunk is not kept as it was.
    """
    if key in snapshot.descriptions:
        return snapshot.descriptions[key]
    if chunk is not None and version < snapshot.step and key not in snapshot.given:
        return None
    if chunk is None or version > snapshot.step or key in snapshot.given:
        raise _lost(snapshot, key)
    return snapshot.descriptions.setdefault(key, describe(chunk))


def give(
    snapshot: Snapshot,
    key: str,
    chunk: Chunk | Slice | None,
    version: int,
    at: int = 0,
    most: int | None = None,
) -> DumpPiece | None:
    """Return the chunk as it is in the snapshot, or a part of it, once; None: it has not come that far.

    Args:
        snapshot: the one that is read.
        key: the chunk's.
        chunk: as it is now; None: it is not here.
        version: of the chunk now.
        at: number of the first byte; parts are given in order.
        most: bytes at most; None: all that follow.

    Raises:
        StepProtocolError: another byte is next, or the chunk is not kept as it was.
    """
    if key not in snapshot.keys or key in snapshot.given:
        raise _lost(snapshot, key)
    if at != snapshot.begun.get(key, 0):
        raise StepProtocolError(
            f"chunk {key!r} is read in order: byte {snapshot.begun.get(key, 0)} is next, not {at}"
        )
    if key in snapshot.blocks:
        found = part_of_block(snapshot.blocks[key], at, most)
    elif chunk is not None and version < snapshot.step:
        return None
    elif chunk is None or version > snapshot.step:
        raise _lost(snapshot, key)
    else:
        snapshot.descriptions.setdefault(key, describe(chunk))
        found = part_of(chunk, at, most)
    snapshot.begun[key] = at + found[1].nbytes
    if snapshot.begun[key] == found[2]:
        snapshot.given.add(key)
        snapshot.blocks.pop(key, None)
    return found


def describe(chunk: Chunk | Slice) -> dict[str, Any]:
    """Return what a reader has to know of a chunk before it reads it.

    Returns:
        Of a chunk "state", its optimizer's: [name, dtype, whether it is one number, which pieces have it]. Of
        a slice "about" and "bytes", those of its dump.
    """
    if isinstance(chunk, Chunk):
        return {"state": chunk.state_fields()}
    # Where training goes on from it, says the state that the snapshot belongs to.
    about = {name: value for name, value in chunk.about().items() if name != APPLIED_BATCHES_KEY}
    return {"about": about, "bytes": chunk.dumped_bytes}


def _lost(snapshot: Snapshot, key: str) -> StepProtocolError:
    return StepProtocolError(f"chunk {key!r} as it was after step {snapshot.step} is not here any more")

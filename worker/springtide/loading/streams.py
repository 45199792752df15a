"""Keep the samples of streams of shards that a member needs, and find out what follows in them.

A member reads the streams that its part of the global batch touches, and a little ahead in those that it is
the last one to touch. Its findings travel with the step's vote, so that all members can deal the next batch
(`springtide.data.streams`). Samples stay until the position is past them: a step that is dropped, or cut
anew, finds them here; a stream that another member has had is read from its position.

The loader is used from the script's thread alone and has no lock.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from springtide.data import streams
from springtide.data.balance import Proportions
from springtide.data.cursor import Cursor
from springtide.data.loop import LoopPlan
from springtide.data.partition import partition
from springtide.data.source import Source
from springtide.data.stream_order import key_parts
from springtide.data.streams import Finding, StreamPosition
from springtide.errors import SpringtideError
from springtide.loading.device_copies import Copier
from springtide.loading.stream_reader import Piece, make_reader
from springtide.train_step.randomness import isolated


@dataclass(slots=True)
class _Buffer:
    """Keep the samples of one stream that have been read, from number `first` of its pass on."""

    epoch: int
    first: int
    begun: int  # number of the sample that was the first one read
    shard: int  # in which the reader stands
    lengths: dict[int, int] = field(default_factory=dict)
    samples: deque[Any] = field(default_factory=deque)
    over: bool = False

    @property
    def stop(self) -> int:
        return self.first + len(self.samples)

    def take_in(self, piece: Piece) -> None:
        self.samples.extend(piece.samples)
        self.lengths.update(piece.ends)
        if piece.ends:
            self.shard = piece.ends[-1][0] + 1
        self.over = piece.over

    def drop_before(self, number: int) -> None:
        while self.samples and self.first < number:
            self.samples.popleft()
            self.first += 1


class StreamLoader:
    """Read the streams of one loop."""

    def __init__(
        self,
        plan: LoopPlan,
        processes: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        copier: Copier | None = None,
    ) -> None:
        """Make it; nothing is read yet.

        Args:
            plan: of the loop, over shards.
            processes: how many read ahead; 0: the script's thread reads.
            collate_fn: makes a batch's data of a list of samples; None: torch's `default_collate`.
            copier: brings batches to the device; None: they stay where `collate_fn` leaves them.
        """
        assert plan.streams is not None
        self._plan, self._order = plan, plan.streams
        self._reader = make_reader(plan, processes)
        self._ahead = bool(processes)
        self._collate = default_collate if collate_fn is None else collate_fn
        self._copier = copier
        self._buffers: dict[int, _Buffer] = {}
        self._cursor = Cursor()
        self._where: dict[int, tuple[int, int]] = {}
        self._findings: dict[int, Finding] = {}
        self.source = Source(0, self._read, runs_code=True)
        """Reads samples by their keys, where `stand_at` has been told of the step."""

    # ---- from the loop

    def look(self, cursor: Cursor, rank: int, size: int) -> dict[int, Finding]:
        """Return what follows in this member's share of the streams, where the batch cannot be dealt yet.

        Args:
            cursor: where the step starts.
            rank: of this member.
            size: members.

        Raises:
            SpringtideError: a shard is not what it was.
        """
        positions = cursor.streams or ()
        wanted = self._order.wanted(positions, self._plan.batch_size)
        own = {
            stream: wanted[stream]
            for stream in range(self._order.streams)
            if wanted[stream] and stream * size // self._order.streams == rank
        }
        with self._isolated():
            return self._find(cursor, positions, own, bounded=False)

    def stand_at(self, cursor: Cursor, rank: int, size: int, proportions: Proportions | None = None) -> None:
        """Note the step that comes next, read ahead of it, and forget what lies behind.

        Args:
            cursor: where the step starts; its batch is known.
            rank: of this worker in its generation.
            size: workers of the generation.
            proportions: of batches by speed; None: even parts.

        Raises:
            SpringtideError: a shard is not what it was.
        """
        plan, order, positions = self._plan, self._order, cursor.streams or ()
        self._cursor = cursor
        self._where = self._places(cursor)
        self._buffers = {n: buffer for n, buffer in self._buffers.items() if buffer.epoch == cursor.epoch}
        for stream, buffer in self._buffers.items():
            buffer.drop_before(self._begin(positions[stream]))
        readers = order.readers(cursor, plan.batch_size, size, plan.min_part, proportions)
        after = order.stepped(cursor, plan.batch_size)
        wanted = order.wanted(after, plan.batch_size)
        own = {n: wanted[n] for n in range(order.streams) if wanted[n] and readers[n] == rank}
        self._want_part(cursor, rank, size, proportions)
        with self._isolated():
            self._findings = self._find(cursor, after, own, bounded=True)

    def found(self) -> list[float]:
        """Return this member's findings beside the step, for its vote; zeros where other members look."""
        nothing = [0.0] * streams.FINDING_NUMBERS
        return [
            number
            for stream in range(self._order.streams)
            for number in (self._findings[stream].to_numbers() if stream in self._findings else nothing)
        ]

    def read(self, step: int, ids: torch.Tensor) -> Any:
        """Return samples of the step, collated.

        Args:
            step: its number.
            ids: keys of the samples of one micro-batch, int64 [n], in order.

        Raises:
            SpringtideError: a shard is not what it was.
        """
        with isolated(self._plan.seed, step, 1 + int(ids[0])):
            return self._read(ids)

    def close(self) -> None:
        """End the processes, and forget all samples."""
        self._reader.close()
        self._buffers.clear()

    # ---- samples

    def _read(self, ids: torch.Tensor) -> Any:
        collated = self._collate([self._sample(key) for key in ids.tolist()])
        return collated if self._copier is None else self._copier.now(collated)

    def _sample(self, key: int) -> Any:
        shard, offset = key_parts(key)
        stream, first = self._where[shard]
        buffer = self._buffers.get(stream)
        if buffer is None or not buffer.first <= first + offset < buffer.stop:
            with self._isolated():
                buffer = self._read_until(stream, self._cursor, first + offset + 1)
        if first + offset >= buffer.stop:
            raise self._changed(shard, f"ends before sample {offset}, which was there")
        return buffer.samples[first + offset - buffer.first]

    def _places(self, cursor: Cursor) -> dict[int, tuple[int, int]]:
        """Return, by the numbers of the shards that are known of, the stream and the number in its pass that
        the shard's first sample has, or would have where it lies before.
        """
        found: dict[int, tuple[int, int]] = {}
        for stream, position in enumerate(cursor.streams or ()):
            first = self._begin(position) - position.offset
            for shard, length in enumerate((*position.ends, 0), start=position.shard):
                number = self._order.number(self._plan.seed, cursor.epoch, stream, shard)
                if number is not None:
                    found[number] = stream, first
                first += length
        return found

    def _begin(self, position: StreamPosition) -> int:
        return position.window * self._order.window

    # ---- reading

    def _isolated(self) -> contextlib.AbstractContextManager[None]:
        """Leave the script's random numbers, and those of collating, as they are while samples are read."""
        return contextlib.nullcontext() if self._ahead else isolated(0)

    def _want_part(self, cursor: Cursor, rank: int, size: int, proportions: Proportions | None) -> None:
        """Ask the processes for this member's samples of the step, and of the next one."""
        if not self._ahead:
            return
        counts = self._order.counts(cursor, self._plan.batch_size)
        part = partition(sum(counts), size, self._plan.min_part, proportions)[rank]
        stop = 0
        for stream, count in enumerate(counts):
            stop += count
            if count and stop > part.start and stop - count < part.start + part.size:
                position = (cursor.streams or ())[stream]
                self._want(stream, cursor, self._begin(position) + position.known)

    def _find(
        self, cursor: Cursor, positions: Sequence[StreamPosition], own: Mapping[int, int], *, bounded: bool
    ) -> dict[int, Finding]:
        """Return what follows the known samples of some streams.

        Args:
            cursor: where the step starts.
            positions: of all streams, of which something is to be found.
            own: by stream, how many samples.
            bounded: the findings travel with a vote.
        """
        stops = {
            stream: self._begin(positions[stream]) + positions[stream].known + count
            for stream, count in own.items()
        }
        for stream, stop in stops.items():
            # What is read while the step is computed is there for the next one.
            self._want(stream, cursor, stop + (own[stream] if self._ahead else 0))
        found: dict[int, Finding] = {}
        for stream, stop in stops.items():
            buffer = self._read_until(stream, cursor, stop)
            try:
                found[stream] = streams.find(
                    positions[stream],
                    own[stream],
                    buffer.lengths.get,
                    partial(self._has_shard, cursor.epoch, stream),
                    bounded=bounded,
                )
            except OverflowError as error:
                raise SpringtideError(f"dataset: {error}: leave empty shards out of the list") from None
        return found

    def _has_shard(self, epoch: int, stream: int, shard: int) -> bool:
        return self._order.number(self._plan.seed, epoch, stream, shard) is not None

    def _want(self, stream: int, cursor: Cursor, stop: int) -> _Buffer:
        """Return the buffer of a stream, whose samples up to number `stop` of the pass are asked for."""
        buffer = self._opened(stream, cursor)
        self._reader.want(stream, stop - buffer.begun)
        return buffer

    def _read_until(self, stream: int, cursor: Cursor, stop: int) -> _Buffer:
        """Return the buffer of a stream that has been read up to number `stop` of the pass, or to its end."""
        buffer = self._opened(stream, cursor)
        if buffer.stop < stop and not buffer.over:
            self._reader.want(stream, stop - buffer.begun)
        position = (cursor.streams or ())[stream]
        while buffer.stop < stop and not buffer.over:
            buffer.take_in(self._reader.take(stream))
            buffer.drop_before(self._begin(position))
        self._compare(stream, cursor, buffer)
        return buffer

    def _opened(self, stream: int, cursor: Cursor) -> _Buffer:
        position = (cursor.streams or ())[stream]
        begin, buffer = self._begin(position), self._buffers.get(stream)
        if buffer is not None and buffer.epoch == cursor.epoch and buffer.first <= begin:
            is_near = begin <= buffer.stop or position.shard == buffer.shard
            if is_near:
                return buffer
        self._reader.begin(stream, cursor.epoch, position.shard, position.offset)
        self._buffers[stream] = _Buffer(cursor.epoch, begin, begin, position.shard)
        return self._buffers[stream]

    def _compare(self, stream: int, cursor: Cursor, buffer: _Buffer) -> None:
        """Raise SpringtideError where a shard has another length than when it was read before."""
        position = (cursor.streams or ())[stream]
        for shard, length in enumerate(position.ends, start=position.shard):
            found = buffer.lengths.get(shard, length)
            if found != length:
                number = self._order.number(self._plan.seed, cursor.epoch, stream, shard)
                assert number is not None
                raise self._changed(number, f"has {found} samples, and had {length}")

    def _changed(self, shard: int, what: str) -> SpringtideError:
        return SpringtideError(
            f"dataset: shard {self._order.shards.name(shard)!r} {what}: a shard has to give the same samples "
            "in the same order each time it is read, on every worker"
        )


def make_stream_loader(
    plan: LoopPlan,
    processes: Any = 0,
    *,
    collate_fn: Any = None,
    copier: Copier | None = None,
) -> StreamLoader:
    """Make the loader of a loop over shards.

    Args:
        plan: of the loop.
        processes: how many read ahead, an integer of the script.
        collate_fn: makes a batch's data of a list of samples; None: torch's `default_collate`.
        copier: brings batches to the device; None: they stay where `collate_fn` leaves them.

    Raises:
        TypeError: `collate_fn` is no function.
        ValueError: it is no number of processes.
        SpringtideError: processes cannot be forked here.
    """
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(
            f"batches(): collate_fn must be a function of a list of samples, got {type(collate_fn).__name__}"
        )
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 0:
        raise ValueError(f"batches(): loader_workers must be an integer >= 0, got {processes!r}")
    if processes and "fork" not in multiprocessing.get_all_start_methods():
        raise SpringtideError("batches(): loader_workers needs a system that can fork processes")
    return StreamLoader(plan, processes, collate_fn, copier)

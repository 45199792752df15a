"""Read streams of shards: in this process, or ahead of the step in processes that do nothing else.

Random numbers that the reading of a sample draws belong to (seed, pass, shard, sample), whoever reads it and
whenever.

Processes: each has the streams whose numbers leave the same remainder, and is told how far to read each of
them; so it reads ahead, and never further than there is memory for. Samples come back pickled. A reader is
used from the script's thread alone and has no lock.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch

from springtide.data.loop import LoopPlan
from springtide.data.streams import MAX_OFFSET
from springtide.errors import SpringtideError
from springtide.loading.prefetch import settle_in
from springtide.train_step.randomness import seed_host

_AT_ONCE = 16
"""Samples of a stream that a process reads, and sends, before it looks at the next stream."""
_READ_SECONDS = 600.0
_LOOK_SECONDS = 1.0


class Piece(NamedTuple):
    """Give what was read of a stream, in order.

    Attributes:
        samples: as the data set gave them.
        ends: (shard, length) of the shards that ended; shards count among the stream's own.
        over: whether the stream ended behind them.
    """

    samples: list[Any]
    ends: list[tuple[int, int]]
    over: bool


class StreamWalk:
    """Read one stream in order, from a position on."""

    def __init__(self, plan: LoopPlan, epoch: int, stream: int, shard: int, offset: int) -> None:
        """Stand at a sample.

        Args:
            plan: of the loop.
            epoch: the pass.
            stream: number of the stream.
            shard: number of the shard among the stream's own.
            offset: samples of it that are left out.
        """
        assert plan.streams is not None
        self._order, self._seed = plan.streams, plan.seed
        self._epoch, self._stream = epoch, stream
        self._shard, self._offset = shard, offset
        self._number = -1  # of the shard in the source
        self._samples: Iterator[Any] | None = None

    def read(self, count: int) -> Piece:
        """Return the next samples, fewer where the stream ends. Errors of the data set go through.

        Args:
            count: how many, at least 1.
        """
        samples, ends = list[Any](), list[tuple[int, int]]()
        while len(samples) < count:
            if self._samples is None and not self._open():
                return Piece(samples, ends, True)
            assert self._samples is not None
            seed_host(self._seed, self._epoch, self._number, self._offset)
            try:
                samples.append(next(self._samples))
            except StopIteration:
                ends.append((self._shard, self._offset))
                self._samples = None
                self._shard, self._offset = self._shard + 1, 0
                continue
            except Exception as error:
                error.add_note(f"while reading sample {self._offset} of shard {self._name!r}")
                raise
            self._offset += 1
            if self._offset >= MAX_OFFSET:
                raise OverflowError(f"shard {self._name!r} has {MAX_OFFSET} samples or more")
        return Piece(samples, ends, False)

    @property
    def _name(self) -> Any:
        return self._order.shards.name(self._number)

    def _open(self) -> bool:
        number = self._order.number(self._seed, self._epoch, self._stream, self._shard)
        if number is None:
            return False
        self._number = number
        try:
            self._samples = iter(self._order.shards.read(self._name, self._offset))
        except Exception as error:
            error.add_note(f"while opening shard {self._name!r} at sample {self._offset}")
            raise
        return True


class StreamReader(Protocol):
    """Read streams for one member: `begin` at a position, `want` ahead, `take` what has been read, `end`."""

    def begin(self, stream: int, epoch: int, shard: int, offset: int) -> None:
        """Stand at a sample of a stream, and forget where it was read before.

        Args:
            stream: its number.
            epoch: the pass.
            shard: number of the shard among the stream's own.
            offset: number of the sample in it.
        """

    def want(self, stream: int, total: int) -> None:
        """Ask for samples, which are read when there is time, or when they are taken.

        Args:
            stream: its number.
            total: how many since it was begun.
        """

    def take(self, stream: int) -> Piece:
        """Return the next of the samples that were asked for; wait for them. There have to be some, or the
        end of the stream.
        """

    def close(self) -> None:
        """End what reads."""


@dataclass(slots=True)
class _Reading:
    walk: StreamWalk
    total: int = 0
    read: int = 0


class LocalReader:
    """Read in the calling thread, when samples are taken; its random numbers are those of the last sample."""

    def __init__(self, plan: LoopPlan) -> None:
        self._plan = plan
        self._streams: dict[int, _Reading] = {}

    def begin(self, stream: int, epoch: int, shard: int, offset: int) -> None:
        """Stand at a sample of a stream; see `StreamReader`.

        Args:
            stream: its number.
            epoch: the pass.
            shard: number of the shard among the stream's own.
            offset: number of the sample in it.
        """
        self._streams[stream] = _Reading(StreamWalk(self._plan, epoch, stream, shard, offset))

    def want(self, stream: int, total: int) -> None:
        """Ask for samples; see `StreamReader`.

        Args:
            stream: its number.
            total: how many since it was begun.
        """
        self._streams[stream].total = max(total, self._streams[stream].total)

    def take(self, stream: int) -> Piece:
        reading = self._streams[stream]
        piece = reading.walk.read(reading.total - reading.read)
        reading.read += len(piece.samples)
        return piece

    def close(self) -> None:
        self._streams.clear()


@dataclass(slots=True)
class _Child:
    process: multiprocessing.process.BaseProcess
    connection: Connection


@dataclass(slots=True)
class _Coming:
    """Keep what a process has sent of a stream, since it was begun for the `opening`th time."""

    opening: int
    total: int = 0
    pieces: deque[Piece] = field(default_factory=deque)


class ProcessReader:
    """Read in other processes, which are started with the first stream that is begun."""

    def __init__(self, plan: LoopPlan, processes: int) -> None:
        """Args: plan: of the loop. processes: how many read, at least 1."""
        self._plan, self._count = plan, processes
        self._children: list[_Child] = []
        self._streams: dict[int, _Coming] = {}
        self._openings = 0

    def begin(self, stream: int, epoch: int, shard: int, offset: int) -> None:
        """Stand at a sample of a stream; see `StreamReader`.

        Args:
            stream: its number.
            epoch: the pass.
            shard: number of the shard among the stream's own.
            offset: number of the sample in it.
        """
        if not self._children:
            self._children = [self._start(number) for number in range(self._count)]
        self._openings += 1
        self._streams[stream] = _Coming(self._openings)
        self._send(stream, ("begin", stream, self._openings, epoch, shard, offset))

    def want(self, stream: int, total: int) -> None:
        """Ask for samples; see `StreamReader`.

        Args:
            stream: its number.
            total: how many since it was begun.
        """
        coming = self._streams[stream]
        if total > coming.total:
            coming.total = total
            self._send(stream, ("want", stream, coming.opening, total))

    def take(self, stream: int) -> Piece:
        coming, began = self._streams[stream], time.monotonic()
        child = self._child(stream)
        while not coming.pieces:
            if child.connection.poll(_LOOK_SECONDS):
                self._receive(child)
            elif time.monotonic() - began > _READ_SECONDS:
                raise SpringtideError(
                    f"the process that reads stream {stream} of the shards has given nothing for "
                    f"{_READ_SECONDS:g} s: is the storage there?"
                )
        return coming.pieces.popleft()

    def close(self) -> None:
        children, self._children = self._children, []
        for child in children:
            child.connection.close()
            child.process.kill()
        for child in children:
            child.process.join()
            child.process.close()
        self._streams.clear()

    def _child(self, stream: int) -> _Child:
        return self._children[stream % self._count]

    def _send(self, stream: int, message: tuple[Any, ...]) -> None:
        child = self._child(stream)
        while child.connection.poll():
            self._receive(child)  # else both could wait for the other to receive
        try:
            child.connection.send(message)
        except OSError:
            self._ended(child)

    def _receive(self, child: _Child) -> None:
        try:
            stream, opening, piece = pickle.loads(child.connection.recv_bytes())
        except (EOFError, OSError):
            self._ended(child)
        coming = self._streams.get(stream)
        if coming is None or coming.opening != opening:
            return
        if isinstance(piece, Exception):
            raise piece
        coming.pieces.append(piece)

    def _ended(self, child: _Child) -> None:
        child.process.join(_LOOK_SECONDS)
        raise SpringtideError(
            f"a process that reads shards ended (exit code {child.process.exitcode}): is the container's "
            "memory limit too low for loader_workers?"
        )

    def _start(self, number: int) -> _Child:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, ours, self._plan, number), daemon=True, name=f"shards-{number}"
        )
        with warnings.catch_warnings():
            # From Python 3.12 on: forking with threads. The child touches nothing that those hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        return _Child(process, ours)


def make_reader(plan: LoopPlan, processes: int) -> StreamReader:
    """Return what reads streams.

    Args:
        plan: of the loop.
        processes: how many read ahead; 0: the script's thread reads.
    """
    return ProcessReader(plan, processes) if processes else LocalReader(plan)


def _serve(connection: Connection, parents: Connection, plan: LoopPlan, number: int) -> None:
    """Read what is asked for, until the one who asks is gone.

    Args:
        connection: to the process that asks.
        parents: its end, which came along.
        plan: of the loop.
        number: of this process.
    """
    parents.close()
    settle_in(number)
    torch.set_num_threads(1)  # the pool of threads has not come along, and would be waited for
    walks: dict[int, tuple[int, _Reading]] = {}
    turn = 0
    while True:
        waiting = [stream for stream, (_, reading) in walks.items() if reading.read < reading.total]
        try:
            if not waiting or connection.poll():
                _take_message(plan, connection.recv(), walks)
                continue
            turn += 1
            stream = waiting[turn % len(waiting)]
            opening, reading = walks[stream]
            connection.send_bytes(pickle.dumps((stream, opening, _read(reading)), protocol=5))
        except (EOFError, OSError):
            return


def _take_message(plan: LoopPlan, message: tuple[Any, ...], walks: dict[int, tuple[int, _Reading]]) -> None:
    kind, stream, opening, *rest = message
    if kind == "begin":
        epoch, shard, offset = rest
        walks[stream] = opening, _Reading(StreamWalk(plan, epoch, stream, shard, offset))
    elif walks[stream][0] == opening:
        walks[stream][1].total = rest[0]


def _read(reading: _Reading) -> Piece | Exception:
    """Return the next samples of a stream, or what the data set has raised; nothing is read behind that."""
    try:
        piece = reading.walk.read(min(_AT_ONCE, reading.total - reading.read))
        pickle.dumps(piece)
    except Exception as error:
        reading.read = reading.total
        return _sendable(error)
    reading.read = reading.total if piece.over else reading.read + len(piece.samples)
    return piece


def _sendable(error: Exception) -> Exception:
    """Return the error, or one that says the same, if it cannot be brought to another process."""
    notes = getattr(error, "__notes__", [])
    sent: Exception = RuntimeError(f"{type(error).__name__}: {error}")
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        sent = copy if isinstance(copy, Exception) else sent
    sent.__notes__ = list(notes)
    return sent

"""Reading ahead in processes of torch's DataLoader, by a plan that may change at any step.

The samples that a worker will need are known: the dealing is a pure function of cursor, rank and size. So
requests for the next steps are given out ahead. When members come or go, the parts of those steps are cut
anew; samples that have been read, or are being read, are used, and only the rest is asked for.

Where the script has a function of its own that collates, its processes call it, micro-batch by micro-batch:
to pad and stack in the script's thread would be part of every step. Its batches cannot be cut anew, so the
few steps that a change of the members cuts are read and collated again.

With `to_device` the next micro-batch is copied to a CUDA device ahead, too (`device_copies`), if its samples
are here.

Threads: the loader is used from the script's thread alone and has no lock; other processes read, and
DataLoader's own threads carry their results.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import stat
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Sampler

from springtide.data.balance import Proportions
from springtide.data.cursor import Cursor
from springtide.data.loop import LoopPlan
from springtide.data.partition import pieces
from springtide.data.source import FetchHalves, Source
from springtide.errors import SpringtideError
from springtide.loading.arrivals import Arrivals
from springtide.loading.device_copies import Copier, DeviceCopies
from springtide.loading.rows import is_rows, join_rows, spans, take_rows
from springtide.train_step.randomness import isolated

AHEAD = 2
"""Requests for each process that are under way, as DataLoader's prefetch_factor."""

_PR_SET_PDEATHSIG = 1
_READ_SECONDS = 600.0


class Request(NamedTuple):
    """Samples of a step.

    Args:
        step: it is for.
        ids: of the samples.
        sizes: of the micro-batches, each of which is collated for itself; empty where what comes back is rows
            that can be cut and joined.
    """

    step: int
    ids: list[int]
    sizes: tuple[int, ...] = ()

    def micro_batches(self) -> Iterator[tuple[int, ...]]:
        """Ids of each."""
        start = 0
        for size in self.sizes:
            yield tuple(self.ids[start : start + size])
            start += size

    @property
    def name(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return what tells it from all others that are under way."""
        return self.step, tuple(self.ids), self.sizes


class Wanted:
    """Chooses the next samples to ask for. PURE but for its state.

    `held` and the requests under way are not asked for again. collates: each micro-batch comes back collated
    by the script's own function, so it is good for nothing but itself.
    """

    def __init__(self, plan: LoopPlan, collates: bool = False) -> None:
        self._plan, self._collates = plan, collates
        self._cursor: Cursor | None = None
        self._rank, self._size, self._stood = 0, 1, 0
        self._proportions: Proportions | None = None
        self._split = 1  # what the script calls batch.split() with
        self._passed = 0  # requests under way from before the last plan
        self._waiting: deque[Request] = deque()
        self.under_way: deque[Request] = deque()
        self.held: dict[int, set[int]] = {}
        self.made: dict[int, list[Request]] = {}
        self._asked_for: dict[int, list[int]] = {}
        """Worker's own part of each step that was asked for."""

    def stand_at(
        self,
        cursor: Cursor,
        rank: int,
        size: int,
        read: Sequence[int] = (),
        proportions: Proportions | None = None,
    ) -> None:
        """Note the step that the worker is about to compute, and forget what lies behind.

        After a change of the members or the cut, a jump of the cursor or another way to split, plan from
        here.

        Args:
            cursor: where that step starts.
            rank: of this worker in its generation.
            size: workers of the generation.
            read: sizes of the micro-batches that the last step was read in.
            proportions: of batches by speed; None: even parts. Later steps are expected to have it, too.
        """
        for kept in (self.held, self.made, self._asked_for):
            for step in [step for step in kept if step < cursor.step]:
                del kept[step]
        jumped = self._cursor is None or not self._stood <= cursor.step <= self._cursor.step
        split = self._split_of(read)
        if jumped or (rank, size, split, proportions) != (
            self._rank,
            self._size,
            self._split,
            self._proportions,
        ):
            self._cursor, self._rank, self._size, self._split = cursor, rank, size, split
            self._proportions = proportions
            self._waiting.clear()
            self._passed = len(self.under_way)
            self._asked_for.clear()
        self._stood = cursor.step

    def _split_of(self, read: Sequence[int]) -> int:
        """Return the `m` with which `batch.split(m)` was called in a step that was read so; the known m where
        none fits.
        """
        sizes, samples = tuple(read), sum(read)
        known = (self._split, *range(1, len(sizes) + 1)) if samples else ()
        return next((m for m in known if self._sizes(samples, m) == sizes), self._split)

    def _sizes(self, samples: int, wanted: int) -> tuple[int, ...]:
        found = pieces(samples, wanted, self._plan.micro_batch, self._plan.min_part)
        return tuple(piece.size for piece in found)

    def next(self) -> Request | None:
        """The next request, which is under way from now on; None at the loop's end."""
        while not self._waiting:
            if self._cursor is None or self._plan.ended(self._cursor):
                return None
            ids = self._plan.batch(
                self._cursor, self._rank, self._size, proportions=self._proportions
            ).ids.tolist()
            step = self._cursor.step
            self._asked_for[step] = ids
            if self._collates and ids:
                request = Request(step, ids, self._sizes(len(ids), self._split))
                if request not in self.under_way and request not in self.made.get(step, ()):
                    self._waiting.append(request)
            elif not self._collates:
                known = self.held.get(step, set()).union(*(r.ids for r in self.under_way if r.step == step))
                if missing := [number for number in ids if number not in known]:
                    self._waiting.append(Request(step, missing))
            self._cursor = self._plan.advance(self._cursor)
        request = self._waiting.popleft()
        self.under_way.append(request)
        return request

    def follows(self, step: int, ids: list[int]) -> tuple[int, list[int]] | None:
        """Return the micro-batch behind one that is handed out, as (step, ids).

        None where that is not known: the step was cut otherwise than was foreseen, or the next one has not
        been asked for.

        Args:
            step: number of the step.
            ids: samples of the micro-batch.
        """
        coming = [*self._pieces(step), *self._pieces(step + 1)]
        if (step, ids) not in coming:
            return None
        place = coming.index((step, ids)) + 1
        return coming[place] if place < len(coming) else None

    def _pieces(self, step: int) -> list[tuple[int, list[int]]]:
        """Return the micro-batches of a step that was asked for, as (step, ids)."""
        dealt = self._asked_for.get(step)
        if not dealt:
            return []
        request = Request(step, dealt, self._sizes(len(dealt), self._split))
        return [(step, list(ids)) for ids in request.micro_batches()]

    def arrived(self) -> Request:
        """The oldest request has been answered."""
        request = self.under_way.popleft()
        self._passed = max(0, self._passed - 1)
        if request.sizes:
            self.made.setdefault(request.step, []).append(request)
        else:
            self.held.setdefault(request.step, set()).update(request.ids)
        return request

    def comes(self, step: int, ids: list[int]) -> bool:
        """Return whether to wait for samples of a step, since they come from the processes.

        That is so if some of these are under way, or this very micro-batch; or if it is behind what was asked
        for before the last plan, and is asked for when that is here.

        Args:
            step: the number of the step.
            ids: samples of one micro-batch.
        """
        if self._collates and self._passed:
            return True
        for request in self.under_way:
            if request.step == step and request.sizes and tuple(ids) in request.micro_batches():
                return True
            if request.step == step and not request.sizes and not set(ids).isdisjoint(request.ids):
                return True
        return False


class _Requests(Sampler[list[int]]):
    """Batch sampler for DataLoader, which asks for one more batch whenever a process is free."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def __iter__(self) -> Iterator[Any]:
        while (request := self._wanted.next()) is not None:
            yield request


class _Dataset(torch.utils.data.Dataset[Any]):
    """Answers for many ids at once, so that the collated samples come back as one.

    With a collate_fn of the script's the micro-batches come back as a list. Random numbers belong to the
    seed, the step and the first id, whichever process draws them.
    """

    def __init__(self, source: Source, seed: int, arrivals: Arrivals | None = None) -> None:
        self._source, self._seed, self._arrivals = source, seed, arrivals

    def __getitems__(self, request: Request) -> Any:
        """Return the answer to a request, and what notes its arrival behind it."""
        answer = self._answer(request)
        return answer, None if self._arrivals is None else self._arrivals.mark(request.name)

    def _answer(self, request: Request) -> Any:
        source = self._source
        if source.halves is None:
            return self.read(request.step, request.ids)
        with isolated(self._seed, request.step, 1 + request.ids[0]):
            samples = dict(zip(request.ids, source.halves.read(torch.tensor(request.ids)), strict=True))
            return [
                source.halves.collate([samples[number] for number in ids]) for ids in request.micro_batches()
            ]

    def read(self, step: int, ids: list[int]) -> Any:
        """The collated samples; a list of the samples themselves for the script's own collate_fn."""
        source = self._source
        read = source.fetch if source.halves is None else source.halves.read
        if not source.runs_code:
            return read(torch.tensor(ids))
        with isolated(self._seed, step, 1 + ids[0]):
            return read(torch.tensor(ids))

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("samples are asked for many at once")


def _as_it_is(collated: Any) -> Any:
    return collated


class Loader:
    """Reads ahead for one loop. Used from the script's thread."""

    def __init__(
        self,
        plan: LoopPlan,
        processes: int,
        device: torch.device | None = None,
        copier: Copier | None = None,
    ) -> None:
        """Make it; processes begin to read with the first sample that is asked for.

        Args:
            plan: of the loop.
            processes: how many read.
            device: of the model; batches for a CUDA device are pinned.
            copier: brings samples to the device; None: they stay in host memory.
        """
        self._arrivals = None if copier is None else Arrivals()
        self._copies = None if copier is None else DeviceCopies(copier)
        self._dataset = _Dataset(plan.source, plan.seed, self._arrivals)
        self._halves = plan.source.halves
        self._wanted = Wanted(plan, self._halves is not None)
        self._processes = processes
        self._device = device if device is not None and device.type == "cuda" else None
        self._answers: Iterator[Any] | None = None
        self._chunks: dict[int, list[tuple[list[int], Any]]] = {}
        self._made: dict[int, dict[tuple[int, ...], Any]] = {}
        self._read: dict[tuple[int, ...], None] = {}  # micro-batches of the running step, each once
        self.read_here = 0
        """Samples that the script's own process had to read."""

    def stand_at(self, cursor: Cursor, rank: int, size: int, proportions: Proportions | None = None) -> None:
        """Note that the step at the cursor comes next, and forget what was read for steps before it.

        Args:
            cursor: where the step starts.
            rank: of this worker in its generation.
            size: workers of the generation.
            proportions: as for `Wanted.stand_at`.
        """
        for kept in (self._chunks, self._made):
            for step in [step for step in kept if step < cursor.step]:
                del kept[step]
        self._wanted.stand_at(cursor, rank, size, [len(numbers) for numbers in self._read], proportions)
        self._read = {}

    def read(self, step: int, ids: torch.Tensor) -> Any:
        """Return samples of a step, collated; what no process has read is read here.

        Args:
            step: its number.
            ids: the samples of one micro-batch, int64 [n], in order.

        Returns:
            Their collated form: on the device if there is a copier, on the CPU else.
        """
        numbers = ids.tolist()
        self._read[tuple(numbers)] = None
        collated = self._collated(step, numbers)
        if self._copies is None:
            return collated
        found = self._copies.take((step, tuple(numbers)), collated)
        self._copy_ahead(self._copies, self._wanted.follows(step, numbers))
        return found

    def _copy_ahead(self, copies: DeviceCopies, following: tuple[int, list[int]] | None) -> None:
        """Begin to copy a micro-batch if all of it is here.

        Args:
            copies: to begin it with.
            following: step and ids; None: nothing is known of it.
        """
        if following is None:
            return
        step, numbers = following
        while not self._is_whole(step, numbers):
            if not self._next_is_here() or not self._take_answer(step, numbers):
                return
        copies.begin((step, tuple(numbers)), self._collated(step, numbers))

    def _is_whole(self, step: int, numbers: list[int]) -> bool:
        """Return whether a micro-batch can be collated of what the processes have read."""
        if self._halves is not None:
            return tuple(numbers) in self._made.get(step, {})
        chunks = self._chunks.get(step, [])
        rows = any(asked == numbers for asked, _ in chunks) or all(is_rows(found) for _, found in chunks)
        return rows and not self._missing(step, numbers)

    def _next_is_here(self) -> bool:
        """Return whether the oldest request that is under way has been answered."""
        under_way = self._wanted.under_way
        if self._arrivals is None or not under_way:
            return False
        return self._arrivals.is_here(under_way[0].name)

    def _collated(self, step: int, numbers: list[int]) -> Any:
        """A micro-batch in host memory."""
        if self._halves is not None:
            return self._read_collated(self._halves, step, numbers)
        while missing := self._missing(step, numbers):
            if not self._take_answer(step, missing):
                self._chunks.setdefault(step, []).append((missing, self._read_here(step, missing)))
                self._wanted.held.setdefault(step, set()).update(missing)
                break
        for asked, collated in self._chunks[step]:
            if asked == numbers:
                return collated
        chunks = self._chunks[step]
        if not all(is_rows(collated) for _, collated in chunks):
            return self._read_here(step, numbers)
        places = {
            number: (chunk, row)
            for chunk, (asked, _) in enumerate(chunks)
            for row, number in enumerate(asked)
        }
        return join_rows(
            [
                take_rows(chunks[chunk][1], start, stop)
                for chunk, start, stop in spans([places[number] for number in numbers])
            ]
        )

    def _read_collated(self, halves: FetchHalves, step: int, numbers: list[int]) -> Any:
        """A micro-batch by the script's own function: made ahead, or here where it was cut otherwise."""
        wanted = tuple(numbers)
        while wanted not in self._made.get(step, {}) and self._take_answer(step, numbers):
            pass
        if (made := self._made.get(step, {})) and wanted in made:
            return made[wanted]
        if missing := self._missing(step, numbers):
            self._chunks.setdefault(step, []).append((missing, self._read_here(step, missing)))
        samples = {
            number: sample
            for asked, found in self._chunks[step]
            for number, sample in zip(asked, found, strict=True)
        }
        return halves.collate([samples[number] for number in numbers])

    def _read_here(self, step: int, numbers: list[int]) -> Any:
        self.read_here += len(numbers)
        return self._dataset.read(step, numbers)

    def _missing(self, step: int, numbers: list[int]) -> list[int]:
        held: set[int] = set().union(*(asked for asked, _ in self._chunks.get(step, [])))
        return [number for number in numbers if number not in held]

    def _take_answer(self, step: int, numbers: list[int]) -> bool:
        """Wait for the next answer; False when none that is under way helps."""
        if self._answers is None:
            self._answers = self._start()
        if not self._wanted.under_way or not self._wanted.comes(step, numbers):
            return False
        answer, _ = next(self._answers)
        request = self._wanted.arrived()
        if self._arrivals is not None:
            self._arrivals.forget(request.name)
        if request.sizes:
            made = zip(request.micro_batches(), answer, strict=True)
            self._made.setdefault(request.step, {}).update(made)
        else:
            self._chunks.setdefault(request.step, []).append((request.ids, answer))
        return True

    def _start(self) -> Iterator[Any]:
        loader = DataLoader(
            self._dataset,
            batch_sampler=_Requests(self._wanted),
            num_workers=self._processes,
            prefetch_factor=AHEAD,
            collate_fn=_as_it_is,
            worker_init_fn=settle_in,
            pin_memory=self._device is not None,
            timeout=_READ_SECONDS,
            multiprocessing_context="fork",
            generator=torch.Generator(),  # the script's own is left alone
        )
        # The thread that pins takes the current device, which would get a context for nothing else.
        current = contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device)
        with warnings.catch_warnings(), current:
            # From Python 3.12 on: forking with threads. The children touch nothing that those hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            return iter(loader)

    def close(self) -> None:
        """End the processes."""
        answers, self._answers = self._answers, None
        self._chunks, self._made = {}, {}
        if self._copies is not None:
            self._copies.drop()
        if answers is not None:
            answers._shutdown_workers()  # type: ignore[attr-defined]


def make_loader(
    plan: LoopPlan,
    processes: Any,
    *,
    exact: bool,
    device: torch.device | None = None,
    copier: Copier | None = None,
) -> Loader | None:
    """Make a loader; None for 0 processes.

    Args:
        plan: which samples belong to which step.
        processes: how many read, an integer of the script.
        exact: whether sums are exact.
        device: of the model.
        copier: brings samples to it, one micro-batch ahead; None: they stay in host memory.

    Raises:
        ValueError: it is no number of processes.
        SpringtideError: the data set cannot be read ahead.
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 0:
        raise ValueError(f"batches(): loader_workers must be an integer >= 0, got {processes!r}")
    if processes and exact:
        raise ValueError(
            "batches(): loader_workers does not go with exact mode, whose random numbers are drawn in the "
            "training process: leave it out"
        )
    if processes and "fork" not in multiprocessing.get_all_start_methods():
        raise SpringtideError("batches(): loader_workers needs a system that can fork processes")
    return Loader(plan, processes, device, copier) if processes else None


def settle_in(number: int) -> None:
    """Let go of the sockets that came along to a new process, and end with the parent.

    A peer sees that this job's worker died by its sockets, which must not live on here.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    os.dup2(nothing, descriptor)  # not closed: its number must not be given to another file
        except OSError:
            continue  # closed since
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

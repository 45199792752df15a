"""Reading ahead in processes of torch's DataLoader, by a plan that may change at any step.

What a worker of the job will need is known: the dealing is a pure function of cursor, rank and size. So
requests for the next steps are given out ahead. When members come or go, the parts of those steps are cut
anew; what has been read, or is being read, for them is used, and only the rest is asked for.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import stat
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from springtide.data.cursor import Cursor
from springtide.data.loop import LoopPlan
from springtide.data.source import Source
from springtide.errors import SpringtideError
from springtide.loading.rows import is_rows, join_rows, spans, take_rows
from springtide.train_step.randomness import isolated

AHEAD = 2
"""Requests for each process that are under way, as DataLoader's prefetch_factor."""

_PR_SET_PDEATHSIG = 1
_READ_SECONDS = 600.0


class Wanted:
    """What to ask for next. Pure but for its state.

    A request is (step, ids). `held` and the requests under way are not asked for again.
    """

    def __init__(self, plan: LoopPlan) -> None:
        self._plan = plan
        self._cursor: Cursor | None = None
        self._rank, self._size, self._stood = 0, 1, 0
        self._waiting: deque[tuple[int, list[int]]] = deque()
        self.under_way: deque[tuple[int, list[int]]] = deque()
        self.held: dict[int, set[int]] = {}

    def stand_at(self, cursor: Cursor, rank: int, size: int) -> None:
        """The worker is about to compute the step at the cursor. Forget what lies behind; after a change of
        the members or a jump of the cursor, plan from here."""
        for step in [step for step in self.held if step < cursor.step]:
            del self.held[step]
        jumped = self._cursor is None or not self._stood <= cursor.step <= self._cursor.step
        if jumped or (rank, size) != (self._rank, self._size):
            self._cursor, self._rank, self._size = cursor, rank, size
            self._waiting.clear()
        self._stood = cursor.step

    def next(self) -> tuple[int, list[int]] | None:
        """The next request, which is under way from now on; None at the loop's end."""
        while not self._waiting:
            if self._cursor is None or self._plan.ended(self._cursor):
                return None
            batch = self._plan.batch(self._cursor, self._rank, self._size)
            step = self._cursor.step
            known = self.held.get(step, set()).union(*(ids for at, ids in self.under_way if at == step))
            if missing := [number for number in batch.ids.tolist() if number not in known]:
                self._waiting.append((step, missing))
            self._cursor = self._plan.advance(self._cursor)
        request = self._waiting.popleft()
        self.under_way.append(request)
        return request

    def arrived(self) -> tuple[int, list[int]]:
        """The oldest request has been answered."""
        step, ids = self.under_way.popleft()
        self.held.setdefault(step, set()).update(ids)
        return step, ids

    def comes(self, step: int, ids: list[int]) -> bool:
        """Whether some of these are under way."""
        return any(at == step and not set(ids).isdisjoint(asked) for at, asked in self.under_way)


class _Requests(Sampler[list[int]]):
    """What DataLoader takes for a batch sampler: it asks for one more whenever a process is free."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def __iter__(self) -> Iterator[list[int]]:
        while (request := self._wanted.next()) is not None:
            step, ids = request
            yield [step, *ids]


class _Dataset(torch.utils.data.Dataset[Any]):
    """Answers for many ids at once, so that the collated samples come back as one.

    With a collate_fn of the script's they come back as they are, in one pickle: each tensor on its own would
    take a file descriptor of shared memory. Random numbers belong to the seed, the step and the first id,
    whichever process draws them.
    """

    def __init__(self, source: Source, seed: int) -> None:
        self._source, self._seed = source, seed

    def __getitems__(self, request: list[int]) -> Any:
        step, *ids = request
        found = self.read(step, ids)
        return found if self._source.parts is None else pickle.dumps(found)

    def read(self, step: int, ids: list[int]) -> Any:
        """The collated samples; a list of the samples themselves for the script's own collate_fn."""
        source = self._source
        read = source.fetch if source.parts is None else source.parts.read
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

    def __init__(self, plan: LoopPlan, processes: int) -> None:
        self._dataset = _Dataset(plan.source, plan.seed)
        self._parts = plan.source.parts
        self._wanted = Wanted(plan)
        self._processes = processes
        self._answers: Iterator[Any] | None = None
        self._chunks: dict[int, list[tuple[list[int], Any]]] = {}
        self.read_here = 0
        """Samples that the script's own process had to read."""

    def stand_at(self, cursor: Cursor, rank: int, size: int) -> None:
        """The step at the cursor comes next."""
        for step in [step for step in self._chunks if step < cursor.step]:
            del self._chunks[step]
        self._wanted.stand_at(cursor, rank, size)

    def read(self, step: int, ids: torch.Tensor) -> Any:
        """The collated samples `ids` of the step."""
        numbers = ids.tolist()
        while missing := self._missing(step, numbers):
            if not self._take_answer(step, missing):
                self._chunks.setdefault(step, []).append((missing, self._read_here(step, missing)))
                self._wanted.held.setdefault(step, set()).update(missing)
                break
        if self._parts is not None:
            samples = {
                number: sample
                for asked, found in self._chunks[step]
                for number, sample in zip(asked, found, strict=True)
            }
            return self._parts.collate([samples[number] for number in numbers])
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
        answer = next(self._answers)
        collated = answer if self._parts is None else pickle.loads(answer)
        at, asked = self._wanted.arrived()
        self._chunks.setdefault(at, []).append((asked, collated))
        return True

    def _start(self) -> Iterator[Any]:
        loader = DataLoader(
            self._dataset,
            batch_sampler=_Requests(self._wanted),
            num_workers=self._processes,
            prefetch_factor=AHEAD,
            collate_fn=_as_it_is,
            worker_init_fn=_settle_in,
            timeout=_READ_SECONDS,
            multiprocessing_context="fork",
            generator=torch.Generator(),  # the script's own is left alone
        )
        with warnings.catch_warnings():
            # From Python 3.12 on: forking with threads. The children touch nothing that those hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            return iter(loader)

    def close(self) -> None:
        """End the processes."""
        answers, self._answers = self._answers, None
        self._chunks = {}
        if answers is not None:
            answers._shutdown_workers()  # type: ignore[attr-defined]


def make_loader(plan: LoopPlan, processes: Any, *, exact: bool) -> Loader | None:
    """None for 0 processes. Raise ValueError, SpringtideError."""
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 0:
        raise ValueError(f"batches(): loader_workers must be an integer >= 0, got {processes!r}")
    if processes and exact:
        raise ValueError(
            "batches(): loader_workers does not go with exact mode, whose random numbers are drawn in the "
            "training process: leave it out"
        )
    if processes and "fork" not in multiprocessing.get_all_start_methods():
        raise SpringtideError("batches(): loader_workers needs a system that can fork processes")
    return Loader(plan, processes) if processes else None


def _settle_in(number: int) -> None:
    """In a new process: let go of the sockets that came along, and end with the parent.

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

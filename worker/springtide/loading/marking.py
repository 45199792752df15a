"""Read a few samples for their marks, without disturbing the script: its random numbers, files, or time."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from springtide.data.marks import MAX_MARKED, Marks, mark, marked_ids
from springtide.data.source import Source
from springtide.loading.prefetch import settle_in
from springtide.train_step.randomness import isolated

log = logging.getLogger(__name__)

READ_SECONDS = 3.0
"""No further sample is begun after so long."""
_CHILD_SECONDS = 60.0


def check_count(value: Any) -> int:
    """Return verify_samples. Raise ValueError when it is no number of samples."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_MARKED:
        raise ValueError(
            f"batches(): verify_samples must be an integer from 0 (compare nothing) to {MAX_MARKED}, "
            f"got {value!r}"
        )
    return value


def read_marks(source: Source, count: int, *, in_child: bool) -> Marks:
    """Return the marks of some samples; none of them where the data cannot be compared.

    A sample is read twice, with the same random numbers each time and on each member. Data that differ from
    themselves then are random by a generator that nobody can seed, and are not compared at all.

    Args:
        source: of the samples.
        count: of samples.
        in_child: read in a process of its own, as loader_workers do: a data set that opens its file at the
            first reading must not do so before it is forked.
    """
    ids = marked_ids(source.size, count)
    if not ids:
        return {}
    try:
        return _in_child(source, ids) if in_child else read_within(source, ids, READ_SECONDS)
    except Exception as error:  # of the script's data set; the training itself will tell
        log.debug("samples are not compared: %s: %s", type(error).__name__, error)
        return {}


def read_within(
    source: Source, ids: Sequence[int], seconds: float, clock: Callable[[], float] = time.monotonic
) -> Marks:
    """Return the marks of the first samples, as many as can be read in time and at least one.

    Args:
        source: whose samples are read; what a data set raises goes through.
        ids: numbers of the samples, in the order in which they are read.
        seconds: most time for it; looked at between two samples.
        clock: monotonic time in seconds.

    Returns:
        Marks by the number of the sample, in decimal; none where a sample is another one each time it is
        read.
    """
    began = clock()
    marks: Marks = {}
    left_out: set[str] = set()
    for number in ids:
        if marks and clock() - began > seconds:
            break  # members compare those that both have read
        found, unknown = mark(_sample(source, number))
        if source.runs_code and mark(_sample(source, number))[0] != found:
            log.debug("samples are not compared: sample %d is another one each time it is read", number)
            return {}
        marks[str(number)] = found
        left_out.update(unknown)
    if left_out:
        log.debug("of samples, not compared: %s", ", ".join(sorted(left_out)))
    return marks


def _sample(source: Source, number: int) -> Any:
    ids = torch.tensor([number])
    if not source.runs_code:
        return source.fetch(ids)
    with isolated(0, 0, number):
        return source.fetch(ids) if source.halves is None else source.halves.read(ids)


class _Once(Dataset[Marks]):
    """Gives the marks, in whichever process asks."""

    def __init__(self, source: Source, ids: Sequence[int]) -> None:
        self._source, self._ids = source, ids

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Marks:
        return read_within(self._source, self._ids, READ_SECONDS)


def _in_child(source: Source, ids: Sequence[int]) -> Marks:
    loader = DataLoader(
        _Once(source, ids),
        batch_size=None,
        num_workers=1,
        worker_init_fn=settle_in,
        timeout=_CHILD_SECONDS,
        multiprocessing_context="fork",
        generator=torch.Generator(),  # the script's own is left alone
    )
    with warnings.catch_warnings():
        # From Python 3.12 on: forking with threads. The child touches nothing that those hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        (marks,) = loader
    return dict(marks)

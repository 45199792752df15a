"""Measures how a step's time is spent in this process: on data, computing, and waiting for others.

Threads and locks: the script's thread measures, and adds to the sums when a step commits; a reporting thread
takes them. `_lock` guards the sums and the number of steps.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from springtide.data.balance import OwnShare
from springtide_protocol import coordinator_pb2 as pb


class Timing:
    """Sums since the coordinator was last told; seconds. Samples are fetched in the script's thread.

    fetching: whether that goes on now; any thread may read it. share: of global batches, told along.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.fetching = False
        self.share = OwnShare()
        self._fetched = 0.0
        self._outside = 0.0  # of that, before the body
        self._before = 0.0  # for the step that is dealt next
        self._paused = 0.0
        self._sums = [0.0] * 4
        self._steps = 0

    def timed(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`fetch`, with the time it takes counted."""

        def timed_fetch(ids: Any) -> Any:
            began = self._clock()
            self.fetching = True
            try:
                return fetch(ids)
            finally:
                self.fetching = False
                self._fetched += self._clock() - began

        return timed_fetch

    def paused(self, seconds: float) -> None:
        """Training stood still between two steps for a checkpoint."""
        self._paused += seconds

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Count what is read before a step is dealt as a part of that step's fetching."""
        began = self._clock()
        self.fetching = True
        try:
            yield
        finally:
            self.fetching = False
            self._before += self._clock() - began

    def note_assigned(self) -> None:
        """A step's samples are dealt: what was fetched for a dropped one does not count."""
        self._fetched, self._before, self._outside = self._before, 0.0, 0.0

    def opened(self) -> None:
        """The step's body begins; its samples may have been fetched before."""
        self._outside = self._fetched

    @property
    def fetched_in_body(self) -> float:
        """Return how much of the running step's fetching was in its body."""
        return self._fetched - self._outside

    def committed(self, step: float, before_reduction: float, wait: float) -> tuple[float, float]:
        """Count a committed step; all times are seconds.

        Args:
            step: of the whole step.
            before_reduction: until all gradients were there.
            wait: of it spent on waiting for others.

        Returns:
            Seconds of fetching in it, and of checkpoints since the step before.
        """
        data, paused = self._fetched, self._paused
        compute = max(0.0, before_reduction - self.fetched_in_body)
        self._fetched = self._outside = self._paused = 0.0
        with self._lock:
            for index, value in enumerate((step, data, compute, wait)):
                self._sums[index] += value
            self._steps += 1
        return data, paused

    def take(self) -> pb.Times | None:
        """Means over the steps since the last call; None without any. Any thread."""
        with self._lock:
            sums, steps = self._sums, self._steps
            self._sums, self._steps = [0.0] * 4, 0
        if not steps:
            return None
        step, data, compute, wait = (value / steps for value in sums)
        share = self.share
        return pb.Times(
            steps=steps,
            step_seconds=step,
            data_seconds=data,
            compute_seconds=compute,
            wait_seconds=wait,
            share_samples=share.samples,
            sample_seconds=share.sample_seconds,
            by_speed=share.balanced,
        )

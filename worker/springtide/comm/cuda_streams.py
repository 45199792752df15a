"""CUDA streams that write into a bucket: its sum begins behind all of them.

autograd runs a parameter's part of backward on the stream of its forward, so a model with branches on side
streams fills one bucket from several; a collective waits for the stream alone on which it is started.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol

import torch


class Stream(Hashable, Protocol):
    """What torch.cuda.Stream has."""

    def wait_stream(self, stream: Any, /) -> None: ...


def current_stream_of(device: torch.device | None) -> Callable[[], Stream] | None:
    """Asks for the stream that the calling thread queues on; None where there are no streams."""
    if device is None or device.type != "cuda":
        return None
    return partial(torch.cuda.current_stream, device)


class Writers:
    """The streams that have written into each bucket of a step. current: None where there are no streams."""

    def __init__(self, current: Callable[[], Stream] | None) -> None:
        self._current = current
        self._wrote: dict[int, set[Stream]] = {}

    def begin(self) -> None:
        """A new step, which is behind all of the last one."""
        self._wrote.clear()

    def write(self, bucket: int, onto: bool) -> None:
        """The current stream writes into a bucket. onto: it changes what is there instead of replacing it."""
        if self._current is None:
            return
        stream = self._current()
        wrote = self._wrote.setdefault(bucket, set())
        if onto:
            self._wait(stream, wrote)
        wrote.add(stream)

    def join(self, bucket: int) -> None:
        """The current stream goes on behind all that was written into the bucket."""
        if self._current is not None:
            self._wait(self._current(), self._wrote.pop(bucket, set()))

    @staticmethod
    def _wait(stream: Stream, others: set[Stream]) -> None:
        for other in others:
            if other != stream:
                stream.wait_stream(other)

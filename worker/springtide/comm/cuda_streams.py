"""CUDA streams that write into a bucket: its sum begins behind all of them.

autograd runs a parameter's part of backward on the stream of its forward, so a model with branches on side
streams fills one bucket from several; a collective waits for the stream alone on which it is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, Protocol

import torch


class Stream(Hashable, Protocol):
    """The part of torch.cuda.Stream's interface that is used here."""

    def wait_stream(self, stream: Any, /) -> None: ...


def current_stream_of(device: torch.device | None) -> Callable[[], Stream] | None:
    """Asks for the stream that the calling thread queues on; None where there are no streams."""
    if device is None or device.type != "cuda":
        return None
    return partial(torch.cuda.current_stream, device)


def switch_to(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Have the calling thread queue on the stream, within the context."""
    context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


class Writers:
    """The streams that have written into each bucket of a step."""

    def __init__(
        self,
        current: Callable[[], Stream] | None,
        switch: Callable[[Any], contextlib.AbstractContextManager[Any]] = switch_to,
    ) -> None:
        """Make it for the buckets of one model.

        Args:
            current: returns the stream that the calling thread queues on; None where there are no streams.
            switch: as `switch_to`.
        """
        self._current, self._switch = current, switch
        self.any = current is not None
        """Whether there are streams at all."""
        self._wrote: dict[int, set[Stream]] = {}
        self._first: dict[int, Stream] = {}
        """The stream of the first gradient of each bucket that waits for others."""

    def begin(self) -> None:
        """A new step, which is behind all of the last one."""
        self._wrote.clear()
        self._first.clear()

    def is_with(self, bucket: int) -> bool:
        """Tell whether the current stream is that of the gradients that wait for the bucket; it is, if none
        does.

        One of another stream cannot wait: its memory is given back to its own stream.
        """
        if self._current is None:
            return True
        stream = self._current()
        return self._first.setdefault(bucket, stream) == stream

    @contextlib.contextmanager
    def with_first(self, bucket: int) -> Iterator[None]:
        """Have the calling thread write into the bucket on the stream of the gradients that wait for it, and
        go on behind that.
        """
        if self._current is None:
            yield
            return
        stream, first = self._current(), self._first.pop(bucket)
        wrote = self._wrote.setdefault(bucket, set())
        self._wait(first, wrote)
        wrote.add(first)
        if stream == first:
            yield
            return
        with self._switch(first):
            yield
        stream.wait_stream(first)

    def write(self, bucket: int, onto: bool) -> None:
        """Note that the current stream writes into a bucket.

        Args:
            bucket: its number.
            onto: it changes what is there instead of replacing it, so that it waits for those that wrote
                before.
        """
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

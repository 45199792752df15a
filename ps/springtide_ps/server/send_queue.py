"""The answers that one client is still to be sent: bounded, however much it asks and slowly it reads.

A request is read only while few bytes of answers wait to be sent. Requests of steps may be answered late, by
other threads, which never wait here: so those without an answer are bounded by themselves, and beyond that
refused. It costs at most: the bytes that may wait, one answer more, and the late ones.

Answers without a tensor go first, and then tensors by the *rank* that their requests gave: the values of the
first layers, which the client's next forward pass needs first, are mostly the last to be ready (Jayarajan et
al., Priority-based Parameter Propagation for Distributed DNN Training, MLSys 2019).
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from typing import Final

from springtide_ps.server.kv_handler import Answer
from springtide_ps.server.step_protocol import StepProtocolError
from springtide_ps.wire.frames import FrameError

UNSENT_BYTES: Final = 64 * 1024 * 1024
OPEN_LIMIT: Final = 1 << 16
OPEN_BYTES: Final = 256 * 1024 * 1024
_EACH_BYTES: Final = 4096  # what an answer and a request cost besides


class SendQueue:
    """Queue a client's answers by their rank, and in their order; any thread puts them, one takes them.

    Args:
        unsent: bytes that may wait before no request is read any more.
        open_limit: how many requests may have no answer yet.
        open_bytes: how much memory these may hold.
    """

    def __init__(
        self, unsent: int = UNSENT_BYTES, open_limit: int = OPEN_LIMIT, open_bytes: int = OPEN_BYTES
    ) -> None:
        self._limit, self._open_limit, self._open_bytes = unsent, open_limit, open_bytes
        self._changed = threading.Condition()
        self._answers: list[tuple[int, int, Answer]] = []
        self._numbers = itertools.count()
        self._ended = False
        self._open: dict[int, tuple[int, int]] = {}
        self._held = 0
        self.unsent = 0
        """Bytes that wait, those on their way included."""

    def wait_for_room(self) -> None:
        """Return when another request may be read: few bytes wait, or nothing will be sent any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.unsent < self._limit)

    @property
    def waited_for(self) -> bool:
        """Return whether requests have no answer yet."""
        return bool(self._open)

    def open(self, request: int, nbytes: int, rank: int = 0) -> None:
        """Note a request that is answered now or later.

        Args:
            request: its number.
            nbytes: memory that it holds until then.
            rank: from 0; a tensor that answers it goes after those of a lower one.

        Raises:
            StepProtocolError: there are too many.
            FrameError: the number is in use.
        """
        with self._changed:
            if len(self._open) >= self._open_limit or self._held + nbytes > self._open_bytes:
                raise StepProtocolError(
                    f"{len(self._open)} requests of this client ({self._held} bytes) have no answer yet: "
                    "wait for some before asking for more"
                )
            if request in self._open:
                raise FrameError(f"request {request} has no answer yet, and another one is called so")
            self._open[request] = nbytes, rank
            self._held += nbytes

    def put(self, answer: Answer) -> None:
        """Queue an answer; never waits."""
        answer.since = time.monotonic()
        with self._changed:
            nbytes, rank = self._open.pop(answer.frame.request, (0, 0))
            self._held -= nbytes
            self.unsent += _cost(answer)
            rank = rank if answer.payload else -1
            heapq.heappush(self._answers, (rank, next(self._numbers), answer))
            self._changed.notify_all()

    def take(self) -> Answer | None:
        """Wait for the next answer to send, and return it; None: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or bool(self._answers))
            return heapq.heappop(self._answers)[2] if self._answers else None

    def sent(self, answer: Answer) -> None:
        """Note that an answer has been sent, or cannot be."""
        with self._changed:
            self.unsent -= _cost(answer)
            self._changed.notify_all()

    def end(self) -> None:
        """End the queue: `take` returns what is there, then None."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _cost(answer: Answer) -> int:
    return len(answer.payload) + _EACH_BYTES

"""Ask the coordinator something, again on each new stream until it has answered.

Threads and locks: one condition guards the open question and its answer. The script's thread asks and waits
on it; the stream's thread writes answers, and repeats the open question on a new stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from springtide_protocol import coordinator_pb2 as pb

_TURN_SECONDS = 0.5


class Questions:
    """Keep the one question that this process has for the coordinator. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._number = 0
        self._open: pb.WorkerMessage | None = None
        self._taken = pb.Evaluation()

    def answered(self, message: pb.Evaluation) -> None:
        """Take an answer, from the stream's thread; one to an older question is ignored."""
        with self._changed:
            if self._open is not None and message.ask == self._number:
                self._open, self._taken = None, message
                self._changed.notify_all()

    @property
    def open(self) -> pb.WorkerMessage | None:
        """Return the question that has to be sent again on a new stream; None when there is none."""
        with self._changed:
            return self._open

    def ask(
        self,
        question: pb.Evaluate,
        send: Callable[[pb.WorkerMessage], None],
        check: Callable[[], None],
    ) -> pb.Evaluation:
        """Send the question and wait for the answer.

        Args:
            question: gets its number here.
            send: queues a message on the stream.
            check: is called while the wait lasts, and raises what ends it.

        Returns:
            The coordinator's answer.
        """
        with self._changed:
            self._number += 1
            question.ask = self._number
            message = pb.WorkerMessage(evaluate=question)
            self._open = message
        send(message)
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._open is None, _TURN_SECONDS):
                    return self._taken
            check()

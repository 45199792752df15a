"""`batches(..., train=False)`: a loop without steps, whose samples are shared out by the coordinator.

Each worker takes ranges of samples as it gets through them. What it reports is summed with the range; ranges
of workers that are gone are taken by others. So the means are over all samples, each once, and no worker
waits in a collective. Without a job there is one range.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from springtide import faults
from springtide.data.batch import Batch, Micro
from springtide.data.source import Source
from springtide.errors import SpringtideError, UsageError
from springtide.leasing import check_together
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import state_to_proto
from springtide_protocol.names import StateName

if TYPE_CHECKING:
    from springtide.runtime import Runtime

_TURN_SECONDS = 0.5
MOST_NAMES = 64


class Questions:
    """The one question that this process has for the coordinator, told again until it is answered."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._number = 0
        self._open: pb.WorkerMessage | None = None
        self._taken = pb.Evaluation()

    def answered(self, message: pb.Evaluation) -> None:
        """From the stream's thread."""
        with self._changed:
            if self._open is not None and message.ask == self._number:
                self._open, self._taken = None, message
                self._changed.notify_all()

    @property
    def open(self) -> pb.WorkerMessage | None:
        """What has to be said again on a new stream."""
        with self._changed:
            return self._open

    def ask(self, runtime: Runtime, question: pb.Evaluate) -> pb.Evaluation:
        """Say it and wait for the answer. Raise SpringtideError when the coordinator refuses this process."""
        session, membership = runtime.session, runtime.membership
        assert session is not None
        assert membership is not None
        with self._changed:
            self._number += 1
            question.ask = self._number
            message = pb.WorkerMessage(evaluate=question)
            self._open = message
        session.send(message)
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._open is None, _TURN_SECONDS):
                    return self._taken
            membership.check()
            session.check_term()


class Evaluation:
    """Iterate over this worker's batches; after the loop, `values` are the means over all samples."""

    def __init__(self, runtime: Runtime, source: Source, unit: int) -> None:
        """unit: samples that this worker computes at once."""
        self._runtime = runtime
        self._source = source
        self._unit = unit
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._current = 0
        self._values: dict[str, float] | None = None
        self._batches = self._iterate()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    @property
    def values(self) -> dict[str, float]:
        """By name: the mean of what was reported, by samples, equal on all workers.

        Raise UsageError before the loop has ended.
        """
        if self._values is None:
            raise UsageError("the values of batches(..., train=False) are known when its loop has ended")
        return dict(self._values)

    def report(self, values: Mapping[str, float]) -> None:
        """Values of the batch that the loop is at."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * self._current
            self._weights[name] = self._weights.get(name, 0.0) + self._current
        if len(self._sums) > MOST_NAMES:
            raise UsageError(f"report(): at most {MOST_NAMES} different values in an evaluation")

    def _iterate(self) -> Iterator[Batch]:
        evaluations = self._runtime.evaluations
        if self._runtime.rehearsing:
            raise UsageError(
                "batches(..., train=False) between the bodies of a rehearsal, whose worker is no member yet: "
                "leave rehearsals= out of the training loop's batches(), or evaluate after the loop"
            )
        evaluations.begin(self._runtime, self)
        start, stop = 0, 0
        while True:
            share = self._next_range(start, stop)
            if share is None:
                evaluations.end()
                self._runtime.values.update(self.values)
                return
            start, stop = share
            self._sums, self._weights = {}, {}
            for first in range(start, stop, self._unit):
                ids = torch.arange(first, min(first + self._unit, stop))
                self._current = ids.numel()
                faults.reach("evaluation", self._runtime.position.cursor.step)
                yield Batch(Micro(ids, ids.numel()), ids, self._source.fetch)

    def _next_range(self, start: int, stop: int) -> tuple[int, int] | None:
        """The range after start..stop-1, which is finished; None when all are, and `values` are known."""
        runtime = self._runtime
        if runtime.session is None:
            if stop == 0:
                return 0, self._source.size
            self._values = {
                name: value / self._weights[name] for name, value in self._sums.items() if self._weights[name]
            }
            return None
        state, index = runtime.evaluations.name()
        question = pb.Evaluate(
            state=state_to_proto(state),
            index=index,
            samples=self._source.size,
            unit=self._unit,
            start=start,
            stop=stop,
            sums=self._sums,
            weights=self._weights,
        )
        answer = runtime.evaluations.questions.ask(runtime, question)
        if answer.problem:
            raise SpringtideError(
                f"batches(train=False): the workers do not agree: {answer.problem}; every worker must "
                "evaluate the same dataset with the same arguments"
            )
        if answer.stop:
            return int(answer.start), int(answer.stop)
        self._values = dict(answer.values)
        return None


class Evaluations:
    """The evaluations of a process, one at a time.

    index: evaluations of the present committed state before this one, so that workers know which is which.
    """

    def __init__(self) -> None:
        self.questions = Questions()
        self._running: Evaluation | None = None
        self._state: StateName | None = None
        self._index = -1

    @property
    def running(self) -> Evaluation | None:
        return self._running

    def check_none(self) -> None:
        """Raise UsageError inside of an evaluation loop, or after one that was left."""
        if self._running is not None:
            raise UsageError(
                "a loop over batches(..., train=False) has not ended: let it run to its end (no `break`), "
                "and train outside of it"
            )

    def begin(self, runtime: Runtime, evaluation: Evaluation) -> None:
        self.check_none()
        if runtime.step_in_body:
            raise UsageError(
                "batches(train=False) inside of a step: evaluate before or after the step's body"
            )
        state = None if runtime.membership is None else runtime.membership.state
        if runtime.loops == 0 or (runtime.membership is not None and state is None):
            raise UsageError(
                "batches(train=False) before the first training loop: this worker has not the job's "
                "parameters yet; evaluate inside of the training loop (between two steps) or after it"
            )
        self._index = self._index + 1 if state == self._state else 0
        self._state, self._running = state, evaluation

    def end(self) -> None:
        self._running = None

    def name(self) -> tuple[StateName, int]:
        """(state, index) of the running evaluation in a job."""
        assert self._state is not None
        return self._state, self._index


def evaluate(runtime: Runtime, source: Source, batch_size: Any, epochs: int) -> Evaluation:
    """Check the arguments. Raise ValueError, UsageError for a wrong place."""
    check_together(runtime, "batches(train=False)")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batches(): batch_size must be an integer >= 1, got {batch_size!r}")
    if epochs != 1:
        raise ValueError(f"batches(train=False) goes over the data once: leave epochs={epochs} out")
    return Evaluation(runtime, source, batch_size)

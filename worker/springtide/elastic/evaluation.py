"""Evaluate in loops without steps, `batches(..., train=False)`, whose samples the coordinator shares out.

Each worker takes ranges of samples as it gets through them, or of shards where samples have no numbers. Its
reports are summed with the range; ranges of workers that are gone are taken by others. So the means are over
all samples, each once, and no worker waits in a collective. Without a job there is one range. The processes
of a pod with `mesh()` take ranges as one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from springtide import faults
from springtide.coordination.session import Session
from springtide.data.batch import Batch
from springtide.elastic.catching_up import CatchingUp
from springtide.elastic.consistency import Consistencies
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.errors import SpringtideError, UsageError
from springtide.loading.device_copies import Copier
from springtide.loading.evaluation import EvaluationData, evaluation_data
from springtide.pods.evaluation import added
from springtide.pods.pod import Pod
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import state_to_proto
from springtide_protocol.names import StateName

MAX_NAMES = 64
FIRST_ERRAND = 1 << 32
"""Index of a state's first errand; evaluations are numbered below."""


class Evaluation:
    """Iterate over this worker's batches; after the loop, `values` are the means over all samples."""

    def __init__(
        self,
        evaluations: Evaluations,
        state: TrainingState,
        data: EvaluationData,
        is_errand: bool = False,
    ) -> None:
        """Begin at the first sample, when it is iterated over.

        Args:
            evaluations: of the process, one of which this is.
            state: of the process.
            data: to go over.
            is_errand: see `Evaluations.errand`.
        """
        self.is_errand = is_errand
        self._evaluations = evaluations
        self._state = state
        self._data = data
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
        """Return the means of what was reported, by name, over all samples; equal on all workers.

        Raise UsageError before the loop has ended.
        """
        if self._values is None:
            raise UsageError("the values of batches(..., train=False) are known when its loop has ended")
        return dict(self._values)

    def report(self, values: Mapping[str, float]) -> None:
        """Take values of the batch that the loop is at."""
        if self._current == 0:
            return  # others count them
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * self._current
            self._weights[name] = self._weights.get(name, 0.0) + self._current
        if len(self._sums) > MAX_NAMES:
            raise UsageError(f"report(): at most {MAX_NAMES} different values in an evaluation")

    def _iterate(self) -> Iterator[Batch]:
        if self._state.warming_up:
            raise UsageError(
                "batches(..., train=False) between the bodies of a rehearsal, whose worker is no member yet: "
                "leave rehearsals= out of the training loop's batches(), or evaluate after the loop"
            )
        self._evaluations.begin(self)
        start, stop = 0, 0
        while True:
            share = self._next_range(start, stop)
            if share is None:
                is_outside = self._evaluations.is_outside
                self._evaluations.end()
                if not is_outside:
                    self._state.report(self.values)
                return
            start, stop = share
            self._sums, self._weights = {}, {}
            for batch, weight in self._data.batches(start, stop):
                self._current = weight
                faults.reach("evaluation", self._state.position.cursor.step)
                yield batch

    def _next_range(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the range behind start..stop-1, which is finished; None behind the last one."""
        if not self._evaluations.shared:
            if stop == 0:
                # Outside of the job the values would be nobody's: a few samples do for the script's code.
                few = min(self._data.unit, self._data.count)
                return 0, few if self._evaluations.is_outside else self._data.count
            self._values = {
                name: value / self._weights[name] for name, value in self._sums.items() if self._weights[name]
            }
            return None
        answer = self._ask(start, stop)
        if answer.problem:
            raise SpringtideError(
                f"batches(train=False): the workers do not agree: {answer.problem}; every worker must "
                "evaluate the same dataset with the same arguments"
            )
        if answer.stop:
            return int(answer.start), int(answer.stop)
        self._values = dict(answer.values)
        return None

    def _ask(self, start: int, stop: int) -> pb.Evaluation:
        """Return the coordinator's answer, which the processes of a pod that trains as one have in common."""
        pod = self._evaluations.pod
        if pod is None:
            return self._evaluations.ask(self._question(start, stop, self._sums, self._weights))

        def ask(words: list[str]) -> str:
            sums, weights = zip(*map(json.loads, words), strict=True)
            answer = self._evaluations.ask(self._question(start, stop, added(sums), added(weights)))
            return answer.SerializeToString().hex()

        told = pod.ask_as_one(json.dumps([self._sums, self._weights]), ask, self._evaluations.check)
        return pb.Evaluation.FromString(bytes.fromhex(told))

    def _question(
        self, start: int, stop: int, sums: Mapping[str, float], weights: Mapping[str, float]
    ) -> pb.Evaluate:
        state, index = self._evaluations.name()
        return pb.Evaluate(
            state=state_to_proto(state),
            index=index,
            samples=self._data.count,
            unit=self._data.unit,
            kind=self._data.kind,
            start=start,
            stop=stop,
            sums=sums,
            weights=weights,
        )


class Evaluations:
    """Run the evaluations of a process, one at a time.

    The script's thread uses it; any may read `running`.
    """

    def __init__(
        self,
        state: TrainingState,
        trainers: TrainerAccess,
        consistencies: Consistencies,
        session: Session | None,
        settle: Callable[[], None] = lambda: None,
        catching_up: CatchingUp | None = None,
    ) -> None:
        """Make it for one process.

        Args:
            state: of the process.
            trainers: where its trainer is found.
            consistencies: say whether there are common steps.
            session: with the coordinator, which shares the samples out; None without a job.
            settle: waits for values that workers send each other.
            catching_up: says whether the process goes through ended loops outside of the job; None: it never
                does.
        """
        self._state, self._trainers, self._catching_up = state, trainers, catching_up
        self._consistencies, self._session, self._settle = consistencies, session, settle
        self._running: Evaluation | None = None
        self._evaluated: StateName | None = None
        # Evaluations and errands of that state so far, so that workers know which is which.
        self._counts = 0, 0
        self._given = 0, 0, 0
        self._index = 0

    @property
    def shared(self) -> bool:
        """Return whether there is a coordinator that shares the samples out."""
        return self._session is not None and not self.is_outside

    @property
    def is_outside(self) -> bool:
        """Return whether the process goes through loops that the job has ended, and is no member yet."""
        return self._catching_up is not None and self._catching_up.is_outside

    @property
    def running(self) -> Evaluation | None:
        """Return the running evaluation; None outside of one."""
        return self._running

    @property
    def pod(self) -> Pod | None:
        """Return the pod whose processes evaluate together; None where this one does so by itself."""
        trainer = self._trainers.trainer
        pod = None if trainer is None else trainer.pod
        return None if pod is None or pod.processes == 1 else pod

    @property
    def begun(self) -> tuple[int, int, int]:
        """Return the step that this process stands behind, and how many evaluations and errands of its state
        have begun."""
        step = self._state.position.cursor.step
        if self._state_name() == self._evaluated:
            return step, *self._counts
        return self._given if self._given[0] == step else (step, 0, 0)

    def count_from(self, begun: tuple[int, int, int]) -> None:
        """Take over from another worker how many evaluations the state that it gave has had.

        Args:
            begun: what `begun` was there. A worker that takes part in later ones of that state would take
                their first one for its own otherwise.
        """
        self._given = begun

    def check_none(self) -> None:
        """Raise UsageError inside of an evaluation loop, or after one that was left."""
        if self._running is not None:
            raise UsageError(
                "a loop over batches(..., train=False) has not ended: let it run to its end (no `break`), "
                "and train outside of it"
            )

    def evaluate(
        self, dataset: Any, batch_size: Any, epochs: int, collate_fn: Any = None, copier: Copier | None = None
    ) -> Evaluation:
        """Make an evaluation of a data set.

        Args:
            dataset: with samples by number, or in shards.
            batch_size: samples that this worker computes at once.
            epochs: 1.
            collate_fn: makes a batch's data of a list of samples; None: torch's `default_collate`.
            copier: brings batches to the device; None: they stay where `collate_fn` leaves them.

        Raises:
            ValueError: an argument is wrong.
            TypeError: the data set cannot be read, or `collate_fn` is no function.
            UsageError: this is the wrong place.
        """
        self._consistencies.check_together("batches(train=False)")
        if epochs != 1:
            raise ValueError(f"batches(train=False) goes over the data once: leave epochs={epochs} out")
        data = evaluation_data(dataset, batch_size, collate_fn, copier=copier, pod=self.pod)
        return Evaluation(self, self._state, data)

    def errand(self) -> Evaluation:
        """Return an evaluation of one sample, which one of the workers gets: it does something for all.

        The others wait until that is done; if the worker is lost, another one gets it. Errands are counted by
        themselves, so that one of which some workers know nothing does not spoil later evaluations: it is
        then done by those that do.
        """
        self._consistencies.check_together("errand()")
        return Evaluation(self, self._state, evaluation_data([0], 1, pod=self.pod), is_errand=True)

    def begin(self, evaluation: Evaluation) -> None:
        """Take the evaluation for the running one. Raise UsageError for a wrong place."""
        self.check_none()
        if self._trainers.in_body:
            raise UsageError(
                "batches(train=False) inside of a step: evaluate before or after the step's body"
            )
        # Workers send each other values at the pace at which they wait for them: one that gets no samples
        # would hold up the others, who wait for its part while it waits for what they find.
        self._settle()
        if evaluation.is_errand and self._catching_up is not None:
            self._catching_up.admit("a task that one worker does for all")
        state = self._state_name()
        if self._state.opened_loops == 0 or (self.shared and state is None):
            raise UsageError(
                "batches(train=False) before the first training loop: this worker has not the job's "
                "parameters yet; evaluate inside of the training loop (between two steps) or after it"
            )
        _, evaluations, errands = self.begun
        if evaluation.is_errand:
            self._index, self._counts = FIRST_ERRAND + errands, (evaluations, errands + 1)
        else:
            self._index, self._counts = evaluations, (evaluations + 1, errands)
        self._evaluated, self._running = state, evaluation

    def _state_name(self) -> StateName | None:
        return None if self._session is None else self._session.membership.state

    def end(self) -> None:
        """Note that the running evaluation has ended."""
        self._trainers.require("batches()").forget_evaluated()
        self._running = None

    def name(self) -> tuple[StateName, int]:
        """Return (state, index) of the running evaluation in a job."""
        assert self._evaluated is not None
        return self._evaluated, self._index

    def check(self) -> None:
        """End the process where the coordinator has refused it, or it has to end without one."""
        assert self._session is not None
        self._session.check()

    def ask(self, question: pb.Evaluate) -> pb.Evaluation:
        """Ask the coordinator. Raise SpringtideError when it refuses this process."""
        assert self._session is not None
        return self._session.ask(question)

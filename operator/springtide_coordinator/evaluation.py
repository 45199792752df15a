"""Evaluation loops: who takes which samples, and the mean over all of them. PURE.

Workers that stand at the same committed state ask for ranges of samples, or of shards. A range counts when
its sums arrive; one whose worker has gone is given to another, and one that arrives twice counts once. So
each sample counts exactly once in the mean, whoever dies, and nobody who does not take part is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide_protocol.names import StateName

KEPT_EVALUATIONS = 16
MOST_NAMES = 64
MOST_CHARACTERS = 128
"""The kind of an evaluation's numbers is kept, and repeated in a sentence: it has no more than these."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which evaluation: the committed state that is evaluated, and how many came before it at this state."""

    state: StateName
    index: int


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Samples start..stop-1."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Results of a worker for its range. sums, weights: by name; the mean is their quotient."""

    samples: SampleRange
    sums: Mapping[str, float]
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Total:
    """All ranges have been counted."""

    values: Mapping[str, float]
    samples: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The workers do not evaluate the same thing."""

    problem: str


Answer = SampleRange | Total | Mismatch


@dataclass(slots=True)
class Evaluation:
    """One evaluation. unit: samples that a worker takes at once. kind: of what samples are counted; empty:
    of samples."""

    samples: int
    unit: int
    kind: str = ""
    _next: int = 0
    _returned: list[SampleRange] = field(default_factory=list)
    _leases: dict[str, SampleRange] = field(default_factory=dict)
    _done: set[SampleRange] = field(default_factory=set)
    _counted: int = 0
    _sums: dict[str, float] = field(default_factory=dict)
    _weights: dict[str, float] = field(default_factory=dict)

    def finish(self, member: str, finished: Finished) -> None:
        """Count a range that was given out and has not been counted.

        Args:
            member: id of the worker.
            finished: the range, with sums and weights by the value's name.
        """
        lease = self._leases.get(member)
        if lease == finished.samples:
            del self._leases[member]
        elif finished.samples in self._returned:
            self._returned.remove(finished.samples)  # given back because its worker seemed to be gone
        elif finished.samples in self._leases.values():
            self._leases = {who: own for who, own in self._leases.items() if own != finished.samples}
        else:
            return
        self._done.add(finished.samples)
        self._counted += finished.samples.stop - finished.samples.start
        for name, value in finished.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._weights[name] = self._weights.get(name, 0.0) + finished.weights.get(name, 0.0)

    def ask(self, member: str, members: int) -> SampleRange | Total | None:
        """Return the member's next range, or the total.

        Args:
            member: id of the worker.
            members: how many may take part.

        Returns:
            None: wait, others still compute the last ones.
        """
        if member in self._leases:
            return self._leases[member]
        if self._returned:
            taken = self._returned.pop()
        elif self._next < self.samples:
            units = -(-(self.samples - self._next) // self.unit)
            size = self.unit * max(1, units // (2 * max(1, members)))
            taken = SampleRange(self._next, min(self.samples, self._next + size))
            self._next = taken.stop
        elif self._leases:
            return None
        else:
            return self.total()
        self._leases[member] = taken
        return taken

    def gone(self, member: str) -> bool:
        """Whether a range has come back with it."""
        lease = self._leases.pop(member, None)
        if lease is not None:
            self._returned.append(lease)
        return lease is not None

    def total(self) -> Total:
        values = {
            name: value / self._weights[name] for name, value in self._sums.items() if self._weights[name]
        }
        return Total(values, self._counted)


class Evaluations:
    """The last evaluations of a job, and who waits for their ends."""

    def __init__(self) -> None:
        self._known: dict[Key, Evaluation] = {}
        self._waiting: dict[str, tuple[Key, int]] = {}

    def ask(
        self,
        member: str,
        number: int,
        key: Key,
        samples: int,
        unit: int,
        finished: Finished | None,
        members: int,
        kind: str = "",
    ) -> dict[str, tuple[int, Answer]]:
        """Take in what a member has finished, and give ranges or the total.

        Args:
            member: id of the worker.
            number: of the question.
            key: which evaluation of the job it is.
            samples: of the evaluation, all of them.
            unit: samples that a worker takes at once.
            finished: range that the member has computed since its last question; None: none.
            members: how many may take part.
            kind: of what the samples are numbers, as the worker names it; empty: of samples.

        Returns:
            By member: the number of the question that is answered, and the answer.
        """
        evaluation = self._known.get(key)
        if evaluation is None:
            evaluation = self._known[key] = Evaluation(samples, unit, kind)
            for old in sorted(self._known)[:-KEPT_EVALUATIONS]:
                del self._known[old]
        problem = _difference(evaluation, Evaluation(samples, unit, kind))
        if problem:
            return {member: (number, Mismatch(problem))}
        if finished is not None:
            evaluation.finish(member, finished)
        self._waiting[member] = key, number
        return self._answers(key, evaluation, members)

    def gone(self, member: str, members: int) -> dict[str, tuple[int, Answer]]:
        """Note that a member's stream has ended: its ranges go to those that wait.

        Args:
            member: id of the worker.
            members: how many may take part.

        Returns:
            By member: the number of the question that is answered, and the answer.
        """
        self._waiting.pop(member, None)
        answers: dict[str, tuple[int, Answer]] = {}
        for key, evaluation in self._known.items():
            if evaluation.gone(member):
                answers |= self._answers(key, evaluation, members)
        return answers

    def _answers(self, key: Key, evaluation: Evaluation, members: int) -> dict[str, tuple[int, Answer]]:
        answers: dict[str, tuple[int, Answer]] = {}
        for member, (wanted, number) in list(self._waiting.items()):
            if wanted == key and (answer := evaluation.ask(member, members)) is not None:
                del self._waiting[member]
                answers[member] = number, answer
        return answers


def _difference(there: Evaluation, here: Evaluation) -> str:
    """Return what two workers do not agree on; empty where they do."""
    if (there.samples, there.unit, there.kind) == (here.samples, here.unit, here.kind):
        return ""
    if there.kind and here.kind:
        return (
            f"{there.samples} {there.kind} at another worker, and {here.samples} {here.kind} here (the "
            "number behind the word shards follows from their names and their order)"
        )
    if there.kind or here.kind:
        which = ("shards", "samples by number") if there.kind else ("samples by number", "shards")
        return f"{which[0]} at another worker, and {which[1]} here"
    return (
        f"{there.samples} samples, {there.unit} at once, at another worker, and {here.samples}, {here.unit} "
        "at once, here"
    )

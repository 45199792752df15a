"""The samples that one body of `with springtide.step()` works on, and the account that is kept of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from springtide.comm import commit_vote
from springtide.comm.process_group import Group
from springtide.data.batch import Batch
from springtide.data.cursor import Cursor
from springtide.errors import SpringtideError, UsageError
from springtide.train_step.replicas import Found
from springtide.train_step.salvaged import BeforeLast, Salvaged
from springtide.train_step.transaction import Phase


@dataclass(slots=True)
class StepAssignment:
    """One body's work: its samples, its group, and whose random numbers it draws.

    Attributes:
        number: the step that it would commit, from 1.
        stage, epoch: of its samples.
        part: whose random numbers it draws.
        first, last: of the bodies that this worker runs for the step (more than one in exact mode only).
        is_warm_up: it is dropped at optimizer.step.
        is_past: its loop has ended for the job; it runs in this process alone, and is put back.
        salvages: if the step is dropped, what the body has computed is kept for the next try.
        salvaged: of earlier tries at the step.
        cursor: where the step starts, with all that is known of streams of shards; None: at the committed
            position.
    """

    batch: Batch
    group: Group
    number: int
    seed: int
    stage: int
    epoch: int
    part: int
    first: bool = True
    last: bool = True
    is_warm_up: bool = False
    is_past: bool = False
    salvages: bool = False
    salvaged: Salvaged | None = None
    cursor: Cursor | None = None


@dataclass(slots=True)
class StepContext:
    """Account of the running body; times in seconds.

    backward_pass: of backward and reductions, from 0; more than one only where several optimizer steps were
    declared.
    reduced: the round's reductions are complete and its gradients are in place. result: of the last side
    reduction. zeros: parameters that have zeros for a gradient, without any backward. change: a member wants
    a new generation after this step. weight: with which this worker's loss counted. steps: optimizer steps
    begun. reported: reported values that a reduction has taken along. found: what was found in it not to be
    equal on all members.
    """

    assignment: StepAssignment
    began: float
    reports: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    backward_pass: int = 0
    reduced: bool = False
    result: commit_vote.Result | None = None
    found: Found | None = None
    zeros: Sequence[int] = ()
    change: bool = False
    weight: float = 0.0
    steps: int = 0
    reported: int = 0
    skipped: bool = False
    exposed_seconds: float = 0.0
    backward_seconds: float = 0.0
    waited_seconds: float = 0.0  # for others: sums, values, servers
    waited_before: float = 0.0  # of that, until all gradients were there
    own_seconds: float = 0.0  # until all gradients were there, without waiting for others
    sums_began: float = 0.0
    communication_seconds: float = 0.0  # from the first reduction's begin to the last one's end
    reduced_bytes: int = 0
    gradients: int = 0
    samples: int = 0
    carried_samples: int = 0  # of these, those that an earlier try at the step has computed
    computed_samples: int = 0  # the others
    is_kept: bool = False  # all of its gradients are there, and stay if the step is dropped
    before_last: BeforeLast | None = None  # what stays whatever becomes of the last micro-batch
    is_void: bool = False  # the step is done again in another way, so that nothing of it is kept

    def note(self, values: Mapping[str, float], weight: float) -> None:
        """Take in reported values.

        Args:
            values: by name.
            weight: samples that they are means over.

        Raises:
            UsageError: there are too many names in this step.
        """
        for name, value in values.items():
            self.reports.setdefault(name, []).append((float(value), weight))
        if len(self.reports) > commit_vote.MOST_VALUES:
            raise UsageError(
                f"report(): at most {commit_vote.MOST_VALUES} different values in a step, got "
                f"{sorted(self.reports)}"
            )

    @property
    def entries(self) -> int:
        """How many values have been reported."""
        return sum(len(entries) for entries in self.reports.values())

    def check_reported(self) -> None:
        """Raise UsageError for reported values that no reduction has taken along.

        It is called when the body ends.
        """
        if self.entries != self.reported:
            raise UsageError(
                "report() after the last optimizer.step() of the body comes too late, because values travel "
                "with the gradients: call report() before optimizer.step(), or after the body"
            )

    def values(self) -> dict[str, float]:
        """Return by name the mean of the reported values, each counted with its weight."""
        return {name: _mean(entries) for name, entries in self.reports.items()}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why this member's reductions failed. suspects: IP addresses of peers that the error names."""

    detail: str
    suspects: list[str]


def _mean(entries: list[tuple[float, float]]) -> float:
    total = math.fsum(weight for _, weight in entries)
    return math.fsum(value * weight for value, weight in entries) / total if total else 0.0


def check_whole(body: StepContext, used: bool) -> None:
    """Check that all samples of the body have had their backward, before sums are made.

    Args:
        body: the running one.
        used: there is a gradient.

    Raises:
        UsageError: some have not; their number is told.
    """
    batch = body.assignment.batch
    missing = batch.micro.remaining_samples
    if missing or (batch.standin and not used):
        raise UsageError(
            f"optimizer.step() before backward() of all samples of the batch ({missing} "
            "are missing): call loss.backward() for the batch, or for each micro-batch of batch.split()"
        )


def check_ended(body: StepContext, phase: Phase, used: bool) -> None:
    """Check that the script's code of the body, which is over, was one whole step.

    Args:
        body: the running one.
        phase: of the transaction.
        used: there is a gradient.

    Raises:
        UsageError: a part of the step is missing; the text says which.
        SpringtideError: the step is half made.
    """
    if phase in (Phase.OPEN, Phase.DROPPED):
        missing = (
            "without backward() and optimizer.step()"
            if not used
            else "without optimizer.step() after its last backward()"
            if body.backward_pass
            else "without optimizer.step()"
        )
        raise UsageError(
            f"the body of step {body.assignment.number} ended {missing}: a body holds one whole step on "
            "every "
            "worker. Do not skip batches with `continue` or `if`; accumulate gradients over "
            "batch.split(m), not over bodies"
        )
    if phase is Phase.STEPPING:
        raise SpringtideError(
            f"optimizer.step() of step {body.assignment.number} raised an exception that the script caught: "
            "the parameters may be half updated; let the exception end the process"
        )

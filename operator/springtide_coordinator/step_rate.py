"""Seconds per step at the present number of workers, by which the job's end is estimated. PURE.

Measured from commit to commit, so that what a script does between its steps counts: evaluations, checkpoints.
The first steps of a generation are left out, and with them the pause before it. Another number of workers is
measured anew. After half an hour older steps count half, so that a single long pause fades.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from springtide_coordinator.commit_intervals import CommitIntervals
from springtide_protocol.names import GenerationName

MEMORY_SECONDS = 1800.0
# What has to be measured before it is told of.
LEAST_STEPS = 2.0
LEAST_SECONDS = 10.0


@dataclass(slots=True)
class StepRate:
    """Feed it with `begun` and `committed`, in order."""

    _intervals: CommitIntervals = field(default_factory=CommitIntervals)
    _steps: float = 0.0
    _seconds: float = 0.0

    @property
    def seconds_per_step(self) -> float:
        """Smoothed seconds from commit to commit; 0 until enough was measured."""
        if self._steps < LEAST_STEPS or self._seconds < LEAST_SECONDS:
            return 0.0
        return self._seconds / self._steps

    def begun(self, generation: GenerationName, size: int) -> None:
        """Note that a generation was made, or is heard of for the first time.

        Args:
            generation: its name.
            size: its workers.
        """
        if self._intervals.begun(generation, size):
            self._steps = self._seconds = 0.0

    def committed(self, generation: GenerationName, size: int, step: int, unix_time: float) -> None:
        """Note that a step was committed.

        Where workers do not step together, one commit is told of for several steps.

        Args:
            generation: its name.
            size: its workers.
            step: its number.
            unix_time: of its reporter, in unix seconds.
        """
        self.begun(generation, size)
        interval = self._intervals.committed(step, unix_time)
        if interval is None:
            return
        self._steps += interval.steps
        self._seconds += interval.seconds
        if self._seconds > MEMORY_SECONDS:
            self._steps, self._seconds = self._steps / 2, self._seconds / 2

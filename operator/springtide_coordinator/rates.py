"""Samples per second by number of workers, for whoever decides how many there are to be.

Counted from commits that follow each other in one generation; the first few of a generation, which pay for
the change, are left out. A size that comes back is measured anew. After five minutes older steps count half.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from springtide_coordinator.commit_intervals import CommitIntervals
from springtide_protocol.names import GenerationName

MEMORY_SECONDS = 300.0
KEPT_SIZES = 64


@dataclass(slots=True)
class Rate:
    """Figures of one size on its last visit."""

    steps: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Rates:
    """Feed it with `begun` and `committed`, in order; `by_size` has the oldest visit first."""

    by_size: dict[int, Rate] = field(default_factory=dict)
    _intervals: CommitIntervals = field(default_factory=CommitIntervals)

    def begun(self, generation: GenerationName, size: int) -> None:
        """Note that a generation was made, or is heard of for the first time.

        Args:
            generation: its name.
            size: its workers.
        """
        if self._intervals.begun(generation, size):
            self.by_size.pop(size, None)

    def committed(
        self, generation: GenerationName, size: int, step: int, unix_time: float, samples: int
    ) -> None:
        """Note that a step was committed.

        Args:
            generation: its name.
            size: its workers.
            step: its number.
            unix_time: of its reporter, in unix seconds.
            samples: of the step.
        """
        self.begun(generation, size)
        interval = self._intervals.committed(step, unix_time)
        if interval is None or interval.steps != 1:
            return
        rate = self.by_size.setdefault(size, Rate())
        rate.steps += 1
        rate.samples += samples
        rate.seconds += interval.seconds
        if rate.seconds > MEMORY_SECONDS:
            rate.steps, rate.samples, rate.seconds = rate.steps / 2, rate.samples / 2, rate.seconds / 2
        while len(self.by_size) > KEPT_SIZES:
            del self.by_size[next(iter(self.by_size))]

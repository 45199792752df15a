"""Samples per second by number of workers, for whoever decides how many there are to be.

Counted from commits that follow each other in one generation; the first few of a generation, which pay for
the change, are left out. A size that comes back is measured anew. After five minutes older steps count half.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from springtide_protocol.names import GenerationName

WARM_STEPS = 3
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
    _generation: GenerationName | None = None
    _size: int = 0
    _skip: int = 0
    _last: tuple[int, float] | None = None  # step and unix time of the newest commit

    def begun(self, generation: GenerationName, size: int) -> None:
        """Note that a generation was made, or is heard of for the first time.

        Args:
            generation: its name.
            size: its workers.
        """
        if generation == self._generation:
            return
        if size != self._size:
            self.by_size.pop(size, None)
        self._generation, self._size = generation, size
        self._skip, self._last = WARM_STEPS, None

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
        last = self._last
        if last is not None and step <= last[0]:
            return
        self._last = (step, unix_time)
        if self._skip > 0 or last is None:
            self._skip -= 1
            return
        if step != last[0] + 1 or unix_time < last[1]:
            return
        rate = self.by_size.setdefault(size, Rate())
        rate.steps += 1
        rate.samples += samples
        rate.seconds += unix_time - last[1]
        if rate.seconds > MEMORY_SECONDS:
            rate.steps, rate.samples, rate.seconds = rate.steps / 2, rate.samples / 2, rate.seconds / 2
        while len(self.by_size) > KEPT_SIZES:
            del self.by_size[next(iter(self.by_size))]

"""The protocol that an experiment tracker fulfils, and what passes between it and the library. PURE."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from springtide.errors import SpringtideError

OWN_PREFIX = "springtide/"
"""Names of values that the library adds to those of the script begin so."""


@dataclass(frozen=True, slots=True)
class Run:
    """Describe the run of a job. All its processes have the same one, also after the job was restarted."""

    id: str
    """Namespace, name and the beginning of the uid of the job; a new one for each start of a script alone."""
    name: str
    """The job's name; the script's, where it trains alone."""
    config: Mapping[str, str | int | float | bool]
    """Hyperparameters by name: those of `init(config=...)`, and what the library knows (`springtide/...`)."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Say what a tracker has of a run already."""

    step: int = -1
    """Everything up to this step is there, whatever its name; -1: that is not known of any step."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """The newest step that is there, by the name of the value."""
    generation: str = ""
    """Name of the newest `Generation` that was written; "" for none."""

    def has(self, name: str, step: int) -> bool:
        """Return whether a value is there.

        Args:
            name: of the value.
            step: of the value.
        """
        return step <= max(self.step, self.steps.get(name, -1))

    @property
    def newest(self) -> int:
        """Return the newest step of any value; -1 for none."""
        return max(self.step, *self.steps.values()) if self.steps else self.step

    def up_to(self, step: int) -> Recorded:
        """Return what is left when everything behind a step is taken back."""
        steps = {name: min(newest, step) for name, newest in self.steps.items()}
        return Recorded(min(self.step, step), steps, self.generation)

    def with_records(self, records: Iterable[Record]) -> Recorded:
        """Return what is there once these are written, too."""
        steps, generation = dict(self.steps), self.generation
        for record in records:
            for name in record.values:
                steps[name] = max(record.step, steps.get(name, -1))
            if record.generation is not None:
                generation = record.generation.name
        return Recorded(self.step, steps, generation)


@dataclass(frozen=True, slots=True)
class Generation:
    """Annotate the step with which other members began to train: how many they are, and why."""

    name: str
    """Name in the job's logs, such as `1.0/3`; those of later generations are greater by their numbers."""
    size: int
    """Worker processes from this step on."""
    reason: str
    """Why the generation was made, in the coordinator's words."""

    def __str__(self) -> str:
        workers = "worker" if self.size == 1 else "workers"
        return f"generation {self.name}, {self.size} {workers}: {self.reason or 'the job begins'}"


@dataclass(frozen=True, slots=True)
class Record:
    """Hold values of one step that is committed. A step has several when values come at different times."""

    step: int
    """Committed steps since the job began, with this one; 0 for values from before the first."""
    unix_time: float
    """Time of the commit or the report, in s."""
    values: Mapping[str, float]
    """Values by name. No name comes twice for one step."""
    generation: Generation | None = None
    """Set when this is the first step of a generation: write it before the values."""


@runtime_checkable
class Logger(Protocol):
    """Write the values of a job's committed steps to an experiment tracker.

    One process of the job writes at a time: the first member of the generation, in a thread of its own. The
    calls, in this order:

    1. `check` in every process, in `springtide.init()`.
    2. `open` when this process is to write. Its answer decides what is written: nothing that the tracker
       has is written again, and what the last writer could not write any more is written now.
    3. `rewind`, if the tracker has steps that the job has lost since; then `write`, again and again.
    4. `close` when another process writes, or the job has ended.

    Any method but `check` may raise any exception and take its time: training does not wait for it. After an
    exception follow `close` and, after a pause, `open` again.
    """

    name: str
    """Shown in logs and as a label of metrics."""
    settle_seconds: float
    """How long after its beginning the new writer waits until it calls `open`, since the one before may still
    end a `write`. 0 where a late `write` of it does no harm."""

    def check(self) -> None:
        """Raise SpringtideError when this tracker cannot be used here: a library is missing, say."""

    def open(self, run: Run) -> Recorded:
        """Begin the run, or go on with it if it is there, and return what is there."""

    def rewind(self, step: int) -> bool:
        """Take back everything behind a step: it was dropped, and those steps are made anew.

        Return False where that cannot be: then steps up to the newest one that is there are not written
        again.
        """

    def write(self, records: Sequence[Record]) -> None:
        """Write records in their order, durably."""

    def close(self, outcome: str) -> None:
        """End the connection. outcome: Finished or Failed when the job has ended so; "": it goes on."""


def require(module: str, what: str, extra: str) -> None:
    """Raise SpringtideError when a tracker's library is not installed; nothing is imported.

    Args:
        module: of the library.
        what: the call that needs it, as the script has it.
        extra: of springtide that brings it.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    # A folder of that name, such as W&B makes for its files, is found as well, but has no origin.
    if spec is None or spec.origin is None:
        raise SpringtideError(
            f"init(loggers=[{what}]): the library {module} is not installed in this image: "
            f"pip install 'springtide[{extra}]'"
        )

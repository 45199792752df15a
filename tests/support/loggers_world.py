"""A job whose processes are killed, join and go back, and its tracker: all by hand, with no thread and no
clock. The library's own parts decide; the trackers here do what the real ones do.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from springtide.loggers import Record, Recorded, Run
from springtide.loggers.history import Beginning
from springtide.loggers.tracking import Tracking
from springtide.loggers.writer import Delivery
from springtide_protocol.names import GenerationName, StateName


class Counts:
    """Counts of a tracker."""

    def __init__(self) -> None:
        self.failures = self.losses = self.waiting = 0

    def failed(self) -> None:
        self.failures += 1

    def lost(self, entries: int) -> None:
        self.losses += entries

    def behind(self, entries: int) -> None:
        self.waiting = entries


class Unreachable(Exception):
    """The tracker does not answer."""


@dataclass
class Store:
    """Keep points as a tracker's server does; `goes_back` is whether it can forget."""

    goes_back: bool = True
    points: dict[tuple[str, int], float] = field(default_factory=dict)
    generation: str = ""
    annotations: list[str] = field(default_factory=list)
    fails_after: int | None = None  # points from now
    rewinds: list[int] = field(default_factory=list)

    def put(self, name: str, step: int, value: float) -> None:
        if self.fails_after is not None:
            if self.fails_after == 0:
                raise Unreachable("connection refused")
            self.fails_after -= 1
        assert (name, step) not in self.points, f"{name} of step {step} is written again"
        self.points[name, step] = value

    def of(self, name: str) -> dict[int, float]:
        return {step: value for (one, step), value in sorted(self.points.items()) if one == name}


class StoreLogger:
    """One process's connection to the store."""

    settle_seconds = 3.0

    def __init__(self, store: Store, name: str = "store") -> None:
        self.name = name
        self.store = store
        self.calls: list[str] = []

    def check(self) -> None:
        pass

    def open(self, run: Run) -> Recorded:
        self.calls.append("open")
        if self.store.fails_after == 0:
            raise Unreachable("connection refused")
        steps: dict[str, int] = {}
        for name, step in self.store.points:
            steps[name] = max(step, steps.get(name, -1))
        return Recorded(-1, steps, self.store.generation)

    def rewind(self, step: int) -> bool:
        self.calls.append(f"rewind {step}")
        self.store.rewinds.append(step)
        if self.store.goes_back:
            for key in [key for key in self.store.points if key[1] > step]:
                del self.store.points[key]
        return self.store.goes_back

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.generation is not None:
                self.store.generation = record.generation.name
                self.store.annotations.append(str(record.generation))
            for name, value in record.values.items():
                self.store.put(name, record.step, value)

    def close(self, outcome: str) -> None:
        self.calls.append(f"close {outcome}".strip())


class Process:
    """A worker process: its tracking, and a delivery that is turned by hand."""

    def __init__(self, number: int, store: Store, clock: Callable[[], float]) -> None:
        self.number = number
        self.reported: dict[str, float] = {}
        self.logger, self.counts = StoreLogger(store), Counts()
        self.tracking = Tracking(
            [],
            {"lr": 0.1},
            run_id="default-test-1234",
            run_name="test",
            take_reported=self._take,
            metrics=lambda name: Counts(),
        )
        tracking = self.tracking
        self.delivery = Delivery(
            self.logger,
            tracking.journal,
            lambda: tracking.role,
            lambda: tracking.run,
            self.counts,
            clock,
        )

    def _take(self) -> dict[str, float]:
        values, self.reported = self.reported, {}
        return values


class Job:
    """Members in rank order, the steps that the job has, and the checkpoint."""

    def __init__(self, store: Store, size: int) -> None:
        self.store = store
        self.ahead = 0.0  # of the real clock, which roles take
        self._numbers, self._values = itertools.count(), itertools.count(1)
        self.steps: dict[int, dict[str, float]] = {0: {}}
        self.known: dict[int, set[int]] = {}  # processes that know a step
        self.checkpoint = 0
        self.incarnation, self.generation = 1, 0
        self.members = [self._process() for _ in range(size)]
        self.begin(fresh=True)

    def _process(self) -> Process:
        return Process(next(self._numbers), self.store, lambda: time.monotonic() + self.ahead)

    @property
    def step(self) -> int:
        return max(self.steps)

    @property
    def writer(self) -> Process:
        return self.members[0]

    def begin(self, joiners: int = 0, *, fresh: bool = False) -> None:
        """Begin the next generation from the newest step, with so many joiners behind the members."""
        for member in self.members:
            member.tracking.pause()
        lacking = [self._process() for _ in range(joiners)]
        line = self.members[0].tracking.line_to_send() if self.members else None
        self.members += lacking
        self.generation += 1
        name = GenerationName.of(self.incarnation, 0, self.generation)
        for rank, member in enumerate(self.members):
            if line is not None and (member in lacking or fresh):
                member.tracking.adopt(line)
            beginning = Beginning(name, self.step, len(self.members), "test")
            member.tracking.begin_generation(beginning, writes=rank == 0, truncates=True)
        self.name = name

    def commit(self, names: Mapping[str, float] | None = None, only_first: bool = False) -> None:
        """Commit a step with values of its own; only_first: nobody but the first member hears of it."""
        step = self.step + 1
        values = dict(names) if names is not None else {"loss": float(next(self._values))}
        for member in self.members[:1] if only_first else self.members:
            member.tracking.committed(StateName(self.name, step), 1000.0 + step, values)
        if not only_first:
            self.steps[step] = values
            self.known[step] = {member.number for member in self.members}

    def report(self, **values: float) -> None:
        """Report values behind the step, at all members."""
        for member in self.members:
            member.reported |= values

    def deliver(self, member: Process | None = None) -> bool:
        """Turn a member's delivery, when what has to pass has passed."""
        self.ahead += 100.0
        return (member or self.writer).delivery.look()

    def go_back(self, size: int, survivors: Sequence[Process] = ()) -> None:
        """Begin from the checkpoint, with new processes and these."""
        self.members = [*survivors, *(self._process() for _ in range(size))]
        self.steps = {step: values for step, values in self.steps.items() if step <= self.checkpoint}
        self.incarnation, self.generation = self.incarnation + 1, 0
        self.begin(fresh=True)

    def known_to_members(self) -> set[int]:
        """Steps that a living member knows."""
        living = {member.number for member in self.members}
        return {step for step in self.steps if self.known.get(step, set()) & living}

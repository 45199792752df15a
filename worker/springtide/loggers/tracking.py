"""Keep what trackers are told of in this process, and the threads that tell them.

Threads and locks: the script's thread calls everything. Each tracker's thread reads the journal, which has a
lock of its own, the role and the facts of the run, each of which is replaced as a whole.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from springtide.coordination.outcome import Failed, Finished, Outcome
from springtide.errors import UsageError
from springtide.loggers.history import (
    Beginning,
    Entry,
    Line,
    flattened,
    line_from_json,
    line_to_json,
    merged,
    named_outside,
    with_beginning,
)
from springtide.loggers.journal import Journal
from springtide.loggers.logger import OWN_PREFIX, Logger, Run
from springtide.loggers.writer import Delivery, Role, TrackerMetrics, Writer
from springtide.settings import Settings
from springtide_protocol.names import WITHOUT_JOB, StateName

FINISH_SECONDS: Final = 30.0
"""Time for trackers to take the last commits of a job that has ended."""
LEAVE_SECONDS: Final = 2.0
"""Time in which a process that is no member for now, or ends before its job, may begin writes. A tracker's
`settle_seconds` is more."""


def check_loggers(loggers: Sequence[Logger]) -> None:
    """Raise UsageError for what is no logger, SpringtideError for one that cannot be used here."""
    if not isinstance(loggers, list | tuple):
        raise UsageError(f"init(loggers=...): expected a list of loggers, got {type(loggers).__name__}")
    names: set[str] = set()
    for logger in loggers:
        if not isinstance(logger, Logger) or isinstance(logger, type):
            shown = f"the class {logger.__name__}" if isinstance(logger, type) else repr(logger)
            raise UsageError(
                f"init(loggers=...): {shown} is no logger: make one, such as "
                "springtide.loggers.TensorBoard('/runs'), or an object of your own with the methods of "
                "springtide.loggers.Logger"
            )
        if logger.name in names:
            raise UsageError(
                f"init(loggers=...): two loggers are named {logger.name!r}: give one of them another name"
            )
        names.add(logger.name)
        logger.check()


def check_config(config: object, loggers: Sequence[Logger]) -> None:
    """Raise UsageError for hyperparameters that nobody could show.

    Args:
        config: of `init()`.
        loggers: which show it.
    """
    if config is None:
        return
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise UsageError(
            "init(config=...): expected a mapping from names to hyperparameters, such as vars(args), got "
            f"{type(config).__name__}"
        )
    if not loggers:
        raise UsageError("init(config=...) without loggers: it is for them to show; give loggers=, too")


def facts_of(settings: Settings, *, batch_size: int, epochs: int, seed: int) -> dict[str, str | int]:
    """Return what the library knows of a run that begins, by name.

    Args:
        settings: of the process.
        batch_size: of the first training loop, over all workers.
        epochs: of that loop.
        seed: of that loop.
    """
    facts: dict[str, str | int] = {"batch_size": batch_size, "epochs": epochs, "seed": seed}
    facts["strategy"] = "None" if settings.alone else settings.strategy
    if settings.logical_workers:
        facts["logical_workers"] = settings.logical_workers
    if settings.strategy == "ParameterServer" and not settings.alone:
        facts["consistency"] = settings.consistency
    for name in ("compression", "shard"):
        if (value := getattr(settings, name)) != "None":
            facts[name] = value
    return facts


class Tracking:
    """Keep the journal of this process, its line, and who writes. The script's thread uses it."""

    def __init__(
        self,
        loggers: Sequence[Logger],
        config: Mapping[str, object],
        *,
        run_id: str,
        run_name: str,
        take_reported: Callable[[], dict[str, float]],
        metrics: Callable[[str], TrackerMetrics],
    ) -> None:
        """Begin without a role.

        Args:
            loggers: of the script.
            config: hyperparameters of the script.
            run_id: of the job; "": the script trains alone.
            run_name: of the job.
            take_reported: returns the values that were reported between steps since it was called last.
            metrics: makes those of a tracker of that name.
        """
        self.journal = Journal()
        self._take_reported = take_reported
        self._alone = not run_id
        script = Path(sys.argv[0]).stem or "script"
        began = time.strftime("%Y%m%d-%H%M%S")
        self.run = Run(run_id or f"{script}-{began}-{os.getpid()}", run_name or script, flattened(config))
        self._described = False
        self._line: Line = ()
        self._beginning = Beginning(WITHOUT_JOB, 0)
        self._begins = True  # the next commit is the generation's first one here
        self._last: tuple[int, Mapping[str, float]] = (0, {})  # the last commit here
        self.role = Role()
        self._writers = [self._writer(logger, metrics(logger.name)) for logger in loggers]

    def _writer(self, logger: Logger, metrics: TrackerMetrics) -> Writer:
        delivery = Delivery(logger, self.journal, lambda: self.role, lambda: self.run, metrics)
        return Writer(delivery, logger.name, lambda: self.role, metrics)

    def describe(self, facts: Mapping[str, str | int | float | bool]) -> None:
        """Add what the library knows of the run, at the script's first training loop."""
        if not self._described:
            self._described = True
            own = {f"{OWN_PREFIX}{name}": value for name, value in facts.items()}
            self.run = replace(self.run, config={**self.run.config, **own})

    # ---- generations

    def line_to_send(self) -> bytes:
        """Return what this process knows of the job's line, for one that joins."""
        return line_to_json(self._line)

    def adopt(self, given: bytes) -> None:
        """Take in the line that a member has given."""
        self._line = merged(self._line, line_from_json(given))

    def begin_generation(self, beginning: Beginning, *, writes: bool, truncates: bool) -> None:
        """Go on in a generation of which this process is a member.

        Args:
            beginning: of the generation.
            writes: this process is the first member.
            truncates: the job has no steps any more behind the one that it begins from. False where workers
                do not step together, which may have made more of them than this process has heard of.
        """
        self._flush_reports()
        former, generation = self._beginning.generation, beginning.generation
        self._beginning, self._begins = beginning, True
        if beginning.step != self._last[0]:
            self._last = (beginning.step, {})
        if truncates:
            self._line = with_beginning(self._line, self._beginning)
        before, now = self.role, time.monotonic()
        # Names are never used twice, so nobody has written between two that follow each other.
        follows = (former.incarnation, former.number + 1) == (generation.incarnation, generation.number)
        if before.writes and follows:
            since, first = before.since, before.first
        else:
            since, first = now, self.journal.end
        no_other = self._alone or (generation.incarnation.is_first and generation.number == 1)
        self.role = Role(writes, self._line, since, first, no_other=no_other)
        self._begin_writing()

    def pause(self) -> None:
        """Note that this process is no member of a generation for now."""
        self.role = replace(self.role, until=time.monotonic() + LEAVE_SECONDS)

    # ---- values

    def committed(self, state: StateName, unix_time: float, values: Mapping[str, float]) -> None:
        """Take the values of a committed step.

        Args:
            state: that the step made.
            unix_time: of the commit, in s.
            values: means over the samples of all members, by name.
        """
        if self._alone and not self.role.writes:
            self.begin_generation(Beginning(WITHOUT_JOB, state.step - 1, 1), writes=True, truncates=True)
        self._flush_reports()
        self.journal.add(Entry(self._beginning, state.step, unix_time, values, self._begins))
        self._last, self._begins = (state.step, values), False

    def _flush_reports(self) -> None:
        """Take in what was reported since the last commit; from here on it does not change any more."""
        reported = self._take_reported()
        if not reported:
            return
        step, of_the_step = self._last
        values = named_outside(reported, of_the_step)
        self.journal.add(Entry(self._beginning, step, time.time(), values, outside=True))

    def close(self, ended: Outcome | None) -> None:
        """Let trackers take what is left, for a limited time, and end their threads.

        ended: how the process does; None where that is not known.
        """
        self._flush_reports()
        now, told = time.monotonic(), ""
        if isinstance(ended, Finished) or self._alone:
            told = type(ended).__name__ if isinstance(ended, Finished | Failed) else ""
            deadline = now + FINISH_SECONDS
            self.role = replace(self.role, until=float("inf"))
        else:
            # Another process may be about to write.
            told = "Failed" if isinstance(ended, Failed) else ""
            deadline = min(self.role.until, now + LEAVE_SECONDS)
            self.role = replace(self.role, until=deadline)
        for writer in self._writers:
            writer.ask_to_close(told, deadline)
        for writer in self._writers:
            writer.await_closed()

    def _begin_writing(self) -> None:
        if self.role.writes:
            for writer in self._writers:
                writer.begin()

"""Write committed steps to one tracker from a thread of its own, while this process is the one that writes.

Threads and locks: a tracker's thread alone uses its delivery and its logger. The script's thread makes roles,
each an object that is replaced as a whole, and asks the thread to end by an event; there is no lock here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from springtide.loggers.history import Line, back_to, gap, lacking, read_generation
from springtide.loggers.journal import Journal
from springtide.loggers.logger import Logger, Recorded, Run
from springtide_protocol.names import GenerationName

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.25
"""How often a tracker's thread looks for commits."""
MAX_BATCH: Final = 256
"""Entries between two looks whether this process still writes."""
MAX_PAUSE_SECONDS: Final = 60.0
"""Longest pause between two tries at a tracker that fails."""


@dataclass(frozen=True, slots=True)
class Role:
    """Say whether this process writes to trackers. Times are monotonic, in s."""

    writes: bool = False
    line: Line = ()
    """History of the job's generations, up to the last one that this process was a member of."""
    since: float = 0.0
    """Time at which this process became the writer; the same while it stays that."""
    first: int = 0
    """Number of the first entry of the journal since then."""
    until: float = float("inf")
    """Time from which it may not begin to write: it is no member of a generation for now."""
    no_other: bool = False
    """Nobody can have written to this run before."""

    def may_write(self, now: float) -> bool:
        """Return whether a write may begin at this time."""
        return self.writes and now < self.until


class TrackerMetrics(Protocol):
    """Count for one tracker. Any thread may call it."""

    def failed(self) -> None:
        """Count a call that raised."""

    def lost(self, entries: int) -> None:
        """Count entries that could not be kept until the tracker took them."""

    def behind(self, entries: int) -> None:
        """Show how many entries wait."""


class Delivery:
    """Bring a tracker to the state of the journal, one look after another; the clock is the caller's."""

    def __init__(
        self,
        logger: Logger,
        journal: Journal,
        role: Callable[[], Role],
        run: Callable[[], Run],
        metrics: TrackerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with a logger that is not open.

        Args:
            logger: of the tracker.
            journal: of this process.
            role: returns the present role of this process.
            run: describes the run.
            metrics: of the tracker.
            clock: monotonic, in s.
        """
        self._logger, self._journal, self._clock = logger, journal, clock
        self._role, self._run, self._metrics = role, run, metrics
        # Of this time as the writer.
        self._recorded: Recorded | None = None  # None: the logger is not open
        self._aligned: GenerationName | None = None  # the tracker is on the line up to that generation
        self._next = 0  # number of the entry that is looked at next
        self._since = float("nan")  # of the role in which the logger was opened
        self._kept_from: int | None = None  # entries from here on wait; None while another process writes
        self._failures, self._retry_at = 0, 0.0
        self._said: set[str] = set()

    @property
    def waiting(self) -> int:
        """Return how many entries wait."""
        return 0 if self._kept_from is None else max(0, self._journal.end - self._kept_from)

    def look(self, hurry: bool = False) -> bool:
        """Write what the tracker lacks; return whether there is no more to do at present.

        hurry: the process is about to end, so pauses between tries are short.
        """
        role = self._role()
        if not role.may_write(self._clock()):
            self.close("")
            self._kept_from = None
            return True
        if role.since != self._since:
            self.close("")  # another process has written meanwhile
            self._since, self._kept_from = role.since, None
        if self._kept_from is None:
            self._kept_from = role.first  # the writer before answers for earlier ones
        try:
            self._open(role)
            while self._recorded is not None and self._write_some():
                pass
        except Exception as error:
            self._fail(error, hurry)
        self._count()
        return self._recorded is not None and self._next >= self._journal.end

    def _open(self, role: Role) -> None:
        now = self._clock()
        if self._recorded is not None or now < self._retry_at:
            return
        if not role.no_other and now < role.since + self._logger.settle_seconds:
            return  # the writer before this one may still end what it is at
        recorded = self._logger.open(self._run())
        self._recorded, self._aligned, self._next = recorded, None, 0
        entries, _ = self._journal.read(0, 1 << 30)
        unknown = gap(entries, role.line, recorded)
        if unknown and recorded.newest >= 0:
            log.warning(
                "tracker %s: it has steps up to %d, and this process knows those from %d on: what the last "
                "writer did not write between them is lost",
                self._logger.name,
                recorded.newest,
                unknown.stop,
            )

    def _write_some(self) -> bool:
        """Write a batch of what the tracker lacks; return whether to look again at once."""
        entries, behind = self._journal.read(self._next, MAX_BATCH)
        # Read after the entries, so that its line has the generations of all of them.
        role = self._role()
        if not role.may_write(self._clock()) or role.since != self._since:
            return False
        self._align(role.line)
        if not entries:
            return False
        assert self._recorded is not None
        records = lacking(entries, role.line, self._recorded)
        if records:
            self._logger.write(records)
            self._recorded = self._recorded.with_records(records)
            if self._failures:
                self._failures = 0
                self._said.discard("failing")
                log.info("tracker %s: it takes commits again", self._logger.name)
        self._next = behind
        return True

    def _align(self, line: Line) -> None:
        """Have the tracker forget steps that were dropped."""
        assert self._recorded is not None
        if not line or line[-1].generation == self._aligned:
            return
        known = self._aligned or read_generation(self._recorded.generation)
        step = back_to(line, known)
        if step is not None and self._recorded.newest > step:
            newest = self._recorded.newest
            if self._logger.rewind(step):
                self._recorded = self._recorded.up_to(step)
                log.info("tracker %s: goes back from step %d to %d", self._logger.name, newest, step)
            else:
                log.warning(
                    "tracker %s: it cannot take steps %d to %d back, which were dropped and are made anew: "
                    "they stay there with the values that they had",
                    self._logger.name,
                    step + 1,
                    newest,
                )
        self._aligned = line[-1].generation

    def _fail(self, error: Exception, hurry: bool) -> None:
        self._metrics.failed()
        self._shut("")
        pause = min(MAX_PAUSE_SECONDS, 2.0**self._failures)
        if hurry:
            pause = min(pause, 0.5)
        self._failures = min(self._failures + 1, 10)
        self._retry_at = self._clock() + pause
        if "failing" not in self._said:
            self._said.add("failing")
            log.warning(
                "tracker %s: %s: %s; it is tried again and again, while up to %d commits wait (said once)",
                self._logger.name,
                type(error).__name__,
                error,
                self._journal.size,
            )

    def _count(self) -> None:
        """Count what waits, and what the journal could not keep any longer."""
        oldest = self._journal.oldest
        assert self._kept_from is not None
        reached = max(self._kept_from, self._next if self._recorded is not None else 0)
        if oldest > reached:
            self._metrics.lost(oldest - reached)
            if "lost" not in self._said:
                self._said.add("lost")
                log.error(
                    "tracker %s: more than %d commits wait, so the oldest are lost to it (said once)",
                    self._logger.name,
                    self._journal.size,
                )
        self._kept_from = max(reached, oldest)
        self._metrics.behind(self.waiting)

    def close(self, outcome: str) -> None:
        """Close the logger if it is open. outcome: what it is told."""
        if self._recorded is not None:
            self._shut(outcome)
        self._metrics.behind(0)

    def _shut(self, outcome: str) -> None:
        """End the logger's connection; what that raises concerns nobody any more."""
        self._recorded = None
        with contextlib.suppress(Exception):
            self._logger.close(outcome)


class Writer:
    """Run the delivery to one tracker in a thread."""

    def __init__(
        self, delivery: Delivery, name: str, role: Callable[[], Role], metrics: TrackerMetrics
    ) -> None:
        """Make the thread; `begin` starts it.

        Args:
            delivery: to the tracker.
            name: of the tracker.
            role: returns the present role of this process.
            metrics: of the tracker.
        """
        self._delivery, self._name, self._role, self._metrics = delivery, name, role, metrics
        self._thread = threading.Thread(target=self._work, name=f"springtide-{name}", daemon=True)
        self._closing = threading.Event()
        self._outcome, self._deadline = "", float("inf")

    def begin(self) -> None:
        """Start the thread, once."""
        if self._thread.ident is None:
            self._thread.start()

    def ask_to_close(self, outcome: str, deadline: float) -> None:
        """Write what is left and close the logger.

        Args:
            outcome: what the logger is told.
            deadline: monotonic; what cannot be written by then is lost.
        """
        self._outcome, self._deadline = outcome, deadline
        self._closing.set()

    def await_closed(self) -> None:
        """Wait for the thread's end until the deadline, and say what it could not write."""
        if self._thread.ident is None:
            return
        self._thread.join(max(0.0, self._deadline - time.monotonic()) + 0.2)
        left = self._delivery.waiting
        if self._role().writes and self._outcome and (left or self._thread.is_alive()):
            self._metrics.lost(left)
            log.error(
                "tracker %s: the process ends, and it did not take the last %d commits in time",
                self._name,
                left,
            )

    def _work(self) -> None:
        while True:
            closing = self._closing.wait(POLL_SECONDS)
            done = self._delivery.look(closing)
            if closing and (done or time.monotonic() >= self._deadline):
                self._delivery.close(self._outcome if self._role().writes else "")
                return
            if closing:
                time.sleep(0.05)

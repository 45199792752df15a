"""End the process: decide and write its outcome, and take SIGTERM as a wish to leave."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from springtide.checkpoint.keeper import FLUSH_SECONDS
from springtide.coordination import outcome
from springtide.coordination.membership import generation_of
from springtide.coordination.park_reply import Leave
from springtide.coordination.session import Session
from springtide.data.taken import taken
from springtide.elastic.evaluation import Evaluations
from springtide.elastic.termination import end_as_child, end_by, is_ours_or_default
from springtide.elastic.training_state import TrainingState
from springtide.errors import ServerStepError, UsageError
from springtide.settings import Settings

log = logging.getLogger(__name__)

_FAILED_FLUSH_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitParts:
    """Name what the end of a process uses of it."""

    settings: Settings
    state: TrainingState
    evaluations: Evaluations
    session: Session | None  # None without a job
    flush: Callable[[float], object]  # waits that long for the checkpoint to be written
    close: Callable[[], None]  # ends threads and sockets


class ProcessExit:
    """Decide and write how the process ends. The script's thread uses it; any may call `write_outcome`."""

    def __init__(self, parts: ExitParts) -> None:
        self._parts = parts
        self._settings, self._state, self._session = parts.settings, parts.state, parts.session

    def depart(self, answer: Leave) -> NoReturn:
        """End the process because the coordinator lets it go, without the script's code after the loop."""
        log.info("leaving the job: %s", answer.reason)
        self._state.end_with(outcome.Left(answer.reason, answer.finished))
        self.write_outcome()
        raise SystemExit(0)

    def finished(self) -> outcome.Outcome:
        """Return how the process ends when its script ended without an exception."""
        state = self._state
        try:
            self._parts.evaluations.check_none()
        except UsageError as problem:
            return outcome.Failed("UsageError", str(problem))
        if state.plan is not None or state.opened_loops == 0:
            what = (
                "before its training loop did: do not leave the loop with `break` or `return`"
                if state.opened_loops
                else "without a training loop: use `for batch in springtide.batches(...)`"
            )
            return outcome.Failed("UsageError", f"the script ended {what}")
        if self._session is not None and not state.generations:
            return outcome.Failed(
                "UsageError",
                "the script of a worker that joins ended before the training loop that the job is in: do not "
                "let what is computed in a training loop, or evaluated between two, end the script",
            )
        generation = generation_of(None if self._session is None else self._session.membership)
        found = taken(state.position.cursor)
        return outcome.Finished(
            (generation.incarnation.number, generation.incarnation.restart),
            generation.number,
            state.position.cursor.step,
            state.position.cursor.epoch,
            state.position.ledger.audit(),
            dict(state.values),
            {"generations": state.generations, "restarts": self._settings.attempt},
            {} if found is None else found.to_json(),
        )

    def write_outcome(self) -> None:
        """Write the termination message of a process in a job, if it is decided how it ends."""
        if self._state.outcome is None or self._settings.alone:
            return
        try:
            outcome.write(self._state.outcome, self._settings.termination_log)
        except OSError as error:
            log.error("cannot write the outcome to %s: %s", self._settings.termination_log, error)

    # ---- the interpreter's end

    def install(self) -> None:
        """Hook into the interpreter's end, and into SIGTERM unless the script handles that itself."""
        previous = sys.excepthook

        def on_exception(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            if self._state.outcome is None:
                # Files, network and memory: the same step may well succeed elsewhere or later.
                outside = isinstance(error, OSError | MemoryError | ServerStepError)
                self._state.end_with(outcome.failed(error), failed_outside=outside)
            previous(kind, error, trace)

        sys.excepthook = on_exception
        atexit.register(self.run, os.getpid())
        if self._settings.alone or threading.current_thread() is not threading.main_thread():
            return
        if is_ours_or_default(signal.getsignal(signal.SIGTERM)):
            process = os.getpid()
            signal.signal(signal.SIGTERM, lambda number, frame: self._on_term(process))

    def run(self, process: int) -> None:
        """Do what comes last in the process of that id; nothing in one that was forked from it."""
        if os.getpid() != process:
            return  # a forked child, of a data loader for example
        if self._state.outcome is None:
            self._state.end_with(found := self.finished())
            if isinstance(found, outcome.Failed) and not self._settings.alone:
                log.error("%s", found.message)
        failed = isinstance(self._state.outcome, outcome.Failed)
        self._parts.flush(_FAILED_FLUSH_SECONDS if failed else FLUSH_SECONDS)
        self.write_outcome()
        self._parts.close()
        # The interpreter's end would look through all of torch's objects for garbage, for most of a second.
        gc.freeze()

    def _on_term(self, process: int) -> None:
        """Ask to leave at the next boundary; the second time, end now.

        See [Note: process 1] in `termination`.
        """
        if os.getpid() != process:
            end_as_child(signal.SIGTERM)  # of a data loader for example, which its parent ends
        session = self._session
        if session is None or session.term_asked:
            end_by(signal.SIGTERM)
        session.note_term(time.monotonic())
        if session.membership.generation is None:
            # It holds nothing and nobody waits for it.
            self._state.end_with(outcome.Left("SIGTERM before it joined"))
            raise SystemExit(0)

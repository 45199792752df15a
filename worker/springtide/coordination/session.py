"""Talk with the coordinator: own the stream, and the thread that reports commits on it.

Threads and locks: the stream's thread (`SessionClient`) hands messages to the membership and calls the
listener's `on_over`, `on_boundary` and `on_feed`; the reporting thread sends times, activity and commits, and
asks `current_activity`; the script's thread asks, checks for SIGTERM and closes. State lies in the membership
under its condition; `_end` is the only lock here: it makes the first of two threads that find the coordinator
unheard end the process, while the other one waits.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from springtide import faults
from springtide.comm.store import StreamStore
from springtide.coordination.activity import Activity, Now, main_thread_place
from springtide.coordination.held_lock import HeldLock
from springtide.coordination.membership import Membership
from springtide.coordination.outcome import Failed, Left, Outcome
from springtide.coordination.progress import CommitLog, data_message
from springtide.coordination.questions import Questions
from springtide.coordination.waiting import ReductionWarnings, TransferReports
from springtide.data.taken import taken
from springtide.elastic.recovery_spans import RecoverySpans
from springtide.elastic.state_transfer import StateTransfer
from springtide.elastic.termination import UNHEARD_SECONDS, end_by
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.settings import Settings
from springtide.train_step.timing import Timing
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import lifeline
from springtide_protocol.heartbeat import beat_every
from springtide_protocol.session_client import SessionClient, SessionClosedError

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.1
_TIMES_SECONDS = 1.0
_FLUSH_SECONDS = 2.0
FIRST_STREAM_SECONDS = 2.0
"""Longest wait for the first stream, before the script goes on without one."""
BETWEEN_SECONDS = 1.5
"""Time that the script's thread then has to end or drop its step and come to a place between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSources:
    """Name what the coordinator is told of. The session's threads read it."""

    state: TrainingState
    trainers: TrainerAccess
    commits: CommitLog
    timing: Timing
    state_transfer: StateTransfer
    spans: RecoverySpans


class SessionListener(Protocol):
    """Hear what the coordinator wants. No method may wait."""

    def on_over(self, reason: str) -> None:
        """Drop the open step: its generation is over. Called from the stream's thread."""

    def on_boundary(self) -> None:
        """Stop after the running step. Called from the stream's thread."""

    def on_feed(self, order: pb.Feed) -> None:
        """Send the state to a process that is about to join. Called from the stream's thread."""

    def current_activity(self) -> Now | None:
        """Return what the script's thread does now. Called from the reporting thread."""

    def write_outcome(self) -> None:
        """Write how the process ends, if that is decided. Any thread calls it before it ends the process."""


class Session:
    """Own the stream to the coordinator, the membership and the thread that reports commits."""

    def __init__(self, settings: Settings, sources: SessionSources, listener: SessionListener) -> None:
        """Make the session; `start` begins it.

        Args:
            settings: of the process.
            sources: of what is told.
            listener: hears what the coordinator wants.
        """
        self._sources, self._listener = sources, listener
        self.membership = Membership(
            settings, self.send, listener.on_over, self._asked_to_stop, StreamStore, self.check_term
        )
        self._client = SessionClient(
            settings.coordinator,
            settings.token,
            self.membership.hello,
            self._receive,
            on_disconnected=self._disconnected,
            authority=settings.authority,
        )
        self._coordinator_host = settings.coordinator.rpartition(":")[0].strip("[]")
        self._questions = Questions()
        self._reductions = ReductionWarnings(sources.trainers.waiting_since, self.membership.others)
        self._transfers = TransferReports(
            sources.state_transfer, lambda: self.membership.generation, self.send
        )
        self._term_at: float | None = None
        self._lost_at = float("-inf")
        self._began = time.monotonic()
        self._end = threading.Lock()
        self._timed_at = self._beat_at = 0.0
        self._streams = 0
        self._resend = False
        self._report_failed = False
        self._held = HeldLock(self._began, time.process_time())
        self._activity = Activity(main_thread_place)
        self._activity_reported_on = 0  # stream
        self._closing = threading.Event()
        self._reporter = threading.Thread(
            target=self._report_for_ever, name="springtide-progress", daemon=True
        )

    def start(self) -> None:
        """Begin to connect and to report; return when there is a stream, or FIRST_STREAM_SECONDS later.

        Scripts set variables of the environment, most of them at their begin. While gRPC resolves a name and
        connects, threads of its own read the environment, and glibc before 2.41 frees its list of variables
        when one is added: the process would end by SIGSEGV, about one in a thousand.
        """
        self._reporter.start()
        self._client.start()
        with contextlib.suppress(TimeoutError, SessionClosedError):  # both come to whoever needs the stream
            self._client.wait_connected(FIRST_STREAM_SECONDS)

    def missing_seconds(self) -> float:
        """Return for how long there has been no stream to the coordinator; 0 while there is one."""
        return 0.0 if self._client.connected else time.monotonic() - max(self._began, self._lost_at)

    def send(self, message: pb.WorkerMessage) -> None:
        """Queue a message; without a stream it is lost, since the next Hello tells what matters."""
        try:
            self._client.send(message)
        except SessionClosedError as error:
            self.membership.session_over(str(error))

    def send_values(self, values: Mapping[str, float]) -> None:
        """Report values that the script reported outside of steps."""
        self.send(pb.WorkerMessage(values=pb.Values(values=values)))

    def ask(self, question: pb.Evaluate) -> pb.Evaluation:
        """Ask the coordinator and wait for its answer. Raise SpringtideError when it refuses this process."""
        return self._questions.ask(question, self.send, self.check)

    def check(self) -> None:
        """End the process where it cannot go on: refused, or asked to end while nobody lets it leave."""
        self.membership.check()
        self.check_term()

    @property
    def asking(self) -> bool:
        """Return whether a question to the coordinator is open."""
        return self._questions.open is not None

    @property
    def term_asked(self) -> bool:
        """Return whether SIGTERM has come."""
        return self._term_at is not None

    def note_term(self, now: float) -> None:
        """Note the first SIGTERM at a monotonic time.

        It takes no lock: the signal handler calls it, which may interrupt code that holds one.
        """
        self._term_at = now

    def close(self, ended: Outcome | None, step: int = 0, samples: str = "") -> None:
        """Tell the last commits and the outcome, and end both threads.

        Args:
            ended: how the process ends; None when nothing is told of that.
            step: whose body or samples made it fail; 0 for none.
            samples: of that step, in words.
        """
        self._closing.set()
        if self._reporter.ident is None:
            return  # never begun
        self._reporter.join(_FLUSH_SECONDS)
        self._report_commits()
        if ended is not None:
            detail = ended.reason if isinstance(ended, Left) else ""
            if isinstance(ended, Failed):
                detail = f"{ended.exception}: {ended.message}"[:1000]
            bye = pb.Bye(outcome=type(ended).__name__, detail=detail, step=step, samples=samples)
            self.send(pb.WorkerMessage(bye=bye))
        try:
            self._client.close(_FLUSH_SECONDS)
        except SessionClosedError as error:
            log.error("%s", error)

    def check_term(self) -> None:
        """End the process as SIGTERM would when nobody is there to let it leave.

        The script's thread calls it between steps and in waits, so that no step is open.
        """
        if self._unheard(time.monotonic()) >= UNHEARD_SECONDS:
            self._end_unheard()

    def _unheard(self, now: float) -> float:
        """Return for how many seconds it has been asked to end with no coordinator there to let it leave."""
        if self._term_at is None or self._client.connected:
            return 0.0
        return now - max(self._term_at, self._lost_at)

    def _end_unheard(self) -> None:
        """Say so once and end, whichever thread comes first; the other one waits for the end."""
        with self._end:
            log.warning("SIGTERM, and no coordinator in %g s: ends without having left", UNHEARD_SECONDS)
            self._listener.write_outcome()  # if there is one by now
            end_by(signal.SIGTERM)

    # ---- the stream's thread

    def _receive(self, message: pb.CoordinatorMessage) -> None:
        kind = message.WhichOneof("message")
        self.membership.receive(message)
        if kind == "evaluation":
            self._questions.answered(message.evaluation)
        if kind == "feed":
            self._listener.on_feed(message.feed)
        if kind == "welcome":
            if message.welcome.HasField("lifeline"):
                told = message.welcome.lifeline
                lifeline.hold(told.host or self._coordinator_host, told.port, told.key)
            self._sources.commits.rewind(self.membership.known)
            if (question := self._questions.open) is not None:
                self.send(question)
            # A coordinator that is new may not have heard of commits of this generation's former first
            # member.
            self._resend = self._streams > 0
            self._streams += 1

    def _asked_to_stop(self) -> None:
        faults.reach("asked", self._sources.state.position.cursor.step + 1)
        self._listener.on_boundary()
        log.info("asked to stop after the step: members or servers come or go")

    def _disconnected(self, reason: str) -> None:
        self._lost_at = time.monotonic()
        if self._term_at is None:
            log.warning("lost the coordinator (%s); training goes on, trying to reach it", reason)
        self.membership.disconnected()

    # ---- the reporting thread

    def _report_for_ever(self) -> None:
        while not self._closing.wait(REPORT_SECONDS):
            try:
                if not self._report():
                    return
            except Exception:
                # Without this thread's heartbeats the process would count as one that stands still. Not only
                # our own faults come here: while the script calls gc.get_objects(), `tuple()` of a generator
                # may raise SystemError in any thread (CPython's issue 127058).
                if not self._report_failed:
                    log.exception("a report to the coordinator failed; further ones go on (said once)")
                self._report_failed = True
                # Commits that were taken for it may not have gone: the coordinator drops what it has twice.
                self._sources.commits.rewind(self.membership.known)

    def _report(self) -> bool:
        """Report what there is to report; return whether there is more to come."""
        # First what must not depend on any other report.
        self._report_heartbeat()
        if self._term_at is not None and not self.membership.leaving:
            log.info("SIGTERM: leaving at the next boundary")
            self.membership.leave("SIGTERM")
        if self._unheard(time.monotonic()) >= UNHEARD_SECONDS + BETWEEN_SECONDS:
            self._end_unheard()
        self._report_commits()
        self._report_times()
        self._report_activity()
        self._sources.spans.look()
        self._reductions.look(time.monotonic())
        self._transfers.look(time.monotonic(), self._client.connected)
        if not self._client.connected:
            try:
                self._client.wait_connected(0.0)
            except TimeoutError:
                return True
            except SessionClosedError as error:
                self.membership.session_over(str(error))
                return False
        return True

    def _report_heartbeat(self) -> None:
        now, every = time.monotonic(), beat_every(self.membership.wanted)
        active = self.membership.standing == pb.ACTIVE
        training = self._client.connected and active
        newest = self._sources.commits.newest
        commits = newest is not None and newest.generation == self.membership.generation
        self._held.look(now, time.process_time(), watched=active and commits)
        # Half a pause earlier than at the next look, which would make the gap longer by a whole one.
        if training and every > 0 and now - self._beat_at >= every - REPORT_SECONDS / 2:
            self._beat_at = now
            self.send(pb.WorkerMessage(heartbeat=pb.Heartbeat(held_seconds=self._held.seconds)))

    def _report_times(self) -> None:
        now = time.monotonic()
        if now - self._timed_at < _TIMES_SECONDS or not self._client.connected:
            return
        self._timed_at = now
        times = self._sources.timing.take()
        if times is not None:
            self.send(pb.WorkerMessage(times=times))

    def _report_activity(self) -> None:
        if not self._client.connected:
            return
        if self._activity_reported_on != self._streams:
            self._activity_reported_on = self._streams
            self._activity.again()
        lasting = self._activity.look(self._listener.current_activity(), time.monotonic())
        if lasting is not None:
            self.send(pb.WorkerMessage(activity=lasting))

    def _report_commits(self) -> None:
        state, commit_log = self._sources.state, self._sources.commits
        if not self._client.connected or not (state.group.rank == 0 or self._resend):
            return
        self._resend = False
        while commits := commit_log.take():
            position, plan = state.position, state.plan
            # The script may be in its next loop already, of which nothing is committed yet.
            in_loop = plan is not None and position.ledger.stage == state.opened_loops - 1
            self.send(
                pb.WorkerMessage(
                    progress=pb.Progress(
                        commits=[commit.to_proto() for commit in commits],
                        data=data_message(position.ledger, taken(position.cursor)),
                        productive_seconds=position.productive_seconds,
                        began_unix=position.began_unix,
                        total_steps=plan.total_steps if plan is not None and in_loop else 0,
                        job_steps=state.job_steps,
                    )
                )
            )

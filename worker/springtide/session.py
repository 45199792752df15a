"""The stream to the coordinator and the thread that tells it of commits."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from springtide import faults
from springtide.activity import Activity, doing, main_thread_place
from springtide.environment import Settings
from springtide.exchange.store import StreamStore
from springtide.membership import Membership
from springtide.outcome import Failed, Left, Outcome
from springtide.records import data_message
from springtide.termination import UNHEARD_SECONDS, end_by
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import generation_to_proto
from springtide_protocol.session_client import SessionClient, SessionClosedError

if TYPE_CHECKING:
    from springtide.runtime import Runtime

log = logging.getLogger("springtide")

TELL_SECONDS = 0.1
_TIMES_SECONDS = 1.0
_FLUSH_SECONDS = 2.0
BETWEEN_SECONDS = 1.5
"""And then for the script's thread to end or drop its step and come to a place between two."""
_SAY_SECONDS = 10.0
_MOVED_SECONDS = 1.0
_MOVED_SAY_SECONDS = 5.0


class Session:
    """Owns the client, the membership and the telling thread.

    term_at: monotonic time of the first SIGTERM, set by the signal handler.
    """

    def __init__(self, settings: Settings, runtime: Runtime) -> None:
        self._runtime = runtime
        self.membership = Membership(settings, self.send, runtime.on_over, self._asked_to_stop, StreamStore)
        self._client = SessionClient(
            settings.coordinator,
            settings.token,
            self.membership.hello,
            self._receive,
            on_disconnected=self._disconnected,
            authority=settings.authority,
        )
        self.membership.on_wait = self.check_term
        self.term_at: float | None = None
        self._lost_at = float("-inf")
        self._began = time.monotonic()
        self._end = threading.Lock()
        self._said = 0.0
        self._moved_told = self._moved_said = 0.0
        self._timed_at = 0.0
        self._streams = 0
        self._resend = False
        self._activity = Activity(main_thread_place)
        self._activity_told_on = 0  # stream
        self._closing = threading.Event()
        self._teller = threading.Thread(target=self._tell_for_ever, name="springtide-progress", daemon=True)

    def start(self) -> None:
        self._teller.start()
        self._client.start()

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
        self.send(pb.WorkerMessage(values=pb.Values(values=values)))

    def close(self, ended: Outcome | None) -> None:
        """Tell the last commits and the outcome, and end both threads."""
        self._closing.set()
        if self._teller.ident is None:
            return  # never begun
        self._teller.join(_FLUSH_SECONDS)
        self._tell()
        if ended is not None:
            detail = ended.reason if isinstance(ended, Left) else ""
            if isinstance(ended, Failed):
                detail = f"{ended.exception}: {ended.message}"[:1000]
            step, samples = self._runtime.ended_in if isinstance(ended, Failed) else (0, "")
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
        if self.term_at is None or self._client.connected:
            return 0.0
        return now - max(self.term_at, self._lost_at)

    def _end_unheard(self) -> None:
        """Say so once and end, whichever thread comes first; the other one waits for the end."""
        with self._end:
            log.warning("SIGTERM, and no coordinator in %g s: ends without having left", UNHEARD_SECONDS)
            self._runtime.write_outcome()  # if there is one by now
            end_by(signal.SIGTERM)

    # ---- the stream's thread

    def _receive(self, message: pb.CoordinatorMessage) -> None:
        kind = message.WhichOneof("message")
        self.membership.receive(message)
        if kind == "evaluation":
            self._runtime.evaluations.questions.answered(message.evaluation)
        if kind == "welcome":
            self._runtime.ring.rewind(self.membership.known)
            if (question := self._runtime.evaluations.questions.open) is not None:
                self.send(question)
            # A coordinator that is new may not have heard of commits of this generation's former first
            # member.
            self._resend = self._streams > 0
            self._streams += 1

    def _asked_to_stop(self) -> None:
        faults.reach("asked", self._runtime.position.cursor.step + 1)
        self._runtime.on_boundary()
        log.info("asked to stop after the step: members or servers come or go")

    def _disconnected(self, reason: str) -> None:
        self._lost_at = time.monotonic()
        if self.term_at is None:
            log.warning("lost the coordinator (%s); training goes on, trying to reach it", reason)
        self.membership.disconnected()

    # ---- the telling thread

    def _tell_for_ever(self) -> None:
        while not self._closing.wait(TELL_SECONDS):
            self._tell()
            self._tell_times()
            self._tell_activity()
            self._watch_reductions()
            self._watch_transfer(time.monotonic())
            if self.term_at is not None and not self.membership.leaving:
                log.info("SIGTERM: leaving at the next boundary")
                self.membership.leave("SIGTERM")
            if self._unheard(time.monotonic()) >= UNHEARD_SECONDS + BETWEEN_SECONDS:
                self._end_unheard()
            if not self._client.connected:
                try:
                    self._client.wait_connected(0.0)
                except TimeoutError:
                    continue
                except SessionClosedError as error:
                    self.membership.session_over(str(error))
                    return

    def _watch_reductions(self) -> None:
        """Name who a step waits for, every few seconds."""
        trainer = self._runtime.trainer
        since = None if trainer is None else trainer.waiting_since
        if since is None:
            return
        now = time.monotonic()
        if now - max(since, self._said) >= _SAY_SECONDS:
            self._said = now
            names = ", ".join(self.membership.others())
            log.warning(
                "a step has waited %.0f s for the gradients of the other members: %s", now - since, names
            )

    def _watch_transfer(self, now: float) -> None:
        """Say how far the state has come that moves to or from this process, when that takes a while."""
        recovery, membership = self._runtime.recovery, self.membership
        progress = None if recovery is None else recovery.handover.progress
        if progress is None or now - max(progress.began, self._moved_told) < _MOVED_SECONDS:
            return
        self._moved_told = now
        if now - max(progress.began, self._moved_said) >= _MOVED_SAY_SECONDS:
            self._moved_said = now
            log.info("%s", progress.text(now))
        if not progress.sends and membership.generation is not None and self._client.connected:
            told = pb.Transferring(
                generation=generation_to_proto(membership.generation),
                holder=progress.peer,
                bytes_done=progress.done,
                bytes_total=progress.total,
            )
            self.send(pb.WorkerMessage(transferring=told))

    def _tell_times(self) -> None:
        now = time.monotonic()
        if now - self._timed_at < _TIMES_SECONDS or not self._client.connected:
            return
        self._timed_at = now
        times = self._runtime.timing.take()
        if times is not None:
            self.send(pb.WorkerMessage(times=times))

    def _tell_activity(self) -> None:
        if not self._client.connected:
            return
        if self._activity_told_on != self._streams:
            self._activity_told_on = self._streams
            self._activity.again()
        lasting = self._activity.look(doing(self._runtime), time.monotonic())
        if lasting is not None:
            self.send(pb.WorkerMessage(activity=lasting))

    def _tell(self) -> None:
        runtime = self._runtime
        if not self._client.connected or not (runtime.group.rank == 0 or self._resend):
            return
        self._resend = False
        while commits := runtime.ring.take():
            position, plan = runtime.position, runtime.plan
            self.send(
                pb.WorkerMessage(
                    progress=pb.Progress(
                        commits=[commit.to_proto() for commit in commits],
                        data=data_message(position.ledger),
                        productive_seconds=position.productive_seconds,
                        began_unix=position.began_unix,
                        total_steps=0 if plan is None else plan.total_steps,
                    )
                )
            )

"""One member of the job whose script knows nothing of it: the coordinator's words become processes.

A seat waits for a generation, runs the script in it with torchrun's environment, and ends it when the
generation is over. Its launcher stays, and so does its place in the job.

Threads and locks: `_changed`, one condition, guards why to stop, the boundary and the script's end. `run`
waits on it in the member's own thread; the stream's thread (`_receive`, `_disconnected`) and the launcher's
(`ended`, `stop`, `leave`) write and notify, and never wait.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from springtide.coordination.membership import Membership
from springtide.coordination.outcome import Failed, Finished, Left, Outcome
from springtide.coordination.park_reply import Leave, Start
from springtide.errors import SpringtideError
from springtide.launch.ports import ReservedPort
from springtide.launch.processes import CannotStart, Child
from springtide.launch.script import Failure, Rendezvous, culprit, variables
from springtide.launch.supervision import End
from springtide.settings import Settings
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import generation_from_proto, required_state
from springtide_protocol.session_client import SessionClient, SessionClosedError

log = logging.getLogger("springtide")

_STAGE = 0
_END_PATIENCE = 2.0
"""Time that the others' scripts have to end, too, when one has and the members are asked to stop."""
_POLL_SECONDS = 0.5


class Launcher(Protocol):
    """The launcher, as a script's member needs it."""

    def spawn(self, rank: int, environment: Mapping[str, str]) -> Child:
        """Start the script of one seat.

        Args:
            rank: of the seat in this pod.
            environment: of the script.

        Raises:
            CannotStart: the system refuses, in its own words.
        """
        ...

    def one_too_many(self) -> bool: ...
    def describe(self, rank: int, end: End) -> Failed:
        """Return the outcome of a script that failed.

        Args:
            rank: of its seat in this pod.
            end: how its process ended.
        """
        ...


class ScriptMember:
    """`run` is called in a thread of its own; `ended` and `stop` from others."""

    def __init__(
        self,
        rank: int,
        settings: Settings,
        environ: Mapping[str, str],
        launcher: Launcher,
        *,
        run_id: str,
        grace: float,
    ) -> None:
        self.rank = rank
        self._settings = replace(settings, local_rank=rank, process_id=uuid.uuid4().hex)
        self._environ, self._launcher, self._run_id, self._grace = environ, launcher, run_id, grace
        self._changed = threading.Condition()
        self._boundary_at: float | None = None
        self._stopped = ""
        self._end: End | None = None
        self._failure = Failure()
        self.generations = 0
        self.outcome: Outcome | None = None
        self.term_at: float | None = None
        self.membership = Membership(self._settings, self._send, self._wake, lambda: None)
        self._client = SessionClient(
            settings.coordinator,
            settings.token,
            self._hello,
            self._receive,
            on_disconnected=self._disconnected,
            authority=settings.authority,
        )

    # ---- the stream's thread

    def _hello(self) -> pb.Hello:
        hello = self.membership.hello()
        hello.opaque, hello.stop_seconds = True, math.ceil(self._grace)
        return hello

    def _receive(self, message: pb.CoordinatorMessage) -> None:
        if message.WhichOneof("message") == "boundary":
            with self._changed:
                current = self.membership.generation
                if current is not None and generation_from_proto(message.boundary.generation) == current:
                    # Also while it waits at the end, where the library would have no step to stop after.
                    self._boundary_at = self._boundary_at or time.monotonic()
                    self._changed.notify_all()
        self.membership.receive(message)

    def _disconnected(self, reason: str) -> None:
        log.warning("process %d lost the coordinator (%s); its script goes on", self.rank, reason)
        self.membership.disconnected()

    def _send(self, message: pb.WorkerMessage) -> None:
        try:
            self._client.send(message)
        except SessionClosedError as error:
            self.membership.session_over(str(error))

    def _wake(self, reason: str = "") -> None:
        with self._changed:
            self._changed.notify_all()

    # ---- the launcher's thread

    def ended(self, end: End) -> None:
        """The script's process has ended."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def leave(self, reason: str) -> None:
        """Ask the coordinator to let this member go, as a worker on SIGTERM does."""
        self.term_at = self.term_at or time.monotonic()
        self.membership.leave(reason)

    def stop(self, reason: str) -> None:
        """End without having left."""
        self._stopped = self._stopped or reason
        self.membership.session_over(reason)
        self._wake()

    @property
    def connected(self) -> bool:
        return self._client.connected

    # ---- the seat's own thread

    def run(self) -> Outcome:
        """Take part until the job lets it go. Never raises; the outcome says what happened."""
        self._client.start()
        try:
            self.outcome = self._take_part()
        except SpringtideError as error:
            self.outcome = Left(self._stopped) if self._stopped else Failed("SpringtideError", str(error))
        except CannotStart as error:
            self.outcome = Failed("", str(error))
        except Exception as error:  # becomes the pod's outcome; the thread must not die in silence
            log.exception("the seat of process %d failed", self.rank)
            self.outcome = Failed(type(error).__name__, str(error))
        detail = getattr(self.outcome, "reason", "") or getattr(self.outcome, "message", "")
        bye = pb.Bye(outcome=type(self.outcome).__name__, detail=str(detail)[:1000])
        self._send(pb.WorkerMessage(bye=bye))
        try:
            self._client.close()
        except SessionClosedError as error:
            log.error("%s", error)
        return self.outcome

    def _take_part(self) -> Outcome:
        reason, detail = int(pb.STANDBY), ""
        while True:
            with self._changed:
                self._boundary_at = None
            self.membership.park(reason, detail)
            answer = self.membership.await_start()  # there is no state here that could be saved first
            if isinstance(answer, Leave):
                return Left(answer.reason, answer.finished)
            assert isinstance(answer, Start)
            try:
                outcome = self._generation(answer)
            except (RuntimeError, OSError, ValueError) as error:
                if isinstance(error, SpringtideError):
                    raise
                over = self.membership.over
                reason = int(pb.DROPPED if over else pb.FORMATION_FAILED)
                detail = over or f"{type(error).__name__}: {error}"
                continue
            if outcome is not None:
                return outcome
            reason, detail = self._why_park()

    def _why_park(self) -> tuple[int, str]:
        """Return the reason (number, text) of parking for the coordinator, after a generation in which the
        script ran.
        """
        if over := self.membership.over:
            return int(pb.DROPPED), over
        if math.isfinite(self._failure.at):
            # No complaint about peers: those end a member that cannot reach the others.
            return int(pb.DROPPED), "its script failed"
        return int(pb.BOUNDARY if self._boundary_at is not None else pb.DROPPED), ""

    def _generation(self, start: Start) -> Outcome | None:
        """Run the script in one generation; None: there will be another one."""
        members = list(start.message.members)
        ids = [member.id for member in members]
        rank = ids.index(self.membership.me.id)
        began = time.monotonic()
        store = start.store
        store.set(f"failure/{rank}", self._failure.to_json())
        reserved: ReservedPort | None = None
        try:
            if rank == 0:
                reserved = ReservedPort()
                store.set("master/0", str(reserved.number).encode())
            failures = {
                member: Failure.from_json(store.get(f"failure/{other}")) for other, member in enumerate(ids)
            }
            if culprit(failures, ids) == self.membership.me.id and self._launcher.one_too_many():
                assert self._end is not None
                return self._launcher.describe(self.rank, self._end)
            port = int(store.get("master/0"))
            rendezvous = Rendezvous(self._run_id, members[0].address, port, start.generation.number - 1)
            self._failure, self._end = Failure(), None
            self.membership.hold(required_state(start.message.state, "Start.state"))
            child = self._launcher.spawn(self.rank, variables(self._environ, members, ids[rank], rendezvous))
            self.membership.formed(time.monotonic() - began, 0.0, 0)
            self.generations += 1
            log.info(
                "generation %s: rank %d of %d, script pid %d (%s)",
                start.generation, rank, len(ids), child.pid, start.message.reason,
            )  # fmt: skip
            return self._watch(child, start, tuple(ids))
        finally:
            if reserved is not None:
                reserved.close()

    def _watch(self, child: Child, start: Start, ids: tuple[str, ...]) -> Outcome | None:
        """Wait until the script has ended, and with it this member's part in the generation."""
        try:
            with self._changed:
                while self._end is None and not self._why_stop():
                    self._changed.wait(_POLL_SECONDS)
                end, why = self._end, self._why_stop()
        except SpringtideError:
            self._end_script(child, "the session is over")
            raise
        if end is None:
            self._end_script(child, why)
            return None
        if end.code == 0:
            return self._at_the_end(start)
        self._failure = Failure(time.time(), ids)
        return None

    def _why_stop(self) -> str:
        """Raise SpringtideError when the coordinator has refused this member."""
        over = self.membership.over
        return over or ("members come or go" if self._boundary_at is not None else "")

    def _end_script(self, child: Child, why: str) -> None:
        """SIGTERM, and SIGKILL after the grace period."""
        log.info("process %d (pid %d) gets SIGTERM: %s", self.rank, child.pid, why)
        for number, patience in ((signal.SIGTERM, self._grace), (signal.SIGKILL, math.inf)):
            deadline = time.monotonic() + patience
            with self._changed:
                if self._end is None:
                    child.signal(number)
                while self._end is None and time.monotonic() < deadline:
                    self._changed.wait(_POLL_SECONDS)
                if self._end is not None:
                    return
            log.warning("process %d has not ended within %g s: SIGKILL", self.rank, self._grace)

    def _at_the_end(self, start: Start) -> Outcome | None:
        """The script ended well: it counts when those of all members did."""

        def asked() -> bool:
            at = self._boundary_at
            return at is not None and time.monotonic() - at > _END_PATIENCE

        if not self.membership.await_end(_STAGE, unless=asked):
            return None
        name = start.generation
        return Finished(
            (name.incarnation.number, name.incarnation.restart),
            name.number,
            0,
            0,
            report={"generations": float(self.generations), "restarts": float(self._settings.attempt)},
        )

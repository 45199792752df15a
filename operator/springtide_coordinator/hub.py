"""Carries out what the state machine decides: the thin shell between membership, history and the streams.

Threads: everything here runs in one event loop and needs no lock; the streams of `service`, its ticker and
the pages of `web` (by `in_loop`) call it. No method awaits, so each event is handled as a whole.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from springtide_coordinator import wire
from springtide_coordinator.change_traces import ChangeTraces
from springtide_coordinator.decision_budget import DecisionBudget
from springtide_coordinator.evaluation import Answer, Evaluations, Total
from springtide_coordinator.heartbeats import Heartbeats
from springtide_coordinator.history import Commit, History
from springtide_coordinator.lifelines import Lifelines
from springtide_coordinator.membership import (
    Connected,
    Disconnected,
    Event,
    FellSilent,
    Membership,
    Phase,
    ProcessEnded,
    Received,
    ServerConnected,
    StoodStill,
    Tick,
    decide,
    describe,
    is_due,
    take_in,
)
from springtide_coordinator.membership.events import Effect, EndStream, LoopEnded, Made, MemberLost, Send
from springtide_coordinator.membership.messages import (
    Outgoing,
    Refused,
    ServerLeaving,
    Standing,
    Start,
    Welcome,
)
from springtide_coordinator.memory import Memories
from springtide_coordinator.poison import Death, Poison
from springtide_coordinator.rates import Rates
from springtide_coordinator.rendezvous import Rendezvous, TooMuchError
from springtide_coordinator.reported import Latest, Names
from springtide_coordinator.settings import Options
from springtide_coordinator.slowness import Share, Slow, Slowness
from springtide_coordinator.stall import Motion
from springtide_coordinator.step_rate import StepRate
from springtide_coordinator.storage import Storage
from springtide_coordinator.streams import Stream
from springtide_coordinator.transfers import Transfers
from springtide_protocol import codec
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import Incarnation, StateName
from springtide_protocol.store_entries import unpack
from springtide_protocol.tracing import NoTracer, Tracer
from springtide_protocol.unknown_kinds import UnknownKinds
from springtide_protocol.versions import STORE_ENTRIES

log = logging.getLogger("springtide.coordinator")

Later = Callable[[float, Callable[[], None]], object]
WorkerStream = Stream[pb.CoordinatorMessage]
ServerStream = Stream[pb.ServerOrder]

LAST_WORDS_SECONDS = 0.005
"""Time for the others to take in what an ended process has still said to them.

Its last message may be the one by which they commit a step: some would have it and others not, who would then
need the newest state.
"""
LIFELINE_SECONDS = 5.0
"""Time for which a lifeline is kept that has lost its stream."""


def steady_unix_clock() -> Callable[[], float]:
    """A clock in unix seconds that never goes backwards."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class Hub:
    """All state of the process; used from one event loop only.

    An event's facts are written down when it comes. Decisions cost O(members), so they are taken once for all
    events of a turn of the loop, and take 4 % of the time at most, which a calm job saves up
    (`decision_budget`). In the same way members' store entries are gathered, and each member gets them in one
    message.

    Args:
        options: of the process.
        incarnation: of the process.
        clock: unix seconds, never backwards.
        later: calls something after so many seconds; None: decisions are taken and entries sent at once.
        tracer: takes the spans of the job's changes; None: nobody does.
        began: when this process did, in unix seconds; 0: now.
    """

    def __init__(
        self,
        options: Options,
        incarnation: Incarnation,
        clock: Callable[[], float] | None = None,
        later: Later | None = None,
        tracer: Tracer | None = None,
        began: float = 0.0,
    ) -> None:
        self.clock = clock or steady_unix_clock()
        self.changes = ChangeTraces(tracer or NoTracer(), options.job_uid, incarnation, began or self.clock())
        self.options = options
        self.membership = Membership(
            incarnation,
            started_at=self.clock(),
            target=options.target,
            minimum=options.minimum,
            maximum=options.maximum,
            standby=options.standby,
            servers_wanted=options.servers,
            consistency_at_first=options.consistency,
            settings=options.membership,
        )
        self.history = History()
        self.slowness = Slowness()
        self.motion = Motion()
        self.heartbeats = Heartbeats(most=2 * options.tick)
        self.rates = Rates()
        self.step_rate = StepRate()
        self.hang_seconds = 0.0  # the operator's limit; 0: not told
        self.rendezvous = Rendezvous()
        self.transfers = Transfers()
        self.memories = Memories()
        self.storage = Storage(interval=options.checkpoint_seconds)
        self.data = pb.Data()
        self.values = Latest()
        self._names = Names()
        self.evaluations = Evaluations()
        self.poison = Poison()
        self.streams: dict[int, WorkerStream] = {}
        self.server_streams: dict[int, ServerStream] = {}
        self._unknown = UnknownKinds()
        self._last_announced = ("", "")
        self._last_session = 0
        self.lifelines = Lifelines(self.process_ended, options.pod_ip or options.host)
        self._next_tick = math.inf
        self._later = later
        self._deciding = self._sending = False  # it is put off
        self._budget = DecisionBudget()
        self._phase = Phase.WAITING
        self._reports = 0  # of members' times since the last look for a slow one
        self._encoded: tuple[object, StateName | None, pb.CoordinatorMessage] | None = None

    # ---- streams ----

    def new_stream(self) -> WorkerStream:
        self._last_session += 1
        stream = self.streams[self._last_session] = WorkerStream(self._last_session)
        return stream

    def new_server_stream(self) -> ServerStream:
        self._last_session += 1
        stream = self.server_streams[self._last_session] = ServerStream(self._last_session)
        return stream

    def hello(self, stream: WorkerStream, hello: pb.Hello) -> None:
        """Let a process in, or refuse it, which ends the stream.

        Args:
            stream: of the process.
            hello: first message of the process.
        """
        try:
            event = Connected(stream.session, wire.to_hello(hello))
        except codec.MalformedError as error:
            self.refuse(stream, str(error))
            return
        self.changes.came(hello.member.id)
        stream.member = hello.member.id
        self._take(event)
        if stream.ended:
            return
        current = self.membership.current
        if current is None or stream.member not in current.ids or stream.member in current.formed:
            return
        self.rendezvous.begin(current.name, len(current.members))
        self._put_entries(self.rendezvous.all_packed(), [stream])

    def receive(self, stream: WorkerStream, message: pb.WorkerMessage) -> None:
        """Take in a message; one that cannot be right ends the stream with the reason.

        Args:
            stream: of the process.
            message: of the process.
        """
        if stream.ended:
            return
        try:
            incoming = wire.to_incoming(message)
            match message.WhichOneof("message"):
                case "store_set":
                    self._store(stream, message.store_set)
                case "progress":
                    self._progress(stream, message.progress)
                case "times":
                    self._times(stream, message.times)
                case "activity":
                    if stream.member in self.membership.members:
                        self.motion.note_report(stream.member, message.activity, self.clock())
                case "heartbeat":
                    held = _seconds(message.heartbeat.held_seconds)
                    self.heartbeats.beat(stream.session, self.clock(), self._commits(), held)
                case "parked" | "ended":
                    self.heartbeats.pause(stream.session)  # it says none while it waits
                case "checkpoint":
                    self.storage.note_report(stream.member, message.checkpoint)
                case "transferring":
                    self.transfers.note_report(stream.member, message.transferring, self.membership)
                case "memory":
                    if stream.member in self.membership.members:
                        self.memories.note_report(stream.member, message.memory)
                case "formed":
                    self.storage.formed(message.formed, self.clock())
                case "bye":
                    self.heartbeats.forget(stream.session)
                    self._bye(stream, message.bye)
                case "evaluate":
                    self._evaluate(stream, message.evaluate)
                case "values":
                    self.values.report(message.values.values)
                case "hello":
                    raise codec.MalformedError("Hello may only be the first message of a stream")
                case None:
                    if not self._unknown.ignores(message, stream.member or "a process"):
                        raise codec.MalformedError("a message without content")
        except (codec.MalformedError, TooMuchError) as error:
            self.refuse(stream, str(error))
            return
        if incoming is not None:
            self._take(Received(stream.session, incoming))
        if message.WhichOneof("message") == "formed" and self.membership.current is not None:
            self.changes.formed(self.membership.current, self.clock())

    def closed(self, stream: WorkerStream | ServerStream) -> None:
        """The stream broke or ended."""
        stream.end()
        # A process that has ended may break its stream first, and end its lifeline in the next moment.
        self._after(LIFELINE_SECONDS, lambda: self.lifelines.drop(stream.session))
        self.heartbeats.forget(stream.session)
        known: list[dict[int, WorkerStream] | dict[int, ServerStream]] = [self.streams, self.server_streams]
        if any(streams.pop(stream.session, None) is not None for streams in known):
            self.changes.broke(stream.member, self.clock())
            self._take(Disconnected(stream.session))
            if all(other.member != stream.member for other in self.streams.values()):
                self._send_ranges(self.evaluations.gone(stream.member, self._size()))

    def process_ended(self, session: int, member: str) -> None:
        """The process of a stream has ended; the stream may seem to be there still.

        Args:
            session: number of the stream.
            member: id of the process.
        """
        self.changes.broke(member, self.clock())
        self._after(LAST_WORDS_SECONDS, lambda: self._take(ProcessEnded(session, member)))

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        if self._later is None:
            call()
        else:
            self._later(seconds, call)

    def server_hello(self, stream: ServerStream, hello: pb.ServerHello) -> None:
        """Let a parameter server in, or refuse it, which ends the stream.

        Args:
            stream: of the process.
            hello: first message of the process.
        """
        try:
            event = ServerConnected(stream.session, wire.to_server_hello(hello))
        except codec.MalformedError as error:
            self.refuse_server(stream, str(error))
            return
        self.changes.came(hello.server.id)
        stream.member = hello.server.id
        self._take(event)

    def server_receive(self, stream: ServerStream, message: pb.ServerMessage) -> None:
        """Take in a message; one that cannot be right ends the stream with the reason.

        Args:
            stream: of the process.
            message: of the process.
        """
        if stream.ended:
            return
        if self._unknown.ignores(message, stream.member or "a parameter server"):
            return
        if message.WhichOneof("message") != "leaving":
            self.refuse_server(stream, "after ServerHello a parameter server may say ServerLeaving only")
            return
        self._take(Received(stream.session, ServerLeaving(message.leaving.reason)))

    def refuse_server(self, stream: ServerStream, reason: str) -> None:
        """Refuse a parameter server for good, and end its stream.

        Args:
            stream: of the process.
            reason: in words.
        """
        log.warning("refused %s: %s", stream.member or "a parameter server", reason)
        stream.put(wire.from_order(Refused(reason, retry=False)))
        stream.end()

    def refuse(self, stream: WorkerStream, reason: str) -> None:
        """Refuse a process for good, and end its stream.

        Args:
            stream: of the process.
            reason: in words.
        """
        log.warning("refused %s: %s", stream.member or "a process", reason)
        stream.put(wire.from_outgoing(Refused(reason, retry=False), None))
        stream.end()

    # ---- operator and time ----

    def sync(self, request: pb.SyncRequest) -> None:
        """Take in what the operator wants and sees; `reply.answer_sync` also tells it the job's state.

        Raises:
            MalformedError: a count beyond every job, or a consistency that there is not.
        """
        synced = wire.to_synced(request, self.clock())
        self.hang_seconds = _seconds(request.hang_seconds)
        self._take(synced)
        self.decide()  # the answer tells of it

    def tick(self, every: float = 0.0) -> None:
        """every: seconds until the next tick, at most; 0: nobody knows.

        With it, anything that comes much later than the next tick should have shows that this process stood
        still.
        """
        began = self.clock()
        self._take(Tick())
        self._cut_off_silent(began)
        # From the beginning: the process may stand still in here as well.
        self._next_tick = began + every if every else math.inf

    # ---- inside ----

    def _cut_off_silent(self, now: float) -> None:
        """Let the membership know who says no heartbeats, while a generation commits steps. Its first step
        may compile and hold the interpreter's lock, so the transport alone watches over it.
        """
        self.heartbeats.look(now)
        if not self.options.learns_heartbeats or not self._commits():
            return
        pods = {
            record.session: record.info.pod_uid or record.info.id
            for record in self.membership.members.values()
            if record.session is not None and record.standing is Standing.ACTIVE
        }
        for session, seconds in self.heartbeats.silent(pods, now).items():
            self.heartbeats.forget(session)
            self._take(FellSilent(session, seconds))

    def _commits(self) -> bool:
        """Return whether the running generation has committed a step."""
        current, known = self.membership.current, self.history.known
        return current is not None and known is not None and known.generation == current.name

    def _take(self, event: Event) -> None:
        now = self.clock()
        late = now - self._next_tick
        if late > self.membership.settings.standstill:
            self._next_tick = now
            self._log(f"this process stood still for {late:.1f} s: broken streams may return", "StoodStill")
            self._handle(take_in(self.membership, StoodStill(late), now), now)
        self._handle(take_in(self.membership, event, now), now)
        if not is_due(self.membership):
            return
        if self._later is None:
            self.decide()
        elif not self._deciding:
            self._deciding = True
            self._later(self._budget.pause(now), self._decide_put_off)

    def _decide_put_off(self) -> None:
        self._deciding = False
        began = self.clock()
        self.decide()
        ended = self.clock()
        self._budget.spend(ended - began, ended)

    def decide(self) -> None:
        """Take all decisions that the facts allow, and say what the job is at."""
        now = self.clock()
        self._handle(decide(self.membership, now), now)
        if (current := self.membership.current) is not None and current.adopted:
            self.changes.adopted(current, now)
        self.memories.keep(self.membership.members.keys())
        self._phase, status = describe(self.membership, now)
        self.motion.look(self._phase, now)
        told = (status.reason, status.message)
        if told != self._last_announced:
            self._last_announced = told
            waiting = ", ".join(status.waiting_for)
            self._log(status.message + (f"; waits for {waiting}" if waiting else ""), reason=status.reason)

    def _handle(self, effects: Sequence[Effect], now: float) -> None:
        self.changes.see(effects, self.membership.target, now)
        for effect in effects:
            self._carry_out(effect, now)

    def _carry_out(self, effect: Effect, now: float) -> None:
        match effect:
            case Send():
                if (stream := self.streams.get(effect.session)) is not None:
                    if isinstance(effect.message, Welcome):
                        stream.capabilities = effect.message.agreement.capabilities
                        stream.put(self._welcome(effect.message, effect.session))
                    else:
                        stream.put(self._to_wire(effect.message))
                elif (server := self.server_streams.get(effect.session)) is not None:
                    if isinstance(effect.message, Welcome):
                        server.capabilities = effect.message.agreement.capabilities
                    server.put(wire.from_order(effect.message))
            case EndStream():
                for ended in (self.streams.get(effect.session), self.server_streams.get(effect.session)):
                    if ended is not None:
                        ended.end()
                self._log(f"ended the stream of {effect.member}: {effect.reason}", reason="StreamEnded")
            case Made():
                self.rendezvous.begin(effect.start.generation, len(effect.start.members))
                self.slowness.keep([member.id for member in effect.start.members])
                self.motion.keep({member.id for member in effect.start.members})
                self.motion.moved_at = None
                size = len({member.pod_uid for member in effect.start.members})
                self.rates.begun(effect.start.generation, size)
                self.step_rate.begun(effect.start.generation, size)
                self.history.held_up = 0.0
                self.history.generation_made(effect.start, effect.cause, now)
                names = ", ".join(
                    [member.label for member in effect.start.members]
                    + [server.label for server in effect.start.servers]
                )
                self._log(f"{effect.start.reason}; begins with {names}", reason="GenerationMade")
            case MemberLost():
                self._log(effect.reason, reason="MemberLost")
            case LoopEnded():
                pass  # the status says so, and is logged when it changes

    def _log(self, message: str, reason: str) -> None:
        current = self.membership.current
        fields = {"generation": current.name if current else "-", "reason": reason}
        log.info("%s", message, extra={"fields": fields})

    def _to_wire(self, message: Outgoing) -> pb.CoordinatorMessage:
        """Return the message to send; the same object for a message that goes to many one after the other."""
        known = self.history.known
        if self._encoded is None or self._encoded[0] is not message or self._encoded[1] != known:
            encoded = wire.from_outgoing(message, known)
            if isinstance(message, Start):
                encoded.start.traceparent = self.changes.traceparent
            self._encoded = (message, known, encoded)
        return self._encoded[2]

    def _welcome(self, message: Welcome, session: int) -> pb.CoordinatorMessage:
        encoded = wire.from_outgoing(message, self.history.known)
        encoded.welcome.training = self._training()
        encoded.welcome.wanted = self.membership.target
        member = self.streams[session].member
        if (lifeline := self.lifelines.announce(session, member)) is not None:
            encoded.welcome.lifeline.CopyFrom(lifeline)
        return encoded

    def _put_entries(self, parts: Iterable[bytes], streams: Iterable[WorkerStream]) -> None:
        """Send entries: packed, or one by one to those who know no other way.

        Args:
            parts: packed entries, of which each is a message.
            streams: of the members that get them.
        """
        assert self.rendezvous.generation is not None
        generation = codec.generation_to_proto(self.rendezvous.generation)
        able = [stream for stream in streams if STORE_ENTRIES in stream.capabilities]
        others = [stream for stream in streams if STORE_ENTRIES not in stream.capabilities]
        for part in parts:
            packed = pb.CoordinatorMessage(store_entries=pb.StoreEntries(generation=generation, packed=part))
            for stream in able:
                stream.put(packed)
            for key, value in unpack(part) if others else ():
                entry = pb.StoreEntry(generation=generation, key=key, value=value)
                for stream in others:
                    stream.put(pb.CoordinatorMessage(store_entry=entry))

    def _store(self, stream: WorkerStream, entry: pb.StoreEntry) -> None:
        current = self.membership.current
        if (
            current is None
            or codec.generation_from_proto(entry.generation) != current.name
            or stream.member not in current.ids
        ):
            return
        self.rendezvous.begin(current.name, len(current.members))
        self.rendezvous.put(entry.key, entry.value, stream.member, self.clock())
        self._send_entries_in_time()

    def _send_entries_in_time(self) -> None:
        """Send the entries that wait, or see to it that they are sent when their time has come.

        A member says all that it has set again on a new stream. Then none may wait; a call that was put off
        until one does would never come, and hold up the entries after it.
        """
        pause = self.rendezvous.pause(self.clock())
        if pause is None:
            return
        if self._later is None or pause <= 0:
            self._send_entries()
        elif not self._sending:
            self._sending = True
            self._later(pause, self._send_entries_put_off)

    def _send_entries_put_off(self) -> None:
        self._sending = False
        self._send_entries_in_time()  # those that were waited for may have gone since, and others come

    def _send_entries(self) -> None:
        """Send what members have set to all of them, but not to the one that alone has set anything."""
        current = self.membership.current
        if current is None or current.name != self.rendezvous.generation:
            return
        packed, only = self.rendezvous.take()
        members = [s for s in self.streams.values() if s.member in current.ids and s.member != only]
        self._put_entries(packed, members)

    def _bye(self, stream: WorkerStream, bye: pb.Bye) -> None:
        record = self.membership.members.get(stream.member)
        if bye.outcome != "Failed" or record is None:
            return
        current = self.membership.current
        generation = current.name if current is not None else None
        death = Death(generation, stream.member, record.info.label, bye.samples, bye.detail)
        self.poison.failed(bye.step, death)

    def _training(self) -> int:
        """Processes of a generation that trains; 0: none does."""
        return self._size() if self._phase is Phase.RUNNING else 0

    def _size(self) -> int:
        current = self.membership.current
        return len(current.ids) if current is not None else 1

    def _evaluate(self, stream: WorkerStream, message: pb.Evaluate) -> None:
        asked = wire.to_evaluate(message)
        self.motion.moved(self.clock())
        self._send_ranges(
            self.evaluations.ask(
                stream.member,
                message.ask,
                asked.key,
                message.samples,
                message.unit,
                asked.finished,
                self._size(),
                message.kind,
            )
        )

    def _send_ranges(self, answers: Mapping[str, tuple[int, Answer]]) -> None:
        for stream in self.streams.values():
            if stream.member in answers:
                number, answer = answers[stream.member]
                stream.put(wire.from_evaluation(number, answer))
                if isinstance(answer, Total):
                    self.values.report(answer.values)

    def _times(self, stream: WorkerStream, times: pb.Times) -> None:
        if stream.member not in self.membership.members:
            return
        now = self.clock()
        self.slowness.note_report(
            stream.member,
            times.steps,
            _seconds(times.step_seconds),
            _seconds(times.data_seconds),
            _seconds(times.compute_seconds),
            _seconds(times.wait_seconds),
            now,
            Share(times.share_samples, _seconds(times.sample_seconds), times.by_speed),
        )
        self._reports += 1
        if self._reports < self._size():
            return
        self._reports = 0  # one look, which costs O(members), for as many reports
        slow = self.slow()
        self.history.held_up = slow.busy - slow.median if slow is not None else 0.0

    def slow(self) -> Slow | None:
        """The member of the current generation that holds the others up, if one does."""
        current = self.membership.current
        return self.slowness.slowest(current.ids, self.clock()) if current is not None else None

    def _progress(self, stream: WorkerStream, progress: pb.Progress) -> None:
        record = self.membership.members.get(stream.member)
        if record is None or record.session != stream.session:
            return
        commits = []
        for commit in progress.commits:
            state = codec.state_from_proto(commit.state)
            if state is None:
                raise codec.MalformedError("Commit.state is not set")
            commits.append(
                Commit(
                    state,
                    commit.unix_time,
                    commit.step_seconds,
                    commit.samples,
                    self._names.of(commit.values),
                    commit.exposed_communication_seconds,
                    commit.skipped,
                    _seconds(commit.data_seconds),
                    _seconds(commit.checkpoint_seconds),
                )
            )
        known = self.history.known
        if commits and known is not None and commits[-1].state.generation < known.generation:
            stream.put(pb.CoordinatorMessage(known=pb.Known(state=codec.state_to_proto(known))))
            return
        self.history.add(commits, progress.productive_seconds, self.clock(), progress.began_unix)
        current = self.membership.current
        if commits and current is not None and commits[-1].state.generation == current.name:
            self.motion.moved(self.clock())
            size = len({member.pod_uid for member in current.members})
            for done in commits:
                if done.state.generation == current.name:
                    self.changes.committed(current.name, done.unix_time)
                    self.rates.committed(current.name, size, done.state.step, done.unix_time, done.samples)
                    self.step_rate.committed(current.name, size, done.state.step, done.unix_time)
        self.history.plan(progress.job_steps, progress.total_steps, progress.data.stage)
        if progress.HasField("data"):
            self.data = progress.data
        known = self.history.known
        if known is not None:
            self.poison.committed(known.step)
            stream.put(pb.CoordinatorMessage(known=pb.Known(state=codec.state_to_proto(known))))


def _seconds(value: float) -> float:
    """A worker's seconds, which are added up for the job's life: what cannot be a duration counts as none."""
    return value if math.isfinite(value) and value > 0 else 0.0

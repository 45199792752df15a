"""Describe each change of a job's members as a trace: from when it was noticed to the first step after it.

The trace begins here. Its name goes to the members with their generation and to the operator with the answer
to Sync, so that each adds what it does itself: the operator replaces the lost pod, members connect, move the
state and make the first step. A worker that takes the place of a lost one joins later, in a generation of its
own: that change is a part of the recovery, as long as the place is remembered.

A generation's own span belongs to the trace of the job. PURE but for the tracer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from springtide_coordinator.membership.events import Effect, Made, MemberLost, Send
from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.messages import Boundary, MemberInfo, Prepare, ServerInfo
from springtide_protocol.names import GenerationName, Incarnation
from springtide_protocol.tracing import (
    Attributes,
    Span,
    SpanEvent,
    TraceContext,
    Tracer,
    of_coordinator,
    of_job,
)

MOST_ANNOUNCED = 16
"""Changes that the operator is told of: it asks every few seconds."""
MOST_PLACES = 4096
MOST_EVENTS = 32
MOST_TEXT = 500

Place = tuple[str, int]
"""Role and slot of a pod."""


@dataclass(frozen=True, slots=True)
class AnnouncedChange:
    """Name a change for the operator: its span, and the uids of the pods that it lost."""

    context: TraceContext
    lost_pods: tuple[str, ...]


@dataclass(slots=True)
class _Change:
    """Hold a change that no step was committed after yet. Times are unix seconds."""

    context: TraceContext
    parent: TraceContext | None
    linked: tuple[TraceContext, ...]
    cause: str
    began: float
    events: list[SpanEvent]
    lost: dict[str, None] = field(default_factory=dict)  # uids of pods
    generation: GenerationName | None = None
    reason: str = ""
    made_at: float = 0.0
    formed_at: float | None = None
    members: int = 0
    servers: int = 0


@dataclass(frozen=True, slots=True)
class _Running:
    """Hold the newest generation."""

    name: GenerationName
    began: float
    attributes: Attributes
    change: TraceContext | None


class ChangeTraces:
    """Follow the changes of one job."""

    def __init__(self, tracer: Tracer, job_uid: str, incarnation: Incarnation, began: float = 0.0) -> None:
        """Begin without a generation.

        Args:
            tracer: takes the spans.
            job_uid: of the TrainingJob.
            incarnation: of this coordinator.
            began: when its process did, in unix seconds.
        """
        self._tracer, self._job_uid, self._incarnation = tracer, job_uid, incarnation
        self._began, self._taken_over = began, False
        self._pods: dict[str, Place] = {}  # of the newest generation, by uid
        self._lost_places: dict[Place, TraceContext] = {}
        self._members: frozenset[str] = frozenset()  # and servers of the newest generation, by id
        self._broken: dict[str, float] = {}  # those whose streams broke, and have not come back
        self._noticed_at: float | None = None
        self._events: list[SpanEvent] = []
        self._open: _Change | None = None
        self._running: _Running | None = None
        self._context: TraceContext | None = None  # of the change that made the newest generation
        self._announced: deque[AnnouncedChange] = deque(maxlen=MOST_ANNOUNCED)

    @property
    def traceparent(self) -> str:
        """Return the change that made the newest generation, as messages name it; "" without any."""
        return "" if self._context is None else str(self._context)

    @property
    def announced(self) -> Sequence[AnnouncedChange]:
        """Return the last changes, oldest first."""
        return tuple(self._announced)

    def see(self, effects: Iterable[Effect], wanted: int, now: float) -> None:
        """Take in what was decided, before any of it is sent.

        Args:
            effects: of one decision.
            wanted: processes that the job is to have.
            now: in unix seconds.
        """
        if not self._tracer.enabled:
            return
        made: Made | None = None
        for effect in effects:
            match effect:
                case MemberLost():
                    broken = self._broken.pop(effect.member, None)
                    if broken is not None:
                        self._notice("stream broke", effect.member, broken)
                    self._notice("member lost", effect.reason, now)
                case Send(message=Prepare() as asked):
                    self._notice("members asked to stop", asked.reason, now)
                case Send(message=Boundary() as asked):
                    self._notice("members asked to stop", asked.reason, now)
                case Made():
                    made = effect
        if made is not None:
            self._made(made, wanted, now)

    def broke(self, member: str, now: float) -> None:
        """Note that a stream broke: if its process is found lost, that is when it was noticed.

        Args:
            member: id of the process.
            now: in unix seconds.
        """
        if member in self._members:
            self._broken[member] = now

    def came(self, member: str) -> None:
        """Note that a process has a stream (again)."""
        self._broken.pop(member, None)

    def adopted(self, generation: Generation, now: float) -> None:
        """Take in a generation that a former coordinator made.

        Args:
            generation: that goes on.
            now: in unix seconds.
        """
        running = self._running
        if not self._tracer.enabled or (running is not None and running.name >= generation.name):
            return
        self._took_over(now, generation.name)
        self._pods = _pods(generation.members, generation.servers)
        self._members = _ids(generation.members, generation.servers)
        self._begin_generation(generation.name, "adopted", len(generation.members), generation.servers, now)

    def formed(self, generation: Generation, now: float) -> None:
        """Note that a member has formed the generation; it counts when all have.

        Args:
            generation: the newest.
            now: in unix seconds.
        """
        change = self._open
        if change is not None and change.generation == generation.name and generation.complete:
            change.formed_at = change.formed_at or now

    def committed(self, generation: GenerationName, unix_time: float) -> None:
        """Note a committed step: the first one of a generation is the end of the change that made it.

        Args:
            generation: in which it was made.
            unix_time: when, by the member's clock.
        """
        change = self._open
        if change is not None and change.generation == generation:
            self._open = None
            self._end(change, unix_time)

    def close(self, now: float, why: str) -> None:
        """Record what is open, since this process ends.

        Args:
            now: in unix seconds.
            why: it does, for a change that nobody sees the end of.
        """
        if not self._tracer.enabled:
            return
        change, self._open = self._open, None
        if change is not None:
            self._end(change, now, why)
        self._end_generation(now)

    # ---- inside

    def _notice(self, name: str, reason: str, now: float) -> None:
        """Note what a change follows from; the first notice is where it begins."""
        self._noticed_at = now if self._noticed_at is None else min(self._noticed_at, now)
        said = SpanEvent(name, now, {"springtide.reason": reason[:MOST_TEXT]})
        if len(self._events) < MOST_EVENTS and said not in self._events:
            self._events.append(said)

    def _made(self, made: Made, wanted: int, now: float) -> None:
        start, cause = made.start, made.cause
        self._took_over(now, start.generation)
        began = now if self._noticed_at is None else min(self._noticed_at, now)
        events, self._events, self._noticed_at = self._events, [], None
        before, self._pods = self._pods, _pods(start.members, start.servers)
        self._members, self._broken = _ids(start.members, start.servers), {}
        lost = {uid: before[uid] for uid in before.keys() - self._pods.keys()}
        came = [self._pods[uid] for uid in self._pods.keys() - before.keys()]
        change = self._open
        if change is not None and cause == "failure" and change.cause != cause:
            # A failure has a trace of its own, whatever it came upon.
            self._end(change, began, "a failure came before a step of it was known")
            change = None
        if change is None:
            change = self._open = self._begin(cause, came, began, events)
        else:  # the generation before has committed nothing: it is the same trouble still
            change.events += events[: MOST_EVENTS - len(change.events)]
        for place in came:
            self._lost_places.pop(place, None)
        if cause == "failure" or len(start.members) < wanted:
            for place in list(lost.values())[: MOST_PLACES - len(self._lost_places)]:
                self._lost_places[place] = change.context
        change.lost |= dict.fromkeys(lost)
        change.generation, change.reason, change.made_at = start.generation, start.reason, now
        change.formed_at, change.members, change.servers = None, len(start.members), len(start.servers)
        self._context = change.context
        self._announce(change)
        self._begin_generation(start.generation, change.cause, len(start.members), start.servers, now)

    def _begin(self, cause: str, came: Iterable[Place], began: float, events: list[SpanEvent]) -> _Change:
        job = self._tracer.begin(of_job(self._job_uid))
        missed = list(dict.fromkeys(self._lost_places[place] for place in came if place in self._lost_places))
        if cause == "start":  # members have been waited for since there was somebody to say Hello to
            began = min(self._began, began)
            return _Change(self._tracer.child_of(job), job, (), cause, began, events)
        if missed and cause != "failure":
            first, *others = missed
            return _Change(self._tracer.child_of(first), first, (*others, job), cause, began, events)
        return _Change(self._tracer.new_trace(), None, (*missed, job), cause, began, events)

    def _announce(self, change: _Change) -> None:
        announced = AnnouncedChange(change.context, tuple(change.lost))
        if self._announced and self._announced[-1].context == change.context:
            self._announced[-1] = announced
        else:
            self._announced.append(announced)

    def _end(self, change: _Change, ended: float, error: str = "") -> None:
        """Record a change and its parts."""
        ended = max(ended, change.began)
        made = min(change.made_at, ended)
        formed = ended if change.formed_at is None else min(max(made, change.formed_at), ended)
        waits = "wait for members" if change.cause == "start" else "stop members"
        parts = [(waits, change.began, made), ("form generation", made, formed)]
        if change.formed_at is not None:
            parts.append(("first step", formed, ended))
        for name, began, over in parts:
            context = self._tracer.child_of(change.context)
            self._tracer.record(Span(name, context, began, over, change.context))
        self._tracer.record(
            Span(
                "recovery" if change.cause == "failure" else change.cause,
                change.context,
                change.began,
                ended,
                change.parent,
                {
                    "springtide.cause": change.cause,
                    "springtide.reason": change.reason[:MOST_TEXT],
                    "springtide.generation": str(change.generation),
                    "springtide.members": change.members,
                    "springtide.servers": change.servers,
                    "springtide.lost_pods": list(change.lost)[:MOST_EVENTS],
                },
                tuple(sorted(change.events, key=lambda event: event.at)),
                change.linked,
                error,
            )
        )

    def _begin_generation(
        self, name: GenerationName, cause: str, members: int, servers: Sequence[ServerInfo], now: float
    ) -> None:
        self._end_generation(now)
        attributes: Attributes = {
            "springtide.generation": str(name),
            "springtide.cause": cause,
            "springtide.members": members,
            "springtide.servers": len(servers),
        }
        self._running = _Running(name, now, attributes, None if self._open is None else self._open.context)

    def _end_generation(self, now: float) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        job = self._tracer.begin(of_job(self._job_uid))
        linked = () if running.change is None else (running.change,)
        self._tracer.record(
            Span(
                "generation",
                self._tracer.child_of(job),
                running.began,
                now,
                job,
                running.attributes,
                linked=linked,
            )
        )

    def _took_over(self, now: float, generation: GenerationName) -> None:
        """Record that this coordinator has taken the place of another, if it has, and has not said so."""
        taken_over, self._taken_over = self._taken_over, True
        number, restart = self._incarnation.number, self._incarnation.restart
        if taken_over or (number, restart) == (1, 0):
            return
        whole = self._tracer.begin(of_coordinator(self._job_uid, number, restart))
        # A container that restarts in its pod is no matter of the operator's: then this is all there is.
        context, parent = (whole, None) if restart else (self._tracer.child_of(whole), whole)
        attributes = {
            "springtide.incarnation": str(self._incarnation),
            "springtide.generation": str(generation),
        }
        job = self._tracer.begin(of_job(self._job_uid))
        self._tracer.record(
            Span("take over", context, min(self._began, now), now, parent, attributes, linked=(job,))
        )


def _pods(members: Iterable[MemberInfo], servers: Iterable[ServerInfo]) -> dict[str, Place]:
    """Return the places of the pods of a generation, by uid."""
    found = {member.pod_uid or member.id: ("worker", member.slot) for member in members}
    return found | {server.pod_uid or server.id: ("server", server.slot) for server in servers}


def _ids(members: Iterable[MemberInfo], servers: Iterable[ServerInfo]) -> frozenset[str]:
    return frozenset(info.id for group in (members, servers) for info in group)

"""Trace how this server comes into each generation: its start, what members tell it, copies to other servers.

Threads and locks: clients' reading threads call `entered`, `arranged` and `resolved`; the store calls
`copied` in its own lock. `_lock` guards all fields and is held for assignments only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from springtide_protocol.tracing import OFF, Attributes, Span, SpanEvent, TraceContext, Tracer, of_job, parse
from springtide_ps.server.step_protocol import Token


@dataclass(slots=True)
class _Generation:
    """Hold the newest generation; times are unix seconds.

    Attributes:
        context: of the change of members that it came with.
        entered_at: when a member said that it begins.
        arranged_at: when the server heard where copies are to be; 0 if it did not.
        entered: whether that is recorded.
        copying_since: when the first copy that is not counted yet was begun; 0 while there is none.
    """

    token: Token
    context: TraceContext
    entered_at: float
    arranged_at: float = 0.0
    entered: bool = False
    copying_since: float = 0.0
    copies: int = 0
    copied_bytes: int = 0
    failed: str = ""


class GenerationSpans:
    """Describe the generations of a server."""

    def __init__(
        self,
        tracer: Tracer = OFF,
        job_uid: str = "",
        process_began: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin before the first generation.

        Args:
            tracer: takes the spans.
            job_uid: of the TrainingJob.
            process_began: when it did, in unix seconds.
            clock: unix seconds.
        """
        self._tracer, self._job_uid, self._clock = tracer, job_uid, clock
        self._lock = threading.Lock()
        self._process: tuple[float, float] | None = (process_began, process_began)
        self._generation: _Generation | None = None

    def ready(self) -> None:
        """Note that the server serves."""
        with self._lock:
            if self._process is not None:
                self._process = self._process[0], self._clock()

    def entered(self, token: Token, traceparent: str, began: float, *, whole: bool) -> None:
        """Note that a member has had a generation begin here; only the first one's word counts.

        Args:
            token: the generation's.
            traceparent: the coordinator's span, as members say it; "" where they say none.
            began: when the word came, in unix seconds.
            whole: this is all that a server hears of a generation's begin: its members do not step together.
        """
        if not self._tracer.enabled:
            return
        with self._lock:
            if self._generation is not None and self._generation.token >= token:
                return
            context = parse(traceparent) or self._tracer.begin(of_job(self._job_uid))
            process, self._process = self._process, None
            self._generation = generation = _Generation(token, context, began)
        if process is not None:
            self._record("start server", context, process[0], max(process), {})
        if whole:
            self._enter(generation)

    def arranged(self, token: Token) -> None:
        """Note that the server has heard where copies of its shards are to be.

        Args:
            token: the generation's.
        """
        with self._lock:
            generation = self._generation
            if generation is not None and generation.token == token:
                generation.arranged_at = generation.arranged_at or self._clock()

    def resolved(self, token: Token) -> None:
        """Note that all members hold the state that the generation begins from.

        Args:
            token: the generation's.
        """
        with self._lock:
            generation = self._generation
        if generation is not None and generation.token == token:
            self._enter(generation)

    def _enter(self, generation: _Generation) -> None:
        """Record that the server is in a generation, once."""
        now = self._clock()
        with self._lock:
            if generation.entered:
                return
            generation.entered = True
        arranged = generation.arranged_at
        events = (SpanEvent("copies arranged", arranged),) if arranged else ()
        named: Attributes = {"springtide.generation": _name(generation.token)}
        began = generation.entered_at
        self._record("enter generation", generation.context, began, now, named, events=events)

    def copied(self, seconds: float, size: int, error: str, last: bool) -> None:
        """Note that a copy of a shard has gone to another server; they are one span together.

        Args:
            seconds: that it took.
            size: bytes.
            error: why it is not there; "" if it is.
            last: no other copy is on its way, or wanted.
        """
        if not self._tracer.enabled:
            return
        now = self._clock()
        with self._lock:
            generation = self._generation
            if generation is None:
                return
            generation.copying_since = generation.copying_since or now - seconds
            generation.copies += not error
            generation.copied_bytes += 0 if error else size
            generation.failed = generation.failed or error
            if not last:
                return
            began, failed = generation.copying_since, generation.failed
            named: Attributes = {
                "springtide.generation": _name(generation.token),
                "springtide.shards": generation.copies,
                "springtide.bytes": generation.copied_bytes,
            }
            generation.copying_since, generation.copies, generation.copied_bytes = 0.0, 0, 0
            generation.failed = ""
        self._record("copy shards", generation.context, began, now, named, failed)

    def _record(
        self,
        name: str,
        parent: TraceContext,
        began: float,
        ended: float,
        attributes: Attributes,
        error: str = "",
        events: tuple[SpanEvent, ...] = (),
    ) -> None:
        context = self._tracer.child_of(parent)
        self._tracer.record(Span(name, context, began, ended, parent, attributes, events, error=error[:500]))


def _name(token: Token) -> str:
    """Return a generation's name as everybody writes it."""
    number, restart, generation = token
    return f"{number}.{restart}/{generation}"
